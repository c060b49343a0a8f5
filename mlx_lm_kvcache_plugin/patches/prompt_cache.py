"""The face that the server sees in place of upstream's `LRUPromptCache`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..codecs.tensors import Room
from ..events import Error
from ..layers import LayerKinds
from ..matching import Prefix
from ..prefix_cache import PrefixCache
from ..spaces import MOST_NAMESPACES
from ..store.thinning import GENERATED, PROMPT, SYSTEM, USER
from .models_cache import (
    LayerCaches,
    Written,
    is_trimmable,
    put_together,
    room_in,
    take_apart,
)
from .ranks import Ranks

logger = logging.getLogger("mlx_lm_kvcache_plugin")

CACHE_TYPES = {GENERATED: (GENERATED,), USER: (USER, PROMPT), SYSTEM: (SYSTEM,)}
"""The kinds of sequence that upstream tells apart, and the labels that count as each."""


ROOM_TOKENS = 256
"""How many tokens may be generated before upstream, which grows by as many, has to copy a cache."""

MOST_ROOM_TOKENS = 4096
"""How much room a prompt gets that is mostly new: it may be given up, and upstream grows by as
many as it computes at once. One that is mostly a hit gets as much again as it has."""


class PrefixPromptCache:
    """`LRUPromptCache` over a `PrefixCache`, with the seven members that the server uses.

    Owned by the thread that generates. A failure inside is a miss, or an insert that is skipped:
    an exception out of here would end that thread and the server with it.

    Args:
        cache: where everything is kept; None to keep nothing.
        kinds: how cache objects are taken apart.
        ranks: the processes that have to reuse alike.

    Attributes:
        cache, kinds, ranks: as they were given.
        fetched: the model and the tokens that were fetched for last, and how many were a hit.
    """

    def __init__(self, cache: PrefixCache | None, kinds: LayerKinds, ranks: Ranks) -> None:
        self.cache = cache
        self.kinds = kinds
        self.ranks = ranks
        self._logged: set[tuple[str, str]] = set()
        self._written: dict[Any, Written] = {}
        self.fetched: tuple[Any, list[int], int] = (None, [], 0)

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[LayerCaches | None, list[int]]:
        """Cache objects for the longest stored prefix, and the tokens that are left: never none."""
        return self._fetch(model, tokens, has_room=False)

    def fetch_alone(self, model: Any, tokens: list[int]) -> tuple[LayerCaches | None, list[int]]:
        """The same for a prompt that goes on with these very objects, as a batch does not.

        They have room for the rest of it, so that upstream need not copy them to add that.
        """
        return self._fetch(model, tokens, has_room=True)

    def _fetch(
        self, model: Any, tokens: list[int], has_room: bool
    ) -> tuple[LayerCaches | None, list[int]]:
        found: list[Prefix | None] = []
        caches: LayerCaches | None = None
        agreed: int | None = None
        with self._failing_softly("fetch"):
            agreed = self.ranks.agree(
                lambda most: self._longest(found, model, tokens, most), len(tokens) - 1
            )
        if self.cache is not None and agreed is not None:
            with self._failing_softly("fetch"):
                prefix = found[-1] if agreed else None
                room = _room(prefix, len(tokens)) if prefix and has_room else None
                caches = self.cache.fetch(tokens, prefix, put_together, room)
        if agreed and not self.ranks.all(caches is not None):
            caches = None
        hit_tokens = agreed if agreed and caches is not None else 0
        self.fetched = (model, tokens, hit_tokens)
        return caches, tokens[hit_tokens:] if hit_tokens else tokens

    def _longest(self, found: list[Prefix | None], model: Any, tokens: list[int], most: int) -> int:
        prefix = self.cache.match(model, tokens, most) if self.cache is not None else None
        found.append(prefix)
        return prefix.tokens if prefix is not None else 0

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: LayerCaches,
        *,
        cache_type: str = GENERATED,
    ) -> None:
        """Store what the cache objects hold for the first of these tokens."""
        if self.cache is not None:
            with self._failing_softly("insert"):
                self._insert(self.cache, model, tokens, prompt_cache, cache_type)

    def _insert(
        self,
        cache: PrefixCache,
        model: Any,
        tokens: list[int],
        prompt_cache: LayerCaches,
        cache_type: str,
    ) -> None:
        if _has_draft(model) and not is_trimmable(prompt_cache):
            return
        if len(self._written) > MOST_NAMESPACES:
            self._written.clear()
        written = self._written.setdefault(model, set())
        layers = take_apart(prompt_cache, len(tokens), self.kinds, written=written)
        if layers is not None:
            cache.insert(model, tokens[: layers.tokens], layers, cache_type)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict at once until no more than this is held."""
        if self.cache is not None:
            with self._failing_softly("trim"):
                self.cache.trim_to(n_sequences, n_bytes)

    def __len__(self) -> int:
        return self.cache.tree.sequences.total() if self.cache is not None else 0

    @property
    def nbytes(self) -> int:
        """The bytes held, index included."""
        return self.cache.tree.used_bytes if self.cache is not None else 0

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Sequences and bytes by upstream's kinds of sequence."""
        sequences = self.cache.tree.sequences if self.cache is not None else {}
        n_bytes = self.cache.tree.bytes_by_label if self.cache is not None else {}
        return {
            cache_type: {
                "n_sequences": sum(sequences.get(label, 0) for label in labels),
                "n_bytes": sum(n_bytes.get(label, 0) for label in labels),
            }
            for cache_type, labels in CACHE_TYPES.items()
        }

    @contextmanager
    def _failing_softly(self, operation: str) -> Iterator[None]:
        """Turn an exception into a log line, once for each kind, and a count."""
        try:
            yield
        except (Exception, SystemExit) as error:
            cause = f"{type(error).__name__}: {error}"
            with suppress(Exception, SystemExit):  # whoever is told must not end the thread either
                if self.cache is not None:
                    self.cache.record(Error(operation, cause))
            known = (operation, type(error).__name__)
            if known not in self._logged:
                self._logged.add(known)
                logger.warning(
                    "prefix cache: %s failed and was skipped: %s", operation, cause, exc_info=error
                )


def _room(prefix: Prefix, tokens: int) -> Room:
    """For the rest of a prompt of so many tokens, and what is generated first."""
    rows = tokens - prefix.tokens + ROOM_TOKENS
    return room_in(prefix.space.layout, min(rows, max(MOST_ROOM_TOKENS, prefix.tokens)))


def _has_draft(model: Any) -> bool:
    """Whether upstream's key of a model, (model, adapter, draft), names a draft model.

    Once a window is full, upstream can no longer take back the tokens that a draft got wrong: they
    stay in the caches, and nothing tells; and from such a cache it refuses to go on.
    """
    return isinstance(model, tuple) and len(model) == 3 and model[2] is not None
