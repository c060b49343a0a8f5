"""The budget: what may be held now, by limit, share and ceiling, and as memory comes and goes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import psutil
import pytest

from mlx_lm_kvcache_plugin.store.budget import GIB, Budget, Memory, probe_memory


class Machine:
    """A machine of 16 GiB whose available memory is whatever a test says."""

    def __init__(self, available_bytes: int = 10 * GIB, total_bytes: int = 16 * GIB) -> None:
        self.available_bytes = available_bytes
        self.total_bytes = total_bytes
        self.probes = 0

    def __call__(self) -> Memory:
        self.probes += 1
        return Memory(self.total_bytes, self.available_bytes)


def make_budget(
    machine: Machine | None = None,
    *,
    limit_bytes: int | None = None,
    percent: float | None = None,
    ceiling: Callable[[], int | None] = lambda: None,
    relieve: Callable[[], object] = lambda: None,
) -> Budget:
    return Budget(
        limit_bytes=limit_bytes,
        percent=percent,
        ceiling=ceiling,
        probe=machine or Machine(),
        relieve=relieve,
    )


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("total_gib", "reserve_gib"), [(8, 1), (16, 1), (20, 1), (40, 2), (512, 25.6)]
)
def test_the_reserve(total_gib: int, reserve_gib: float) -> None:
    """The larger of 1 GiB and 5% of the RAM."""
    assert Memory(total_gib * GIB, 0).reserve_bytes == int(reserve_gib * GIB)


@pytest.mark.parametrize("used_bytes", [0, 5000, 2 * GIB])
def test_a_fixed_limit_is_the_limit(used_bytes: int) -> None:
    """However much memory there is, and whatever is held already."""
    budget = make_budget(limit_bytes=5000)
    assert budget.allowed_bytes(used_bytes) == 5000
    assert budget.limit_bytes == 5000
    assert budget.resolve(used_bytes) == 5000
    assert budget.origin == "a fixed limit"


def test_a_share_is_one_of_what_is_available_when_first_needed() -> None:
    """Not when it is made, which is before the model is loaded; and it stays what it was then."""
    machine = Machine(available_bytes=15 * GIB)
    budget = make_budget(machine, percent=0.25)
    assert machine.probes == 0
    assert budget.limit_bytes is None
    machine.available_bytes = 8 * GIB
    assert budget.allowed_bytes(0) == budget.limit_bytes == 2 * GIB
    machine.available_bytes = 12 * GIB
    assert budget.allowed_bytes(0) == budget.limit_bytes == 2 * GIB


def test_a_share_can_be_settled_anew() -> None:
    """When a model has been loaded; what is held already could be had back, and counts in."""
    machine = Machine(available_bytes=8 * GIB)
    budget = make_budget(machine, percent=0.25)
    assert budget.resolve(0) == 2 * GIB
    machine.available_bytes = 3 * GIB
    assert budget.resolve(GIB) == budget.limit_bytes == GIB
    assert budget.origin == "25% of the 4,294,967,296 bytes available"


def test_without_limit_and_share_all_that_is_available_is_the_limit() -> None:
    """The reserve is left to others then too."""
    machine = Machine(available_bytes=8 * GIB)
    assert make_budget(machine).resolve(0) == 8 * GIB
    assert make_budget(machine).allowed_bytes(0) == 7 * GIB


def test_a_ceiling_lowers_the_limit_while_it_is_there() -> None:
    """It is asked for every time, and never raises the limit."""
    ceilings: list[int | None] = [3000, 0, 9000, None]
    budget = make_budget(limit_bytes=5000, ceiling=lambda: ceilings.pop(0))
    assert [budget.allowed_bytes(0) for _ in range(4)] == [3000, 0, 5000, 5000]
    assert not budget.is_short


@pytest.mark.parametrize(
    ("spare_bytes", "allowed_bytes"),
    [(10**12, 5000), (4000, 5000), (3999, 4999), (0, 1000), (-1, 999), (-1000, 0), (-GIB, 0)],
)
def test_the_reserve_is_left_to_others(spare_bytes: int, allowed_bytes: int) -> None:
    """What is held may grow by what is spare beyond the reserve, and shrinks by what lacks."""
    machine = Machine(available_bytes=GIB + spare_bytes)
    assert make_budget(machine, limit_bytes=5000).allowed_bytes(1000) == allowed_bytes


def test_memory_comes_back_and_the_limit_with_it() -> None:
    """An episode takes nothing away for good."""
    machine = Machine()
    budget = make_budget(machine, limit_bytes=5000)
    machine.available_bytes = GIB - 2000
    assert budget.allowed_bytes(3000) == 1000
    assert budget.is_short
    machine.available_bytes = 2 * GIB
    assert budget.allowed_bytes(1000) == 5000
    assert not budget.is_short


def test_an_episode_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """While memory is short there is one line, however often it is asked; the next one is new."""
    machine = Machine()
    budget = make_budget(machine, limit_bytes=5000)
    for available_bytes in (2 * GIB, GIB, GIB - 1, 0, GIB // 2, GIB, GIB // 4, 0):
        machine.available_bytes = available_bytes
        budget.allowed_bytes(1000)
    assert warnings_in(caplog) == [
        "memory is short: 1.00 GiB available, less than the reserve of 1.00 GiB; "
        "the prefix cache gives way",
        "memory is short: 0.25 GiB available, less than the reserve of 1.00 GiB; "
        "the prefix cache gives way",
    ]


def test_others_give_back_first(caplog: pytest.LogCaptureFixture) -> None:
    """What others hold for nothing is asked for when memory is short, and may be all it takes."""
    machine = Machine(available_bytes=GIB - 1000)
    relieved = []

    def relieve() -> None:
        relieved.append(machine.available_bytes)
        machine.available_bytes += 900

    budget = make_budget(machine, limit_bytes=5000, relieve=relieve)
    assert budget.allowed_bytes(3000) == 2900
    assert budget.is_short
    assert budget.allowed_bytes(3000) == 3800
    assert not budget.is_short
    assert budget.allowed_bytes(3000) == 3800
    assert relieved == [GIB - 1000, GIB - 100]
    assert len(warnings_in(caplog)) == 1


def test_enough_memory_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """A limit that is reached is everyday business."""
    budget = make_budget(limit_bytes=5000)
    for used_bytes in (0, 5000, 9000):
        budget.allowed_bytes(used_bytes)
    assert warnings_in(caplog) == []


def test_a_probe_that_fails_is_told() -> None:
    """The caller skips what it was about to do: nothing is made up here."""

    def fail() -> Memory:
        raise OSError("no such file: /proc/meminfo")

    with pytest.raises(OSError, match="meminfo"):
        Budget(limit_bytes=5000, probe=fail).allowed_bytes(0)


def test_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Total, and what is left before the machine has to swap: not what is wholly unused."""

    class Virtual:
        total, available, free = 300, 200, 100

    monkeypatch.setattr(psutil, "virtual_memory", Virtual)
    assert probe_memory() == Memory(total_bytes=300, available_bytes=200)
