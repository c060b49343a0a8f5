"""Reading the tree of blocks. Nothing here changes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from .blocks import CHECKPOINT, TOKEN_BYTES, Block, Match, Root, Tokens

LOOK_AHEAD_NODES = 1 << 14
"""How far beyond a match a checkpoint is looked for: it would have to be cut back all that way."""


class Lookup:
    """What can be asked of a tree of blocks.

    Args:
        block_tokens: tokens of a complete block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._roots: dict[Hashable, Root] = {}

    def __contains__(self, block: Block) -> bool:
        return block.parent is not None and block.parent.children.get(block.key) is block

    def has(self, namespace: Hashable) -> bool:
        """Whether anything is stored of a namespace."""
        return namespace in self._roots

    def roots(self) -> list[Root]:
        """The roots of all namespaces that hold anything."""
        return list(self._roots.values())

    def root(self, namespace: Hashable) -> Root:
        """The node that sequences of a namespace begin under; kept once something is added."""
        return self._roots.get(namespace) or Root(namespace)

    def walk(self, namespace: Hashable, tokens: Tokens) -> list[Block]:
        """The complete blocks that `tokens` begin with, in order."""
        node: Block | None = self._roots.get(namespace)
        found: list[Block] = []
        data, width = tokens.tobytes(), self.block_tokens * TOKEN_BYTES
        for start in range(0, len(data) - width + 1, width):
            node = node.children.get(data[start : start + width]) if node else None
            if node is None:
                break
            found.append(node)
        return found

    def match(self, namespace: Hashable, tokens: Tokens) -> Match:
        """The longest stored run that `tokens` begin with, to the token."""
        path, children, rows = self._walk_on(namespace, tokens)
        whole = len(path) * self.block_tokens
        if children:
            return Match((*path, children[0]), rows, whole + rows)
        return Match(tuple(path), self.block_tokens if path else 0, whole)

    def _walk_on(self, namespace: Hashable, tokens: Tokens) -> tuple[list[Block], list[Block], int]:
        """The complete blocks, the children behind them that agree longest, and for how long."""
        path: list[Block] = self.walk(namespace, tokens)
        node = path[-1] if path else self._roots.get(namespace)
        if node is None:
            return path, [], 0
        return path, *self._agreeing(node, tokens[len(path) * self.block_tokens :])

    def longest_run(self, node: Block, tokens: Tokens) -> tuple[Block | None, int]:
        """The child of `node` that agrees with the longest run of `tokens`, and its length."""
        children, rows = self._agreeing(node, tokens)
        return (children[0] if children else None), rows

    def _agreeing(self, node: Block, tokens: Tokens) -> tuple[list[Block], int]:
        """All children that agree with the longest run that any does, and its length."""
        data = tokens[: self.block_tokens].tobytes()
        agreeing = list(node.children)
        shortest, longest = 0, len(data) // TOKEN_BYTES
        while shortest < longest:  # by halves: a node may have thousands of children
            middle = (shortest + longest + 1) // 2
            prefix = data[: middle * TOKEN_BYTES]
            found = [key for key in agreeing if key.startswith(prefix)]
            if found:
                agreeing, shortest = found, middle
            else:
                longest = middle - 1
        return ([node.children[key] for key in agreeing] if shortest else []), shortest

    def checkpoints(self, namespace: Hashable, tokens: Tokens) -> Iterator[tuple[Block, int]]:
        """The checkpoints on the way along `tokens`, and their positions; the deepest first."""
        path: list[Block] = self.walk(namespace, tokens)
        for depth in range(len(path), -1, -1):
            node = path[depth - 1] if depth else self._roots.get(namespace)
            start = depth * self.block_tokens
            rest = tokens[start : start + self.block_tokens].tobytes()
            if node is not None:
                bearers = [c for key, c in node.children.items() if key and rest.startswith(key)]
                for bearer in sorted(bearers, key=lambda block: -block.tokens):
                    if CHECKPOINT in bearer.children:
                        yield bearer.children[CHECKPOINT], start + bearer.tokens

    def find_checkpoint(self, namespace: Hashable, tokens: Tokens) -> tuple[Block | None, int]:
        """The checkpoint that stands for the most of the first `tokens`, and for how many."""
        return next(self.checkpoints(namespace, tokens), (None, 0))

    def find_longer_checkpoint(
        self, namespace: Hashable, tokens: Tokens, accept: Callable[[Any], bool]
    ) -> tuple[Block | None, int]:
        """A near checkpoint beyond the longest stored run of `tokens`, and the run's length.

        Args:
            accept: whether a checkpoint's payload will do.
        """
        path, children, rows = self._walk_on(namespace, tokens)
        waiting = deque(children or path[-1:])
        for _ in range(LOOK_AHEAD_NODES):
            if not waiting:
                break
            node = waiting.popleft()
            if not node.key and node.payload is not None and accept(node.payload):
                return node, len(path) * self.block_tokens + rows
            waiting += node.children.values()
        return None, 0
