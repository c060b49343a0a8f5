"""The face in place of upstream's `LRUPromptCache`: the same script over both, and failures."""

from __future__ import annotations

import inspect
import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

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

from mlx_lm_kvcache_plugin.events import Error, Hit, Miss, Reason, Stop
from mlx_lm_kvcache_plugin.patches.models_cache import leaves_of
from mlx_lm_kvcache_plugin.patches.prompt_cache import (
    CACHE_TYPES,
    MOST_ROOM_TOKENS,
    ROOM_TOKENS,
    PrefixPromptCache,
)
from mlx_lm_kvcache_plugin.patches.ranks import Ranks
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget
from tests.events import Events
from tests.patches import cache_objects as objects
from tests.patches.cache_objects import KINDS, STATE_KINDS, known_kinds, same, visible
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

    def __init__(self, ranks: Ranks | None = None, **options: Any) -> None:
        self.events = Events()
        self.store = make_cache(emit=self.events.append, **options)
        super().__init__(self.store, known_kinds(), ranks or Ranks())

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> Any:
        caches, rest = super().fetch_nearest_cache(model, tokens)
        self.store.tree.check()
        return caches, rest

    def insert_cache(self, *arguments: Any, **options: Any) -> None:
        super().insert_cache(*arguments, **options)
        self.store.tree.check()

    def hit(self, tokens: Tokens, model: Any = MODEL) -> int:
        """How many tokens are a hit."""
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

    Where layers cannot be cut, ours gives up checkpoints inside of what went on, and stock does
    not; but never the last one of a sequence that nothing went on from.

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
        if make is plain_caches:
            assert hits[1] >= hits[0]
        assert last_on_the_way(known, tokens) <= hits[1] < len(tokens)
        for cache in (stock, ours):
            cache.insert_cache(MODEL, tokens[:], make(tokens), cache_type="assistant")
        known.append(tokens)
    assert not ours.events.of(Error)
    assert len(ours.events.of(Hit)) > 10


def last_on_the_way(known: list[list[int]], tokens: list[int]) -> int:
    """How long the sequence is that `tokens` go on from and that no other one goes on from."""
    on_the_way = [one for one in known if tokens[: len(one)] == one]
    last = max(on_the_way, key=len)
    return len(last) if all(other[: len(last)] != last or other == last for other in known) else 0


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


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_room_changes_nothing_that_is_read(make: Make) -> None:
    """A prompt that goes on alone gets arrays that are longer where upstream's may be."""
    ours = Face()
    tokens = list(range(30))
    ours.put(tokens, make=make)
    request = [*tokens, *range(100, 120)]
    roomy, _ = ours.fetch_alone(MODEL, request)
    exact, rest = ours.fetch_nearest_cache(MODEL, request)
    assert rest == request[30:]
    pairs = zip(sum(contents(roomy), []), sum(contents(exact), []), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)
    for cache in leaves_of(roomy):
        if type(cache) is KVCache:
            assert cache.keys.shape[2] == cache.values.shape[2] == 30 + 20 + ROOM_TOKENS


def test_what_is_added_needs_no_copy() -> None:
    """Upstream writes the rest of the prompt, and 256 tokens more, into the arrays as they are."""
    ours = Face()
    ours.put(range(30))
    caches, rest = ours.fetch_alone(MODEL, list(range(50)))
    (length,) = {cache.keys.shape[2] for cache in caches}
    for cache in caches:
        heads, dim = cache.keys.shape[1], cache.keys.shape[3]
        new = mx.ones((1, heads, len(rest) + ROOM_TOKENS, dim), cache.keys.dtype)
        cache.update_and_fetch(new, new)
        assert cache.offset == cache.keys.shape[2] == length


