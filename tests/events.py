"""What caches under test tell."""

from __future__ import annotations

from typing import Any

from mlx_lm_kvcache_plugin.events import Error, Event, Evict


class Events(list[Event]):
    """What a cache emits."""

    def of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self if isinstance(event, kinds)]

    def causes(self) -> dict[str, int]:
        """How many blocks went for which cause."""
        causes: dict[str, int] = {}
        for event in self.of(Evict):
            causes[event.cause] = causes.get(event.cause, 0) + event.blocks
        return causes

    def forget(self) -> None:
        """Begin anew, where no error was to come so far."""
        assert not self.of(Error)
        self.clear()
