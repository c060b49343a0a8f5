"""Sums since the start and over the last minutes, by a clock that the tests set."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.events import (
    Error,
    Event,
    Evict,
    Hit,
    Insert,
    Miss,
    Reason,
    Restore,
    Skip,
    SkipReason,
    Stop,
)
from mlx_lm_kvcache_plugin.stats.statistics import LAST_MISSES, Statistics
from mlx_lm_kvcache_plugin.store.eviction import Cause

NOTHING = {"requests": 0, "prompt_tokens": 0, "hit_tokens": 0}


class Clock:
    """What time it is, in seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def statistics(clock: Clock) -> Statistics:
    return Statistics(clock)


def record(statistics: Statistics, *events: Event) -> dict[str, Any]:
    """What is told once these are recorded."""
    for event in events:
        statistics.record(event)
    return statistics.told()


def requests_in(told: dict[str, Any]) -> dict[str, int]:
    """How many requests there were in each window."""
    return {name: each["requests"] for name, each in told["hit_rate"].items()}


# Rates


def test_a_rate_is_of_tokens(statistics: Statistics) -> None:
    """Hits over all that was asked for, whatever the number of requests."""
    told = record(statistics, Hit(100, 90, 0.1), Miss(900), Hit(1000, 10, 0.1))
    expected = {"requests": 3, "prompt_tokens": 2000, "hit_tokens": 100, "rate": 0.05}
    assert told["hit_rate"] == dict.fromkeys(("1m", "5m", "15m", "start"), expected)


def test_without_requests_there_is_no_rate(statistics: Statistics) -> None:
    """Nor is it zero: nothing was missed either; and the past is empty."""
    told = statistics.told()
    expected = {**NOTHING, "rate": None}
    assert told["hit_rate"] == dict.fromkeys(("1m", "5m", "15m", "start"), expected)
    assert len(told["history"]) == 90
    assert all(
        {**bucket, "age_seconds": 0} == {"age_seconds": 0, **NOTHING} for bucket in told["history"]
    )


def test_a_prompt_of_no_tokens_has_no_rate(statistics: Statistics) -> None:
    """It counts as a request, and divides nothing by zero."""
    told = record(statistics, Miss(0, Stop(Reason.BELOW_ONE_TOKEN)))
    assert told["hit_rate"]["1m"] == {**NOTHING, "requests": 1, "rate": None}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "1m 5m 15m start"),
        (49, "1m 5m 15m start"),
        (61, "5m 15m start"),
        (289, "5m 15m start"),
        (301, "15m start"),
        (889, "15m start"),
        (901, "start"),
        (10**6, "start"),
    ],
)
@pytest.mark.parametrize("phase", [0.0, 4.9, 9.9])
def test_a_request_leaves_one_window_after_the_other(
    phase: float, seconds: float, expected: str
) -> None:
    """To ten seconds, the length of a bucket."""
    clock = Clock(1000 + phase)
    statistics = Statistics(clock)
    statistics.record(Hit(10, 5, 0.1))
    clock.now += seconds
    told = statistics.told()
    assert {name for name, count in requests_in(told).items() if count} == set(expected.split())
    for name, each in told["hit_rate"].items():
        assert each["rate"] == (0.5 if name in expected.split() else None)


def test_requests_of_other_times_add_up(statistics: Statistics, clock: Clock) -> None:
    """Each window has its own sum."""
    for at, tokens in ((1000, 1), (1200, 10), (1900, 100), (1999, 1000)):
        clock.now = at
        statistics.record(Hit(tokens, 0, 0.1))
    rates = statistics.told()["hit_rate"]
    assert {name: each["prompt_tokens"] for name, each in rates.items()} == {
        "1m": 1000,
        "5m": 1100,
        "15m": 1110,
        "start": 1111,
    }


