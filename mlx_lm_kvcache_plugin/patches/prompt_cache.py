"""The face that the server sees in place of upstream's `LRUPromptCache`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ..events import Error
from ..prefix_cache import PrefixCache
from .models_cache import LayerCaches, Snapshot, caches_from, computed_tokens, tensors_of

logger = logging.getLogger("mlx_lm_kvcache_plugin")

CACHE_TYPES = ("assistant", "user", "system")
"""The kinds of sequence that upstream tells apart."""


class PrefixPromptCache:
    """`LRUPromptCache` over a `PrefixCache`, with the seven members that the server uses.

    Owned by the thread that generates. A failure inside is a miss, or an insert that is skipped:
    an exception out of here would end that thread and the server with it.

    Args:
        cache: where everything is kept; None to keep nothing.
    """

    def __init__(self, cache: PrefixCache | None) -> None:
        self._cache = cache
        self._logged: set[tuple[str, str]] = set()

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[LayerCaches | None, list[int]]:
        """Cache objects for the longest stored prefix, and the tokens that are left: never none."""
        cache = self._cache
        if cache is not None:
            with self._failing_softly(cache, "fetch"):
                found = cache.fetch(
                    model, tokens, lambda fetched: (caches_from(fetched), fetched.tokens)
                )
                if found is not None:
                    caches, hit_tokens = found
                    return caches, tokens[hit_tokens:]
        return None, tokens

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: LayerCaches,
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Store what the cache objects hold for the first of these tokens."""
        if self._cache is not None:
            with self._failing_softly(self._cache, "insert"):
                self._insert(self._cache, model, tokens, prompt_cache, cache_type)

    def _insert(
        self,
        cache: PrefixCache,
        model: Any,
        tokens: Sequence[int],
        caches: LayerCaches,
        cache_type: str,
    ) -> None:
        computed = computed_tokens(caches, len(tokens))
        if not computed:
            return
        tensors = tensors_of(caches)
        if tensors is not None:
            cache.insert(model, tokens[:computed], tensors, cache_type)
        elif cache.wants_checkpoint(model, tokens[:computed], sum(c.nbytes for c in caches)):
            cache.insert_checkpoint(model, tokens[:computed], Snapshot(caches), cache_type)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict at once until no more than this is held."""
        if self._cache is not None:
            with self._failing_softly(self._cache, "trim"):
                self._cache.trim_to(n_sequences, n_bytes)

    def __len__(self) -> int:
        return self._cache.tree.sequences.total() if self._cache is not None else 0

    @property
    def nbytes(self) -> int:
        """The bytes held, index included."""
        return self._cache.tree.used_bytes if self._cache is not None else 0

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Sequences and bytes by upstream's kinds of sequence."""
        sequences = self._cache.tree.sequences if self._cache is not None else {}
        n_bytes = self._cache.tree.bytes_by_label if self._cache is not None else {}
        return {
            cache_type: {
                "n_sequences": sequences.get(cache_type, 0),
                "n_bytes": n_bytes.get(cache_type, 0),
            }
            for cache_type in CACHE_TYPES
        }

    @contextmanager
    def _failing_softly(self, cache: PrefixCache, operation: str) -> Iterator[None]:
        """Turn an exception into a log line, once for each kind, and a count."""
        try:
            yield
        except (Exception, SystemExit) as error:
            cause = f"{type(error).__name__}: {error}"
            with suppress(Exception, SystemExit):  # whoever is told must not end the thread either
                cache.record(Error(operation, cause))
            known = (operation, type(error).__name__)
            if known not in self._logged:
                self._logged.add(known)
                logger.warning(
                    "prefix cache: %s failed and was skipped: %s", operation, cause, exc_info=error
                )
