"""How ranks agree: simulated ones under anything that may happen, and real processes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_lm_kvcache_plugin as plugin
from mlx_lm_kvcache_plugin.patches.ranks import Ranks
from tests.ring import Ring

SECONDS = 60

unhurried = settings(deadline=None, database=None, derandomize=True)  # threads wait for each other

POSITIONS = st.lists(st.frozensets(st.integers(1, 12)), min_size=2, max_size=4)
"""Where each of some ranks can restore a prompt exactly."""


class Crash(Exception):
    """What goes wrong on one rank."""


class Meeting:
    """In place of MLX's collective: all wait for each other, and get the least of each place.

    Who waits for a rank that has left already, since it did fewer rounds, fails.
    """

    def __init__(self, size: int) -> None:
        self._said: list[list[int]] = []
        self._least: list[int] = []
        self._all_spoke = threading.Barrier(size, self._close)
        self._all_heard = threading.Barrier(size)

    def _close(self) -> None:
        self._least = [min(place) for place in zip(*self._said, strict=True)]
        self._said.clear()

    def all_min(self, numbers: list[int]) -> list[int]:
        self._said.append(numbers)
        self._all_spoke.wait()
        least = self._least
        self._all_heard.wait()
        return least

    def leave(self) -> None:
        self._all_spoke.abort()


def group_of(size: int) -> Any:
    return SimpleNamespace(size=lambda: size)


def on_each(size: int, act: Callable[[Ranks, int], Any]) -> list[Any]:
    """What an act gives on each of some ranks at once, be it an exception."""
    meeting = Meeting(size)

    def on(rank: int) -> Any:
        try:
            return act(Ranks(group_of(size), meeting.all_min), rank)
        except (Crash, ValueError) as error:
            return error
        finally:
            meeting.leave()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(on, range(size)))


class Store:
    """A rank's store that can restore a prompt at some positions.

    Attributes:
        bounds: what it was asked for.
    """

    def __init__(self, positions: Collection[int], crash_at: int = -1) -> None:
        self._positions = positions
        self._crash_at = crash_at
        self.bounds: list[int] = []

    def longest(self, bound: int) -> int:
        self.bounds.append(bound)
        if len(self.bounds) == self._crash_at:
            raise Crash
        return max((position for position in self._positions if position <= bound), default=0)


@unhurried
@given(POSITIONS, st.integers(0, 13))
def test_ranks_agree_on_the_most_that_all_can_restore(
    positions: list[frozenset[int]], most: int
) -> None:
    """The largest position that is common to all and within the bound; none if there is none."""
    stores = [Store(each) for each in positions]
    agreed = on_each(len(stores), lambda ranks, rank: ranks.agree(stores[rank].longest, most))
    common = frozenset.intersection(*positions)
    expected = max((position for position in common if position <= most), default=0)
    assert agreed == [expected] * len(stores)
    for store in stores:
        assert store.bounds[0] == most
        assert store.bounds == sorted(set(store.bounds), reverse=True) == stores[0].bounds


@unhurried
@given(POSITIONS, st.lists(st.integers(0, 13), min_size=4, max_size=4))
def test_each_rank_may_have_a_first_bound_of_its_own(
    positions: list[frozenset[int]], bounds: list[int]
) -> None:
    """The least of them holds."""
    stores = [Store(each) for each in positions]
    most = bounds[: len(stores)]
    agreed = on_each(len(most), lambda ranks, rank: ranks.agree(stores[rank].longest, most[rank]))
    common = frozenset.intersection(*positions)
    assert agreed == [max((p for p in common if p <= min(most)), default=0)] * len(most)


@unhurried
@given(POSITIONS, st.integers(0, 13), st.data())
def test_what_one_rank_raises_leaves_no_other_waiting(
    positions: list[frozenset[int]], most: int, data: st.DataObject
) -> None:
    """They agree on none, and it is raised where it was."""
    failing = data.draw(st.integers(0, len(positions) - 1))
    crash_at = data.draw(st.integers(1, 4))
    stores = [
        Store(each, crash_at if rank == failing else -1) for rank, each in enumerate(positions)
    ]
    agreed = on_each(len(stores), lambda ranks, rank: ranks.agree(stores[rank].longest, most))
    if len(stores[failing].bounds) < crash_at:
        assert len(set(agreed)) == 1
    else:
        assert isinstance(agreed.pop(failing), Crash)
        assert set(agreed) == {0}


@pytest.mark.parametrize("said", [8, -1])
def test_what_no_rank_may_say(said: int) -> None:
    """More than the bound, or less than nothing: a mistake of that rank, and a hit on none."""
    longest = (lambda bound: said, lambda bound: bound)
    first, second = on_each(2, lambda ranks, rank: ranks.agree(longest[rank], 7))
    assert isinstance(first, ValueError) and second == 0


@unhurried
@given(st.lists(st.booleans(), min_size=2, max_size=4))
def test_all_and_any(said: list[bool]) -> None:
    """As Python's own, over the ranks."""
    size = len(said)
    assert on_each(size, lambda ranks, rank: ranks.all(said[rank])) == [all(said)] * size
    assert on_each(size, lambda ranks, rank: ranks.any(said[rank])) == [any(said)] * size


