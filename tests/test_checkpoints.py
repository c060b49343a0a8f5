"""The composer over layers with windows and states: rows in blocks, the rest at checkpoints."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin.codecs.packing import Payload
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.events import Event, Evict, Hit, Insert, Miss
from mlx_lm_kvcache_plugin.layers import Layers
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget
from mlx_lm_kvcache_plugin.store.thinning import GENERATED, SYSTEM, USER
from mlx_lm_kvcache_plugin.store.tree import BlockTree
from mlx_lm_kvcache_plugin.writing import Checkpoint
from tests.store.caches import (
    MIXED,
    MODEL,
    STATES,
    TINY,
    Crash,
    Machine,
    State,
    fail_on_call,
    fetch,
    fetched_from,
    insert,
    is_what_was_computed,
    layers_for,
    make_cache,
    state_of,
)
from tests.tensors import Rows, rows_read, runs

SHAPES: dict[str, dict[str, Any]] = {
    "rows, windows and a state": MIXED,
    "rows and windows": {**TINY, "windows": (5, 3)},
    "rows and a state": STATES,
    "windows alone": {**TINY, "layers": 0, "windows": (4,)},
    "a state alone": {"layers": 0, "state_bytes": 300},
}
"""Models that need checkpoints, once their windows are full."""

every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def inserts(events: list[Event]) -> list[tuple[int, int, int]]:
    """What was told of each insert: its tokens, those that are stored, and those that are new."""
    return [
        (event.tokens, event.stored_tokens, event.new_tokens)
        for event in events
        if isinstance(event, Insert)
    ]


def checkpoints(cache: PrefixCache) -> list[int]:
    """The positions of all, the oldest first."""
    return [block.depth_tokens() for block in cache.tree if isinstance(block.payload, Checkpoint)]


# What a hit is


@every_shape
def test_a_checkpoint_is_for_its_exact_position(shape: dict[str, Any]) -> None:
    """Found by what continues it, and by nothing shorter; the deepest of several.

    And what comes back is what was there at that position, bit for bit.
    """
    cache = make_cache()
    for length in (13, 6, 16):
        insert(cache, range(length), label=SYSTEM, **shape)
    expected = {5: 0, 6: 0, 7: 6, 13: 6, 14: 13, 16: 13, 17: 16, 30: 16}
    for length, hit in expected.items():
        fetched = fetched_from(cache, range(length))
        assert (fetched.tokens if fetched else 0) == hit
        assert fetched is None or is_what_was_computed(fetched, range(length), **shape)
    assert fetch(cache, [*range(12), -1, -2]) == 6
    assert fetch(cache, [*range(13), -1]) == 13


@every_shape
@pytest.mark.parametrize("shared", range(9, 15))
def test_two_sequences_share_their_first_blocks(shape: dict[str, Any], shared: int) -> None:
    """Rows are stored once, as far as whole blocks are shared; each has its own at its end."""
    cache = make_cache(block_tokens=4)
    sequences = [[*range(shared), *range(first, first + 7)] for first in (100, 200)]
    for tokens in sequences:
        insert(cache, tokens, **shape)
    assert cache.tree.tokens == sum(map(len, sequences)) - shared // 4 * 4
    for tokens in sequences:
        fetched = fetched_from(cache, [*tokens, 0])
        assert fetched is not None and fetched.tokens == len(tokens)
        assert is_what_was_computed(fetched, tokens, **shape)


def test_what_is_shared_takes_its_bytes_once() -> None:
    """A second chat on the same long system prompt adds its own blocks and its own checkpoint."""
    cache = make_cache(block_tokens=8)
    shape = {**MIXED, "dim": 64}
    insert(cache, [*range(160), *range(200, 210)], **shape)
    held = cache.tree.used_bytes
    insert(cache, [*range(160), *range(300, 310)], **shape)
    assert cache.tree.used_bytes - held < held / 3


def test_a_conversation_goes_on_from_what_it_got() -> None:
    """Fetch, compute what is new, insert: every turn finds the last one, and it is exact."""
    cache = make_cache(block_tokens=8)
    conversation = list(range(9))
    insert(cache, conversation, label=USER, **MIXED)
    for turn in range(1, 20):
        conversation += range(turn * 100, turn * 100 + 1 + turn % 7)
        fetched = fetched_from(cache, [*conversation, -1])
        assert fetched is not None and fetched.tokens == len(conversation) - 1 - turn % 7
        assert is_what_was_computed(fetched, conversation, **MIXED)
        insert(cache, conversation, label=USER if turn % 2 else GENERATED, **MIXED)


def test_only_what_is_new_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that lead to another checkpoint already are not read again."""
    cache = make_cache(block_tokens=16)
    insert(cache, range(16 * 20 + 5), **TINY, state_bytes=100)
    layers = layers_for(range(16 * 22 + 3), **TINY, state_bytes=100)
    asked = rows_read(monkeypatch)
    cache.insert(MODEL, range(layers.tokens), layers, USER)
    assert runs(asked) == {(320, 352), (352, 355)}
    asked.clear()
    cache.insert(MODEL, range(layers.tokens), layers, USER)
    assert asked == []