def test_room_is_for_those_who_take_it() -> None:
    """A window that is not yet full has just its rows; and a prompt that is mostly new may be given
    up: it gets room for some of it."""
    ours = Face()
    ours.put(range(10), make=rotating_caches)
    caches, _ = ours.fetch_alone(MODEL, [*range(10), *range(100, 100 + 3 * MOST_ROOM_TOKENS)])
    window, plain = caches
    assert window.keys.shape[2] == 10
    assert plain.keys.shape[2] == 10 + MOST_ROOM_TOKENS


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
        assert ours.hit([*tokens, 1], model=other) == 0
    assert ours.hit([*tokens, 1]) == 10


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_goes_through_the_store(kind: str, bits: int | None) -> None:
    """In full precision to the bit; with 4 bits in the same shape, and states to the bit too.

    Beside a plain layer, which makes sure that there are rows in blocks.
    """
    ours = Face(codec="raw" if bits is None else "rotated", bits=bits, block_tokens=128)
    tokens, caches = tokens_and_caches(kind)
    ours.insert_cache(MODEL, tokens, caches)
    back, rest = ours.fetch_nearest_cache(MODEL, [*tokens, 1])
    assert back is not None and rest == [1] and not ours.events.of(Error)
    _, (layer, plain) = tokens_and_caches(kind)
    if bits is None:
        assert same(visible(back[1]), visible(plain))
    if bits is None and kind not in objects.QUANTIZED_KINDS or kind in STATE_KINDS:
        assert same(visible(back[0]), visible(layer))
    assert looks_of(visible(back[0]))[:3] == looks_of(visible(layer))[:3]


def tokens_and_caches(kind: str) -> tuple[list[int], list[Any]]:
    """A layer of this kind beside a plain one, and as many tokens as they are of."""
    layer = KINDS[kind]()
    offsets = [leaf.offset for leaf in leaves_of([layer]) if hasattr(leaf, "offset")]
    length = offsets[0] if offsets else 20
    return list(range(length)), [layer, objects.plain(length)]


def looks_of(seen: Any) -> list[Any]:
    return [(array.shape, array.dtype) for array in objects.arrays_in(seen)]


@pytest.mark.parametrize("width", [0, 128])
def test_values_that_are_none_take_no_bytes(width: int) -> None:
    """An indexer's: of no width, or zeros; they come back for upstream to attend to."""

    def bytes_with(cache: Any) -> int:
        ours = Face(block_tokens=128)
        ours.insert_cache(MODEL, list(range(200)), [cache])
        back, _ = ours.fetch_nearest_cache(MODEL, list(range(150)))
        assert back is not None and back[0].values.shape == (1, 2, 149, cache.values.shape[3])
        return ours.nbytes

    cache = KVCache()
    cache.update_and_fetch(objects.rows(200), mx.zeros((1, 2, 200, width)))
    row_bytes = 2 * 64 * 4
    assert 200 * row_bytes < bytes_with(cache) < 200 * row_bytes + 4096
    assert bytes_with(objects.plain(200)) > 2 * 200 * row_bytes


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_negative_ids_are_tokens(make: Make) -> None:
    """Upstream gives an image ids of 60 bits; two images of one size are not the same."""
    one, other = -(2**60) + 12345, -(2**60) + 54321
    ours = Face()
    ours.put([1, 2, one, one, one, 3, 4], make=make)
    assert ours.hit([1, 2, one, one, one, 3, 4, 9]) == 7
    can_be_cut = make is not recurrent_caches
    assert ours.hit([1, 2, one, one, one, 3, 9]) == (6 if can_be_cut else 0)
    assert ours.hit([1, 2, other, other, other, 3, 9]) == (2 if can_be_cut else 0)


def test_a_draft_stores_what_was_computed() -> None:
    """Its key is longer than any of its layers, and the draft's layers lag behind."""
    tokens = list(range(20))
    caches = [*plain_caches(tokens[:17]), *plain_caches(tokens[:15])]
    ours = Face()
    ours.insert_cache(MODEL, tokens, caches)
    fetched, rest = ours.fetch_nearest_cache(MODEL, [*tokens, 1])
    assert fetched is not None and len(rest) == 6
    assert all(are_for([cache], tokens[:15], plain_caches) for cache in fetched)


def test_what_was_fetched_for_is_known() -> None:
    """A prefill that sets checkpoints has to know of which prompt, and behind which hit."""
    ours = Face()
    ours.put(range(10))
    assert ours.hit([*range(10), 1, 2]) == 10
    assert ours.fetched == (MODEL, [*range(10), 1, 2], 10)
    assert ours.hit([50, 51]) == 0
    assert ours.fetched == (MODEL, [50, 51], 0)


