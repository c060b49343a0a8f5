"""The composer: from a model's tokens and layers to blocks in the store, and back.

It knows no upstream class. A layer whose tokens are independent rows comes as two tensors (keys,
values) and lives in blocks; a cache with any other layer comes as one opaque checkpoint that
stands for exactly as many tokens as were computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import mlx.core as mx
import numpy as np

from .codecs.affine import AffineCodec
from .codecs.base import Codec, CodecOptions
from .codecs.packing import Packer, Payload, SequencePacker, Tensor, TensorSpec
from .codecs.raw import RawCodec
from .codecs.registry import CodecRegistry
from .events import Counters, Event, Evict, Hit, Insert, Miss
from .settings import Settings
from .store.blocks import Block, Tokens
from .store.budget import Budget
from .store.insertion import Insertion
from .store.tree import BlockTree, Cause

logger = logging.getLogger("mlx_lm_kvcache_plugin")

BLOCK_TOKENS = 128
"""Settled by bytes, fidelity and speed together: docs/decisions/0001-block-size.md."""

BLOCKS_AT_ONCE = 16
"""How many blocks are encoded in one go: few calls, and little that is not yet counted."""

TAIL_BITS = 8
"""Tails are encoded anew as they grow, and end up inside of blocks: they have to be near exact."""


class Checkpoint(Protocol):
    """The state of all layers at one position, as its maker left it."""

    @property
    def nbytes(self) -> int: ...

    @property
    def can_be_cut(self) -> bool:
        """Whether its maker can shorten it to fewer tokens once it is restored."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What is known of a prompt's first tokens: either tensors or a checkpoint.

    Attributes:
        tokens: how many tokens it stands for.
        tensors: keys and values of each layer in turn, [heads, tokens, dim], evaluated.
        checkpoint: the state of all layers.
        surplus_tokens: how many tokens the checkpoint has to be cut by.
    """

    tokens: int
    tensors: list[mx.array] | None = None
    checkpoint: Checkpoint | None = None
    surplus_tokens: int = 0


class PrefixCache:
    """Past prefixes, encoded, shared block by block, within a budget.

    Owned by one thread. A method that raises has changed nothing but the recency of what it
    touched, and perhaps evicted something.

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
        self._emit = emit
        self._packers: dict[Hashable, SequencePacker] = {}
        self._key_codec, self._value_codec = registry.create_pair(settings)
        self._tail_codec: Codec = RawCodec()
        if settings.codec != RawCodec.name:
            self._tail_codec = AffineCodec(CodecOptions(TAIL_BITS, settings.group_size))

    # Fetching

    def fetch(self, namespace: Hashable, tokens: Sequence[int]) -> Fetched | None:
        """The longest stored prefix of `tokens`, short of the last one: that has to be computed."""
        begun = time.perf_counter()
        self.keep_within_budget()
        wanted = np.array(tokens, np.int64)[:-1]
        if namespace in self._packers:
            fetched = self._fetch_tensors(namespace, wanted)
        else:
            fetched = self._fetch_checkpoint(namespace, wanted)
        if fetched is None:
            self.record(Miss(len(tokens)))
        else:
            self.record(Hit(len(tokens), fetched.tokens, time.perf_counter() - begun))
        return fetched

    def _fetch_tensors(self, namespace: Hashable, wanted: Tokens) -> Fetched | None:
        match = self.tree.match(namespace, wanted)
        if not match.tokens:
            return None
        payloads = [cast(Payload, block.payload) for block in match.blocks]
        has_tail = match.blocks[-1].tokens < self.tree.block_tokens
        tail_rows = match.rows if has_tail else 0
        tensors = list(self._packers[namespace].decode(payloads, match.tokens, tail_rows))
        self.tree.touch(match.blocks[-1])
        return Fetched(match.tokens, tensors)

    def _fetch_checkpoint(self, namespace: Hashable, wanted: Tokens) -> Fetched | None:
        node, tokens = self.tree.find_checkpoint(namespace, wanted)
        longer, shared = self.tree.find_longer_checkpoint(namespace, wanted, _can_be_cut)
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
        self.keep_within_budget()
        ids = np.array(tokens, np.int64)
        packers = self._packers_for(namespace, [tensor.spec for tensor in tensors])
        blocks, rest = divmod(len(ids), self.tree.block_tokens)
        with Insertion(self.tree, namespace, ids, label) as insertion:
            if self._add_blocks(insertion, packers.blocks, tensors, blocks):
                self._add_tail(insertion, packers.tails, tensors, rest)
        self._finish_insert(insertion, len(ids), begun)

    def _add_blocks(
        self, insertion: Insertion, packer: Packer, tensors: Sequence[Tensor], blocks: int
    ) -> bool:
        """Add the missing ones of the first `blocks`; False once there is no room."""
        tokens = self.tree.block_tokens
        while (missing := blocks - insertion.tokens // tokens) > 0:
            count = min(missing, BLOCKS_AT_ONCE)
            payloads = packer.encode(tensors, insertion.tokens, tokens, count)
            self.keep_within_budget(insertion.tip)
            for payload in payloads:
                if not insertion.add(tokens, payload):
                    return False
        return True

    def _add_tail(
        self, insertion: Insertion, packer: Packer, tensors: Sequence[Tensor], count: int
    ) -> None:
        if count and not insertion.covers(count):
            insertion.add(count, packer.encode(tensors, insertion.tokens, count)[0])

    def insert_checkpoint(
        self, namespace: Hashable, tokens: Sequence[int], checkpoint: Checkpoint, label: str
    ) -> None:
        """Store the state of all layers after exactly these tokens."""
        begun = time.perf_counter()
        self.keep_within_budget()
        ids = np.array(tokens, np.int64)
        if self._packers.pop(namespace, None) is not None:
            self.tree.drop(namespace, Cause.REPLACED)
        with Insertion(self.tree, namespace, ids, label) as insertion:
            if self._add_bearers(insertion, len(ids)) and not insertion.enter(0):
                insertion.add(0, checkpoint)
        self._finish_insert(insertion, len(ids), begun)

    def _add_bearers(self, insertion: Insertion, tokens: int) -> bool:
        """Add nodes without payload up to exactly `tokens`; False once there is no room."""
        while (missing := tokens - insertion.tokens) > 0:
            count = min(missing, self.tree.block_tokens)
            if not (insertion.enter(count) or insertion.add(count, None)):
                return False
        return True

    def _finish_insert(self, insertion: Insertion, tokens: int, begun: float) -> None:
        self._evict_to_limit()  # what was spared while it was added to
        if self.max_sequences is not None:
            self.tree.evict_sequences(max(0, self.max_sequences), Cause.COUNT)
        self._report_evictions()
        seconds = time.perf_counter() - begun
        self.record(Insert(tokens, insertion.tokens, insertion.added_tokens, seconds))
        logger.debug(
            "prefix cache holds %d bytes: %d blocks, %d tokens",
            self.tree.used_bytes,
            len(self.tree),
            self.tree.tokens,
        )

    # Keeping within bounds

    def keep_within_budget(self, keep: Block | None = None) -> None:
        """Ask what may be held now, and evict what is more, but not `keep`.

        While the machine is short of memory it is asked again after each eviction, until it is
        back above its reserve or nothing is left.
        """
        while True:
            before = self.tree.used_bytes
            self.tree.limit_bytes = self.budget.allowed_bytes(before)
            self._evict_to_limit(keep)
            if self.tree.used_bytes == before or not self.budget.is_short:
                break
        self._report_evictions()

    def _evict_to_limit(self, keep: Block | None = None) -> None:
        cause = Cause.PRESSURE if self.budget.is_short else Cause.MEMORY
        self.tree.evict_to(self.tree.limit_bytes, cause, keep)

    def trim_to(self, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict at once until no more than this is held."""
        if n_bytes is not None:
            self.tree.evict_to(max(0, n_bytes), Cause.TRIM)
        if n_sequences is not None:
            self.tree.evict_sequences(max(0, n_sequences), Cause.TRIM)
        self._report_evictions()

    def _report_evictions(self) -> None:
        """Emit what was evicted since the last time, by cause."""
        for cause, blocks in self.tree.evicted_blocks.items():
            n_bytes = self.tree.evicted_bytes[cause]
            self.record(Evict(blocks, n_bytes, cause.value))
        self.tree.evicted_blocks.clear()
        self.tree.evicted_bytes.clear()

    def record(self, event: Event) -> None:
        """Count an event and pass it on."""
        self.counters.count(event)
        self._emit(event)

    # Models

    def packer_for(self, specs: Sequence[TensorSpec]) -> Packer:
        """How whole blocks of such tensors are encoded."""
        return Packer(specs, self._key_codec, self._value_codec)

    def _packers_for(self, namespace: Hashable, specs: Sequence[TensorSpec]) -> SequencePacker:
        packers = self._packers.get(namespace)
        if packers is None or packers.blocks.specs != tuple(specs):
            # What is stored of a model that looks different now can never be used again.
            self.tree.drop(namespace, Cause.REPLACED)
            for other in [name for name in self._packers if not self.tree.has(name)]:
                del self._packers[other]
            tails = Packer(specs, self._tail_codec, self._tail_codec)
            packers = self._packers[namespace] = SequencePacker(self.packer_for(specs), tails)
        return packers


def _can_be_cut(checkpoint: Checkpoint) -> bool:
    return checkpoint.can_be_cut
