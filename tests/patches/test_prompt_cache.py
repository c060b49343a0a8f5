"""The face in place of upstream's `LRUPromptCache`: the same script over both, and failures."""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    LRUPromptCache,
    RotatingKVCache,
)

from mlx_lm_kvcache_plugin.events import Counters, Error, Event, Evict
from mlx_lm_kvcache_plugin.patches.prompt_cache import CACHE_TYPES, PrefixPromptCache
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget
from tests.store.caches import Machine, make_cache

MODEL = ("model", None, None)
DIM = 64

Tokens = Sequence[int]
Make = Callable[[Tokens], list[Any]]


def row_of(tokens: Tokens) -> mx.array:
    """What a model computes for the last of these tokens, as it would: of all before it too."""
    seed = [abs(token) % 2**31 for token in tokens]
    return mx.array(np.random.default_rng(seed).standard_normal(DIM).astype(np.float32))


def plain_caches(tokens: Tokens) -> list[Any]:
    """One layer with a row for each token: a cut or a join at the wrong place shows."""
    cache = KVCache()
    for end in range(1, len(tokens) + 1):
        row = row_of(tokens[:end])[None, None, None]
        cache.update_and_fetch(row, -row)
    return [cache]


def rotating_caches(tokens: Tokens) -> list[Any]:
    """A window of 12 tokens beside a plain layer."""
    window = RotatingKVCache(12)
    for end in range(1, len(tokens) + 1):
        row = row_of(tokens[:end])[None, None, None]
        window.update_and_fetch(row, -row)
    return [window, *plain_caches(tokens)]


def recurrent_caches(tokens: Tokens) -> list[Any]:
    """A state that stands for all tokens, beside a plain layer."""
    state = ArraysCache(1)
    state[0] = row_of(tokens)[None]
    return [state, *plain_caches(tokens)]


MAKERS: dict[str, Make] = {
    "plain": plain_caches,
    "rotating": rotating_caches,
    "recurrent": recurrent_caches,
}


def contents(caches: list[Any]) -> list[list[Any]]:
    """What a model sees in the layers."""
    seen = []
    for cache in caches:
        if isinstance(cache, ArraysCache):
            seen.append([np.array(cache[0])])
        elif isinstance(cache, RotatingKVCache):
            ordered = [cache._temporal_order(side) for side in (cache.keys, cache.values)]
            seen.append([cache.offset, *(np.array(side)[..., -12:, :] for side in ordered)])
        else:
            end = cache.offset
            seen.append([end, np.array(cache.keys)[:, :, :end], np.array(cache.values)[:, :, :end]])
    return seen


def are_for(caches: list[Any], tokens: Tokens, make: Make) -> bool:
    """Whether the layers are what a model computes for exactly these tokens."""
    pairs = zip(contents(caches), contents(make(tokens)), strict=True)
    return all(
        np.array_equal(one, other)
        for ours, wanted in pairs
        for one, other in zip(ours, wanted, strict=True)
    )


class Face(PrefixPromptCache):
    """Ours over a small store, with the events and an audit after each operation."""

    def __init__(self, cache: PrefixCache | None = None, **options: Any) -> None:
        self.events: list[Event] = []
        self.store = cache or make_cache("raw", emit=self.events.append, **options)
        super().__init__(self.store)

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> Any:
        caches, rest = super().fetch_nearest_cache(model, tokens)
        self.store.tree.check()
        return caches, rest

    def insert_cache(self, *arguments: Any, **options: Any) -> None:
        super().insert_cache(*arguments, **options)
        self.store.tree.check()

    def fetched(self, tokens: Tokens, model: Any = MODEL) -> int:
        """How many tokens are a hit; what comes back is right."""
        caches, rest = self.fetch_nearest_cache(model, list(tokens))
        assert list(tokens)[len(tokens) - len(rest) :] == rest
        assert (caches is not None) == (len(rest) < len(tokens))
        return len(tokens) - len(rest)

    def put(self, tokens: Tokens, cache_type: str = "assistant", make: Make = plain_caches) -> None:
        self.insert_cache(MODEL, list(tokens), make(tokens), cache_type=cache_type)


# The same face


