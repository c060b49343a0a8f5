"""A tree of immutable blocks: what many token sequences share is stored once.

A block stands for a run of consecutive tokens under its parent block, so a sequence is a path
from the root of its namespace. There are three kinds of node, told apart by their tokens alone:

- a block holds exactly `block_tokens` tokens and may have children;
- a tail holds fewer, the incomplete end of a sequence; it gives way to a block that completes it;
- a checkpoint holds none: it hangs below the block or tail at whose end its state was taken.

A block or tail that can only be used from a checkpoint on is a bearer: it goes with the last one
below it. A child is found by the bytes of its tokens in its parent's dict, so there is no hash that
could collide. The tree knows payloads by their `nbytes` alone.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Hashable
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
"""Token ids. 64 bits, since upstream gives images negative ids of 60 bits."""

TOKEN_BYTES = 8

CHECKPOINT = b""
"""The key of a checkpoint."""

OBJECT_BYTES = sys.getsizeof(1 << 62) + sys.getsizeof(0.0)
"""What a node's chain and the time of its last use take."""


class Sized(Protocol):
    """What is known of a payload."""

    @property
    def nbytes(self) -> int: ...


def chain_of(chain: int, key: bytes) -> int:
    """The chain of a node: a hash over its namespace and all tokens up to its end.

    It names what was stored after that is gone, in statistics alone: two that collide make a figure
    wrong and nothing else.

    Args:
        chain: of the node above; of a root, the hash of its namespace.
        key: the bytes of the node's tokens.
    """
    return hash((chain, key))


class Block:
    """A node of the tree. Only `BlockTree` writes to it.

    Attributes:
        parent: the node above; None for a root.
        root: what it is below; a root is its own.
        chain: what `chain_of` says.
        used_at: when it was last used, in seconds of `time.monotonic`.
        key: the bytes of its tokens.
        payload: what is stored for them; None for a bearer that only leads to its checkpoints.
        is_bearer: whether it is of use for the checkpoints below it alone.
        label: upstream's word for the kind of sequence it came with ("assistant", ...).
        children: by key.
        nbytes: what it holds, index included.
    """

    __slots__ = (
        "chain",
        "children",
        "is_bearer",
        "key",
        "label",
        "nbytes",
        "newer",
        "older",
        "parent",
        "payload",
        "root",
        "used_at",
    )

    root: Root
    chain: int

    def __init__(
        self,
        parent: Block | None,
        key: bytes,
        payload: Sized | None,
        label: str,
        is_bearer: bool = False,
    ) -> None:
        self.parent = parent
        if parent is not None:
            self.root = parent.root
            self.chain = chain_of(parent.chain, key)
        self.used_at = 0.0
        self.key = key
        self.payload = payload
        self.label = label
        self.is_bearer = is_bearer
        self.children: dict[bytes, Block] = {}
        self.nbytes = 0
        self.older: Block | None = None
        self.newer: Block | None = None

    @property
    def tokens(self) -> int:
        """How many tokens it stands for."""
        return len(self.key) // TOKEN_BYTES

    def path(self) -> list[Block]:
        """The nodes from below the root to this one."""
        nodes: list[Block] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def depth_tokens(self) -> int:
        """The position in its sequence at which it ends."""
        return sum(node.tokens for node in self.path())

    def measure(self) -> int:
        """Count what it holds, down to the Python objects of the index."""
        index = sys.getsizeof(self) + sys.getsizeof(self.key) + sys.getsizeof(self.children)
        payload_bytes = self.payload.nbytes if self.payload is not None else 0
        return index + OBJECT_BYTES + payload_bytes


@dataclass(slots=True)
class Tally:
    """What the nodes below a root come to, itself included.

    Attributes:
        used_bytes: index included.
        tokens: that they stand for.
    """

    used_bytes: int = 0
    blocks: int = 0
    tails: int = 0
    checkpoints: int = 0
    tokens: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*map(operator.add, astuple(self), astuple(other)))


class Root(Block):
    """Where the sequences of a namespace begin. It stands for no tokens and is never evicted.

    Attributes:
        tally: of what is below it.
    """

    __slots__ = ("namespace", "tally")

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, b"", None, "")
        self.root = self
        self.chain = hash(namespace)
        self.namespace = namespace
        self.tally = Tally()


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored run that a sequence begins with.

    Attributes:
        blocks: matching nodes from below the root; all but the last match whole.
        rows: how many tokens of the last one match.
        tokens: how many tokens match in all.
    """

    blocks: tuple[Block, ...] = ()
    rows: int = 0
    tokens: int = 0


def before_image(ids: Tokens, tokens: int) -> int:
    """The longest run of the first `tokens` that does not end inside of an image.

    Upstream puts one negative id for all tokens of an image, and embeds an image whole or not.
    """
    if 0 < tokens < len(ids) and ids[tokens] < 0:
        others = np.flatnonzero(ids[:tokens] != ids[tokens])
        return int(others[-1]) + 1 if len(others) else 0
    return max(0, tokens)


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two keys begin with alike."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
