"""What the events of a server come to: sums since the start, and over the last minutes."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..events import Error, Event, Evict, Hit, Insert, Miss, Reason, Restore, Skip, SkipReason, Stop
from ..store.eviction import Cause

BUCKET_SECONDS, BUCKETS = 10, 90
WINDOWS = {"1m": 6, "5m": 30, "15m": BUCKETS}
"""Spans of time, in buckets."""

LAST_MISSES = 50


@dataclass(slots=True)
class Sums:
    """Of some requests.

    Attributes:
        requests: how many.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0

    def add(self, prompt_tokens: int, hit_tokens: int, requests: int = 1) -> None:
        self.requests += requests
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A request that was a hit in less than one would hope for."""

    at: float
    prompt_tokens: int
    hit_tokens: int
    stop: Stop


@dataclass(slots=True)
class Reasons:
    """What requests came to that ended for one reason.

    Attributes:
        requests: how many.
        misses: those without any hit.
        tokens: that had to be computed.
    """

    requests: int = 0
    misses: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Spent:
    """How often something was done, and how long it took in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


@dataclass(slots=True)
class _Totals:
    requests: Sums = field(default_factory=Sums)
    misses: dict[Reason, Reasons] = field(
        default_factory=lambda: {reason: Reasons() for reason in Reason}
    )
    inserts: int = 0
    new_tokens: int = 0
    restored_tokens: int = 0
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    evicted_blocks: Counter[str] = field(default_factory=Counter)
    evicted_bytes: Counter[str] = field(default_factory=Counter)
    decode: Spent = field(default_factory=Spent)
    encode: Spent = field(default_factory=Spent)
    restore: Spent = field(default_factory=Spent)
    errors: Counter[str] = field(default_factory=Counter)
    last_error: str | None = None


class Statistics:
    """Takes events on one thread, and tells on any.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._begun = clock()
        self._totals = _Totals()
        self._buckets: deque[tuple[int, Sums]] = deque(maxlen=BUCKETS)
        self._last_misses: deque[Shortfall] = deque(maxlen=LAST_MISSES)

    def record(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            self._record(event)

    def _record(self, event: Event) -> None:
        totals = self._totals
        match event:
            case Hit():
                totals.decode.add(event.seconds)
                self._add_request(event.prompt_tokens, event.hit_tokens, event.stop)
            case Miss():
                self._add_request(event.prompt_tokens, 0, event.stop)
            case Insert() if event.stored_tokens:
                totals.inserts += 1
                totals.new_tokens += event.new_tokens
                totals.encode.add(event.seconds)
            case Insert():
                totals.skipped[SkipReason.NO_ROOM] += 1
            case Skip():
                totals.skipped[event.reason] += 1
            case Restore():
                totals.restored_tokens += event.tokens
                totals.restore.add(event.seconds)
            case Evict():
                totals.evicted_blocks[event.cause] += event.blocks
                totals.evicted_bytes[event.cause] += event.nbytes
            case Error():
                totals.errors[event.operation] += 1
                totals.last_error = f"{event.operation}: {event.cause}"
                totals.skipped[SkipReason.ERROR] += event.operation == "insert"

    def _add_request(self, prompt_tokens: int, hit_tokens: int, stop: Stop | None) -> None:
        self._totals.requests.add(prompt_tokens, hit_tokens)
        place = int(self._clock() // BUCKET_SECONDS)
        if not self._buckets or self._buckets[-1][0] != place:
            self._buckets.append((place, Sums()))
        self._buckets[-1][1].add(prompt_tokens, hit_tokens)
        if stop is None:
            return
        missed = prompt_tokens - hit_tokens
        reasons = self._totals.misses[stop.reason]
        reasons.requests += 1
        reasons.misses += not hit_tokens
        reasons.tokens += missed
        # A request that goes on where what is stored ends is as it should be.
        if stop.reason is not Reason.NOTHING_STORED or hit_tokens < missed:
            self._last_misses.append(Shortfall(self._clock(), prompt_tokens, hit_tokens, stop))

    def told(self) -> dict[str, Any]:
        """All of it, as JSON holds it; docs/statistics.md says what is what."""
        with self._lock:
            now = self._clock()
            history = self._history(now)
            rates = {name: _rate(history[-count:]) for name, count in WINDOWS.items()}
            rates["start"] = _rate([asdict(self._totals.requests)])
            return {
                "uptime_seconds": now - self._begun,
                "hit_rate": rates,
                "history": history,
                "last_misses": [_told(miss, now) for miss in reversed(self._last_misses)],
                **self._told_totals(),
            }

    def _told_totals(self) -> dict[str, Any]:
        totals = self._totals
        blocks, n_bytes = totals.evicted_blocks, totals.evicted_bytes
        return {
            "misses": {reason.value: asdict(each) for reason, each in totals.misses.items()},
            "inserts": {
                "count": totals.inserts,
                "new_tokens": totals.new_tokens,
                "skipped": {reason.value: totals.skipped[reason] for reason in SkipReason},
            },
            "evictions": {
                cause.value: {"blocks": blocks[cause.value], "bytes": n_bytes[cause.value]}
                for cause in Cause
            },
            "timing": {
                "decode": asdict(totals.decode),
                "encode": asdict(totals.encode),
                "restore": asdict(totals.restore),
            },
            "errors": dict(totals.errors),
            "last_error": totals.last_error,
            "restored_tokens": totals.restored_tokens,
        }

    def _history(self, now: float) -> list[dict[str, Any]]:
        """The last buckets, the oldest first, those without a request too."""
        held, last = dict(self._buckets), int(now // BUCKET_SECONDS)
        return [
            {"age_seconds": (last - place) * BUCKET_SECONDS, **asdict(held.get(place, Sums()))}
            for place in range(last - BUCKETS + 1, last + 1)
        ]


def _rate(sums: list[dict[str, Any]]) -> dict[str, Any]:
    total = Sums()
    for each in sums:
        total.add(each["prompt_tokens"], each["hit_tokens"], each["requests"])
    rate = total.hit_tokens / total.prompt_tokens if total.prompt_tokens else None
    return {**asdict(total), "rate": rate}


def _told(miss: Shortfall, now: float) -> dict[str, Any]:
    return {
        "age_seconds": now - miss.at,
        "prompt_tokens": miss.prompt_tokens,
        "hit_tokens": miss.hit_tokens,
        **miss.stop.told(),
    }