def test_the_members_are_upstreams() -> None:
    """Names, parameters and the ways to pass them, as far as the server uses them."""
    for name in ("fetch_nearest_cache", "insert_cache", "trim_to", "stats_by_type"):
        ours, stock = (
            inspect.signature(getattr(owner, name)).parameters.values()
            for owner in (PrefixPromptCache, LRUPromptCache)
        )
        assert [(p.name, p.kind, p.default) for p in ours] == [
            (p.name, p.kind, p.default) for p in stock
        ]
    assert isinstance(PrefixPromptCache.nbytes, property)
    assert [*LRUPromptCache().stats_by_type()] == list(CACHE_TYPES)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("seed", range(4))
def test_the_same_script_over_stock_and_ours(make: Make, seed: int) -> None:
    """Chats that branch and come back: ours hits at least as much as stock, and never wrongly.

    Stock is right too here, since nothing is asked for that is stored whole: that kills it.
    """
    chance = random.Random(seed)
    stock, ours = LRUPromptCache(10), Face()
    known: list[list[int]] = [[]]
    for _ in range(40):
        start = chance.choice(known)
        tokens = start[: chance.choice([len(start), chance.randint(0, len(start))])]
        tokens = [*tokens, *(chance.randint(0, 3) for _ in range(chance.randint(1, 9)))]
        if tokens in known or any(one[: len(tokens)] == tokens for one in known):
            continue
        hits = []
        for cache in (stock, ours):
            caches, rest = cache.fetch_nearest_cache(MODEL, tokens)
            hits.append(len(tokens) - len(rest))
            if caches is not None and (cache is ours or make is not rotating_caches):
                assert are_for(caches, tokens[: hits[-1]], make)
        assert hits[1] >= hits[0]
        assert hits[1] < len(tokens)
        for cache in (stock, ours):
            cache.insert_cache(MODEL, tokens[:], make(tokens), cache_type="assistant")
        known.append(tokens)
    assert not [event for event in ours.events if isinstance(event, Error)]
    assert ours.store.counters.hits > 10


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_last_token_is_left_to_compute(make: Make) -> None:
    """However the same tokens are asked for again, there is a rest."""
    for length in (1, 2, 4, 5, 11, 13, 30):
        ours, tokens = Face(), list(range(length))
        ours.put(tokens, make=make)
        caches, rest = ours.fetch_nearest_cache(MODEL, tokens)
        assert rest
        if caches is not None:
            assert are_for(caches, tokens[: -len(rest)], make)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_is_handed_out_is_the_callers(make: Make) -> None:
    """It may write into it; the next one gets what was stored."""
    ours, tokens = Face(), list(range(20))
    ours.put(tokens, make=make)
    for _ in range(2):
        caches, rest = ours.fetch_nearest_cache(MODEL, [*tokens, 50, 51])
        assert caches is not None and rest == [50, 51]
        assert are_for(caches, tokens, make)
        for cache in caches:
            for side in cache.cache if isinstance(cache, ArraysCache) else (cache.keys,):
                side[...] = 7


def test_what_came_in_is_the_callers_too() -> None:
    """Upstream goes on with the caches that it handed in."""
    ours, tokens = Face(), list(range(6))
    caches = plain_caches(tokens)
    ours.insert_cache(MODEL, tokens, caches)
    caches[0].keys[...] = 0
    fetched, _ = ours.fetch_nearest_cache(MODEL, [*tokens, 9])
    assert fetched is not None and are_for(fetched, tokens, plain_caches)


def test_models_never_mix() -> None:
    """The key is (model, adapter, draft): one that differs in any of them is another."""
    ours, tokens = Face(), list(range(10))
    ours.put(tokens)
    for other in (("model", None, "draft"), ("model", "adapter", None), ("other", None, None)):
        assert ours.fetched([*tokens, 1], model=other) == 0
    assert ours.fetched([*tokens, 1]) == 10


def test_negative_ids_are_tokens() -> None:
    """Upstream gives an image ids of 60 bits; two images of one size are not the same."""
    one, other = -(2**60) + 12345, -(2**60) + 54321
    ours = Face()
    ours.put([1, 2, one, one, one, 3, 4])
    assert ours.fetched([1, 2, one, one, one, 3, 9]) == 6
    assert ours.fetched([1, 2, other, other, other, 3, 9]) == 2


def test_a_draft_stores_what_was_computed() -> None:
    """Its key is longer than any of its layers, and the draft's layers lag behind."""
    tokens = list(range(20))
    caches = [*plain_caches(tokens[:17]), *plain_caches(tokens[:15])]
    ours = Face()
    ours.insert_cache(MODEL, tokens, caches)
    fetched, rest = ours.fetch_nearest_cache(MODEL, [*tokens, 1])
    assert fetched is not None and len(rest) == 6
    assert all(are_for([cache], tokens[:15], plain_caches) for cache in fetched)


