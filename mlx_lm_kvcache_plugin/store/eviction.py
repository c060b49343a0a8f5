"""The order in which blocks are given up, least recently used first, and why they are.

On two public production traces no simple policy beat LRU over blocks, so this is the one policy.
The list runs through the blocks themselves: two slots each, and every step takes constant time.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class Cause(enum.Enum):
    """Why blocks were evicted."""

    MEMORY = "memory"
    """The byte limit."""
    COUNT = "count"
    """The limit on sequences."""
    PRESSURE = "pressure"
    """The machine ran short of memory."""
    TRIM = "trim"
    """The caller asked for it."""
    REPLACED = "replaced"
    """The model behind a namespace changed its shape."""
    CLEARED = "cleared"
    """Somebody cleared the cache."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """A node that was given up.

    Attributes:
        parent: the chain of the node above.
        key: the bytes of its tokens.
    """

    parent: int
    key: bytes
    cause: Cause


class Linked(Protocol):
    """What the list needs of a member: two slots that nobody else writes."""

    older: Any
    newer: Any


Member = TypeVar("Member", bound=Linked)


class RecencyList(Generic[Member]):
    """Members from the least to the most recently used; each is in one list at most.

    Whoever touches a path of a tree from its leaf to its root keeps every parent newer than its
    children, so that the oldest member is always a leaf.
    """

    __slots__ = ("_newest", "_oldest")

    def __init__(self) -> None:
        self._oldest: Member | None = None
        self._newest: Member | None = None

    @property
    def oldest(self) -> Member | None:
        """The next one to be evicted."""
        return self._oldest

    def append(self, member: Member) -> None:
        """Add a member as the most recently used one."""
        member.older, member.newer = self._newest, None
        if self._newest is None:
            self._oldest = member
        else:
            self._newest.newer = member
        self._newest = member

    def remove(self, member: Member) -> None:
        """Take a member out."""
        if member.older is None:
            self._oldest = member.newer
        else:
            member.older.newer = member.newer
        if member.newer is None:
            self._newest = member.older
        else:
            member.newer.older = member.older
        member.older = member.newer = None

    def touch(self, member: Member) -> None:
        """Make a member the most recently used one."""
        if member is not self._newest:
            self.remove(member)
            self.append(member)

    def __iter__(self) -> Iterator[Member]:
        """From the oldest to the newest."""
        member = self._oldest
        while member is not None:
            yield member
            member = member.newer

    def __reversed__(self) -> Iterator[Member]:
        """From the newest to the oldest."""
        member = self._newest
        while member is not None:
            yield member
            member = member.older
