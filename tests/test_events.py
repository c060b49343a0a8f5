"""Events and their sums."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from mlx_lm_kvcache_plugin.events import (
    Counters,
    Error,
    Event,
    Evict,
    Hit,
    Insert,
    Miss,
    Restore,
    Skip,
    SkipReason,
)

EXAMPLES: dict[type[Event], tuple[Event, dict[str, int]]] = {
    Hit: (Hit(100, 60, 0.5), {"hits": 1, "prompt_tokens": 100, "hit_tokens": 60}),
    Miss: (Miss(70), {"misses": 1, "prompt_tokens": 70}),
    Insert: (Insert(50, 40, 30, 0.5), {"inserts": 1, "stored_tokens": 30}),
    Skip: (Skip(50, SkipReason.NO_ROOM), {"skipped_inserts": 1}),
    Restore: (Restore(80, 0.5), {"restored_tokens": 80}),
    Evict: (Evict(3, 9000, "memory"), {"evicted_blocks": 3, "evicted_bytes": 9000}),
    Error: (Error("fetch", "a reason"), {"errors": 1}),
}
"""One event of each kind, and what it adds."""


def counted(*events: Event) -> dict[str, int]:
    """The counters that are not zero."""
    counters = Counters()
    for event in events:
        counters.count(event)
    return {name: value for name, value in dataclasses.asdict(counters).items() if value}


def test_every_kind_has_an_example() -> None:
    """A new kind of event is to be counted, and tested here."""
    assert set(EXAMPLES) == set(get_args(Event))


@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_event_is_counted(kind: type[Event]) -> None:
    """It adds what it is about, and nothing else."""
    event, added = EXAMPLES[kind]
    assert counted(event) == added


def test_counters_are_sums() -> None:
    """Over all events: tokens that were stored before are not counted as stored again."""
    events = [event for event, _ in EXAMPLES.values()]
    assert counted(*events, *events) == {
        "hits": 2,
        "misses": 2,
        "prompt_tokens": 340,
        "hit_tokens": 120,
        "inserts": 2,
        "skipped_inserts": 2,
        "stored_tokens": 60,
        "restored_tokens": 160,
        "evicted_blocks": 6,
        "evicted_bytes": 18000,
        "errors": 2,
    }


@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_event_does_not_change(kind: type[Event]) -> None:
    """It is handed to plugins, and each is to see what happened."""
    event, _ = EXAMPLES[kind]
    field = dataclasses.fields(event)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, field, None)