# What cannot be cut


def test_a_cache_that_trims_less_than_asked_is_a_miss() -> None:
    """`ChunkedKVCache(8)` holding 20 tokens, and a request that shares 5: counted as a miss."""

    def make(tokens: Tokens) -> list[Any]:
        cache = ChunkedKVCache(8)
        for end in range(1, len(tokens) + 1):
            row = row_of(tokens[:end])[None, None, None]
            cache.update_and_fetch(row, -row)
            cache.maybe_trim_front()
        return [cache]

    tokens = list(range(20))
    ours = Face()
    ours.put(tokens, make=make)
    assert ours.fetched([*tokens[:5], 99, 98]) == 0
    assert ours.fetched(tokens) == 0
    assert ours.fetched([*tokens, 99]) == 20
    assert (ours.store.counters.hits, ours.store.counters.misses) == (1, 2)
    assert ours.store.counters.errors == 0


@pytest.mark.parametrize("shared", [3, 8, 12, 19])
def test_a_window_that_is_full_is_used_at_its_position_alone(shared: int) -> None:
    """What it forgot cannot come back."""
    ours, tokens = Face(), list(range(20))
    ours.put(tokens, make=rotating_caches)
    assert ours.fetched([*tokens[:shared], 99, 98]) == 0
    assert ours.fetched([*tokens, 99]) == 20


def test_a_window_that_is_not_full_can_be_cut() -> None:
    """As stock does, and exactly."""
    ours, tokens = Face(), list(range(10))
    ours.put(tokens, make=rotating_caches)
    caches, rest = ours.fetch_nearest_cache(MODEL, [*tokens[:7], 99, 98])
    assert caches is not None and rest == [99, 98]
    assert are_for(caches, tokens[:7], rotating_caches)


@pytest.mark.parametrize("empty", [KVCache, lambda: ArraysCache(2), lambda: RotatingKVCache(8)])
def test_what_holds_nothing_is_not_stored(empty: Callable[[], Any]) -> None:
    """Caches that nothing was computed with stand for no token, whatever their key says."""
    ours = Face()
    ours.put(range(10))
    ours.insert_cache(MODEL, list(range(20)), [empty()])
    assert ours.fetched(range(30)) == 10
    assert ours.store.counters.errors == 0


def test_states_that_disagree_are_not_stored() -> None:
    """Layers at different positions are no state of a sequence."""
    ours = Face()
    caches = [*rotating_caches(range(20))[:1], *plain_caches(range(19))]
    ours.insert_cache(MODEL, list(range(20)), caches)
    assert len(ours) == ours.nbytes == 0


# Bounds


def test_a_short_cache_is_charged_for_its_tokens() -> None:
    """Ten tokens in a buffer of 256 rows."""
    ours = Face()
    ours.put(range(10))
    row_bytes = 2 * DIM * 4
    assert plain_caches(range(10))[0].nbytes == 256 * row_bytes
    assert 10 * row_bytes <= ours.nbytes < 10 * row_bytes + 4096


def test_trimming_evicts_at_once() -> None:
    """By bytes and by sequences, the least recently used first; less than none is none."""
    ours = Face()
    for start in range(0, 50, 10):
        ours.put(range(start, start + 10))
    ours.trim_to()
    assert len(ours) == 5
    ours.fetched(range(0, 10))
    ours.trim_to(n_sequences=3)
    assert len(ours) == 3
    assert [ours.fetched(range(start, start + 10)) for start in (0, 10, 20, 30, 40)] == [
        9,
        0,
        0,
        9,
        9,
    ]
    half = ours.nbytes // 2
    ours.trim_to(n_bytes=half)
    assert 0 < ours.nbytes <= half
    ours.trim_to(n_bytes=-1)
    assert len(ours) == ours.nbytes == 0
    ours.put(range(10))
    ours.trim_to(n_sequences=-1)
    assert len(ours) == 0
    assert {event.cause for event in ours.events if isinstance(event, Evict)} == {"trim"}