@every_shape
def test_what_a_hit_hands_over_is_the_callers_own(shape: dict[str, Any]) -> None:
    """Upstream writes into it: the next hit is the same as before."""
    cache = make_cache(block_tokens=8)
    insert(cache, range(20), **shape)
    for _ in range(2):
        fetched = fetched_from(cache, range(21))
        assert fetched is not None and is_what_was_computed(fetched, range(21), **shape)
        for tensor in [*fetched.rows, *fetched.windows]:
            tensor[:, :, :] = 7.0
            mx.eval(tensor)
        for state in fetched.states:
            state.append("used")


def test_what_a_hit_hands_over_is_evaluated() -> None:
    """Another thread can use it; a lazy array could not be evaluated there."""
    cache = make_cache("rotated", 4, block_tokens=8)
    insert(cache, range(20), dim=64, windows=(5, 3), state_bytes=10)
    fetched = fetched_from(cache, range(21))
    assert fetched is not None
    arrays, sums = [*fetched.rows, *fetched.windows], list[float]()
    thread = threading.Thread(
        target=lambda: sums.extend(float(np.array(array).sum()) for array in arrays)
    )
    thread.start()
    thread.join()
    assert len(sums) == 8


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_windows_and_tails_are_near_exact_and_states_exact(bits: int) -> None:
    """Whatever the bits that blocks have: they are encoded anew as they grow and slide."""
    cache = make_cache("rotated", bits, block_tokens=32)
    shape: dict[str, Any] = {"windows": (40, 20), "state_bytes": 10}
    insert(cache, range(64 + 30), **shape)
    fetched = fetched_from(cache, range(95))
    assert fetched is not None and fetched.states == [list(range(94))]
    computed = layers_for(range(94), **shape)
    for decoded, window in zip(fetched.windows, computed.windows, strict=True):
        assert relative_error(decoded, window.rows(0, window.length)) < 0.006
    for decoded, tensor in zip(fetched.rows, computed.rows, strict=True):
        assert relative_error(decoded[:, 64:], tensor.rows(64, 94)) < 0.006
        error = relative_error(decoded[:, 8:64], tensor.rows(8, 64))
        assert (error < 0.006) == (bits == 8)


def relative_error(one: mx.array, wanted: mx.array) -> float:
    return float(mx.linalg.norm(one - wanted) / mx.linalg.norm(wanted))


