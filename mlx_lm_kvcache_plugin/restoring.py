"""Reads from disk what a prompt begins with and the tree lacks, as far as there is room."""

from __future__ import annotations

from dataclasses import replace

from .codecs.records import payload_from, states_from, windows_from
from .disk.files import Record
from .disk.names import BLOCK, Name
from .disk.tier import DiskTier, Home
from .layers import Portable
from .matching import find_prefix
from .searching import Search
from .spaces import Space
from .store.blocks import Sized, Tokens
from .store.insertion import Insertion
from .store.thinning import GENERATED, PROMPT, SYSTEM, USER
from .store.tree import BlockTree
from .writing import Checkpoint


class Restoration:
    """Restores a prefix of one sequence, of one layout. Used once.

    Args:
        tier, home: where the files are.
        portable: makes states of what files hold.
        tree, space: where everything goes.
        search: for the sequence.
    """

    def __init__(
        self,
        tier: DiskTier,
        home: Home,
        portable: Portable,
        tree: BlockTree,
        space: Space,
        search: Search,
    ) -> None:
        self._tier = tier
        self._home = home
        self._portable = portable
        self._tree = tree
        self._space = space
        self._search = search

    def run(self) -> int:
        """Read what goes beyond what the tree holds; returns how many tokens that is."""
        if self._space.layout.needs_checkpoint:
            return self._restore_checkpoint()
        names, sequence = self._search.rows()
        return self._read_rows(names, sequence) if names else 0

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

    def _restore_checkpoint(self) -> int:
        in_memory = find_prefix(self._tree, self._space, self._search.ids)
        for depth, name in self._search.checkpoints(in_memory.tokens if in_memory else 0):
            if restored := self._restore_at(depth, name):
                return restored
        return 0

    def _restore_at(self, depth: int, name: Name) -> int:
        """Restore a checkpoint and all that leads there: how many tokens were read, 0 if it fails.

        The checkpoint comes first: without it the rows are of no use.
        """
        record = self._tier.read(self._home, name)
        if record is None:
            return 0
        label, checkpoint = _label(record), self._checkpoint(record)
        sequence = self._search.ids[: depth * self._search.step + name.tokens]
        with Insertion(self._tree, self._space, sequence, label, bears=True) as insertion:
            way = [
                self._search.block(at) for at in range(insertion.tokens // self._search.step, depth)
            ]
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
        most_bytes = room_bytes // max(1, sum(name.tokens == self._search.step for name in way))
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


def _label(record: Record) -> str:
    """What kind of sequence it came with. A file is not believed to say anything else."""
    label = record.meta["label"]
    return label if label in (SYSTEM, USER, PROMPT, GENERATED) else GENERATED
