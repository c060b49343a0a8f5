"""The most that any store could hit in a trace, if it knew all requests to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from .trace import Request


class Optimum:
    """Belady's rule, token by token: what is over is given up where its next use comes last.

    No store of so many tokens hits more, in whatever pieces it keeps them. Between two uses a token
    is held all the time or is no hit the second time, so at each moment it is chosen who keeps on
    waiting; and to give up whose use is farthest leaves the most room for all others. What leads to
    a token is used no later than it, and of those used together the last ones are given up first,
    so what is held are prefixes: a store that knew the future could do this.

    It is a bound from above by a hair: a prompt that is held whole counts whole here, though its
    last token has to be computed, and an index takes no room.

    Args:
        requests: all that will be served, in their order.
        limit_tokens: how many may be held.
    """

    def __init__(self, requests: Sequence[Request], limit_tokens: int) -> None:
        self._limit_tokens = limit_tokens
        self._next_uses = next_uses(requests)
        self._held: dict[int, int] = {}
        self._held_tokens = 0
        # The last one to be used first. What is out of date was used: it comes behind all others.
        self._order: list[tuple[int, int, int]] = []

    def serve(self, request: Request) -> int:
        """Look for the prompt, then keep the best; returns how many of its tokens were a hit."""
        hit_tokens = 0
        for hash_id, length in zip(request.hash_ids, request.lengths(), strict=True):
            held = self._held.get(hash_id, 0)
            hit_tokens += held
            if held < length:
                break
        self._hold(request)
        self._give_up()
        return hit_tokens

    def _hold(self, request: Request) -> None:
        """Hold all of the prompt that will be used again."""
        placed = zip(request.hash_ids, request.lengths(), next(self._next_uses), strict=True)
        for place, (hash_id, length, use) in enumerate(placed):
            self._held_tokens -= self._held.pop(hash_id, 0)
            if use is not None:
                self._held[hash_id] = length
                self._held_tokens += length
                heappush(self._order, (-use, -place, hash_id))

    def _give_up(self) -> None:
        """Give up what is over the limit, of a hash id's tokens the last ones."""
        while (excess := self._held_tokens - self._limit_tokens) > 0:
            hash_id = self._order[0][2]
            given_up = min(excess, self._held[hash_id])
            self._held[hash_id] -= given_up
            self._held_tokens -= given_up
            if not self._held[hash_id]:
                del self._held[hash_id]
                heappop(self._order)


def next_uses(requests: Sequence[Request]) -> Iterator[list[int | None]]:
    """For each request and hash id the place of the next request that has it; None for no more."""
    following: dict[int, int] = {}
    found: list[list[int | None]] = []
    for place in range(len(requests) - 1, -1, -1):
        hash_ids = requests[place].hash_ids
        found.append([following.get(hash_id) for hash_id in hash_ids])
        following.update(dict.fromkeys(hash_ids, place))
    return reversed(found)
