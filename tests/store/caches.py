"""Small prefix caches for tests, and keys and values that depend on all tokens before them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_lm_kvcache_plugin.codecs.registry import BUILT_IN, CodecRegistry
from mlx_lm_kvcache_plugin.events import Event
from mlx_lm_kvcache_plugin.fetched import Fetched
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget, Memory
from tests.tensors import Rows

MODEL = "model"


@dataclass(eq=False)
class Point:
    """A checkpoint: the state after these tokens."""

    tokens: tuple[int, ...]
    can_be_cut: bool = False
    nbytes: int = 300


@dataclass
class Machine:
    """Memory that a test takes away and gives back, and a probe that may fail."""

    available_bytes: int = 10 * GIB
    before_probing: Callable[[], None] = field(default=lambda: None)

    def probe(self) -> Memory:
        self.before_probing()
        return Memory(16 * GIB, self.available_bytes)


def make_cache(
    codec: str = "raw",
    bits: int | None = None,
    *,
    limit_bytes: int = GIB,
    budget: Budget | None = None,
    block_tokens: int = 4,
    emit: Callable[[Event], None] = lambda event: None,
    **more: Any,
) -> PrefixCache:
    registry = CodecRegistry()
    for name, factory in BUILT_IN.items():
        registry.register(name, factory)
    return PrefixCache(
        Settings(key_bits=bits, value_bits=bits, codec=codec),
        registry,
        budget or Budget(limit_bytes=limit_bytes, probe=Machine().probe),
        emit=emit,
        block_tokens=block_tokens,
        **more,
    )


def tensors_for(
    tokens: Sequence[int],
    namespace: Hashable = MODEL,
    *,
    layers: int = 2,
    heads: int = 2,
    dim: int = 64,
    dtype: mx.Dtype = mx.float32,
) -> list[Rows]:
    """Keys and values as a model gives them: a row is told by its token and all before it."""
    states, state = [], sum(map(ord, str(namespace)))
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % 2**64
        states.append(state)
    tensors = []
    for index in range(2 * layers):
        columns = np.arange(index * heads * dim, (index + 1) * heads * dim, dtype=np.uint64)
        mixed = np.array(states, np.uint64)[:, None] ^ (columns * np.uint64(0x9E3779B97F4A7C15))
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (mixed >> np.uint64(40)).astype(np.float32) / 2**22 - 2
        rows = values.reshape(len(tokens), heads, dim).swapaxes(0, 1)
        tensors.append(Rows(mx.array(rows).astype(dtype)))
    return tensors


def insert(
    cache: PrefixCache,
    tokens: Sequence[int],
    namespace: Hashable = MODEL,
    label: str = "assistant",
    **shape: Any,
) -> None:
    """Store what a model computes for these tokens."""
    cache.insert(namespace, tokens, tensors_for(tokens, namespace, **shape), label)
    cache.tree.check()


def fetch(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = MODEL) -> int:
    """How many tokens are a hit."""
    fetched = cache.fetch(namespace, tokens)
    cache.tree.check()
    return fetched.tokens if fetched else 0


def is_what_was_computed(
    fetched: Fetched, tokens: Sequence[int], namespace: Hashable = MODEL, **shape: Any
) -> bool:
    """Whether every tensor is, bit for bit, what the model computes for the tokens of the hit."""
    wanted = [tensor.array for tensor in tensors_for(tokens[: fetched.tokens], namespace, **shape)]
    assert fetched.tensors is not None
    return len(wanted) == len(fetched.tensors) and all(
        one.dtype == other.dtype and bool(mx.array_equal(one, other))
        for one, other in zip(fetched.tensors, wanted, strict=True)
    )


class Crash(Exception):
    """What the tests make fail."""


def fail_on_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for one call that raises `Crash`."""
    calls = 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Crash
        return function(*args, **options)

    return failing