def test_the_past_is_told_bucket_by_bucket(statistics: Statistics, clock: Clock) -> None:
    """Ninety of ten seconds, the oldest first, those without a request too."""
    for at, tokens in ((1005, 1), (1006, 2), (1030, 4), (1890, 8)):
        clock.now = at
        statistics.record(Hit(tokens, 1, 0.1))
    history = statistics.told()["history"]
    assert [bucket["age_seconds"] for bucket in history] == [10 * n for n in reversed(range(90))]
    assert {
        bucket["age_seconds"]: (bucket["requests"], bucket["prompt_tokens"], bucket["hit_tokens"])
        for bucket in history
        if bucket["requests"]
    } == {890: (2, 3, 2), 860: (1, 4, 1), 0: (1, 8, 1)}


def test_old_buckets_pass_by(statistics: Statistics, clock: Clock) -> None:
    """However many there were: none is held longer than it is told."""
    for number in range(500):
        clock.now = 1000 + 10 * number
        statistics.record(Miss(1))
    assert requests_in(statistics.told()) == {"1m": 6, "5m": 30, "15m": 90, "start": 500}
    assert len(statistics._buckets) == 90
    clock.now += 10**5
    told = statistics.told()
    assert requests_in(told) == {"1m": 0, "5m": 0, "15m": 0, "start": 500}
    assert not any(bucket["requests"] for bucket in told["history"])


def test_the_time_since_the_start(statistics: Statistics, clock: Clock) -> None:
    """Of these statistics, that is."""
    clock.now += 12.5
    assert statistics.told()["uptime_seconds"] == 12.5


# Misses


def test_requests_are_counted_by_why_they_were_no_more(statistics: Statistics) -> None:
    """Every reason is there; a request that was a hit as far as one can be has none."""
    told = record(
        statistics,
        Hit(100, 90, 0.1, Stop(Reason.DIVERGED, 90)),
        Hit(100, 60, 0.1, Stop(Reason.DIVERGED, 60)),
        Miss(7, Stop(Reason.DIVERGED, 0)),
        Miss(50, Stop(Reason.EVICTED, 0, "count")),
        Hit(100, 99, 0.1),
        Miss(5),
    )
    expected = {reason.value: {"requests": 0, "misses": 0, "tokens": 0} for reason in Reason}
    expected["diverged"] = {"requests": 3, "misses": 1, "tokens": 57}
    expected["evicted"] = {"requests": 1, "misses": 1, "tokens": 50}
    assert told["misses"] == expected


def test_the_last_misses_are_told(statistics: Statistics, clock: Clock) -> None:
    """The newest first, in words too."""
    statistics.record(Miss(300, Stop(Reason.EVICTED, 128, "memory")))
    clock.now += 3.5
    told = record(statistics, Hit(2000, 1234, 0.1, Stop(Reason.DIVERGED, 1234)))
    assert told["last_misses"] == [
        {
            "age_seconds": 0.0,
            "prompt_tokens": 2000,
            "hit_tokens": 1234,
            "reason": "diverged",
            "token": 1234,
            "cause": None,
            "text": "diverged at token 1,234",
        },
        {
            "age_seconds": 3.5,
            "prompt_tokens": 300,
            "hit_tokens": 0,
            "reason": "evicted",
            "token": 128,
            "cause": "memory",
            "text": "evicted from token 128 on (memory)",
        },
    ]


def test_the_last_misses_are_bounded(statistics: Statistics) -> None:
    """The oldest are forgotten."""
    stops = [Miss(number, Stop(Reason.DIVERGED)) for number in range(200)]
    told = record(statistics, *stops)["last_misses"]
    assert [miss["prompt_tokens"] for miss in told] == list(reversed(range(200)))[:LAST_MISSES]


@pytest.mark.parametrize(
    ("event", "is_told"),
    [
        (Hit(100, 99, 0.1), False),
        (Hit(100, 50, 0.1, Stop(Reason.NOTHING_STORED, 50)), False),
        (Hit(100, 49, 0.1, Stop(Reason.NOTHING_STORED, 49)), True),
        (Hit(100, 98, 0.1, Stop(Reason.DIVERGED, 98)), True),
        (Miss(1, Stop(Reason.BELOW_ONE_TOKEN)), True),
        (Miss(100, Stop(Reason.NOTHING_STORED)), True),
        (Miss(100), False),
    ],
)
def test_a_chat_that_goes_on_is_no_miss(
    statistics: Statistics, event: Event, is_told: bool
) -> None:
    """What is new in it is new; while it is less than what was a hit, that is as it should be."""
    assert bool(record(statistics, event)["last_misses"]) == is_told


