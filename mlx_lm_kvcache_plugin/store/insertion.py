"""Adding one sequence to the tree: as much of it as fits, or nothing if anything fails."""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType

from .blocks import Block, Sized, Tokens
from .tree import BlockTree


class Insertion:
    """Adds nodes below one another, from the end of what is stored already.

    Used as a context: an exception inside it takes back whatever was added.

    Args:
        tree: where to.
        namespace, tokens: the sequence.
        label: for the nodes that are added.
        bears: whether they are of use for a checkpoint alone that is to be added at their end.

    Attributes:
        tip: the deepest node of the sequence so far, perhaps the root.
        tokens: how many tokens lead to it.
        path_bytes: what the nodes from below the root to it hold.
    """

    def __init__(
        self,
        tree: BlockTree,
        namespace: Hashable,
        tokens: Tokens,
        label: str,
        bears: bool = False,
    ) -> None:
        path = tree.walk(namespace, tokens)
        self.tip: Block = path[-1] if path else tree.root(namespace)
        self.tokens = len(path) * tree.block_tokens
        self._tree = tree
        self._sequence = tokens
        self._label = label
        self._bears = bears
        self._added: list[Block] = []
        self.path_bytes = sum(block.nbytes for block in path)

    @property
    def stored_tokens(self) -> int:
        """How many tokens of the sequence, from its first, are stored now."""
        node, tokens = self.tip, self.tokens
        while node.parent is not None and node not in self._tree:
            # A tail that was covered by a longer one counts for what it covered.
            tokens -= tokens % self._tree.block_tokens or node.tokens
            node = node.parent
        return tokens

    @property
    def added_tokens(self) -> int:
        """How many of them were not stored before."""
        return sum(block.tokens for block in self._added if block in self._tree)

    def relative(self, count: int) -> Block | None:
        """The stored node that shares the longest run of the next `count` tokens."""
        return self._tree.longest_run(self.tip, self._next(count))[0]

    def covers(self, count: int) -> bool:
        """Whether the next `count` tokens are stored already; if so, goes to where they are."""
        child, rows = self._tree.longest_run(self.tip, self._next(count))
        if child is None or rows < count:
            return False
        self._advance(child, count)
        return True

    def enter(self, count: int) -> bool:
        """Go to the node of exactly the next `count` tokens (0: a checkpoint), if there is one."""
        key = self._next(count).tobytes()
        child = self.tip.children.get(key)
        if child is None:
            return False
        self._advance(child, count)
        return True

    def add(self, count: int, payload: Sized | None, label: str | None = None) -> bool:
        """Add a node for the next `count` tokens (0 for a checkpoint), if there is room.

        Args:
            label: if it has another than the sequence.
        """
        key = self._next(count).tobytes()
        is_bearer = self._bears and count > 0
        label = self._label if label is None else label
        block = self._tree.add(self.tip, key, payload, label, is_bearer)
        if block is None:
            return False
        self._added.append(block)
        self.path_bytes += block.nbytes
        self._advance(block, count)
        return True

    def _next(self, count: int) -> Tokens:
        return self._sequence[self.tokens : self.tokens + count]

    def _advance(self, block: Block, count: int) -> None:
        self.tip = block
        self.tokens += count

    def __enter__(self) -> Insertion:
        # From here on the whole path is newer than the rest, so that it is not evicted for itself.
        self._tree.touch(self.tip)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            for block in reversed(self._added):
                if block in self._tree:  # not gone already with the one below it
                    self._tree.remove(block)
        else:
            for block in self._added:
                self._tree.supersede(block)
            if self.tip in self._tree:
                self._tree.touch(self.tip)
        if self.tip in self._tree and self.tip.is_bearer and not self.tip.children:
            # It was to bear a checkpoint that found no room, or lost those that it bore.
            self._tree.remove(self.tip)