@pytest.mark.parametrize(
    ("make", "length", "expected"),
    [
        (plain_caches, 20, 20),
        (rotating_caches, 10, 10),
        (rotating_caches, 11, 11),
        (rotating_caches, 12, 0),
        (recurrent_caches, 10, 0),
    ],
)
def test_beside_a_draft_only_rows_are_stored(make: Make, length: int, expected: int) -> None:
    """Upstream cannot take back what a draft got wrong from a full window or from a state.

    So nobody knows what is in them, and it refuses to go on from them, even if nothing was dropped
    yet; the same model alone has no such trouble.
    """
    for draft, hit in (("draft", expected), (None, length)):
        ours, tokens = Face(), list(range(length))
        ours.insert_cache(("model", None, draft), tokens, make(tokens))
        assert ours.hit([*tokens, 99], model=("model", None, draft)) == hit
        assert not ours.events.of(Error) and (ours.nbytes > 0) is (hit > 0)


# What cannot be cut


def test_a_cache_that_trims_less_than_asked_is_a_miss() -> None:
    """`ChunkedKVCache(8)` holding 20 tokens, and a request that shares 5: counted as a miss.

    12 of them were dropped, so that upstream's `trim` would leave it 3 tokens longer than asked.
    """

    def make(tokens: Tokens) -> list[Any]:
        cache = ChunkedKVCache(8)
        for end in range(1, len(tokens) + 1):
            row = row_of(tokens[:end])[None, None, None]
            cache.update_and_fetch(row, -row)
            objects.drop_front(cache)
        return [cache]

    tokens = list(range(20))
    ours = Face()
    ours.put(tokens, make=make)
    assert ours.hit([*tokens[:5], 99, 98]) == 0
    assert ours.hit(tokens) == 0
    caches, rest = ours.fetch_nearest_cache(MODEL, [*tokens, 99])
    assert caches is not None and rest == [99]
    assert same(visible(caches[0]), visible(make(tokens)[0]))
    assert (len(ours.events.of(Hit)), len(ours.events.of(Miss))) == (1, 2)
    assert not ours.events.of(Error)


@pytest.mark.parametrize("shared", [3, 8, 12, 19])
def test_a_window_that_is_full_is_used_at_its_position_alone(shared: int) -> None:
    """What it forgot cannot come back."""
    ours, tokens = Face(), list(range(20))
    ours.put(tokens, make=rotating_caches)
    assert ours.hit([*tokens[:shared], 99, 98]) == 0
    assert ours.hit([*tokens, 99]) == 20


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
    assert ours.hit(range(30)) == 10
    assert not ours.events.of(Error)


def test_a_window_beside_plain_layers_shares_their_blocks() -> None:
    """A prompt longer than its window: the plain layer's blocks are shared, the window is exact.

    Two sequences that part behind a checkpoint need the rows up to there once.
    """
    ours = Face(block_tokens=16)
    system, rest = list(range(100)), list(range(200, 300))
    ours.put(system, "system", make=rotating_caches)
    one_bytes = ours.nbytes
    ours.put([*system, *rest], make=rotating_caches)
    both_bytes = ours.nbytes
    ours.put([*system, *reversed(rest)], make=rotating_caches)
    assert ours.nbytes - both_bytes < one_bytes + 4096
    for tokens in ([*system, *rest], [*system, *reversed(rest)]):
        caches, left = ours.fetch_nearest_cache(MODEL, [*tokens, 1])
        assert caches is not None and left == [1]
        assert are_for(caches, tokens, rotating_caches)
    caches, left = ours.fetch_nearest_cache(MODEL, [*system, 7, 8])
    assert caches is not None and left == [7, 8]
    assert are_for(caches, system, rotating_caches)


@pytest.mark.parametrize("make", [rotating_caches, recurrent_caches])
def test_another_message_resumes_where_the_system_prompt_ends(make: Make) -> None:
    """Stored where the system prompt ends and where the chat does; a new chat has the first alone.

    Its state is the one of that position, to the bit, however the first chat went on.
    """
    ours = Face()
    system, chat = list(range(30)), list(range(30, 50))
    ours.put(system, "system", make=make)
    ours.put([*system, *chat], make=make)
    caches, rest = ours.fetch_nearest_cache(MODEL, [*system, 30, 31, 99])
    assert caches is not None and rest == [30, 31, 99]
    assert are_for(caches, system, make)
    assert ours.hit([*system[:29], 99, 98]) == 0
    assert ours.hit([*system, *chat, 99]) == 50