def test_sequences_and_bytes_by_type() -> None:
    """They add up to the whole, but for the root, and an unknown type harms nothing."""
    ours = Face()
    ours.put(range(10), "system")
    ours.put(range(20), "user")
    ours.put([9, 8, 7])
    stats = ours.stats_by_type()
    assert {kind: stat["n_sequences"] for kind, stat in stats.items()} == {
        "assistant": 1,
        "user": 1,
        "system": 0,
    }
    assert all(stat["n_bytes"] > 0 for stat in stats.values())
    # The root of the model's sequences is of no type.
    assert 0 <= ours.nbytes - sum(stat["n_bytes"] for stat in stats.values()) < 512
    assert len(ours) == 2
    ours.put([5, 5, 5], "tool")
    assert [*ours.stats_by_type()] == list(CACHE_TYPES)
    assert len(ours) == 3


def test_nothing_is_kept_without_a_store() -> None:
    """`--disable-prefix-cache`: all seven members answer."""
    ours = PrefixPromptCache(None)
    ours.insert_cache(MODEL, [1, 2, 3], plain_caches([1, 2, 3]))
    assert ours.fetch_nearest_cache(MODEL, [1, 2, 3, 4]) == (None, [1, 2, 3, 4])
    ours.trim_to(n_bytes=0, n_sequences=0)
    assert len(ours) == ours.nbytes == 0
    assert all(stat == {"n_sequences": 0, "n_bytes": 0} for stat in ours.stats_by_type().values())


# Failures


class Unreadable:
    """A layer that is of no use."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(f"no {name}")


BROKEN: dict[str, list[Any]] = {
    "a layer that cannot be read": [Unreadable()],
    "a layer that refers to itself": [],
}
BROKEN["a layer that refers to itself"].append(BROKEN["a layer that refers to itself"])


@pytest.mark.parametrize("kind", BROKEN)
def test_a_cache_that_cannot_be_stored_is_skipped(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever comes in: logged once, counted each time, and all else is as it was."""
    ours = Face()
    ours.put(range(10))
    before = ours.nbytes, len(ours)
    for number in range(3):
        ours.insert_cache(MODEL, [number, 50, 51], BROKEN[kind])
    assert (ours.nbytes, len(ours)) == before
    assert ours.store.counters.errors == 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert ours.fetched(range(10)) == 9


def test_a_failure_is_a_miss_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """With its cause, once for each operation and kind of error, and counted every time."""
    machine = Machine()
    events: list[Event] = []
    budget = Budget(limit_bytes=GIB, probe=machine.probe)
    ours = Face(make_cache("raw", budget=budget, emit=events.append))
    ours.put(range(10))

    def fail_with(error: Exception) -> None:
        def fail() -> None:
            raise error

        machine.before_probing = fail

    for error in (OSError("first"), OSError("second"), KeyError("third")):
        fail_with(error)
        assert ours.fetched(range(10)) == 0
        ours.put([7, 7, 7])
    machine.before_probing = lambda: None
    assert ours.fetched(range(10)) == 9 and ours.fetched([7, 7, 7, 7]) == 0
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "prefix cache: fetch failed and was skipped: OSError: first",
        "prefix cache: insert failed and was skipped: OSError: first",
        "prefix cache: fetch failed and was skipped: KeyError: 'third'",
        "prefix cache: insert failed and was skipped: KeyError: 'third'",
    ]
    assert all(record.exc_info for record in caplog.records)
    errors = [event for event in events if isinstance(event, Error)]
    assert [error.operation for error in errors] == ["fetch", "insert"] * 3
    assert errors[2] == Error("fetch", "OSError: second")
    counters = Counters()
    for event in events:
        counters.count(event)
    assert counters == ours.store.counters and counters.errors == 6


def test_what_ends_the_process_is_no_failure() -> None:
    """A keyboard interrupt is not ours to swallow."""
    ours = Face()
    with pytest.raises(KeyboardInterrupt):

        class Interrupted:
            @property
            def caches(self) -> Any:
                raise KeyboardInterrupt

            def __getattr__(self, name: str) -> Any:
                raise KeyboardInterrupt

        ours.insert_cache(MODEL, [1, 2], [Interrupted()])


def test_a_listener_that_fails_does_not_reach_the_server() -> None:
    """Neither on a hit nor on a miss, and not when it is told of its own failure either."""

    def fail(event: object) -> None:
        raise RuntimeError("no")

    ours = PrefixPromptCache(make_cache(emit=fail))
    for _ in range(2):
        assert ours.fetch_nearest_cache(MODEL, [1, 2, 3]) == (None, [1, 2, 3])
        ours.insert_cache(MODEL, [1, 2], plain_caches([1, 2]))
    ours.trim_to(n_bytes=0)