# All else


def test_inserts_and_what_was_skipped(statistics: Statistics) -> None:
    """What found no room at all is no insert; a failure is one that was skipped."""
    told = record(
        statistics,
        Insert(100, 100, 60, 0.5),
        Insert(100, 100, 0, 0.25),
        Insert(100, 0, 0, 9.0),
        *[Skip(5, reason) for reason in SkipReason if reason is not SkipReason.ERROR],
        Error("insert", "it is late"),
    )
    assert told["inserts"] == {
        "count": 2,
        "new_tokens": 60,
        "skipped": {"no room": 2, "draft model": 1, "unknown layers": 1, "error": 1},
    }
    assert told["timing"]["encode"] == {"count": 2, "seconds": 0.75}


def test_evictions_by_cause(statistics: Statistics) -> None:
    """Every cause is there."""
    told = record(statistics, Evict(3, 30, "memory"), Evict(2, 20, "trim"), Evict(1, 5, "memory"))
    expected = {cause.value: {"blocks": 0, "bytes": 0} for cause in Cause}
    expected |= {"memory": {"blocks": 4, "bytes": 35}, "trim": {"blocks": 2, "bytes": 20}}
    assert told["evictions"] == expected


def test_times_and_what_came_from_disk(statistics: Statistics) -> None:
    """How often, and how long in all."""
    told = record(statistics, Hit(10, 5, 0.5), Hit(10, 5, 0.25), Restore(7, 2.0), Restore(3, 1.0))
    assert told["timing"] == {
        "decode": {"count": 2, "seconds": 0.75},
        "encode": {"count": 0, "seconds": 0.0},
        "restore": {"count": 2, "seconds": 3.0},
    }
    assert told["restored_tokens"] == 10


def test_errors_by_operation(statistics: Statistics) -> None:
    """And the last one in words; none before there is any."""
    told = statistics.told()
    assert (told["errors"], told["last_error"]) == ({}, None)
    told = record(statistics, *[Error(name, "no") for name in ("fetch", "insert", "fetch")])
    assert told["errors"] == {"fetch": 2, "insert": 1}
    assert told["last_error"] == "fetch: no"


def every_event() -> Iterator[Event]:
    yield Hit(10, 5, 0.5, Stop(Reason.EVICTED, 5, "memory"))
    yield Miss(10, Stop(Reason.ERROR))
    yield Insert(10, 10, 5, 0.1)
    yield Skip(10, SkipReason.NO_ROOM)
    yield Restore(5, 0.1)
    yield Evict(1, 100, "count")
    yield Error("restore", "no")


def test_all_of_it_is_plain(statistics: Statistics) -> None:
    """Strict JSON."""
    told = record(statistics, *every_event())
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_one_thread_records_while_others_ask() -> None:
    """Whoever asks sees whole events: what belongs together adds up."""
    statistics = Statistics()
    is_over = threading.Event()
    told: list[dict[str, Any]] = []
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            while not is_over.is_set():
                told.append(statistics.told())
        except BaseException as error:
            failures.append(error)

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    while len(told) < 50 and not failures:
        for _ in range(20):
            statistics.record(Hit(10, 5, 0.5, Stop(Reason.DIVERGED, 5)))
    is_over.set()
    for asker in askers:
        asker.join()
    assert not failures
    for each in told:
        start, reasons = each["hit_rate"]["start"], each["misses"]["diverged"]
        assert start["requests"] == reasons["requests"] == each["timing"]["decode"]["count"]
        assert start["prompt_tokens"] == 2 * start["hit_tokens"] == 10 * start["requests"]
        assert len(each["last_misses"]) == min(LAST_MISSES, start["requests"])
