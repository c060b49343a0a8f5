"""Prompt caches to measure with: random ones of any shape, and a real model's for real text."""

from __future__ import annotations

import functools
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import KVCache, make_prompt_cache

from demo.model_folder import default_cache_dir
from demo.smollm2 import ensure_model
from mlx_lm_kvcache_plugin.evaluation import scoring

TOPICS = ("string-methods", "compound", "debugger", "formatstrings")
"""Chapters of the Python reference, which every CPython ships as text."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The cache of a model: `layers` times keys and values of [1, heads, tokens, head_dim]."""

    layers: int
    heads: int
    head_dim: int
    dtype: mx.Dtype = mx.bfloat16

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in 16-bit precision."""
        return self.layers * 2 * self.heads * self.head_dim * 2

    def prompt_cache(self, tokens: int, seed: int = 0) -> list[KVCache]:
        """A cache of so many tokens, as upstream hands one in: padded to multiples of 256."""
        mx.random.seed(seed)
        return [self._layer(tokens) for _ in range(self.layers)]

    def _layer(self, tokens: int) -> KVCache:
        cache: Any = KVCache()
        _append(cache, (1, self.heads, tokens, self.head_dim), self.dtype)
        return cache


SMALL = ModelShape(layers=8, heads=4, head_dim=64)
LARGE = ModelShape(layers=8, heads=4, head_dim=128)
TINY = ModelShape(layers=1, heads=1, head_dim=64)


def extend(caches: Sequence[Any], tokens: int) -> None:
    """Append random tokens to every layer, as generating them would."""
    for cache in caches:
        _, heads, _, dim = cache.keys.shape
        _append(cache, (1, heads, tokens, dim), cache.keys.dtype)


def _append(cache: Any, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    """Append random keys and values of that shape."""
    cache.update_and_fetch(*(mx.random.normal(shape).astype(dtype) for _ in range(2)))
    mx.eval(cache.keys, cache.values)


@functools.cache
def smollm2() -> tuple[Any, Any]:
    """The real SmolLM2-135M-Instruct in float32, and its tokenizer."""
    loaded: Any = load(str(ensure_model(default_cache_dir())))
    return loaded[0], loaded[1]


def topic_ids(topic: str, tokens: int) -> list[int]:
    """The first tokens of a chapter of the Python reference."""
    _, tokenizer = smollm2()
    ids: list[int] = tokenizer.encode(pydoc_data.topics.topics[topic][: tokens * 8])[:tokens]
    assert len(ids) == tokens, f"the chapter {topic!r} is too short"
    return ids


def read_by_smollm2(ids: list[int]) -> list[Any]:
    """What SmolLM2 computes for these tokens."""
    model, _ = smollm2()
    caches: list[Any] = make_prompt_cache(model)
    scoring.read(model, caches, ids)
    return caches