@pytest.mark.parametrize("shape", [TINY, MIXED], ids=["rows", "checkpoints"])
@pytest.mark.parametrize("length", [10, 13, 15])
def test_a_match_can_be_bounded(shape: dict[str, Any], length: int) -> None:
    """By what others can restore: the longest within the bound, to the token or the checkpoint.

    The last token has to be computed whatever the bound.
    """
    cache = make_cache()
    for position in (6, 9, 13):
        insert(cache, range(position), label=SYSTEM, **shape)
    for most in range(20):
        prefix = cache.match(MODEL, range(length), most)
        longest = min(most, length - 1)
        if shape is TINY:
            expected = min(longest, 13)
        else:
            expected = max([end for end in (6, 9, 13) if end <= longest], default=0)
        assert (prefix.tokens if prefix else 0) == expected
        fetched = cache.fetch(range(length), prefix)
        assert fetched is None or is_what_was_computed(fetched, range(length), **shape)


def test_matching_leaves_no_trace() -> None:
    """Neither an event nor another order: only what is fetched is used."""
    events: list[Event] = []
    cache = make_cache(emit=events.append)
    for first in (0, 100):
        insert(cache, range(first, first + 9), **MIXED)
    before, told = list(cache.tree), len(events)
    assert cache.match(MODEL, range(12)) is not None
    assert (list(cache.tree), len(events)) == (before, told)
    assert fetch(cache, range(12)) == 9
    assert list(cache.tree) != before
    assert isinstance(events[-1], Hit)


def test_namespaces_never_meet() -> None:
    """Each model has its own checkpoints, of its own numbers."""
    cache = make_cache()
    insert(cache, range(10), namespace="one", **MIXED)
    assert fetch(cache, range(11), namespace="other") == 0
    insert(cache, range(8), namespace="other", **MIXED)
    fetched = fetched_from(cache, range(11), "other")
    assert fetched is not None and fetched.tokens == 8
    assert is_what_was_computed(fetched, range(11), "other", **MIXED)


def test_no_hit_inside_of_an_image() -> None:
    """Upstream embeds an image whole or not at all, so a checkpoint inside of one is none for it.

    It is one where the image ends, and for a prompt that leaves the image there.
    """
    cache = make_cache(block_tokens=4)
    image, other = [-(2**60)] * 6, [-9] * 5
    prompt = [1, 2, 3, 4, 5, *image, *other, 6, 7]
    for end in (5, 8, 11, 13, 16):
        insert(cache, prompt[:end], label=SYSTEM, **MIXED)
    for asked, hit in [
        (prompt, 16),
        (prompt[:16], 11),
        (prompt[:15], 11),
        (prompt[:12], 11),
        (prompt[:11], 5),
        (prompt[:10], 5),
        ([*prompt[:8], 9], 8),
        ([*prompt[:13], 9], 13),
        (prompt[:6], 5),
    ]:
        assert fetch(cache, asked) == hit
        if hit:
            fetched = fetched_from(cache, asked)
            assert fetched is not None and is_what_was_computed(fetched, asked, **MIXED)


def test_a_checkpoint_inside_of_an_image_hides_none_before_it() -> None:
    """One may stand there, where a prompt was cut: it is for a prompt that leaves it there."""
    cache = make_cache(block_tokens=4)
    image = [-7] * 10
    for end in (3, 8):
        insert(cache, [1, 2, 3, 4, 5, *image][:end], label=SYSTEM, **MIXED)
    assert fetch(cache, [1, 2, 3, 4, 5, *image, 6]) == 3
    assert fetch(cache, [1, 2, 3, 4, 5, -7, -7, -7, 6]) == 8


# Layouts


WINDOWED: dict[str, Any] = {**TINY, "windows": (8,)}


def test_a_window_that_is_not_full_is_rows() -> None:
    """It can be cut anywhere then, as long as nothing had to be dropped."""
    cache = make_cache()
    insert(cache, range(8), **WINDOWED)
    for length in range(1, 12):
        fetched = fetched_from(cache, range(length))
        assert (fetched.tokens if fetched else 0) == min(length - 1, 8)
        assert fetched is None or is_what_was_computed(fetched, range(length), **WINDOWED)
    assert checkpoints(cache) == []


