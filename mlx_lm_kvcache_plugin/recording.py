"""Tells what the prefix cache does: passes it on, and keeps the history of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from .diagnosis import diagnose
from .events import Error, Event, Evict, Hit, Insert, Miss, Restore, Skip, SkipReason, Stop
from .matching import Prefix
from .spaces import Space, Spaces
from .stats.history import History
from .store.blocks import Block, Tokens
from .store.budget import Budget
from .store.prompt import TokenIds
from .store.tree import BlockTree

logger = logging.getLogger("mlx_lm_kvcache_plugin")


class Recorder:
    """Takes note of what the owner of a tree does with it.

    Args:
        tree, spaces: what is stored.
        budget: what may be.
        emit: is told of every event.
        history: is told what is asked for and stored; None if nobody wants to know.
    """

    def __init__(
        self,
        tree: BlockTree,
        spaces: Spaces,
        budget: Budget,
        emit: Callable[[Event], None],
        history: History | None,
    ) -> None:
        self.history = history
        self._tree = tree
        self._spaces = spaces
        self._budget = budget
        self._emit = emit
        self._restored_tokens = 0

    def record(self, event: Event) -> None:
        """Take note of an event and pass it on."""
        if isinstance(event, Restore):
            self._restored_tokens = event.tokens
        if self.history is not None and not self._budget.is_short and _found_no_room(event):
            self.history.found_no_room()
        self._emit(event)

    def begin(self) -> None:
        """A prompt is about to be looked up: what was restored for others is no matter of it."""
        self._restored_tokens = 0

    def diagnose(
        self, namespace: Hashable | None, tokens: TokenIds, prefix: Prefix | None
    ) -> Stop | None:
        """Why no more of a prompt was found; None too where nobody wants to know."""
        is_told = self.history is not None or logger.isEnabledFor(logging.DEBUG)
        if namespace is not None and is_told:
            with self._failing_softly("diagnosis"):
                hit_tokens = prefix.tokens if prefix is not None else 0
                return diagnose(
                    self._tree, self._spaces, self.history, namespace, tokens, hit_tokens
                )
        return None

    def fetched(
        self,
        namespace: Hashable | None,
        tokens: TokenIds,
        prefix: Prefix | None,
        seconds: float,
        stop: Stop | None,
    ) -> None:
        """A prompt was looked up, and what was found of it handed over."""
        self._log(len(tokens), prefix, seconds, stop)
        hit_tokens = prefix.tokens if prefix is not None else 0
        if prefix is None:
            self.record(Miss(len(tokens), stop))
        else:
            self.record(Hit(len(tokens), hit_tokens, seconds, stop))
        if self.history is not None and namespace is not None:
            with self._remembering():
                in_memory = max(0, hit_tokens - self._restored_tokens)
                self.history.asked(namespace, tokens, in_memory)
                if prefix is not None:
                    self._used(prefix.space, prefix.checkpoint or prefix.blocks[-1])

    def _log(self, tokens: int, prefix: Prefix | None, seconds: float, stop: Stop | None) -> None:
        """One line for each request."""
        why = f"; {stop}" if stop is not None else ""
        if prefix is None:
            logger.debug("match 0 of %s tokens%s", f"{tokens:,}", why)
            return
        blocks, tail = divmod(prefix.tokens, self._tree.block_tokens)
        logger.debug(
            "match %s of %s tokens (blocks %d, tail %d%s), decoded in %.0f ms%s",
            f"{prefix.tokens:,}",
            f"{tokens:,}",
            blocks,
            tail,
            ", checkpoint" if prefix.checkpoint is not None else "",
            seconds * 1000,
            why,
        )

    def inserted(
        self, space: Space, ids: Tokens, tip: Block, needless: Sequence[Block], insert: Insert
    ) -> None:
        """A sequence was stored, as far as there was room.

        Args:
            ids: all of it.
            tip: the last node that it has.
            needless: checkpoints that were taken out because of it.
        """
        self.record(insert)
        logger.debug(
            "prefix cache holds %d bytes: %d blocks, %d tokens",
            self._tree.used_bytes,
            len(self._tree),
            self._tree.tokens,
        )
        with self._remembering():
            self._used(space, tip, ids)
            if self.history is not None:
                self.history.thinned(needless)

    def _used(self, space: Space, tip: Block, ids: TokenIds = ()) -> None:
        if self.history is not None and tip in self._tree:
            limit_bytes = self._budget.nominal_bytes(self._tree.used_bytes)
            needs_checkpoint = space.layout.needs_checkpoint
            self.history.used(space.namespace, tip, needs_checkpoint, limit_bytes, ids)

    @contextmanager
    def evictions(self) -> Iterator[None]:
        """Record what is evicted inside, one event for each cause, also if it fails."""
        try:
            yield
        finally:
            gone, n_bytes = self._tree.evicted, dict(self._tree.evicted_bytes)
            blocks = self._tree.evicted_blocks
            self._tree.evicted = []
            self._tree.evicted_bytes.clear()
            if self.history is not None:
                with self._remembering():
                    self.history.evicted(gone)
            for cause in blocks:
                self.record(Evict(blocks[cause], n_bytes[cause], cause.value))

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """Other threads read the history while they hold the tree's lock."""
        with self._failing_softly("history"), self._tree.lock:
            yield

    @contextmanager
    def _failing_softly(self, operation: str) -> Iterator[None]:
        """What is only told may never spoil what is done."""
        try:
            yield
        except Exception as error:
            logger.debug("prefix cache: %s failed", operation, exc_info=error)
            self.record(Error(operation, f"{type(error).__name__}: {error}"))


def _found_no_room(event: Event) -> bool:
    """Whether a sequence was larger than all that may be held."""
    if isinstance(event, Skip):
        return event.reason is SkipReason.NO_ROOM
    return isinstance(event, Insert) and event.tokens > 0 and not event.stored_tokens
