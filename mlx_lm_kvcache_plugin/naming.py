"""What the nodes of a sequence are called on disk, for whoever writes or reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .disk.names import BLOCK, CHECKPOINT, Name, child_key, layout_digest, root_key
from .disk.tier import Home
from .store.blocks import TOKEN_BYTES, Block, Tokens


@dataclass(frozen=True, slots=True)
class Naming:
    """Names the nodes of one space.

    Attributes:
        root: the key at the beginning of its sequences.
        layout: the digest of its layout.
        step: tokens of a whole block.
    """

    root: bytes
    layout: bytes
    step: int

    @classmethod
    def of(cls, home: Home, layout: str, step: int) -> Naming:
        """Args: layout: its text."""
        return cls(root_key(home.namespace), layout_digest(layout), step)

    def keys(self, ids: Tokens) -> list[bytes]:
        """The keys after no whole block, after one, after two, ... of a sequence."""
        keys = [self.root]
        for start in range(0, len(ids) - self.step + 1, self.step):
            keys.append(child_key(keys[-1], ids[start : start + self.step].tobytes()))
        return keys

    def name(self, kind: str, parent: bytes, tokens: bytes) -> Name:
        """The name of a node.

        Args:
            parent: the key after the last whole block before it.
            tokens: of a block or tail; of a checkpoint those behind that block.
        """
        count = len(tokens) // TOKEN_BYTES
        return Name(parent, child_key(parent, tokens), count, kind, self.layout)

    def path(self, nodes: Sequence[Block]) -> Iterator[tuple[Block, bytes, Name]]:
        """The nodes of a path, the tokens that their names stand for, and their names."""
        parent, tail = self.root, b""
        for node in nodes:
            tokens = node.key or tail
            name = self.name(BLOCK if node.key else CHECKPOINT, parent, tokens)
            yield node, tokens, name
            if node.tokens == self.step:
                parent = name.own
            else:
                tail = node.key