def test_two_layouts_of_a_model_live_side_by_side() -> None:
    """A short chat's window is rows, a long one's is full; each serves, and the longer hit wins."""
    events: list[Event] = []
    cache = make_cache(emit=events.append)
    long = [*range(6), *range(100, 110)]
    insert(cache, long, label=USER, **WINDOWED)
    insert(cache, range(8), **WINDOWED)
    insert(cache, [*long, *range(200, 206)], label=USER, **WINDOWED)
    assert not [event for event in events if isinstance(event, Evict)]
    for asked, hit in [
        (range(20), 8),
        (range(4), 3),
        ([*long, 0], 16),
        (long, 6),
        ([*long, *range(200, 204)], 16),
        ([*long, *range(200, 207)], 22),
    ]:
        fetched = fetched_from(cache, asked)
        assert fetched is not None and fetched.tokens == hit
        assert is_what_was_computed(fetched, asked, **WINDOWED)


def test_the_longer_hit_wins_whichever_layout_was_first() -> None:
    """A checkpoint in the middle of what is rows to its end, or the other way round."""
    for order in (1, -1):
        cache = make_cache()
        for windows in [(5, 100), (100, 100), (5, 5)][::order]:
            length = {(5, 100): 9, (100, 100): 12, (5, 5): 15}[windows]
            insert(cache, range(length), **TINY, windows=windows)
        hits = [fetch(cache, range(length)) for length in (9, 10, 12, 13, 14, 16)]
        assert hits == [8, 9, 11, 12, 12, 15]


def test_rows_that_change_their_layout_are_known_to_have_been_encoded() -> None:
    """They were fetched from the one and go into a block of the other: that is once more."""
    cache = make_cache("rotated", 4)
    for length in (8, 16):
        insert(cache, range(length), label=USER, **{**WINDOWED, "dim": 64})
    firsts = [next(iter(root.children.values())) for root in cache.tree.roots()]
    assert sorted(block.payload.encodings for block in firsts) == [1, 2]


@pytest.mark.parametrize(
    "changed", [{"layers": 2}, {"windows": (8, 8)}, {"heads": 2}, {"dtype": mx.float16}]
)
def test_another_model_drops_both_layouts(changed: dict[str, Any]) -> None:
    """What is stored of a model that looks different now can never be used again."""
    events: list[Event] = []
    cache = make_cache(emit=events.append)
    insert(cache, range(20), **WINDOWED)
    insert(cache, range(8), **WINDOWED)
    insert(cache, range(8), namespace="other", **WINDOWED)
    insert(cache, range(6), **{**WINDOWED, **changed})
    evicted = [event for event in events if isinstance(event, Evict)]
    assert [(event.blocks, event.cause) for event in evicted] == [(8, "replaced")]
    assert [fetch(cache, range(30)), fetch(cache, range(30), "other")] == [6, 8]


def test_a_layer_that_is_filled_later_makes_no_other_model() -> None:
    """A layer that had no tensors yet may turn out to have any."""
    cache = make_cache()
    both = layers_for(range(6), **{**TINY, "layers": 2})
    one = layers_for(range(5), **TINY)
    look = (*one.layout.look, ())
    cache.insert(MODEL, range(5), replace(one, layout=replace(one.layout, look=look)), USER)
    cache.insert(MODEL, range(6), both, USER)
    cache.tree.check()
    assert len(cache.tree.roots()) == 2
    assert [fetch(cache, [*range(5), 7]), fetch(cache, range(7))] == [5, 6]


def test_layouts_that_are_gone_are_forgotten() -> None:
    """Nothing grows with the number of layouts ever seen."""
    cache = make_cache(limit_bytes=7500)
    for model in range(30):
        insert(cache, range(12), namespace=f"model {model}", **WINDOWED)
        insert(cache, range(7), namespace=f"model {model}", **WINDOWED)
    held = len(cache.tree.roots())
    spaces = cache.spaces._spaces
    assert 0 < held < 10
    assert sum(map(len, spaces.values())) <= held + 1
    assert len(spaces) <= held + 1


# What goes


