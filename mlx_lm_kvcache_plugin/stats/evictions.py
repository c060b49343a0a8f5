"""Remembers what was evicted of late and why, by tokens alone."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

from ..store.blocks import CHECKPOINT, TOKEN_BYTES, Block, chain_of, common_tokens
from ..store.eviction import Cause, Evicted

MOST_REMEMBERED = 1 << 13
"""Nodes; with their tokens some 10 MB if there ever are so many."""


class RecentEvictions:
    """Nodes that were given up and not stored again since; the oldest are forgotten.

    Args:
        block_tokens: tokens of a complete block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._causes: OrderedDict[tuple[int, bytes], Cause] = OrderedDict()
        self._keys: defaultdict[int, list[bytes]] = defaultdict(list)  # in order, by parent

    def add(self, evicted: Sequence[Evicted]) -> None:
        """Remember these."""
        for node in evicted[-MOST_REMEMBERED:]:
            place = (node.parent, node.key)
            if place not in self._causes:
                insort(self._keys[node.parent], node.key)
            self._causes[place] = node.cause
            self._causes.move_to_end(place)
        while len(self._causes) > MOST_REMEMBERED:
            self._forget(*next(iter(self._causes)))

    def clear(self) -> None:
        """Forget all."""
        self._causes.clear()
        self._keys.clear()

    def forget(self, nodes: Iterable[Block]) -> None:
        """These are stored again."""
        for node in nodes if self._causes else ():
            if node.parent is not None:
                self._forget(node.parent.chain, node.key)

    def _forget(self, parent: int, key: bytes) -> None:
        if self._causes.pop((parent, key), None) is not None:
            keys = self._keys[parent]
            del keys[bisect_left(keys, key)]
            if not keys:
                del self._keys[parent]

    def rows(
        self, chain: int, keys: Iterable[bytes], least_tokens: int
    ) -> tuple[int, Cause] | None:
        """How many tokens of what goes on like this were given up, and why; None if they were not.

        Args:
            chain: after the last whole block that is there.
            keys: the tokens behind it, block by block; the last of them need not be whole.
            least_tokens: how many of these have to have been.
        """
        gone_tokens, cause = 0, None
        for key in keys if self._causes else ():
            nearest = self._nearest(chain, key)
            tokens = common_tokens(nearest, key)
            gone_tokens += tokens
            if tokens and cause is None and gone_tokens >= least_tokens:
                cause = self._causes[chain, nearest]
            if tokens < self._block_tokens:
                break
            chain = chain_of(chain, key)
        return None if cause is None else (gone_tokens, cause)

    def checkpoint(
        self, root: int, keys: Iterable[bytes], least_tokens: int, held_tokens: int
    ) -> tuple[int, Cause] | None:
        """The position of a prompt's last checkpoint that was given up, and why; None without one.

        Args:
            root: the chain that the prompt begins with.
            keys: its tokens, block by block; the last of them need not be whole.
            least_tokens: it has to stand for so many of these.
            held_tokens: those of whole blocks that are there; behind them the way is one that was
                given up.
        """
        found: tuple[int, Cause] | None = None
        chain, start = root, 0
        for key in itertools.chain(keys, [b""]) if self._causes else ():
            found = self._checkpoint_at(chain, key, start, least_tokens) or found
            end = start + self._block_tokens
            is_known = end <= held_tokens or (chain, key) in self._causes
            if len(key) < self._block_tokens * TOKEN_BYTES or not is_known:
                break
            chain, start = chain_of(chain, key), end
        return found

    def _checkpoint_at(
        self, chain: int, key: bytes, start: int, least_tokens: int
    ) -> tuple[int, Cause] | None:
        """The last checkpoint within one block that begins after so many tokens."""
        for rows in reversed(self._keys.get(chain, [])):  # so the longest comes first
            position = start + len(rows) // TOKEN_BYTES
            if position >= least_tokens and key.startswith(rows):
                bearer = chain_of(chain, rows) if rows else chain
                if cause := self._causes.get((bearer, CHECKPOINT)):
                    return position, cause
        return None

    def _nearest(self, chain: int, key: bytes) -> bytes:
        """Of what was given up there, the tokens that begin like a block's for the longest."""
        keys = self._keys.get(chain, [])
        place = bisect_left(keys, key)
        # What is most like it stands beside it.
        beside = keys[max(0, place - 1) : place + 1]
        return max(beside, key=lambda other: common_tokens(other, key), default=b"")
