"""The composer: from a model's tokens and layers to blocks in the store, and back.

It knows no upstream class. A layer whose tokens are independent rows comes as two tensors (keys,
values) and lives in blocks; a cache with any other layer comes as one opaque checkpoint that
stands for exactly as many tokens as were computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, cast

import numpy as np

from .codecs.packing import Payload, Tensor, TensorSpec
from .codecs.registry import CodecRegistry
from .codecs.sequence import SequencePacker, SequencePackers
from .events import Counters, Event, Evict, Hit, Insert, Miss
from .fetched import Checkpoint, Fetched
from .settings import Settings
from .store.blocks import Block, Tokens, before_image
from .store.budget import Budget, evict_to_limit, keep_within
from .store.insertion import Insertion
from .store.tree import BlockTree, Cause

logger = logging.getLogger("mlx_lm_kvcache_plugin")

BLOCK_TOKENS = 128
"""Settled by bytes, fidelity and speed together: docs/decisions/0001-block-size.md."""

BLOCKS_AT_ONCE = 16
"""How many blocks are encoded in one go: few calls, and little that is not yet counted."""


class PrefixCache:
    """Past prefixes, encoded, shared block by block, within a budget. Owned by one thread.

    A method that raises has stored nothing.

    Args:
        settings: codec, bits and group size.
        registry: where the codec is found.
        budget: what may be held.
        emit: is told of every event.
        max_sequences: how many sequences may be held; None for any number.
        block_tokens: tokens of a block.

    Attributes:
        tree: what is stored.
        counters: sums over all events.
        packers: how the tensors of a model are encoded.
    """

    def __init__(
        self,
        settings: Settings,
        registry: CodecRegistry,
        budget: Budget,
        *,
        emit: Callable[[Event], None] = lambda event: None,
        max_sequences: int | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.settings = settings
        self.budget = budget
        self.max_sequences = max_sequences
        self.tree = BlockTree(block_tokens, limit_bytes=0)
        self.counters = Counters()
        self.packers = SequencePackers(settings, registry)
        self._emit = emit
        self._known: dict[Hashable, SequencePacker] = {}

    # Fetching

    def fetch(
        self,
        namespace: Hashable,
        tokens: Sequence[int],
        translate: Callable[[Fetched], Any] = lambda fetched: fetched,
    ) -> Any:
        """The longest stored prefix of `tokens`, short of the last one: that has to be computed.

        Args:
            namespace: sequences of different namespaces never meet.
            tokens: of the prompt.
            translate: makes of a `Fetched` what the caller wants; a failure of it is no hit.

        Returns:
            What `translate` made of it; None if nothing that the prompt begins with is stored.
        """
        begun = time.perf_counter()
        ids = np.array(tokens, np.int64)
        wanted = ids[: before_image(ids, len(ids) - 1)]
        fetch = self._fetch_tensors if namespace in self._known else self._fetch_checkpoint
        fetched = fetch(namespace, wanted)
        result = translate(fetched) if fetched is not None else None
        # Only now: what was just used is what should be left, if little may be.
        self.keep_within_budget()
        if fetched is None:
            self.record(Miss(len(tokens)))
        else:
            self.record(Hit(len(tokens), fetched.tokens, time.perf_counter() - begun))
        return result

    def _fetch_tensors(self, namespace: Hashable, wanted: Tokens) -> Fetched | None:
        match = self.tree.match(namespace, wanted)
        whole_tokens = before_image(wanted, match.tokens)
        if whole_tokens < match.tokens:  # its last blocks were evicted, or had no room
            match = self.tree.match(namespace, wanted[:whole_tokens])
        if not match.tokens:
            return None
        payloads = [cast(Payload, block.payload) for block in match.blocks]
        tensors = list(self._known[namespace].decode(payloads, match.tokens))
        self.tree.touch(match.blocks[-1])
        return Fetched(match.tokens, tensors)

    def _fetch_checkpoint(self, namespace: Hashable, wanted: Tokens) -> Fetched | None:
        node, tokens = self.tree.find_checkpoint(namespace, wanted)
        can_be_cut = attrgetter("can_be_cut")
        longer, shared = self.tree.find_longer_checkpoint(namespace, wanted, can_be_cut)
        surplus = 0
        if longer is not None and shared > tokens:
            node, tokens = longer, shared
            surplus = longer.depth_tokens() - shared
        if node is None:
            return None
        self.tree.touch(node)
        return Fetched(tokens, checkpoint=cast(Checkpoint, node.payload), surplus_tokens=surplus)

    # Inserting

    def insert(
        self, namespace: Hashable, tokens: Sequence[int], tensors: Sequence[Tensor], label: str
    ) -> None:
        """Store a sequence whose layers are all rows per token.

        Args:
            namespace: sequences of different namespaces never meet.
            tokens: as many as the tensors have rows.
            tensors: keys and values of each layer in turn.
            label: upstream's word for the kind of sequence.
        """
        begun = time.perf_counter()
        with self._reporting_evictions():
            keep_within(self.tree, self.budget)
            ids = np.array(tokens, np.int64)
            packers = self._packers_for(namespace, [tensor.spec for tensor in tensors])
            blocks, rest = divmod(len(ids), self.tree.block_tokens)
            with Insertion(self.tree, namespace, ids, label) as insertion:
                if self._add_blocks(insertion, packers, tensors, blocks):
                    self._add_tail(insertion, packers, tensors, rest)
            self._settle()
        self._record_insert(len(ids), insertion.stored_tokens, insertion.added_tokens, begun)

    def _add_blocks(
        self, insertion: Insertion, packers: SequencePacker, tensors: Sequence[Tensor], blocks: int
    ) -> bool:
        """Add the missing ones of the first `blocks`; False once there is no room."""
        tokens = self.tree.block_tokens
        while (missing := blocks - insertion.tokens // tokens) > 0:
            before = _encodings_of(insertion.relative(tokens))
            count = min(missing, self._blocks_at_once(insertion), 1 if before else BLOCKS_AT_ONCE)
            if not count:
                return False
            packer = packers.for_block(before)
            payloads = packer.encode(tensors, insertion.tokens, tokens, count, before)
            keep_within(self.tree, self.budget, insertion.tip)
            if not all(insertion.add(tokens, payload) for payload in payloads):
                return False
        return True

    def _blocks_at_once(self, insertion: Insertion) -> int:
        """How many blocks to encode before any of them is stored: what has room, and not many."""
        payload = insertion.tip.payload
        if payload is None:
            return 1  # the first one shows how large they are
        room_bytes = self.tree.limit_bytes - insertion.path_bytes
        return max(0, min(BLOCKS_AT_ONCE, room_bytes // payload.nbytes))

    def _add_tail(
        self, insertion: Insertion, packers: SequencePacker, tensors: Sequence[Tensor], count: int
    ) -> None:
        if count and not insertion.covers(count):
            before = _encodings_of(insertion.relative(count))
            insertion.add(
                count, packers.tails.encode(tensors, insertion.tokens, count, 1, before)[0]
            )

    def wants_checkpoint(self, namespace: Hashable, tokens: Sequence[int], nbytes: int) -> bool:
        """Whether one of about that size would be new, which uses the old one, and have room."""
        ids = np.array(tokens, np.int64)
        node, position = self.tree.find_checkpoint(namespace, ids)
        if node is not None and position == len(ids):
            self.tree.touch(node)
            return False
        return nbytes <= self.budget.allowed_bytes(self.tree.used_bytes)

    def insert_checkpoint(
        self, namespace: Hashable, tokens: Sequence[int], checkpoint: Checkpoint, label: str
    ) -> None:
        """Store the state of all layers after exactly these tokens."""
        begun = time.perf_counter()
        with self._reporting_evictions():
            keep_within(self.tree, self.budget)
            ids = np.array(tokens, np.int64)
            if self._known.pop(namespace, None) is not None:
                self.tree.drop(namespace, Cause.REPLACED)
            with Insertion(self.tree, namespace, ids, label) as insertion:
                stored = self._add_bearers(insertion, len(ids)) and (
                    insertion.enter(0) or insertion.add(0, checkpoint)
                )
            if stored and checkpoint.can_be_cut:
                self._drop_shorter(namespace, ids, insertion.tip)
            self._settle()
        stored_tokens = len(ids) if stored and insertion.tip in self.tree else 0
        self._record_insert(len(ids), stored_tokens, insertion.added_tokens, begun)

    def _add_bearers(self, insertion: Insertion, tokens: int) -> bool:
        """Add nodes without payload up to exactly `tokens`; False once there is no room."""
        while (missing := tokens - insertion.tokens) > 0:
            count = min(missing, self.tree.block_tokens)
            if not (insertion.enter(count) or insertion.add(count, None)):
                return False
        return True

    def _drop_shorter(self, namespace: Hashable, ids: Tokens, longest: Block) -> None:
        """Take out the checkpoints on the way to one that can be cut back to any of them."""
        for node, _ in list(self.tree.checkpoints(namespace, ids)):
            if node is not longest and cast(Checkpoint, node.payload).can_be_cut:
                self.tree.remove(node)

    def _settle(self) -> None:
        """Evict what was spared while it was added to, and whole sequences beyond their number."""
        evict_to_limit(self.tree, self.budget)
        if self.max_sequences is not None:
            self.tree.evict_sequences(max(0, self.max_sequences), Cause.COUNT)

    def keep_within_budget(self) -> None:
        """Evict what is more than may be held now."""
        with self._reporting_evictions():
            keep_within(self.tree, self.budget)

    def trim_to(self, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict at once until no more than this is held."""
        with self._reporting_evictions():
            if n_bytes is not None:
                self.tree.evict_to(max(0, n_bytes), Cause.TRIM)
            if n_sequences is not None:
                self.tree.evict_sequences(max(0, n_sequences), Cause.TRIM)

    # Telling

    def record(self, event: Event) -> None:
        """Count an event and pass it on."""
        self.counters.count(event)
        self._emit(event)

    def _record_insert(self, tokens: int, stored: int, new: int, begun: float) -> None:
        self.record(Insert(tokens, stored, new, time.perf_counter() - begun))
        logger.debug(
            "prefix cache holds %d bytes: %d blocks, %d tokens",
            self.tree.used_bytes,
            len(self.tree),
            self.tree.tokens,
        )

    @contextmanager
    def _reporting_evictions(self) -> Iterator[None]:
        """Record what is evicted inside, one event for each cause, also if it fails."""
        try:
            yield
        finally:
            blocks, n_bytes = dict(self.tree.evicted_blocks), dict(self.tree.evicted_bytes)
            self.tree.evicted_blocks.clear()
            self.tree.evicted_bytes.clear()
            for cause in blocks:
                self.record(Evict(blocks[cause], n_bytes[cause], cause.value))

    def _packers_for(self, namespace: Hashable, specs: Sequence[TensorSpec]) -> SequencePacker:
        packers = self._known.get(namespace)
        if packers is None or packers.blocks.specs != tuple(specs):
            # What is stored of a model that looks different now can never be used again.
            self.tree.drop(namespace, Cause.REPLACED)
            for other in [name for name in self._known if not self.tree.has(name)]:
                del self._known[other]
            packers = self._known[namespace] = self.packers.for_specs(specs)
        return packers


def _encodings_of(block: Block | None) -> int:
    """How often the rows that were fetched from a block had gone through the codec for blocks."""
    return block.payload.encodings if block and isinstance(block.payload, Payload) else 0
