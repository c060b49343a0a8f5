"""Events."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from mlx_lm_kvcache_plugin.events import (
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

EXAMPLES: list[Event] = [
    Hit(100, 60, 0.5),
    Miss(70),
    Insert(50, 40, 30, 0.5),
    Skip(50, SkipReason.NO_ROOM),
    Restore(80, 0.5),
    Evict(3, 9000, "memory"),
    Error("fetch", "a reason"),
]
"""One event of each kind."""


def test_every_kind_has_an_example() -> None:
    """A new kind of event is to be tested here."""
    assert set(map(type, EXAMPLES)) == set(get_args(Event))


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_an_event_does_not_change(event: Event) -> None:
    """It is handed to plugins, and each is to see what happened."""
    field = dataclasses.fields(event)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, field, None)
