"""The face that the server sees in place of upstream's `LRUPromptCache`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..codecs.tensors import Room
from ..events import Error, Event, Miss, Reason, Skip, SkipReason, Stop
from ..layers import LayerKinds
from ..matching import Prefix
from ..prefix_cache import PrefixCache
from ..spaces import MOST_NAMESPACES
from ..store.prompt import Prompt
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

    Owned by the thread that generates; whoever else changes the cache holds `lock`. A failure in
    here is a miss, or an insert that is skipped: an exception that got out would end that thread
    and the server with it.

    Args:
        cache: where everything is kept; None to keep nothing.
        kinds: how cache objects are taken apart.
        ranks: the processes that have to reuse alike.
        emit: is told of every request where nothing is kept.

    Attributes:
        cache, kinds, ranks: as they were given.
        lock: held by every call.
        fetched: the model and the tokens that were fetched for last, and how many were a hit.
    """

    def __init__(
        self,
        cache: PrefixCache | None,
        kinds: LayerKinds,
        ranks: Ranks,
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.cache = cache
        self.kinds = kinds
        self.ranks = ranks
        self.reset_locks()
        self._record = cache.record if cache is not None else emit
        self._logged: set[tuple[str, str]] = set()
        self._written: dict[Any, Written] = {}
        self.fetched: tuple[Any, list[int], int] = (None, [], 0)

    def reset_locks(self) -> None:
        """Nobody holds any: there is no other thread yet, or any more."""
        self.lock = threading.RLock()
        if self.cache is not None:
            self.cache.tree.reset_lock()

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
        with self.lock:
            caches, agreed = self._find(model, tokens, has_room)
        if agreed and not self.ranks.all(caches is not None):
            caches = None
        hit_tokens = agreed if agreed and caches is not None else 0
        self.fetched = (model, tokens, hit_tokens)
        return caches, tokens[hit_tokens:] if hit_tokens else tokens

    def _find(
        self, model: Any, tokens: list[int], has_room: bool
    ) -> tuple[LayerCaches | None, int | None]:
        """What this rank has of it, and how many tokens all ranks agreed upon."""
        found: list[Prefix | None] = []
        prompt = Prompt(tokens)
        caches: LayerCaches | None = None
        agreed: int | None = None
        reason: Reason | None = Reason.ERROR
        with self._failing_softly("fetch"):
            agreed = self.ranks.agree(
                lambda most: self._longest(found, model, prompt, most), len(tokens) - 1
            )
            if self.cache is None:
                reason = Reason.DISABLED
        if self.cache is not None and agreed is not None:
            with self._failing_softly("fetch"):
                prefix = found[-1] if agreed else None
                room = _room(prefix, len(tokens)) if prefix and has_room else None
                caches = self.cache.fetch(prompt, prefix, put_together, room, model)
                reason = None
        if reason is not None:
            with suppress(Exception, SystemExit):
                self._record(Miss(len(tokens), Stop(reason)))
        return caches, agreed

    def _longest(self, found: list[Prefix | None], model: Any, prompt: Prompt, most: int) -> int:
        prefix = self.cache.match(model, prompt, most) if self.cache is not None else None
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
            with self.lock, self._failing_softly("insert"):
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
            cache.record(Skip(len(tokens), SkipReason.DRAFT_MODEL))
            return
        if len(self._written) > MOST_NAMESPACES:
            self._written.clear()
        written = self._written.setdefault(model, set())
        layers = take_apart(prompt_cache, len(tokens), self.kinds, written=written)
        if layers is None:
            cache.record(Skip(len(tokens), SkipReason.UNKNOWN_LAYERS))
        else:
            cache.insert(model, tokens[: layers.tokens], layers, cache_type)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict at once until no more than this is held."""
        if self.cache is not None:
            with self.lock, self._failing_softly("trim"):
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
                self._record(Error(operation, cause))
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