def test_one_alone_talks_to_nobody() -> None:
    """No collective at all, and what is raised is raised at once."""
    alone = Ranks(group_of(1), all_min=lambda numbers: pytest.fail("talks to itself"))
    store = Store({3, 5}, crash_at=3)
    assert [alone.agree(store.longest, most) for most in (9, 4)] == [5, 3]
    assert store.bounds == [9, 4]
    with pytest.raises(Crash):
        alone.agree(store.longest, 9)
    assert [alone.all(True), alone.all(False), alone.any(True), alone.any(False)] == [1, 0, 1, 0]


def test_this_process_is_alone() -> None:
    """By default they are the processes that were launched together."""
    assert Ranks().size == 1


REAL = """
import mlx.core as mx
import mlx_lm_kvcache_plugin as plugin
from mlx_lm_kvcache_plugin.patches.ranks import Ranks

ranks = Ranks()
rank = mx.distributed.init().rank()
assert ranks.size == 2

def longest_of(*positions):
    return lambda bound: max((p for p in positions if p <= bound), default=0)

def failing(bound):
    if rank == 1:
        raise RuntimeError("on rank 1")
    return bound

own = [longest_of(10, 70_000, 1 << 30), longest_of(10, 80_000, 1 << 30)][rank]
for round in range(100):
    # A model's collective is on its way, as when a request joins a batch.
    pending = mx.distributed.all_sum(mx.ones((64, 64)))
    mx.async_eval(pending)
    told = [ranks.agree(own, most) for most in ((1 << 31) - 1, 90_000, 10, 9)]
    told += [ranks.all(True), ranks.all(rank == 0), ranks.any(rank == 0), ranks.any(False)]
    try:
        told.append(ranks.agree(failing, 5))
    except RuntimeError as error:
        told.append(str(error))
    assert pending.sum().item() == 2 * 64 * 64
print(*told)
"""


def test_real_processes_agree(tmp_path: Path) -> None:
    """Over MLX's ring, between collectives of the model that are still on their way."""
    command = [sys.executable, "-c", REAL]
    environment = {**os.environ, "PYTHONPATH": str(Path(plugin.__file__).parents[1])}
    with Ring(tmp_path, [command] * 2, environment) as ring:
        assert ring.wait(SECONDS) == [0, 0]
        said = [ring.output(rank).splitlines()[-1] for rank in range(2)]
    agreed = f"{1 << 30} 10 10 0 True False True False"
    assert said == [f"{agreed} 0", f"{agreed} on rank 1"]
