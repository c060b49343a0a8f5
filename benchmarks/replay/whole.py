"""Stores of others for a replay: their real classes, with whole copies of the caches of prompts.

Their loops over tokens are Python's and would take hours. So one token of theirs stands for one
hash id, up to 512 tokens, and caches weigh as many bytes as those tokens do in 16 bits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import LRUPromptCache

from ..stores import MODEL
from .trace import Request

LAST = -1
"""Stands for a prompt's last token, which is not stored: it has to be computed in any case."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """An array by its size alone."""

    nbytes: int


class CopiedLayer:
    """A cache object that stands for a whole prompt cache, by its size alone."""

    def __init__(self, nbytes: int, offset: int) -> None:
        self.keys, self.values = Bytes(nbytes // 2), Bytes(nbytes - nbytes // 2)
        self.offset = offset

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        self.offset -= tokens
        return tokens


class Stock:
    """mlx-lm's `LRUPromptCache`: copies, the one that was inserted first goes first.

    Its server lets it hold more than the limit from an insert to the next fetch; here it never may.

    Args:
        token_bytes: of the keys and values of one token.
        limit_bytes: what may be held.
        max_size: how many sequences may be held; None for any number.
    """

    def __init__(self, token_bytes: int, limit_bytes: int, max_size: int | None) -> None:
        size = sys.maxsize if max_size is None else max_size
        self.cache = LRUPromptCache(size, limit_bytes)
        self._token_bytes = token_bytes

    def serve(self, request: Request) -> int:
        """Fetch for the prompt, then insert it; returns how many of its tokens were a hit."""
        wanted = [*request.hash_ids, LAST]
        _, rest = self.cache.fetch_nearest_cache(MODEL, wanted)
        layer = CopiedLayer(request.tokens * self._token_bytes, len(request.hash_ids))
        self.cache.insert_cache(MODEL, list(request.hash_ids), [layer])
        return request.hit_tokens(len(wanted) - len(rest))


class VllmMlx:
    """vllm-mlx's `MemoryAwarePrefixCache`: copies, the least recently used goes first.

    Args:
        token_bytes: of the keys and values of one token.
        limit_bytes: what may be held.
    """

    def __init__(self, token_bytes: int, limit_bytes: int) -> None:
        from vllm_mlx.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig

        # Its least prefix is 128 tokens, so 1 where one stands for 512; MB may be a fraction.
        config: Any = MemoryCacheConfig(max_memory_mb=limit_bytes / 2**20, min_prefix_tokens=1)
        self.cache = MemoryAwarePrefixCache(None, config)
        self._token_bytes = token_bytes

    def serve(self, request: Request) -> int:
        """Fetch for the prompt, then insert it; returns how many of its tokens were a hit."""
        wanted = [*request.hash_ids, LAST]
        _, rest = self.cache.fetch(wanted)
        layer = CopiedLayer(request.tokens * self._token_bytes, len(request.hash_ids))
        self.cache.store(list(request.hash_ids), [layer])
        return request.hit_tokens(len(wanted) - len(rest))
