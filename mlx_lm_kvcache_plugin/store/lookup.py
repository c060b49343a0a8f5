"""Reading the tree of blocks. Nothing here changes it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from .blocks import CHECKPOINT, TOKEN_BYTES, Block, Match, Root, Tokens


class Lookup:
    """What can be asked of a tree of blocks.

    Args:
        block_tokens: tokens of a complete block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._roots: dict[Hashable, Root] = {}
        self._last_run: tuple[Block, bytes, tuple[Block | None, int]] | None = None

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
        path: list[Block] = self.walk(namespace, tokens)
        node = path[-1] if path else self._roots.get(namespace)
        whole = len(path) * self.block_tokens
        child, rows = self.longest_run(node, tokens[whole:]) if node else (None, 0)
        if child is not None:
            return Match((*path, child), rows, whole + rows)
        return Match(tuple(path), self.block_tokens if path else 0, whole)

    def longest_run(self, node: Block, tokens: Tokens) -> tuple[Block | None, int]:
        """The child of `node` that agrees with the longest run of `tokens`, and its length.

        The last answer is remembered until anything changes: whoever is to tell why a prompt was
        no longer a hit asks once more, and a node may have thousands of children.
        """
        data, last = tokens[: self.block_tokens].tobytes(), self._last_run
        if last is None or last[0] is not node or last[1] != data:
            self._last_run = last = (node, data, self._find_run(node, data))
        return last[2]

    def _find_run(self, node: Block, data: bytes) -> tuple[Block | None, int]:
        agreeing = list(node.children)
        shortest, longest = 0, len(data) // TOKEN_BYTES
        while shortest < longest:  # by halves
            middle = (shortest + longest + 1) // 2
            prefix = data[: middle * TOKEN_BYTES]
            found = [key for key in agreeing if key.startswith(prefix)]
            if found:
                agreeing, shortest = found, middle
            else:
                longest = middle - 1
        return (node.children[agreeing[0]] if shortest else None), shortest

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
