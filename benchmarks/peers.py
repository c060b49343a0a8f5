"""Our store, stock's and vllm-mlx's prefix cache behind one face, and asked the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache

from mlx_lm_kvcache_plugin.prefix_cache import BLOCK_TOKENS

from .samples import ModelShape
from .stores import MODEL, make_store, sequence

ROOM_MB = 1 << 20


class Peer(Protocol):
    """A store of prefixes, empty and with room for everything.

    Attributes:
        name: of the store and its bits.
        nbytes: what it says that it holds.
    """

    name: str

    @property
    def nbytes(self) -> int: ...

    def insert(self, ids: list[int], caches: list[Any]) -> None:
        """Store what the caches hold for these tokens."""

    def fetch(self, ids: list[int]) -> tuple[list[Any], int]:
        """What it hands out, not yet evaluated if that is its way, and the hit tokens."""


class PromptCache:
    """What has the face of upstream's `LRUPromptCache`: that itself, and ours."""

    def __init__(self, name: str, store: Any) -> None:
        self.name = name
        self._store = store

    @property
    def nbytes(self) -> int:
        return int(self._store.nbytes)

    def insert(self, ids: list[int], caches: list[Any]) -> None:
        self._store.insert_cache(MODEL, ids, caches)

    def fetch(self, ids: list[int]) -> tuple[list[Any], int]:
        caches, rest = self._store.fetch_nearest_cache(MODEL, ids)
        return caches or [], len(ids) - len(rest)


class MemoryAware:
    """vllm-mlx's `MemoryAwarePrefixCache`, quantized."""

    def __init__(self, name: str, bits: int) -> None:
        from vllm_mlx.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig

        self.name = name
        config = MemoryCacheConfig(
            max_memory_mb=ROOM_MB,
            kv_quantize=True,
            kv_bits=bits,
            min_prefix_tokens=1,  # else it reuses nothing below 128, and has no work in some rows
        )
        self._store = MemoryAwarePrefixCache(object(), config)

    @property
    def nbytes(self) -> int:
        return int(self._store.memory_usage_mb * (1 << 20))  # a power of two: exact

    def insert(self, ids: list[int], caches: list[Any]) -> None:
        self._store.store(ids, caches)

    def fetch(self, ids: list[int]) -> tuple[list[Any], int]:
        caches, rest = self._store.fetch(ids)
        return caches or [], len(ids) - len(rest)


def ours(bits: int, block_tokens: int = BLOCK_TOKENS) -> Peer:
    return PromptCache(f"ours, {bits} bits", make_store(block_tokens, kv_cache_bits=bits)[0])


def stock() -> Peer:
    return PromptCache("stock", LRUPromptCache())


def vllm_mlx(bits: int) -> Peer:
    return MemoryAware(f"vllm-mlx, {bits} bits", bits)


def evaluate(caches: Sequence[Any]) -> None:
    """Compute all that was handed out."""
    mx.eval([(cache.keys, cache.values) for cache in caches])


def held_by_chats(peer: Peer, shape: ModelShape) -> tuple[int, int]:
    """Insert eight chats that share 3,000 of 3,200 tokens: bytes held after one and after all."""
    held = []
    for chat in range(8):
        ids = sequence(3000) + sequence(200, seed=chat + 1)
        peer.insert(ids, shape.prompt_cache(3200))
        held.append(peer.nbytes)
    return held[0], held[-1]
