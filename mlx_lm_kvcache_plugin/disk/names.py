"""Keys and file names: where a record lies follows from what it stands for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

FORMAT = "mlx_lm_kvcache_plugin/1"
"""What files of ours say of themselves; another number means that these cannot be read."""

KEY_BYTES = 16
LAYOUT_BYTES = 8

BLOCK, CHECKPOINT = "b", "c"
"""The kinds of records."""

_ROOT, _CHILD, _LAYOUT = b"kvcache root", b"kvcache child", b"kvcache layout"
"""BLAKE2b's personalization: the same bytes never give the same key in two roles."""

_FILENAME = re.compile(
    rf"([0-9a-f]{{{2 * KEY_BYTES}}})-([0-9a-f]{{{2 * KEY_BYTES}}})-"
    rf"(0|[1-9][0-9]{{0,8}})([bc])-([0-9a-f]{{{2 * LAYOUT_BYTES}}})\.safetensors"
)


def root_key(namespace: bytes) -> bytes:
    """The key at the beginning of every sequence of a namespace.

    Args:
        namespace: the namespace's fingerprint, of any length.
    """
    return blake2b(namespace, digest_size=KEY_BYTES, person=_ROOT).digest()


def child_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of what follows a block; it stands for all tokens up to there.

    Args:
        parent: the block's key, or the root's, of `KEY_BYTES` bytes.
        tokens: the tokens that follow, as int64, little endian.
    """
    return blake2b(parent + tokens, digest_size=KEY_BYTES, person=_CHILD).digest()


def layout_digest(text: str) -> bytes:
    """What stands for a layout in a name: `LAYOUT_BYTES` bytes."""
    return blake2b(text.encode(), digest_size=LAYOUT_BYTES, person=_LAYOUT).digest()


@dataclass(frozen=True, slots=True)
class Name:
    """What a record is found by.

    Attributes:
        parent: the key of the whole block before it, or the root's.
        own: `child_key` of the parent and the record's tokens.
        tokens: how many these are: of a block one or more, of a checkpoint those behind the last
            whole block.
        kind: `BLOCK` or `CHECKPOINT`.
        layout: the layout's digest.
    """

    parent: bytes
    own: bytes
    tokens: int
    kind: str
    layout: bytes

    @property
    def filename(self) -> str:
        keys = f"{self.parent.hex()}-{self.own.hex()}"
        return f"{keys}-{self.tokens}{self.kind}-{self.layout.hex()}.safetensors"

    @property
    def subfolder(self) -> str:
        """One of 256: all children of one parent lie in the same."""
        return f"{self.parent[0]:02x}"

    @classmethod
    def parse(cls, filename: str) -> Name | None:
        """Read a file's name; None if no record has such a name."""
        found = _FILENAME.fullmatch(filename)
        if not found:
            return None
        parent, own, tokens, kind, layout = found.groups()
        if kind == BLOCK and tokens == "0":
            return None
        unhex = bytes.fromhex
        return cls(unhex(parent), unhex(own), int(tokens), kind, unhex(layout))


def may_be_child(
    parent: bytes, kind: str | None = None, layout: bytes | None = None
) -> Callable[[str], bool]:
    """Tells by its ends whether a filename may be that of a record below a block.

    Args:
        kind, layout: of the record; None for any.
    """
    begin, suffix = f"{parent.hex()}-", ".safetensors"
    end = suffix if layout is None else f"-{layout.hex()}{suffix}"
    before_layout = -len(f"-{'':{2 * LAYOUT_BYTES}}{suffix}")

    def may_be(filename: str) -> bool:
        if not (filename.startswith(begin) and filename.endswith(end)):
            return False
        return kind is None or filename[before_layout - 1 : before_layout] == kind

    return may_be