@pytest.mark.parametrize("length", [11, 12, 13, 36])
def test_a_prompt_may_be_as_long_as_a_window(length: int) -> None:
    """One less, as many, one more, three times as many: a hit at its end, and as it was there."""
    ours, tokens = Face(), list(range(length))
    ours.put(tokens, make=rotating_caches)
    caches, rest = ours.fetch_nearest_cache(MODEL, [*tokens, 99])
    assert caches is not None and rest == [99]
    assert are_for(caches, tokens, rotating_caches)
    shorter = ours.hit([*tokens[:8], 99])
    assert shorter == (8 if length <= 12 else 0)


def test_a_window_fills_up_in_the_course_of_a_chat() -> None:
    """Rows while it is not full, then a window: what was stored before is a hit all the same."""
    ours, tokens = Face(), list(range(40))
    for length in (8, 12, 20, 40):
        ours.put(tokens[:length], "user", make=rotating_caches)
        for stored in (8, 12, 20, 40):
            if stored <= length:
                caches, rest = ours.fetch_nearest_cache(MODEL, [*tokens[:stored], 99])
                assert caches is not None and rest == [99]
                assert are_for(caches, tokens[:stored], rotating_caches)


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
    ours.hit(range(0, 10))
    ours.trim_to(n_sequences=3)
    assert len(ours) == 3
    assert [ours.hit(range(start, start + 10)) for start in (0, 10, 20, 30, 40)] == [
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
    assert ours.events.causes().keys() == {"trim"}


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
    ours.put([6, 6, 6], "prompt")  # ours, which is none of upstream's
    assert ours.stats_by_type()["user"]["n_sequences"] == 2
    ours.put([5, 5, 5], "tool")
    assert [*ours.stats_by_type()] == list(CACHE_TYPES)
    assert len(ours) == 4


def test_nothing_is_kept_without_a_store() -> None:
    """`--disable-prefix-cache`: all seven members answer."""
    ours = PrefixPromptCache(None, known_kinds(), Ranks())
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
    """Whatever comes in: logged once, an event each time, and all else is as it was."""
    ours = Face()
    ours.put(range(10))
    before = ours.nbytes, len(ours)
    for number in range(3):
        ours.insert_cache(MODEL, [number, 50, 51], BROKEN[kind])
    assert (ours.nbytes, len(ours)) == before
    assert len(ours.events.of(Error)) == 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert ours.hit(range(10)) == 9


def test_a_failure_is_a_miss_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """With its cause, once for each operation and kind of error, and an event every time."""
    machine = Machine()
    ours = Face(budget=Budget(limit_bytes=GIB, probe=machine.probe))
    ours.put(range(10))

    def fail_with(error: Exception) -> None:
        def fail() -> None:
            raise error

        machine.before_probing = fail

    for error in (OSError("first"), OSError("second"), KeyError("third")):
        fail_with(error)
        assert ours.hit(range(10)) == 0
        ours.put([7, 7, 7])
    machine.before_probing = lambda: None
    assert ours.hit(range(10)) == 9 and ours.hit([7, 7, 7, 7]) == 0
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "prefix cache: fetch failed and was skipped: OSError: first",
        "prefix cache: insert failed and was skipped: OSError: first",
        "prefix cache: fetch failed and was skipped: KeyError: 'third'",
        "prefix cache: insert failed and was skipped: KeyError: 'third'",
    ]
    assert all(record.exc_info for record in caplog.records)
    errors = ours.events.of(Error)
    assert [error.operation for error in errors] == ["fetch", "insert"] * 3
    assert errors[2] == Error("fetch", "OSError: second")


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

    ours = PrefixPromptCache(make_cache(emit=fail), known_kinds(), Ranks())
    for _ in range(2):
        assert ours.fetch_nearest_cache(MODEL, [1, 2, 3]) == (None, [1, 2, 3])
        ours.insert_cache(MODEL, [1, 2], plain_caches([1, 2]))
    ours.trim_to(n_bytes=0)


# Several ranks


class OtherRank:
    """What another rank says in each collective, so that ours can be tested alone.

    Args:
        says: its numbers, in turn; more than that is an error.
    """

    def __init__(self, *says: int) -> None:
        self.says = list(says)
        self.heard: list[int] = []

    def all_min(self, numbers: list[int]) -> list[int]:
        mine, _ = numbers
        other = self.says.pop(0)
        self.heard.append(mine)
        return [min(mine, other), min(-mine, -other)]

    def ranks(self) -> Ranks:
        group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        return Ranks(group, self.all_min)


