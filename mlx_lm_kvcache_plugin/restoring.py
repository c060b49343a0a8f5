"""Reads from disk what a prompt begins with and the tree lacks, as far as there is room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .codecs.records import payload_from, states_from, windows_from
from .disk.files import Record
from .disk.names import BLOCK, CHECKPOINT, Name
from .disk.tier import DiskTier, Home
from .layers import Portable
from .matching import find_prefix
from .naming import Naming
from .spaces import Space
from .store.blocks import Sized, Tokens, before_image, common_tokens
from .store.insertion import Insertion
from .store.thinning import GENERATED, PROMPT, SYSTEM, USER
from .store.tree import BlockTree
from .writing import Checkpoint

MOST_CHILDREN = 512
"""How many files below one block are asked for their tokens, those that were used last: a folder of
many short prompts has thousands, and each takes some ten microseconds."""


class Restoration:
    """Restores a prefix of one sequence, of one layout. Used once.

    Args:
        tier, home: where the files are.
        portable: makes states of what files hold.
        tree, space: where everything goes.
        naming: what everything is called there.
        ids: of the prompt, as many as may be restored.
    """

    def __init__(
        self,
        tier: DiskTier,
        home: Home,
        portable: Portable,
        tree: BlockTree,
        space: Space,
        naming: Naming,
        ids: Tokens,
    ) -> None:
        self._tier = tier
        self._home = home
        self._portable = portable
        self._tree = tree
        self._space = space
        self._naming = naming
        self._ids = ids
        self._step = naming.step
        self._keys = naming.keys(ids)

    def run(self) -> int:
        """Read what goes beyond what the tree holds; returns how many tokens that is."""
        if self._space.layout.needs_checkpoint:
            return self._restore_checkpoint()
        return self._restore_rows()

    # What can be cut anywhere

    def _restore_rows(self) -> int:
        way = self._tree.walk(self._space, self._ids)
        held, depth = len(way), self._depth_on_disk(len(way))
        names = [self._block(place) for place in range(held, depth)]
        sequence = self._ids[: depth * self._step]
        rows = 0
        if depth == held:  # else nothing below it is in memory
            node = way[-1] if way else self._tree.root(self._space)
            rows = self._tree.longest_run(node, self._ids[len(sequence) :])[1]
        child, tokens = self._longest_child(depth, rows)
        if child is not None:
            names.append(child)
            sequence = np.concatenate([sequence, np.frombuffer(tokens, np.int64)])
        return self._read_rows(names, sequence) if names else 0

    def _longest_child(self, depth: int, rows: int) -> tuple[Name | None, bytes]:
        """The file that goes on after so many blocks and shares more than `rows` tokens."""
        rest = self._ids[depth * self._step :][: self._step].tobytes()
        best: tuple[Name | None, bytes] = None, b""
        for name in self._children(depth, BLOCK, MOST_CHILDREN):
            tokens = self._tier.tokens_of(self._home, name)
            shared = common_tokens(tokens, rest) if tokens is not None else 0
            if tokens is not None and shared > rows:
                best, rows = (name, tokens), shared
        return best

    def _read_rows(self, names: list[Name], sequence: Tokens) -> int:
        with Insertion(self._tree, self._space, sequence, "") as insertion:
            for name in names:
                record = self._tier.read(self._home, name)
                if record is None:
                    break
                payload = payload_from(record.meta, record.arrays)
                if not insertion.add(name.tokens, payload, _label(record)):
                    break
        return insertion.added_tokens

    # What can be resumed at checkpoints alone

    def _restore_checkpoint(self) -> int:
        in_memory = find_prefix(self._tree, self._space, self._ids)
        for depth, name in self._checkpoints(in_memory.tokens if in_memory else 0):
            if restored := self._restore_at(depth, name):
                return restored
        return 0

    def _checkpoints(self, held: int) -> Iterator[tuple[int, Name]]:
        """Those behind so many tokens, and how many blocks lead there; the deepest first."""
        deepest = len(self._keys) - 1
        if self._space.layout.rows:  # as far as these are to be had
            deepest = self._depth_on_disk(len(self._tree.walk(self._space, self._ids)))
        for depth in range(deepest, -1, -1):
            start = depth * self._step
            rest = self._ids[start : start + self._step]
            for name in sorted(self._children(depth, CHECKPOINT), key=lambda name: -name.tokens):
                position = start + name.tokens
                if (
                    held < position <= len(self._ids)
                    and before_image(self._ids, position) == position
                    and name == self._name(CHECKPOINT, depth, rest[: name.tokens])
                ):
                    yield depth, name
            if start <= held:
                return

    def _restore_at(self, depth: int, name: Name) -> int:
        """Restore a checkpoint and all that leads there: how many tokens were read, 0 if it fails.

        The checkpoint comes first: without it the rows are of no use.
        """
        record = self._tier.read(self._home, name)
        if record is None:
            return 0
        label, checkpoint = _label(record), self._checkpoint(record)
        sequence = self._ids[: depth * self._step + name.tokens]
        with Insertion(self._tree, self._space, sequence, label, bears=True) as insertion:
            way = [self._block(at) for at in range(insertion.tokens // self._step, depth)]
            if name.tokens and (way or not insertion.enter(name.tokens)):
                way.append(replace(name, kind=BLOCK))
            if not self._add_way(insertion, way, checkpoint.nbytes):
                return 0
            if not insertion.add(0, checkpoint, label):
                return 0
        return len(sequence)

    def _add_way(self, insertion: Insertion, way: list[Name], reserved_bytes: int) -> bool:
        """Add what leads to a checkpoint; nothing if not all of it has room beside that.

        Then nothing is evicted in vain. The first block shows how large all are.
        """
        room_bytes = self._tree.limit_bytes - insertion.path_bytes - reserved_bytes
        if room_bytes < 0:
            return False
        most_bytes = room_bytes // max(1, sum(name.tokens == self._step for name in way))
        for name in way:
            if not self._add_rows(insertion, name, most_bytes):
                return False
            most_bytes = room_bytes
        return True

    def _add_rows(self, insertion: Insertion, name: Name, most_bytes: int) -> bool:
        """Add a block or tail, if it takes no more than this."""
        if not self._space.layout.rows:
            return insertion.add(name.tokens, None)
        record = self._tier.read(self._home, name)
        if record is None:
            return False
        payload = payload_from(record.meta, record.arrays)
        if payload.nbytes > most_bytes:
            return False
        return insertion.add(name.tokens, payload, _label(record))

    def _checkpoint(self, record: Record) -> Sized:
        windows = windows_from(record.meta["windows"], record.arrays)
        states = states_from(record.arrays)
        return Checkpoint(windows, self._portable.states_from(record.meta["states"], states))

    # Both

    def _depth_on_disk(self, depth: int) -> int:
        """How many blocks of the way there are, if there are so many already."""
        while depth + 1 < len(self._keys) and self._tier.has(self._home, self._block(depth)):
            depth += 1
        return depth

    def _block(self, place: int) -> Name:
        """The file of the block behind so many blocks."""
        start = place * self._step
        return self._name(BLOCK, place, self._ids[start : start + self._step])

    def _name(self, kind: str, depth: int, tokens: Tokens) -> Name:
        """The name of what goes on with these tokens after so many blocks."""
        return self._naming.name(kind, self._keys[depth], tokens.tobytes())

    def _children(self, depth: int, kind: str, most: int | None = None) -> list[Name]:
        """The files of this kind and layout behind so many blocks."""
        parent, layout = self._keys[depth], self._naming.layout
        return self._tier.children(self._home, parent, kind=kind, layout=layout, most=most)


def _label(record: Record) -> str:
    """What kind of sequence it came with. A file is not believed to say anything else."""
    label = record.meta["label"]
    return label if label in (SYSTEM, USER, PROMPT, GENERATED) else GENERATED
