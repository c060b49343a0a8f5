"""Finds on disk what a prompt begins with and the tree lacks, by names alone; reads no payload."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from .disk.names import BLOCK, CHECKPOINT, Name
from .disk.tier import DiskTier, Home
from .layers import Layout
from .naming import Naming
from .store.blocks import Block, Tokens, before_image, common_tokens
from .store.tree import BlockTree

MOST_CHILDREN = 512
"""How many files below one block are asked for their tokens, those that were used last: a folder of
many short prompts has thousands, and each takes some ten microseconds."""


class Search:
    """Looks for a prefix of one sequence, of one layout. Used once.

    Args:
        tier, home: where the files are.
        tree: where everything is that need not be found.
        space: under what namespace of it.
        layout: what the sequence's layers look like.
        naming: what everything is called on disk.
        ids: of the prompt, as many as may be restored.

    Attributes:
        step: tokens of a whole block.
        ids: as they were given.
    """

    def __init__(
        self,
        tier: DiskTier,
        home: Home,
        tree: BlockTree,
        space: Hashable,
        layout: Layout,
        naming: Naming,
        ids: Tokens,
    ) -> None:
        self.ids = ids
        self.step = naming.step
        self._tier = tier
        self._home = home
        self._tree = tree
        self._space = space
        self._layout = layout
        self._naming = naming
        self._keys = naming.keys(ids)

    def reach(self) -> tuple[int, bool]:
        """How many tokens would be of use if all that is found were restored.

        And whether what is found goes on with others there.
        """
        if self._layout.needs_checkpoint:
            deepest = next(self.checkpoints(0), None)
            return (deepest[0] * self.step + deepest[1].tokens if deepest else 0), False
        names, sequence = self.rows()
        if not names:
            with self._tree.lock:
                common = self._tree.match(self._space, self.ids).tokens
        else:
            common = common_tokens(sequence.tobytes(), self.ids.tobytes())
        return before_image(self.ids, common), common < len(sequence)

    def rows(self) -> tuple[list[Name], Tokens]:
        """What can be cut anywhere: the files that go on where the tree ends, and all tokens to
        the end of the last one."""
        way = self._held_blocks()
        held, depth = len(way), self._depth_on_disk(len(way))
        names = [self.block(place) for place in range(held, depth)]
        sequence = self.ids[: depth * self.step]
        rows = 0
        if depth == held:  # else nothing below it is in memory
            with self._tree.lock:
                node = way[-1] if way else self._tree.root(self._space)
                rows = self._tree.longest_run(node, self.ids[len(sequence) :])[1]
        child, tokens = self._longest_child(depth, rows)
        if child is not None:
            names.append(child)
            sequence = np.concatenate([sequence, np.frombuffer(tokens, np.int64)])
        return names, sequence

    def _held_blocks(self) -> list[Block]:
        with self._tree.lock:  # and not for longer: a disk may be slow
            return self._tree.walk(self._space, self.ids)

    def _longest_child(self, depth: int, rows: int) -> tuple[Name | None, bytes]:
        """The file that goes on after so many blocks and shares more than `rows` tokens."""
        rest = self.ids[depth * self.step :][: self.step].tobytes()
        best: tuple[Name | None, bytes] = None, b""
        for name in self._children(depth, BLOCK, MOST_CHILDREN):
            tokens = self._tier.tokens_of(self._home, name)
            shared = common_tokens(tokens, rest) if tokens is not None else 0
            if tokens is not None and shared > rows:
                best, rows = (name, tokens), shared
        return best

    def checkpoints(self, held: int) -> Iterator[tuple[int, Name]]:
        """Those behind so many tokens, and how many blocks lead there; the deepest first."""
        deepest = len(self._keys) - 1
        if self._layout.rows:  # as far as these are to be had
            deepest = self._depth_on_disk(len(self._held_blocks()))
        for depth in range(deepest, -1, -1):
            start = depth * self.step
            rest = self.ids[start : start + self.step]
            for name in sorted(self._children(depth, CHECKPOINT), key=lambda name: -name.tokens):
                position = start + name.tokens
                if (
                    held < position <= len(self.ids)
                    and before_image(self.ids, position) == position
                    and name == self._name(CHECKPOINT, depth, rest[: name.tokens])
                ):
                    yield depth, name
            if start <= held:
                return

    def _depth_on_disk(self, depth: int) -> int:
        """How many blocks of the way there are, if there are so many already."""
        while depth + 1 < len(self._keys) and self._tier.has(self._home, self.block(depth)):
            depth += 1
        return depth

    def block(self, place: int) -> Name:
        """The file of the block behind so many blocks."""
        start = place * self.step
        return self._name(BLOCK, place, self.ids[start : start + self.step])

    def _name(self, kind: str, depth: int, tokens: Tokens) -> Name:
        """The name of what goes on with these tokens after so many blocks."""
        return self._naming.name(kind, self._keys[depth], tokens.tobytes())

    def _children(self, depth: int, kind: str, most: int | None = None) -> list[Name]:
        """The files of this kind and layout behind so many blocks."""
        parent, layout = self._keys[depth], self._naming.layout
        return self._tier.children(self._home, parent, kind=kind, layout=layout, most=most)