def test_bearers_go_with_the_last_checkpoint_below_them() -> None:
    """And there is no hit any more; what another one needs stays."""
    cache = make_cache()
    shared = list(range(8))
    for first in (100, 200):
        insert(cache, [*shared, *range(first, first + 6)], **MIXED)
    cache.trim_to(n_sequences=1)
    cache.tree.check()
    assert fetch(cache, [*shared, *range(100, 110)]) == 0
    assert fetch(cache, [*shared, *range(200, 210)]) == 14
    assert [block.tokens for block in cache.tree] == [0, 2, 4, 4, 4]
    cache.trim_to(n_sequences=0)
    cache.tree.check()
    assert (len(cache.tree), cache.tree.used_bytes, cache.tree.roots()) == (0, 0, [])
    assert fetch(cache, [*shared, *range(200, 210)]) == 0


def test_a_checkpoint_that_is_used_is_kept() -> None:
    """A hit makes it the most recent one; so does storing it once more."""
    for is_hit in (True, False):
        cache = make_cache()
        insert(cache, range(7), **MIXED)
        insert(cache, range(100, 107), **MIXED)
        if is_hit:
            assert fetch(cache, range(8)) == 7
        else:
            insert(cache, range(7), **MIXED)
        cache.trim_to(n_sequences=1)
        cache.tree.check()
        assert [fetch(cache, range(8)), fetch(cache, range(100, 108))] == [7, 0]


def test_what_is_preferred_is_evicted_last() -> None:
    """All of a namespace, in all of its layouts, and in its own order."""
    cache = make_cache()
    for first in (0, 1000):
        insert(cache, range(first, first + 20), namespace="one", **WINDOWED)
    insert(cache, range(7), namespace="one", **WINDOWED)
    for name in ("two", "three"):
        insert(cache, range(20), namespace=name, **WINDOWED)
    cache.prefer("one")
    cache.tree.check()
    cache.prefer("never stored")
    cache.trim_to(n_sequences=3)
    cache.tree.check()
    assert fetch(cache, range(21), "two") == fetch(cache, range(21), "three") == 0
    assert [len(cache.spaces.of(name)) for name in ("one", "two")] == [2, 1]
    cache.trim_to(n_sequences=2)
    assert fetch(cache, range(21), "one") == 7
    assert fetch(cache, range(1000, 1021), "one") == 20


def test_a_limit_on_sequences_counts_checkpoints() -> None:
    """The oldest go, and with each what led to it alone."""
    events: list[Event] = []
    cache = make_cache(emit=events.append, max_sequences=2)
    for first in range(0, 500, 100):
        insert(cache, range(first, first + 10), **MIXED)
    hits = [fetch(cache, range(first, first + 11)) for first in range(0, 500, 100)]
    assert hits == [0, 0, 0, 10, 10]
    evicted = [(event.blocks, event.cause) for event in events if isinstance(event, Evict)]
    assert evicted == [(4, "count")] * 3


@pytest.mark.parametrize("thought", [0, 5])
def test_forty_turns_leave_few_checkpoints(thought: int) -> None:
    """Each turn makes needless what the ones before it set, and the last prompt is always there."""
    cache = make_cache(block_tokens=8)
    shape: dict[str, Any] = {**TINY, "windows": (6,), "state_bytes": 50}
    history = list(range(20))
    insert(cache, history, label=SYSTEM, **shape)
    for turn in range(1, 41):
        prompt = [*history, *range(turn * 100, turn * 100 + 9)]
        insert(cache, prompt, label=USER, **shape)
        answer = list(range(turn * 100 + 50, turn * 100 + 56))
        insert(cache, [*prompt, *[9000 + turn] * thought, *answer], label=GENERATED, **shape)
        for end, asked in [(len(prompt), prompt), (20, history[:20])]:
            fetched = fetched_from(cache, [*asked, -1])
            assert fetched is not None and fetched.tokens == end
            assert is_what_was_computed(fetched, asked, **shape)
        history = [*prompt, *answer]
    assert 5 < len(checkpoints(cache)) <= 10
    assert cache.tree.tokens < len(history) + 8 * 10


