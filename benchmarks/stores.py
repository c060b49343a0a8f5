"""Our store as the server gets it, and what several measure of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_lm_kvcache_plugin.layers import LayerKinds
from mlx_lm_kvcache_plugin.patches.layer_kinds import BuiltInLayerKinds, PlainTensor
from mlx_lm_kvcache_plugin.patches.models_cache import LayerCaches, take_apart
from mlx_lm_kvcache_plugin.patches.prompt_cache import PrefixPromptCache
from mlx_lm_kvcache_plugin.patches.ranks import Ranks
from mlx_lm_kvcache_plugin.plugins import plugins
from mlx_lm_kvcache_plugin.prefix_cache import BLOCK_TOKENS, PrefixCache
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.store.budget import Budget

MODEL = ("model", None, None)
"""A key as the server makes them: model, adapter, draft model."""


def make_store(
    block_tokens: int = BLOCK_TOKENS, **options: Any
) -> tuple[PrefixPromptCache, PrefixCache]:
    """Our class as the server gets it, and the cache behind it, with room for everything."""
    settings = Settings.resolve(options)
    budget = Budget(limit_bytes=1 << 40)
    cache = PrefixCache(settings, plugins().codecs(), budget, block_tokens=block_tokens)
    return PrefixPromptCache(cache, upstream_kinds(), Ranks()), cache


def upstream_kinds() -> LayerKinds:
    """The kinds of upstream's own cache objects."""
    kinds = LayerKinds()
    BuiltInLayerKinds.kvcache_register_layer_kinds(kinds.register)
    return kinds


def sixteen_bit(caches: LayerCaches, tokens: int) -> list[PlainTensor]:
    """Keys and values of each layer in turn, in float16."""
    layers = take_apart(caches, tokens, upstream_kinds())
    assert layers is not None
    rows: Any = layers.rows
    return [PlainTensor(row.array.astype(mx.float16), row.length) for row in rows]


def sequence(tokens: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    ids: list[int] = np.random.default_rng(seed).integers(0, 50_000, tokens).tolist()
    return ids


def relative_error(cache: PrefixCache, tensors: Sequence[PlainTensor], tokens: int) -> float:
    """|decoded - original| / |original|, the mean over layers."""
    packer = cache.packers.for_specs([tensor.spec for tensor in tensors])
    block_tokens = cache.tree.block_tokens
    payloads = packer.blocks.encode(tensors, 0, block_tokens, tokens // block_tokens)
    errors = []
    for tensor, decoded in zip(tensors, packer.decode(payloads, tokens), strict=True):
        original = tensor.rows(0, tokens).astype(mx.float32)
        difference = decoded.astype(mx.float32) - original
        errors.append((mx.linalg.norm(difference) / mx.linalg.norm(original)).item())
    return statistics.fmean(errors)
