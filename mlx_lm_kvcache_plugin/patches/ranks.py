"""What the ranks of one model have to agree on, lest their collectives no longer meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

AllMin = Callable[[list[int]], list[int]]
"""Takes as many numbers on each rank, and gives all of them the least of each place."""


class Ranks:
    """The processes that compute one model together; one alone needs no talk.

    All ranks make the same calls in the same order, each from the thread that generates: there the
    model's own collectives run, and those of one stream stay in order.

    Args:
        group: the processes; by default, all that were launched together.
        all_min: how they tell each other; by default, MLX's collective.

    Attributes:
        size: how many there are.
    """

    def __init__(
        self, group: mx.distributed.Group | None = None, all_min: AllMin | None = None
    ) -> None:
        self._group = mx.distributed.init() if group is None else group
        self.size = self._group.size()
        self._all_min = all_min or self._collective

    def agree(self, longest: Callable[[int], int], most: int) -> int:
        """The most tokens, up to `most`, that every rank can restore exactly.

        In each round all say what they can restore within the bound; unless that is the same, the
        least of it is the next bound. So the bound falls, and the ranks do equally many rounds.

        Args:
            longest: the most tokens within the given bound that this rank can restore. If it
                raises, the ranks agree on none.
            most: the first bound; ranks may differ in it.

        Raises:
            whatever `longest` raised on this rank, but only once no other rank waits for it.
        """
        bound = max(most, 0)
        while True:
            mine, error = _outcome(longest, bound)
            least, greatest = self._range(mine)
            if error is not None:
                raise error
            if not least or least == greatest:
                return least
            bound = least

    def all(self, fine: bool) -> bool:
        """Whether it is fine on every rank."""
        return self._range(int(fine))[0] == 1

    def any(self, one: bool) -> bool:
        """Whether it is so on one rank at least."""
        return self._range(int(one))[1] == 1

    def _range(self, number: int) -> tuple[int, int]:
        """The least and the greatest of what the ranks say, in one collective."""
        if self.size == 1:
            return number, number
        least, negated = self._all_min([number, -number])
        return least, -negated

    def _collective(self, numbers: list[int]) -> list[int]:
        # Each backend picks the stream itself if none is named, and NCCL knows no shorter integers.
        least = mx.distributed.all_min(mx.array(numbers, mx.int32), group=self._group)
        return cast(list[int], least.tolist())  # evaluated at once, so that the order is the same


def _outcome(longest: Callable[[int], int], bound: int) -> tuple[int, BaseException | None]:
    """What `longest` says; nothing to restore if it fails."""
    try:
        mine = longest(bound)
        if not 0 <= mine <= bound:
            raise ValueError(f"{mine} tokens where at most {bound} were asked for")
    except BaseException as error:
        return 0, error
    return mine, None