# Room


def test_a_checkpoint_without_room_is_told_as_not_stored() -> None:
    """Of a state a part is worth nothing: neither is it kept, nor said to be."""
    events: list[Event] = []
    cache = make_cache(limit_bytes=5000, emit=events.append)
    insert(cache, range(6), namespace="other", **MIXED)
    insert(cache, range(6), **{**MIXED, "state_bytes": 6000})
    assert inserts(events) == [(6, 6, 6)]
    assert fetch(cache, range(7), "other") == 6
    assert fetch(cache, range(7)) == 0


def lying(layers: Layers, nbytes: int) -> Layers:
    """States that take more than they said."""
    return replace(layers, freeze=lambda: State((), nbytes))


@pytest.mark.parametrize("end", [6, 8, 20])
def test_the_way_to_another_checkpoint_is_not_told_as_stored(end: int) -> None:
    """One without room is not stored, though the first nodes on its way are there already; and
    what is there stays as it was.
    """
    events: list[Event] = []
    cache = make_cache(limit_bytes=12_000, emit=events.append)
    for length in (10, 11, 12):
        insert(cache, range(length), label=GENERATED, **MIXED)
    left = checkpoints(cache)
    cache.insert(MODEL, range(end), lying(layers_for(range(end), **MIXED), 13_000), USER)
    cache.tree.check()
    assert inserts(events)[-1] == (end, 0, 0)
    assert checkpoints(cache) == left
    assert fetch(cache, range(13)) == 12


def test_states_that_can_never_fit_are_not_copied() -> None:
    """They may take a gigabyte: what they say of themselves is believed."""
    cache = make_cache(limit_bytes=5000)
    layers = layers_for(range(6), **{**MIXED, "state_bytes": 5001})
    cache.insert(MODEL, range(6), replace(layers, freeze=never), USER)
    insert(cache, range(6), **MIXED)
    layers = layers_for(range(6), **MIXED)
    cache.insert(MODEL, range(6), replace(layers, freeze=never), USER)  # it is there already


def never() -> State:
    raise AssertionError("states were copied")


@pytest.mark.parametrize(
    ("tokens", "state_bytes", "windows"),
    [
        (300, 300, (7,)),
        (1000, 300, (7,)),
        (100, 55_000, (7,)),
        (100, 300, (99,) * 9),
        (3, 300, (2,) * 600),
    ],
)
def test_a_way_that_does_not_fit_displaces_nothing(
    tokens: int, state_bytes: int, windows: tuple[int, ...]
) -> None:
    """Not for a prompt that is larger than the budget, or is so together with its state or its
    windows: what it displaced would be gone for nothing. The first block shows how large the others
    will be.
    """
    events: list[Event] = []
    cache = make_cache(limit_bytes=66_000, emit=events.append)
    shape = {**MIXED, "dim": 16}
    insert(cache, range(1000, 1100), namespace="other", label=USER, **shape)
    insert(cache, range(60), label=USER, **shape)
    held = set(cache.tree)
    large = {**shape, "state_bytes": state_bytes, "windows": windows}
    insert(cache, range(tokens), namespace="second", label=USER, **large)
    insert(cache, range(5000, 5000 + tokens), namespace="third", label=USER, **large)
    assert inserts(events)[2:] == [(tokens, 0, 0)] * 2
    assert set(cache.tree) == held
    assert fetch(cache, range(1000, 1101), "other") == 100
    fetched = fetched_from(cache, range(61))
    assert fetched is not None and fetched.tokens == 60
    assert is_what_was_computed(fetched, range(61), **shape)