@pytest.mark.parametrize(
    ("make", "says", "heard", "expected"),
    [
        (plain_caches, (20, 1), [20, 1], 20),
        (plain_caches, (12, 12, 1), [20, 12, 1], 12),
        (plain_caches, (25, 20, 1), [20, 20, 1], 20),
        (plain_caches, (0,), [20], 0),
        (recurrent_caches, (20, 1), [20, 1], 20),
        (recurrent_caches, (12, 8, 1), [20, 8, 1], 8),
        (recurrent_caches, (12, 5, 0), [20, 8, 0], 0),
    ],
)
def test_a_hit_is_what_every_rank_can_restore(
    make: Make, says: tuple[int, ...], heard: list[int], expected: int
) -> None:
    """The longest prefix that all of them have at the same position.

    Each says what it has, as often as the others do: else they would wait for each other.
    """
    other, tokens = OtherRank(*says), list(range(20))
    ours = Face(ranks=other.ranks())
    ours.put(tokens[:8], "system", make=make)
    ours.put(tokens, make=make)
    caches, rest = ours.fetch_nearest_cache(MODEL, [*tokens, 98, 99])
    assert (other.heard, other.says) == (heard, [])
    assert len(rest) == 22 - expected and (caches is not None) is (expected > 0)
    if caches is not None:
        assert are_for(caches, tokens[:expected], make)
    assert ours.fetched == (MODEL, [*tokens, 98, 99], expected)
    assert len(ours.events.of(Hit)) == int(expected > 0)


def test_a_rank_that_cannot_restore_makes_it_a_miss_for_all() -> None:
    """Though this one could: they would compute different tokens."""
    other = OtherRank(10, 0)
    ours = Face(ranks=other.ranks())
    ours.put(range(10))
    assert ours.hit([*range(10), 99]) == 0
    assert (other.heard, other.says) == ([10, 1], [])
    assert ours.fetched[2] == 0


def test_a_failure_is_told_to_the_other_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """Whichever step it is in: they go on, and here it is a miss like any other failure."""
    for name, says, heard in (("match", (10,), [0]), ("fetch", (10, 1), [10, 0])):
        other = OtherRank(*says)
        ours = Face(ranks=other.ranks())
        ours.put(range(10))
        with mock.patch.object(ours.store, name, side_effect=OSError(name)):
            assert ours.hit([*range(10), 99]) == 0
        assert (other.heard, other.says) == (heard, [])
        missed = Miss(11, Stop(Reason.ERROR))
        assert ours.events[-2:] == [Error("fetch", f"OSError: {name}"), missed]
    assert len(caplog.records) == 2


def test_a_rank_that_keeps_nothing_says_so() -> None:
    """`--disable-prefix-cache` on one of them is a miss on all."""
    other = OtherRank(10)
    ours = PrefixPromptCache(None, known_kinds(), other.ranks())
    assert ours.fetch_nearest_cache(MODEL, [1, 2, 3]) == (None, [1, 2, 3])
    assert (other.heard, other.says) == ([0], [])


def test_two_ranks_reuse_alike() -> None:
    """Each over a store of its own, one of which has room for less: request after request.

    They meet in every collective, or the barrier would break.
    """
    said: list[list[int]] = [[], []]
    barrier = threading.Barrier(2, timeout=60)

    def serve(rank: int) -> list[int]:
        def all_min(numbers: list[int]) -> list[int]:
            said[rank] = numbers
            barrier.wait()
            least = [min(pair) for pair in zip(*said, strict=True)]
            barrier.wait()
            return least

        group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
        ours = Face(ranks=Ranks(group, all_min), limit_bytes=[GIB, 30_000][rank])
        chance, hits = random.Random(7), []
        for _ in range(60):
            start = chance.choice([0, 100, 200])
            tokens = list(range(start, start + chance.randint(1, 40)))
            hits.append(ours.hit([*tokens, 7]))
            ours.put(tokens, make=rotating_caches)
        assert not ours.events.of(Error)
        return hits

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(serve, range(2))
    assert one == other and 10 < sum(hit > 0 for hit in one) < 60
