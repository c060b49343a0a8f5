"""Writes a sequence into the store: what is missing of it is encoded, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .codecs.packing import Packer, Payload
from .codecs.windows import WindowPayload
from .layers import Frozen, Layers
from .spaces import Space
from .store.blocks import Block, Tokens
from .store.budget import Budget, keep_within
from .store.insertion import Insertion
from .store.tree import BlockTree

BLOCKS_AT_ONCE = 16
"""How many blocks are encoded in one go: few calls, and little that is not yet counted."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Checkpoint:
    """What belongs to one position: the windows and the states of all layers that have one."""

    windows: WindowPayload
    states: Frozen

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self) + self.windows.nbytes + self.states.nbytes


class Writer:
    """Writes the sequences of one space.

    Args:
        tree: where to.
        budget: asked again after each run of blocks.
        space: how everything is encoded.
        others: the other spaces of its namespace: what was fetched may have come from there.
        layers: of the sequence.
    """

    def __init__(
        self,
        tree: BlockTree,
        budget: Budget,
        space: Space,
        others: Sequence[Space],
        layers: Layers,
    ) -> None:
        self._tree = tree
        self._budget = budget
        self._space = space
        self._others = others
        self._layers = layers
        self._elsewhere: list[tuple[Block, ...]] = []
        self._windows: WindowPayload | None = None

    def write(self, ids: Tokens, label: str) -> Insertion:
        """Store as much of the sequence as has room; what needs a checkpoint, whole or not at all.

        Args:
            ids: as many as the layers stand for.
            label: upstream's word for the kind of sequence.
        """
        needs_checkpoint = self._space.layout.needs_checkpoint
        blocks, rest = divmod(len(ids), self._tree.block_tokens)
        self._elsewhere = [self._tree.match(space, ids).blocks for space in self._others]
        with Insertion(self._tree, self._space, ids, label, needs_checkpoint) as insertion:
            if needs_checkpoint:  # first: it has to be known what room they take
                self._windows = self._space.windows.encode(self._layers.windows)
            if (
                self._room_bytes(insertion) > 0
                and self._add_blocks(insertion, blocks)
                and self._add_tail(insertion, rest)
                and self._windows is not None
            ):
                insertion.add(0, Checkpoint(self._windows, self._layers.freeze()))
        return insertion

    def _room_bytes(self, insertion: Insertion) -> int:
        """What the sequence may still take for its rows, if everything else goes."""
        held = insertion.path_bytes + self._layers.state_bytes
        return self._tree.limit_bytes - held - (self._windows.nbytes if self._windows else 0)

    def _add_blocks(self, insertion: Insertion, blocks: int) -> bool:
        """Add the missing ones of the first `blocks`; False once there is no room."""
        tokens = self._tree.block_tokens
        while (missing := blocks - insertion.tokens // tokens) > 0:
            before = self._encodings_before(insertion, tokens)
            room = self._blocks_with_room(insertion, missing)
            count = min(room, 1 if before else BLOCKS_AT_ONCE)
            if not count:
                return False
            packer = self._space.rows.for_block(before)
            payloads = self._encode(packer, insertion.tokens, tokens, count, before)
            keep_within(self._tree, self._budget, insertion.tip)
            if not all(insertion.add(tokens, payload) for payload in payloads):
                return False
        return True

    def _blocks_with_room(self, insertion: Insertion, missing: int) -> int:
        """How many of the missing blocks can be stored, if everything else goes.

        None where all are needed and not all can be: nothing is to be evicted in vain.
        """
        if not self._layers.rows:
            return missing
        payload = insertion.tip.payload
        if payload is None:
            return 1  # the first one shows how large they are
        room = max(0, self._room_bytes(insertion) // payload.nbytes)
        if self._space.layout.needs_checkpoint and room < missing:
            return 0
        return min(missing, room)

    def _add_tail(self, insertion: Insertion, count: int) -> bool:
        """Add what is left of the sequence behind its blocks; False if there is no room."""
        is_bearer = self._space.layout.needs_checkpoint
        # A checkpoint stands at the end of its bearer: a longer one will not do.
        if not count or (insertion.enter(count) if is_bearer else insertion.covers(count)):
            return True
        before = self._encodings_before(insertion, count)
        (payload,) = self._encode(self._space.rows.tails, insertion.tokens, count, 1, before)
        return insertion.add(count, payload)

    def _encode(
        self, packer: Packer, start: int, tokens: int, count: int, before: int
    ) -> Sequence[Payload | None]:
        """Payloads of consecutive blocks; without any rows there is nothing to hold."""
        if not self._layers.rows:
            return [None] * count
        return packer.encode(self._layers.rows, start, tokens, count, before)

    def _encodings_before(self, insertion: Insertion, count: int) -> int:
        """How often rows of the next `count` tokens may have gone through the codec for blocks."""
        place = insertion.tokens // self._tree.block_tokens
        relatives = [insertion.relative(count)]
        relatives += [blocks[place] for blocks in self._elsewhere if place < len(blocks)]
        return max(map(_encodings_of, relatives))


def _encodings_of(block: Block | None) -> int:
    """The same of the rows that were fetched from a block."""
    return block.payload.encodings if block and isinstance(block.payload, Payload) else 0
