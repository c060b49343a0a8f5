"""What a prompt would hit, and where it leaves what is stored: told, and nothing is changed by it.

A block has four tokens.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.disk.tier import DiskTier
from mlx_lm_kvcache_plugin.events import Event, Hit, Miss, Reason, Stop
from mlx_lm_kvcache_plugin.inspection.explanation import (
    AROUND_TOKENS,
    Explanation,
    Nearest,
    explain,
)
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.stats.history import History
from mlx_lm_kvcache_plugin.store.budget import GIB
from mlx_lm_kvcache_plugin.store.thinning import SYSTEM, USER
from tests.disk.records import Disk
from tests.store.caches import MODEL, STATES, TINY, WINDOWS, JsonLayers, insert, make_cache

NEW = 97


def nearest(cache: PrefixCache, tokens: Sequence[int]) -> Nearest:
    """The nearest sequence, which there is."""
    found = explain(cache, MODEL, tokens).nearest
    assert found is not None
    return found


def cache_with(*sequences: Sequence[int], **shape: Any) -> PrefixCache:
    cache = make_cache(history=History(4))
    for sequence in sequences:
        insert(cache, sequence, label=USER, **{**TINY, **shape})
    return cache


# The nearest sequence


def test_nothing_is_stored_of_the_model() -> None:
    """Then nothing is near, whatever there is of others."""
    cache = make_cache()
    assert explain(cache, MODEL, [1, 2, 3]) == Explanation(
        3, 0, 0, Stop(Reason.NOTHING_STORED), None
    )
    insert(cache, [1, 2, 3], "other", **TINY)
    assert explain(cache, MODEL, [1, 2, 3]) == Explanation(3, 0, 0, Stop(Reason.OTHER_MODEL), None)


@pytest.mark.parametrize("place", range(14))
def test_both_sides_of_where_they_part(place: int) -> None:
    """What they share just before, and how either goes on."""
    cache = cache_with(range(14))
    told = explain(cache, MODEL, [*range(place), NEW, 98, 99])
    assert told.stop == Stop(Reason.DIVERGED if place < 14 else Reason.NOTHING_STORED, place)
    assert told.nearest is not None
    assert told.nearest.common_tokens == told.hit_tokens == place
    assert told.nearest.before == list(range(place))
    assert told.nearest.prompt == [NEW, 98, 99]
    assert told.nearest.stored == list(range(place, 14))


def test_a_prompt_that_is_stored_whole() -> None:
    """It has nothing of its own, and what is stored may go on."""
    cache = cache_with(range(14))
    told = nearest(cache, range(10))
    assert (told.common_tokens, told.prompt) == (10, [])
    assert told.stored == list(range(10, 14))
    told = nearest(cache, range(14))
    assert (told.common_tokens, told.prompt, told.stored) == (14, [], [])


def test_only_so_many_tokens_are_told() -> None:
    """The last ones before, the first ones behind."""
    cache = cache_with(range(200))
    told = nearest(cache, [*range(100), *range(500, 600)])
    assert told.before == list(range(100 - AROUND_TOKENS, 100))
    assert told.prompt == list(range(500, 500 + AROUND_TOKENS))
    assert told.stored == list(range(100, 100 + AROUND_TOKENS))


def test_the_last_used_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what goes on from there; and it is as old as its last use."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    cache = cache_with([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9], [5, 5])
    now = 107.0
    told = nearest(cache, [1, 2, 3, 4, NEW])
    assert told.stored[0] in (5, 9)
    assert told.age_seconds == 7.0
    cache.fetch([*range(1, 9), NEW], cache.match(MODEL, [*range(1, 9), NEW]))
    now = 110.0
    told = nearest(cache, [1, 2, 3, 4, NEW])
    assert (told.stored, told.age_seconds) == ([5, 6, 7, 8], 3.0)
    told = nearest(cache, [NEW, NEW])
    assert (told.common_tokens, told.before) == (0, [])
    assert (told.stored, told.age_seconds) == ([1, 2, 3, 4, 5, 6, 7, 8], 3.0)
    insert(cache, [1, 2, 3, 4, 5, 6, 8, 8], **TINY)  # which leaves the other one inside of a block
    assert nearest(cache, [1, 2, 3, 4, 5, 6, NEW]).stored == [8, 8]
    told = nearest(cache, [5, 5, NEW])
    assert (told.common_tokens, told.stored, told.age_seconds) == (2, [], 10.0)


def test_a_model_that_looks_different_at_other_lengths() -> None:
    """The one that has the most in common, whatever was evicted of the others."""
    cache = cache_with(range(5), range(100, 114), **WINDOWS)
    cache.trim_to(n_sequences=1)
    assert nearest(cache, [NEW, NEW]).stored == list(range(100, 114))
    insert(cache, range(5), **WINDOWS)
    assert nearest(cache, [*range(3), NEW]).stored == [3, 4]
    assert nearest(cache, [*range(100, 109), NEW]).stored == list(range(109, 114))


def test_checkpoints_are_no_tokens() -> None:
    """What goes on is told beside them."""
    cache = cache_with(**STATES)
    for length in (4, 6, 14):
        insert(cache, range(length), label=SYSTEM, **STATES)
    told = explain(cache, MODEL, [*range(8), NEW, NEW])
    assert (told.hit_tokens, told.stop) == (6, Stop(Reason.NOT_RESTORABLE, 8))
    assert told.nearest is not None and told.nearest.stored == list(range(8, 14))
    assert nearest(cache, [*range(4), NEW]).common_tokens == 4


@pytest.mark.parametrize("shape", [STATES, WINDOWS], ids=["states", "windows"])
@pytest.mark.parametrize("first", [9, 14])
def test_what_goes_on_beside_a_checkpoint_is_told(shape: dict[str, Any], first: int) -> None:
    """Whether the system prompt or the whole conversation was stored first."""
    cache = cache_with(range(first), **shape)
    insert(cache, range(9 + 14 - first), label=SYSTEM, **shape)
    told = explain(cache, MODEL, [*range(9), NEW, NEW])
    assert told.stop == Stop(Reason.DIVERGED, 9)
    assert told.nearest is not None and told.nearest.stored == list(range(9, 14))


@pytest.mark.parametrize("tokens", [[], [1]])
def test_a_prompt_of_hardly_anything(tokens: list[int]) -> None:
    """Nothing of it can be a hit."""
    told = explain(cache_with([1, 2, 3]), MODEL, tokens)
    assert (told.prompt_tokens, told.hit_tokens) == (len(tokens), 0)
    assert told.stop == Stop(Reason.BELOW_ONE_TOKEN)
    assert told.nearest is not None and told.nearest.stored == [1, 2, 3][len(tokens) :]


# Nothing changes


@pytest.mark.parametrize("shape", [TINY, STATES, WINDOWS], ids=["rows", "states", "windows"])
def test_nothing_is_changed(shape: dict[str, Any]) -> None:
    """Neither the order nor a time nor a figure; and nobody is told."""
    events: list[Event] = []
    cache = make_cache(emit=events.append, history=History(4))
    for length in (5, 14, 9):
        insert(cache, range(length), label=SYSTEM, **shape)
    insert(cache, range(50, 57), label=USER, **shape)
    cache.trim_to(n_sequences=2)

    def everything() -> Any:
        assert cache.history is not None
        nodes = [(node, node.used_at, node.nbytes, list(node.children)) for node in cache.tree]
        figures = cache.tree.used_bytes, cache.history.predicted
        return nodes, figures, list(events), list(cache.tree.roots())

    before = everything()
    for prompt in ([*range(7), NEW], range(14), [NEW, NEW], [], [*range(50, 57), NEW]):
        explain(cache, MODEL, prompt)
        explain(cache, "other", prompt)
        assert everything() == before


# On disk


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


class Started:
    """A process that has its folder alone."""

    def __init__(self, folder: Path) -> None:
        self.tier = DiskTier(folder, GIB, disk_usage=lambda _: Disk())
        self.events: list[Event] = []
        self.cache = make_cache(tier=self.tier, history=History(4), emit=self.events.append)
        self.cache.attach(MODEL, b"weights", {"model": "of a test"}, JsonLayers())

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *failure: object) -> None:
        self.tier.close()

    def insert(self, tokens: Sequence[int], **shape: Any) -> None:
        insert(self.cache, tokens, label=SYSTEM, **{**TINY, **shape})
        assert self.tier.flush()

    def told_and_had(self, tokens: Sequence[int]) -> tuple[Explanation, int, Stop | None]:
        """What is told of a prompt, what it hits afterwards, and why no more."""
        told = explain(self.cache, MODEL, tokens)
        prefix = self.cache.match(MODEL, tokens)
        self.cache.fetch(tokens, prefix, namespace=MODEL)
        (had,) = [event for event in self.events if isinstance(event, Hit | Miss)][-1:]
        return told, prefix.tokens if prefix else 0, had.stop


@pytest.mark.parametrize("shape", [TINY, STATES, WINDOWS], ids=["rows", "states", "windows"])
@pytest.mark.parametrize("length", [3, 8, 14, 15])
def test_what_would_be_read_first_is_told(folder: Path, shape: dict[str, Any], length: int) -> None:
    """After a restart all of it, and afterwards none."""
    with Started(folder) as started:
        started.insert(range(length), **shape)
    for prompt in ([*range(length), NEW], [*range(length), NEW, NEW, NEW]):
        with Started(folder) as started:
            told, hit_tokens, stop = started.told_and_had(prompt)
            assert told.hit_tokens == told.on_disk_tokens == hit_tokens == length
            assert told.stop == stop
            assert told.nearest is None
            told, *_ = started.told_and_had(prompt)
            assert (told.hit_tokens, told.on_disk_tokens, told.stop) == (length, 0, stop)


@pytest.mark.parametrize("place", range(14))
def test_where_a_prompt_leaves_what_is_on_disk(folder: Path, place: int) -> None:
    """Inside of a block it is seen to go on there; the next block is not looked for."""
    with Started(folder) as started:
        started.insert(range(14))
    with Started(folder) as started:
        told, hit_tokens, stop = started.told_and_had([*range(place), NEW, NEW])
        assert (told.hit_tokens, told.stop) == (hit_tokens, stop)
        assert (told.hit_tokens, told.on_disk_tokens) == (place, place)
        reason = Reason.DIVERGED if place % 4 else Reason.NOTHING_STORED
        assert told.stop == Stop(reason, place)


def test_what_memory_gave_up_is_on_disk(folder: Path) -> None:
    """It is no reason to compute it."""
    with Started(folder) as started:
        started.insert(range(14))
        started.cache.trim_to(n_bytes=0)
        told, hit_tokens, stop = started.told_and_had([*range(14), NEW, NEW])
        assert (told.hit_tokens, told.on_disk_tokens, hit_tokens) == (14, 14, 14)
        assert told.stop == stop == Stop(Reason.NOTHING_STORED, 14)
        started.cache.trim_to(n_bytes=0)
        started.tier.clear()
        told, hit_tokens, stop = started.told_and_had([*range(14), NEW, NEW])
        assert (told.hit_tokens, hit_tokens) == (0, 0)
        assert told.stop == stop == Stop(Reason.EVICTED, 0, "trim")


FAILING = {"reading": ("open",), "listing": ("scandir", "listdir"), "everything": ("lstat",)}
FAILING["everything"] += FAILING["reading"] + FAILING["listing"]


@pytest.mark.parametrize("functions", FAILING.values(), ids=FAILING)
def test_a_disk_that_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, functions: Sequence[str]
) -> None:
    """Memory alone is told of, and no failure is counted; it may be over in a moment."""
    with Started(folder) as started:
        started.insert(range(14))
    with Started(folder) as started:
        insert(started.cache, range(8), **TINY)
        assert started.tier.flush()
        before = asdict(started.tier.counters), list(started.events)
        with monkeypatch.context() as patch:
            for function in functions:
                patch.setattr(os, function, failing(getattr(os, function), folder))
            told = explain(started.cache, MODEL, [*range(14), NEW])
        assert (told.hit_tokens, told.on_disk_tokens) == (8, 0)
        assert (asdict(started.tier.counters), list(started.events)) == before
        assert explain(started.cache, MODEL, [*range(14), NEW]).hit_tokens == 14


def failing(function: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """It fails with whatever lies in a folder."""

    def fail(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).startswith(str(folder)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return function(path, *arguments, **options)

    return fail


def test_memory_and_disk_together(folder: Path) -> None:
    """What memory holds need not be read."""
    with Started(folder) as started:
        started.insert(range(14))
    with Started(folder) as started:
        insert(started.cache, range(8), **TINY)
        told, hit_tokens, stop = started.told_and_had([*range(12), NEW, NEW])
        assert (told.hit_tokens, told.on_disk_tokens, hit_tokens) == (12, 4, 12)
        assert told.nearest is not None and told.nearest.common_tokens == 8
        assert told.stop == stop