@every_shape
@pytest.mark.parametrize("seed", range(3))
def test_the_limit_is_never_exceeded(
    shape: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a moment: room is made before a block or a checkpoint is counted."""
    cache = make_cache(limit_bytes=9000)
    excesses: list[int] = []
    account = BlockTree._account

    def watching(tree: BlockTree, *arguments: Any) -> None:
        account(tree, *arguments)
        excesses.append(tree.used_bytes - tree.limit_bytes)

    monkeypatch.setattr(BlockTree, "_account", watching)
    choose = random.Random(seed)
    stored = 0
    for _ in range(60):
        tokens = [choose.choice([0, 1]) for _ in range(choose.randrange(1, 30))]
        insert(cache, tokens, label=choose.choice([USER, GENERATED]), **shape)
        hit = fetch(cache, [*tokens, 2])
        assert hit <= len(tokens)
        stored += hit == len(tokens)
    assert max(excesses) <= 0
    assert stored > 20


@pytest.mark.parametrize("call", range(1, 9))
@pytest.mark.parametrize("shared", [8, 6, 0])
@pytest.mark.parametrize("shape", [MIXED, SHAPES["a state alone"]], ids=["mixed", "a state"])
def test_memory_that_runs_short_for_a_moment(call: int, shared: int, shape: dict[str, Any]) -> None:
    """Whatever goes while a checkpoint is being added, what is added to it stands on firm ground.

    The last checkpoint that its way bore may be among it.
    """
    machine = Machine()
    cache = make_cache(budget=Budget(limit_bytes=GIB, probe=machine.probe))
    insert(cache, range(13), **shape)
    # Twice: it is asked again after others have given back what they can.
    machine.run_short(lambda probe: probe in (call, call + 1))
    tokens = [*range(shared), *range(100, 120 + 64)]
    insert(cache, tokens, **shape)
    machine.run_short(lambda probe: False)
    insert(cache, tokens, **shape)
    fetched = fetched_from(cache, [*tokens, 0])
    assert fetched is not None and fetched.tokens == len(tokens)
    assert is_what_was_computed(fetched, tokens, **shape)


@pytest.mark.parametrize("call", range(1, 7))
def test_memory_that_runs_short_and_stays_so(call: int) -> None:
    """Nothing is held above what may be held, and nothing is told as stored."""
    events: list[Event] = []
    machine = Machine()
    budget = Budget(limit_bytes=GIB, probe=machine.probe)
    cache = make_cache(budget=budget, emit=events.append)
    insert(cache, range(13), **MIXED)
    machine.run_short(lambda probe: probe >= call)
    insert(cache, [*range(8), *range(100, 250)], **MIXED)
    ran_short = machine.probes >= call
    assert ran_short == (cache.tree.used_bytes == 0)
    if ran_short:
        assert inserts(events)[1:] in ([], [(158, 0, 0)])


# Failures


def crash_in_the_codec(call: int, layers: Layers, machine: Machine, patch: Any) -> Layers:
    patch.setattr(RawCodec, "encode", fail_on_call(call, RawCodec.encode))
    return layers


def crash_in_the_tensors(call: int, layers: Layers, machine: Machine, patch: Any) -> Layers:
    patch.setattr(Rows, "rows", fail_on_call(call, Rows.rows))
    return layers


def crash_in_the_probe(call: int, layers: Layers, machine: Machine, patch: Any) -> Layers:
    machine.before_probing = fail_on_call(call, lambda: None)
    return layers


def crash_in_the_payload(call: int, layers: Layers, machine: Machine, patch: Any) -> Layers:
    patch.setattr(Payload, "__init__", fail_on_call(call, Payload.__init__))
    return layers


def crash_in_the_states(call: int, layers: Layers, machine: Machine, patch: Any) -> Layers:
    return replace(layers, freeze=fail_on_call(call, layers.freeze))


CRASHES: dict[Callable[[int, Layers, Machine, Any], Layers], int] = {
    crash_in_the_codec: 4,
    crash_in_the_tensors: 10,
    crash_in_the_probe: 3,
    crash_in_the_payload: 20,
    crash_in_the_states: 1,
}
"""And how many calls of each there are at least in the insert below."""


@pytest.mark.parametrize(("crash", "least"), CRASHES.items(), ids=[c.__name__ for c in CRASHES])
@pytest.mark.parametrize("shared", [0, 6, 8])
def test_a_crash_skips_an_insert_whole(
    crash: Callable[[int, Layers, Machine, Any], Layers],
    least: int,
    shared: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At whichever call: nothing is half stored, no counter moves, and the next one works."""
    tokens = [*range(shared), *range(100, 180), -1]
    layers = layers_for(tokens, **MIXED)
    for call in itertools.count(1):
        events: list[Event] = []
        machine = Machine()
        cache = make_cache(budget=Budget(limit_bytes=GIB, probe=machine.probe), emit=events.append)
        insert(cache, range(9), label=GENERATED, **MIXED)
        before = state_of(cache)
        events.clear()
        with monkeypatch.context() as patch:
            failing = crash(call, layers, machine, patch)
            try:
                cache.insert(MODEL, tokens, failing, USER)
            except Crash:
                crashed = True
            else:
                crashed = False
        machine.before_probing = lambda: None
        cache.tree.check()
        if not crashed:
            break
        assert state_of(cache) == before
        assert events == []
    assert call > least
    fetched = fetched_from(cache, [*tokens, -2])
    assert fetched is not None and fetched.tokens == len(tokens)
    assert is_what_was_computed(fetched, tokens, **MIXED)


@pytest.mark.parametrize("call", [1, 2, 3, 4, "restore"])
def test_a_crash_in_a_fetch_changes_nothing(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller turns it into a miss; what is stored is there the next time."""
    events: list[Event] = []
    cache = make_cache(emit=events.append)
    insert(cache, range(10), **MIXED)
    before = state_of(cache)
    events.clear()
    with monkeypatch.context() as patch:
        if call == "restore":
            patch.setattr(State, "restore", mock.Mock(side_effect=Crash))
        else:
            patch.setattr(RawCodec, "decode", fail_on_call(call, RawCodec.decode))
        with pytest.raises(Crash):
            fetched_from(cache, range(11))
    assert state_of(cache) == before
    assert events == []
    fetched = fetched_from(cache, range(11))
    assert fetched is not None and is_what_was_computed(fetched, range(11), **MIXED)


# Events


def test_one_event_for_each_request() -> None:
    """A miss, an insert, a hit; what is there already is used, and not worth a word."""
    events: list[Event] = []
    cache = make_cache(emit=events.append)
    assert fetched_from(cache, range(11)) is None
    insert(cache, range(10), label=USER, **MIXED)
    assert fetch(cache, range(11)) == 10
    insert(cache, range(12), label=GENERATED, **MIXED)
    insert(cache, range(12), label=GENERATED, **MIXED)
    insert(cache, range(8), label=USER, **MIXED)
    assert [type(event) for event in events] == [Miss, Insert, Hit, Insert, Insert]
    assert inserts(events) == [(10, 10, 10), (12, 12, 4), (8, 8, 0)]


@every_shape
def test_nothing_computed_is_nothing_stored(shape: dict[str, Any]) -> None:
    """There is no checkpoint of no tokens, and no error."""
    cache = make_cache()
    layers = layers_for([1], **{**shape, "windows": (), "state_bytes": 1})
    cache.insert(MODEL, [], replace(layers, tokens=0), USER)
    cache.tree.check()
    assert (len(cache.tree), cache.tree.used_bytes) == (0, 0)


def test_labels_are_counted() -> None:
    """Each checkpoint is a sequence of its kind; its bearers are of the kind they came with."""
    cache = make_cache()
    insert(cache, range(8), label=SYSTEM, **MIXED)
    insert(cache, range(20), label=USER, **MIXED)
    insert(cache, [*range(8), *range(50, 70)], label=USER, **MIXED)
    assert +cache.tree.sequences == {SYSTEM: 1, USER: 2}
    by_label = +cache.tree.bytes_by_label
    assert 0 < by_label[SYSTEM] < by_label[USER]
    assert sum(by_label.values()) == cache.tree.used_bytes
