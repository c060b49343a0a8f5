"""Remembers what was evicted of late and why, by tokens alone."""

from __future__ import annotations

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

    def cause(self, chain: int, keys: Iterable[bytes], least_tokens: int) -> Cause | None:
        """Why what goes on like this was given up; None if it was not.

        Args:
            chain: after the last whole block.
            keys: the tokens behind it, block by block; the last of them need not be whole.
            least_tokens: how many of these it has to have held.
        """
        held_tokens = 0
        for key in keys if self._causes else ():
            nearest = self._nearest(chain, key)
            tokens = common_tokens(nearest, key)
            held_tokens += tokens
            if tokens and held_tokens >= least_tokens:
                return self._causes[chain, nearest]
            if tokens < self._block_tokens:
                break
            chain = chain_of(chain, key)
        return None

    def checkpoint_cause(self, chain: int, following: bytes, held_tokens: int) -> Cause | None:
        """Why a prompt's last checkpoint of one block was given up; None if it was not.

        Args:
            chain: after the whole block before it, or the root's.
            following: the tokens behind that, of one block at most.
            held_tokens: it has to stand for more of these.
        """
        for key in reversed(self._keys.get(chain, [])):  # so the longest comes first
            if following.startswith(key) and len(key) > held_tokens * TOKEN_BYTES:
                bearer = chain_of(chain, key) if key else chain
                if cause := self._causes.get((bearer, CHECKPOINT)):
                    return cause
        return None

    def _nearest(self, chain: int, key: bytes) -> bytes:
        """Of what was given up there, the tokens that begin like a block's for the longest."""
        keys = self._keys.get(chain, [])
        place = bisect_left(keys, key)
        # What is most like it stands beside it.
        beside = keys[max(0, place - 1) : place + 1]
        return max(beside, key=lambda other: common_tokens(other, key), default=b"")
