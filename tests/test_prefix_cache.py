"""The composer: from tokens and layers to blocks and back, event by event."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin import matching
from mlx_lm_kvcache_plugin.codecs.packing import Payload
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.codecs.registry import BUILT_IN, CodecRegistry
from mlx_lm_kvcache_plugin.errors import CodecError
from mlx_lm_kvcache_plugin.events import Evict, Hit, Insert, Miss
from mlx_lm_kvcache_plugin.layers import Fetched
from mlx_lm_kvcache_plugin.options import KV_CACHE_BITS
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget, Memory
from tests.events import Events
from tests.store.caches import (
    MODEL,
    TINY,
    Crash,
    Machine,
    fail_on_call,
    fetch,
    fetched_from,
    insert,
    is_what_was_computed,
    layers_for,
    make_cache,
    row_layers,
    space_of,
    state_of,
    tensors_for,
)
from tests.tensors import Rows, rows_read, runs


def insert_rows(cache: PrefixCache, tokens: Sequence[int], tensors: Sequence[Rows]) -> None:
    """Store these rows for the tokens."""
    cache.insert(MODEL, tokens, row_layers(tensors, len(tokens)), "assistant")
    cache.tree.check()


def relative_error(one: mx.array, wanted: mx.array) -> float:
    wanted = wanted.astype(mx.float32)
    difference = one.astype(mx.float32) - wanted
    return float(mx.linalg.norm(difference) / mx.linalg.norm(wanted))


# What a hit is


@pytest.mark.parametrize("shared", [200, 255, 256, 257, 300, 511, 512, 513, 599])
def test_a_hit_is_exact_to_the_token(shared: int) -> None:
    """Inside of a block, at its end and in a tail: no token is lost or doubled."""
    cache = make_cache(block_tokens=256)
    stored = list(range(600))
    insert(cache, stored, **TINY)
    wanted = stored[:shared] + [-1] * 50
    fetched = fetched_from(cache, wanted)
    assert fetched is not None
    assert fetched.tokens == shared
    assert is_what_was_computed(fetched, wanted, **TINY)


def test_a_short_sequence_hides_no_longer_match() -> None:
    """[0:200] of its own and a prompt of 4,000 that shares 3,200: the hit is 3,200."""
    prompt = list(range(4000))
    for sequences in ([prompt[:200], prompt], [prompt, prompt[:200]]):
        cache = make_cache(block_tokens=128)
        for tokens in sequences:
            insert(cache, tokens, **TINY)
        assert fetch(cache, prompt[:3200] + [-1] * 100) == 3200


@pytest.mark.parametrize("length", [2, 8, 9, 11])
def test_the_last_token_is_never_a_hit(length: int) -> None:
    """The model has to compute something: a request for exactly what is stored lacks one."""
    cache = make_cache()
    tokens = list(range(length))
    insert(cache, tokens, **TINY)
    assert fetch(cache, tokens) == length - 1
    assert fetch(cache, [*tokens, 5]) == length


@pytest.mark.parametrize("tokens", [[], [0]])
def test_too_short_for_a_hit(tokens: list[int]) -> None:
    """Nothing, and one token, which has to be computed, are misses."""
    cache = make_cache()
    insert(cache, range(10), **TINY)
    assert fetched_from(cache, tokens) is None


def test_namespaces_never_meet() -> None:
    """Each model has its own hits, of its own numbers."""
    cache = make_cache()
    insert(cache, range(10), namespace="one")
    assert fetch(cache, range(11), namespace="other") == 0
    insert(cache, range(8), namespace="other")
    fetched = fetched_from(cache, range(11), "other")
    assert fetched is not None and fetched.tokens == 8
    assert is_what_was_computed(fetched, range(11), namespace="other")


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_full_precision_comes_back_bit_for_bit(dtype: mx.Dtype) -> None:
    """Blocks and tail alike, whatever the dtype."""
    cache = make_cache("raw", block_tokens=8)
    insert(cache, range(21), dtype=dtype)
    fetched = fetched_from(cache, range(22))
    assert fetched is not None and fetched.tokens == 21
    assert is_what_was_computed(fetched, range(22), dtype=dtype)


@pytest.mark.parametrize("codec", BUILT_IN)
def test_what_a_hit_hands_over_is_the_callers_own(codec: str) -> None:
    """Upstream writes into it: the next hit is the same as before."""
    cache = make_cache(codec, None if codec == "raw" else 8, block_tokens=8)
    insert(cache, range(20))

    def content() -> list[bytes]:
        fetched = fetched_from(cache, range(21))
        assert fetched is not None
        before = [np.array(tensor).tobytes() for tensor in fetched.rows]
        for tensor in fetched.rows:
            tensor[:, :, :] = 7.0
            mx.eval(tensor)
        return before

    assert content() == content()


@pytest.mark.parametrize("codec", BUILT_IN)
def test_what_a_hit_hands_over_is_evaluated(codec: str) -> None:
    """Another thread can use it; a lazy array could not be evaluated there."""
    cache = make_cache(codec, None if codec == "raw" else 4, block_tokens=8)
    insert(cache, range(20))
    fetched = fetched_from(cache, range(21))
    assert fetched is not None
    tensors = fetched.rows
    sums: list[float] = []
    thread = threading.Thread(
        target=lambda: sums.extend(float(np.array(tensor).sum()) for tensor in tensors)
    )
    thread.start()
    thread.join()
    assert len(sums) == 4


@pytest.mark.parametrize("shared", [0, 5, 15, 16, 17, 63, 64, 65, 100, 255, 256, 300])
def test_how_far_is_looked_first_changes_nothing(
    shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is turned into an array bit by bit; the longest match is found all the same."""
    monkeypatch.setattr(matching, "LOOKED_AT_FIRST", 16)
    cache = make_cache(block_tokens=4)
    insert(cache, range(300), **TINY)
    insert(cache, range(70), namespace="other", **TINY)
    for most in (None, 64, 63):
        request = [*range(shared), *range(1000, 1100)]
        prefix = cache.match(MODEL, request, most)
        assert (prefix.tokens if prefix else 0) == min(shared, 10_000 if most is None else most)


@pytest.mark.parametrize("image", [(10, 20), (14, 18), (2, 70), (60, 66)])
def test_an_image_where_a_look_ends_is_looked_at_whole(
    image: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "LOOKED_AT_FIRST", 16)
    cache = make_cache(block_tokens=4)
    tokens = [*range(image[0]), *[-7] * (image[1] - image[0]), *range(image[1], 100)]
    insert(cache, tokens, **TINY)
    assert fetch(cache, [*tokens, 1]) == 100
    assert fetch(cache, [*tokens[: image[1]], 5000, 1]) == image[1]


def test_only_the_rows_of_the_hit_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks beyond the match are not looked at, and of the last one just the rows that match."""
    cache = make_cache("rotated", 3, block_tokens=16)  # through MLX's operations on a CPU too
    decoded_rows: list[int] = []
    dequantize = mx.dequantize

    def spy(packed: mx.array, *args: Any, **options: Any) -> mx.array:
        decoded_rows.append(packed.shape[1])
        return dequantize(packed, *args, **options)

    monkeypatch.setattr(mx, "dequantize", spy)

    def rows_decoded(shared: int) -> list[int]:
        decoded_rows.clear()
        fetch(cache, [*range(shared), -1])
        return decoded_rows

    insert(cache, range(165))
    assert rows_decoded(37) == [37]  # of all four tensors, which look alike
    assert rows_decoded(32) == [32]
    assert rows_decoded(160) == [160]
    assert sorted(rows_decoded(163)) == [3, 160]


# What an insert does


def test_growing_a_conversation_encodes_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete block is encoded once; only the new ones and the tail are read at all."""
    cache = make_cache(block_tokens=16)
    insert(cache, range(16 * 20 + 5), **TINY)
    longer = tensors_for(range(16 * 22 + 3), **TINY)
    asked = rows_read(monkeypatch)
    insert_rows(cache, range(16 * 22 + 3), longer)
    assert runs(asked) == {(320, 352), (352, 355)}
    asked.clear()
    insert_rows(cache, range(16 * 22 + 3), longer)
    insert_rows(cache, range(16 * 21), longer)
    assert asked == []


def test_blocks_are_encoded_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls for a long prompt, and never all of it in memory before any of it is counted."""
    cache = make_cache(block_tokens=4)
    tensors = tensors_for(range(4 * 40), **TINY)
    asked = rows_read(monkeypatch)
    insert_rows(cache, range(4 * 40), tensors)
    assert sorted(runs(asked)) == [(0, 4), (4, 68), (68, 132), (132, 160)]


def test_what_has_no_room_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work for a prompt much larger than the budget is that for what is kept of it."""
    cache = make_cache(limit_bytes=200_000, block_tokens=4)
    tensors = tensors_for(range(1000))
    asked = rows_read(monkeypatch)
    insert_rows(cache, range(1000), tensors)
    kept = fetch(cache, range(1000))
    assert 70 < kept <= max(stop for _, stop in asked) < kept + 4 * 3


def test_what_is_shared_is_stored_once() -> None:
    """A second chat on the same system prompt adds its own blocks and no others."""
    cache = make_cache(block_tokens=4)
    insert(cache, [*range(40), 1, 2, 3, 4, 5], **TINY)
    held = cache.tree.used_bytes
    insert(cache, [*range(40), 6, 7, 8, 9, 10], **TINY)
    assert cache.tree.tokens == 50
    assert cache.tree.used_bytes - held < held / 3


def test_eight_chats_share_their_system_prompt() -> None:
    """Eight that share 3,000 of 3,200 tokens take at most 1.7 times what one takes."""
    for codec, bits in [("raw", None), ("rotated", 4)]:
        cache = make_cache(codec, bits, block_tokens=128)
        held = []
        for chat in range(8):
            insert(cache, [*range(3000), *range(chat * 1000 + 5000, chat * 1000 + 5200)])
            held.append(cache.tree.used_bytes)
        assert held[-1] <= 1.7 * held[0]


def test_twenty_turns_change_no_block_that_is_stored() -> None:
    """Fetch, append, insert at 8 bits in bfloat16: the first blocks' bytes stay what they were.

    And nothing drifts: after twenty turns the whole is as near to what was computed as 8 bits are.
    """
    cache = make_cache("rotated", 8, block_tokens=16)
    conversation = list(range(40))
    insert(cache, conversation, dtype=mx.bfloat16)

    def first_blocks() -> list[bytes]:
        blocks = cache.tree.match(space_of(cache), np.arange(32)).blocks
        payloads = [block.payload for block in blocks if isinstance(block.payload, Payload)]
        assert len(payloads) == 2
        return [
            part.tobytes() for payload in payloads for parts in payload.groups for part in parts
        ]

    original = first_blocks()
    assert len(original) > 2
    for turn in range(20):
        conversation += [turn * 100 + token for token in range(1000, 1007)]
        computed = tensors_for(conversation, dtype=mx.bfloat16)
        fetched = fetched_from(cache, conversation)
        assert fetched is not None
        assert fetched.tokens == len(conversation) - 7
        known = [
            Rows(mx.concatenate([old, new.rows(fetched.tokens, len(conversation))], axis=1))
            for old, new in zip(fetched.rows, computed, strict=True)
        ]
        insert_rows(cache, conversation, known)
        assert first_blocks() == original
    fetched = fetched_from(cache, [*conversation, 0])
    assert fetched is not None
    for decoded, tensor in zip(fetched.rows, computed, strict=True):
        assert relative_error(decoded, tensor.array) < 0.01


@pytest.mark.parametrize("bits", KV_CACHE_BITS)
@pytest.mark.parametrize("codec", ["affine", "rotated"])
def test_tails_are_near_exact_whatever_the_bits(codec: str, bits: int) -> None:
    """They are encoded anew as they grow: always at 8 bits, while blocks have the asked ones."""
    cache = make_cache(codec, bits, block_tokens=32)
    insert(cache, range(64 + 30))
    fetched = fetched_from(cache, range(95))
    assert fetched is not None and fetched.tokens == 94
    for decoded, tensor in zip(fetched.rows, tensors_for(range(94)), strict=True):
        assert relative_error(decoded[:, 64:], tensor.array[:, 64:]) < 0.006
        assert (relative_error(decoded[:, 8:64], tensor.array[:, 8:64]) < 0.006) == (bits == 8)


def test_a_tail_gives_way_to_its_block() -> None:
    """Once the block is complete it is encoded from full precision, and the tail is gone."""
    cache = make_cache(block_tokens=8)
    insert(cache, range(13), **TINY)
    insert(cache, range(16), **TINY)
    assert [block.tokens for block in cache.tree] == [8, 8]


def test_a_padded_buffer_is_charged_for_its_tokens() -> None:
    """Ten tokens in a buffer of 256 rows take what ten tokens take."""
    cache = make_cache(block_tokens=128)
    insert_rows(cache, range(10), tensors_for(range(256), dtype=mx.float16))
    assert cache.tree.used_bytes < 10 * (2 * 2 * 2 * 64 * 2) + 1500
    assert fetch(cache, range(256)) == 10


def test_four_bits_really_hold_less() -> None:
    """A thousand tokens at 4 bits, tail and index included, are not what they are raw."""
    held = {}
    for codec, bits in [("raw", None), ("affine", 4), ("rotated", 4), ("rotated", 8)]:
        cache = make_cache(codec, bits, block_tokens=128)
        insert(cache, range(1000), heads=4, dtype=mx.float16)
        held[codec, bits] = cache.tree.used_bytes
    assert held["affine", 4] < 0.35 * held["raw", None]
    assert held["rotated", 4] < 0.35 * held["raw", None]
    assert 0.5 * held["raw", None] < held["rotated", 8] < 0.6 * held["raw", None]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("bits", "at_most"), [(8, 0.55), (4, 0.30)])
def test_bytes_held_for_a_16_bit_byte(dim: int, bits: int, at_most: float) -> None:
    """4,096 tokens with the default codec and block size, everything counted."""
    cache = make_cache("rotated", bits, block_tokens=128)
    shape: dict[str, Any] = {"heads": 4, "dim": dim, "dtype": mx.float16}
    insert(cache, range(4096), **shape)
    full = sum(tensor.array.nbytes for tensor in tensors_for(range(4096), **shape))
    assert cache.tree.used_bytes <= at_most * full


def test_keys_and_values_have_their_own_bits() -> None:
    """The settings' bits for the keys go to even tensors, those for the values to odd ones."""
    registry = CodecRegistry()
    registry.register("affine", BUILT_IN["affine"])
    settings = Settings(key_bits=8, value_bits=2, codec="affine")
    budget = Budget(limit_bytes=GIB, probe=Machine().probe)
    cache = PrefixCache(settings, registry, budget, block_tokens=8)
    insert(cache, range(8))
    fetched = fetched_from(cache, range(9))
    assert fetched is not None
    errors = [
        relative_error(decoded, tensor.array) > 0.1
        for decoded, tensor in zip(fetched.rows, tensors_for(range(8)), strict=True)
    ]
    assert errors == [False, True, False, True]


def test_an_unknown_codec_is_refused_at_once() -> None:
    """Not with the first request."""
    with pytest.raises(CodecError, match="no codec named 'nix'"):
        make_cache("nix", 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_cannot_be_quantized_come_back(bad: float) -> None:
    """In a block and in a tail: they are kept raw, and nothing is raised."""
    cache = make_cache("rotated", 4, block_tokens=8)
    tensors = tensors_for(range(21))
    tensors[1].array[1, 5, 7] = bad
    tensors[2].array[0, 18, 3] = bad
    insert_rows(cache, range(21), tensors)
    fetched = fetched_from(cache, range(22))
    assert fetched is not None
    assert mx.array_equal(fetched.rows[1][:, :8], tensors[1].array[:, :8], equal_nan=True)
    assert mx.array_equal(fetched.rows[2][:, 16:], tensors[2].array[:, 16:], equal_nan=True)
    assert relative_error(fetched.rows[0], tensors[0].array) < 0.1


def test_unequal_keys_and_values_and_none_at_all() -> None:
    """Every tensor has its own width and dtype, and a width of 0 is one too."""
    cache = make_cache("rotated", 8, block_tokens=8)
    wide = tensors_for(range(21), dim=192, layers=1)
    narrow = tensors_for(range(21), dim=128, layers=1, dtype=mx.bfloat16)
    tensors = [wide[0], narrow[1], narrow[0], Rows(mx.zeros((2, 21, 0), mx.float16))]
    insert_rows(cache, range(21), tensors)
    fetched = fetched_from(cache, range(20))
    assert fetched is not None
    for decoded, tensor in zip(fetched.rows, tensors, strict=True):
        assert decoded.shape == (2, 19, tensor.array.shape[2])
        assert decoded.dtype == tensor.array.dtype
        if tensor.array.size:
            assert relative_error(decoded, tensor.array[:, :19]) < 0.01


def test_nothing_computed_is_nothing_stored() -> None:
    """A sequence of no tokens is no sequence, and no error."""
    events = Events()
    cache = make_cache(emit=events.append)
    insert(cache, [], **TINY)
    assert (len(cache.tree), cache.tree.used_bytes) == (0, 0)
    assert [(event.tokens, event.stored_tokens) for event in events.of(Insert)] == [(0, 0)]


def test_a_model_that_looks_different_starts_anew() -> None:
    """What was stored of its namespace is dropped; other namespaces stay."""
    events = Events()
    cache = make_cache(emit=events.append)
    insert(cache, range(10))
    insert(cache, range(10), namespace="other")
    insert(cache, range(6), layers=3)
    assert events.causes() == {"replaced": 3}
    fetched = fetched_from(cache, range(11))
    assert fetched is not None and fetched.tokens == 6
    assert is_what_was_computed(fetched, range(11), layers=3)
    assert fetch(cache, range(11), namespace="other") == 10


@pytest.mark.parametrize("changed", [{"heads": 1}, {"dim": 32}, {"dtype": mx.float16}])
def test_heads_width_and_dtype_are_the_look_of_a_model(changed: dict[str, Any]) -> None:
    """A block of one look is never decoded as another."""
    cache = make_cache()
    insert(cache, range(10))
    insert(cache, range(3), **changed)
    assert fetch(cache, range(11)) == 3


def test_looks_of_models_that_are_gone_are_forgotten() -> None:
    """Nothing grows with the number of models ever seen."""
    cache = make_cache(limit_bytes=4000)
    for model in range(50):
        insert(cache, range(12), namespace=f"model {model}", **TINY)
    held = len(cache.tree.roots())
    assert held < 10
    assert len(cache.spaces._spaces) <= held + 1


# Failures


def crash_in_the_codec(call: int, machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RawCodec, "encode", fail_on_call(call, RawCodec.encode))


def crash_in_the_tensors(call: int, machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rows, "rows", fail_on_call(call, Rows.rows))


def crash_in_the_probe(call: int, machine: Machine, patch: pytest.MonkeyPatch) -> None:
    machine.before_probing = fail_on_call(call, lambda: None)


CRASHES = [(crash_in_the_probe, call) for call in (1, 2, 3)] + [
    (crash, call)
    for crash, calls in ((crash_in_the_codec, (1, 2, 3)), (crash_in_the_tensors, (1, 4, 9, 12)))
    for call in calls
]
"""Calls by the insert below: for the first 16 blocks, for the rest, and for the tail; each time one
of the codec, and of each of the four tensors one look and one for its rows."""


@pytest.mark.parametrize(("crash", "call"), CRASHES)
@pytest.mark.parametrize("continues", [True, False])
def test_a_crash_skips_an_insert_whole(
    crash: Callable[[int, Machine, pytest.MonkeyPatch], None],
    call: int,
    continues: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it happens: nothing is half stored, no counter moves, and the next one works."""
    events, machine = Events(), Machine()
    budget = Budget(limit_bytes=GIB, probe=machine.probe)
    cache = make_cache(budget=budget, emit=events.append)
    insert(cache, range(9), heads=1, dim=2)
    before = state_of(cache)
    namespace = MODEL if continues else "other"
    tokens = [*range(8 if continues else 0), *range(100, 180), -1]
    layers = layers_for(tokens, namespace, heads=1, dim=2)
    events.clear()
    with monkeypatch.context() as patch:
        crash(call, machine, patch)
        with pytest.raises(Crash):
            cache.insert(namespace, tokens, layers, "user")
        machine.before_probing = lambda: None
    cache.tree.check()
    assert state_of(cache) == before
    assert events == []
    cache.insert(namespace, tokens, layers, "user")
    cache.tree.check()
    fetched = fetched_from(cache, [*tokens, -2], namespace)
    assert fetched is not None and fetched.tokens == len(tokens)
    assert is_what_was_computed(fetched, tokens, namespace, heads=1, dim=2)


@pytest.mark.parametrize("call", [1])
def test_a_crash_in_a_fetch_changes_nothing(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller turns it into a miss; what is stored is there the next time."""
    events = Events()
    cache = make_cache(emit=events.append)
    insert(cache, range(10))
    before = state_of(cache)
    events.clear()
    with monkeypatch.context() as patch:
        patch.setattr(RawCodec, "decode", fail_on_call(call, RawCodec.decode))
        with pytest.raises(Crash):
            fetched_from(cache, range(11))
    assert state_of(cache) == before
    assert events == []
    fetched = fetched_from(cache, range(11))
    assert fetched is not None and is_what_was_computed(fetched, range(11))


def test_a_hit_is_one_when_it_can_be_handed_over() -> None:
    """The caller gets what it made of it; what it could not make anything of is no hit."""
    events = Events()
    cache = make_cache(emit=events.append)
    insert(cache, range(10), **TINY)
    before = state_of(cache)
    found = cache.match(MODEL, range(11))
    assert cache.fetch(range(11), found, lambda fetched: f"{fetched.tokens} tokens") == "10 tokens"
    assert len(events.of(Hit)) == 1

    def fail(fetched: Fetched) -> None:
        raise Crash

    with pytest.raises(Crash):
        cache.fetch(range(11), found, fail)
    assert cache.fetch(range(11), cache.match("other", range(11)), fail) is None
    assert len(events.of(Hit)) == len(events.of(Miss)) == 1
    assert state_of(cache) == before


# The budget


def test_a_prompt_larger_than_the_budget_keeps_its_beginning() -> None:
    """Its leading blocks displace others by recency, and are a hit afterwards."""
    events = Events()
    cache = make_cache(limit_bytes=20_000, emit=events.append)
    for prompt in (901, 902):
        insert(cache, [prompt] * 8, **TINY)
    insert(cache, range(400), **TINY)
    (said,) = events.of(Insert)[2:]
    assert 0 < said.stored_tokens < 400
    assert said.new_tokens == said.stored_tokens
    assert cache.tree.used_bytes <= 20_000
    assert fetch(cache, range(400)) == said.stored_tokens
    assert events.causes() == {"memory": 4}
    insert(cache, [901] * 8, **TINY)
    assert fetch(cache, [901] * 9) == 8


def test_what_is_used_is_kept() -> None:
    """Room for two prompts: A, B, a hit on A, C: A stays and B goes."""
    cache = make_cache()
    insert(cache, [1] * 8, **TINY)
    insert(cache, [2] * 8, **TINY)
    cache.budget = Budget(limit_bytes=cache.tree.used_bytes + 300, probe=Machine().probe)
    assert fetch(cache, [1] * 9) == 8
    insert(cache, [3] * 8, **TINY)
    assert [fetch(cache, [prompt] * 9) for prompt in (1, 2, 3)] == [8, 0, 8]


def test_the_limit_holds_after_every_insert() -> None:
    """Room for two, five distinct prompts: never more than the limit, always the last two."""
    cache = make_cache("rotated", 4, block_tokens=16)
    insert(cache, [0] * 40)
    insert(cache, [1] * 40)
    limit_bytes = cache.tree.used_bytes + 500  # for dicts that grow a little in use
    cache.budget = Budget(limit_bytes=limit_bytes, probe=Machine().probe)
    for prompt in range(2, 7):
        insert(cache, [prompt] * 40)
        assert cache.tree.used_bytes <= limit_bytes
        hits = [fetch(cache, [other] * 41) for other in (prompt - 1, prompt)]
        assert hits == [40, 40]


def test_a_share_of_memory_is_settled_when_first_needed() -> None:
    """Not when the cache is made, which is before the model is loaded."""
    machine = Machine(available_bytes=12 * GIB)
    cache = make_cache(budget=Budget(percent=0.5, probe=machine.probe))
    machine.available_bytes = 8 * GIB
    assert fetched_from(cache, [1, 2]) is None
    assert cache.budget.limit_bytes == cache.tree.limit_bytes == 4 * GIB


def test_without_memory_everything_goes_and_grows_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line for the episode, evictions told by their cause, and service afterwards."""
    events, machine = Events(), Machine()
    budget = Budget(limit_bytes=GIB, probe=machine.probe)
    cache = make_cache(budget=budget, emit=events.append)
    insert(cache, range(10), **TINY)
    held = cache.tree.used_bytes
    machine.available_bytes = GIB // 2
    assert fetch(cache, range(11)) == 10  # what is there still serves, and goes then
    assert cache.tree.used_bytes == 0
    for _ in range(3):
        assert fetch(cache, range(11)) == 0
        insert(cache, range(10), **TINY)
        assert cache.tree.used_bytes == 0
    assert [(e.blocks, e.nbytes, e.cause) for e in events.of(Evict)] == [(3, held, "pressure")]
    assert [record.getMessage()[:15] for record in caplog.records] == ["memory is short"]
    machine.available_bytes = 10 * GIB
    insert(cache, range(10), **TINY)
    assert fetch(cache, range(11)) == 10


def test_all_goes_while_memory_does_not_come_back() -> None:
    """It is asked again after each eviction: a little too short all the time, and nothing stays."""
    machine = Machine()
    cache = make_cache(budget=Budget(limit_bytes=GIB, probe=machine.probe))
    for prompt in range(5):
        insert(cache, [prompt] * 8, **TINY)
    machine.available_bytes = GIB - 1
    assert fetched_from(cache, [5] * 9) is None
    assert cache.tree.used_bytes == 0


def test_no_more_goes_than_memory_lacks() -> None:
    """It is asked again after each eviction: back above the reserve, the rest stays."""
    cache = make_cache()
    spare_bytes = GIB
    cache.budget = Budget(
        limit_bytes=GIB,
        probe=lambda: Memory(16 * GIB, GIB + spare_bytes - cache.tree.used_bytes),
    )
    for prompt in range(10):
        insert(cache, [prompt] * 8, **TINY)
    held = cache.tree.used_bytes
    spare_bytes = held - held // 4
    cache.keep_within_budget()
    cache.tree.check()
    assert held / 2 < cache.tree.used_bytes <= spare_bytes
    assert fetch(cache, [9] * 9) == 8


@pytest.mark.parametrize("call", [2, 3])
def test_memory_that_runs_short_during_an_insert(call: int) -> None:
    """What was being added to is spared until the insert is done, and goes then: nothing is held
    above what may be held."""
    machine = Machine()
    budget = Budget(limit_bytes=GIB, probe=machine.probe)
    cache = make_cache(budget=budget)
    insert(cache, range(8), **TINY)
    machine.run_short(lambda probe: probe >= call)
    insert(cache, range(8 + 4 * 40), **TINY)
    assert machine.probes >= call
    assert cache.tree.used_bytes <= cache.tree.limit_bytes == 0


@pytest.mark.parametrize(
    ("max_sequences", "enough_for"), [(0, 1000), (None, 1), (None, 2), (None, 3)]
)
def test_what_went_at_once_is_not_told_as_stored(
    max_sequences: int | None, enough_for: int
) -> None:
    """The event says what is there when the insert is done: nothing, if nothing may be.

    Memory is enough for the first few probes, and short from then on.
    """
    events, machine = Events(), Machine()
    budget = Budget(limit_bytes=GIB, probe=machine.probe)
    cache = make_cache(budget=budget, emit=events.append, max_sequences=max_sequences)
    machine.run_short(lambda probe: probe > enough_for)
    insert(cache, range(4 * 20), **TINY)
    assert len(cache.tree) == 0
    (told,) = events.of(Insert)
    assert (told.stored_tokens, told.new_tokens) == (0, 0)


@pytest.mark.parametrize("length", range(1, 11))
def test_what_was_covered_and_went_is_not_told_as_stored(length: int) -> None:
    """A sequence that was stored as the beginning of another one goes with that one."""
    events = Events()
    cache = make_cache(emit=events.append)
    insert(cache, range(10), **TINY)
    cache.max_sequences = 0
    insert(cache, range(length), **TINY)
    told = events.of(Insert)[-1]
    assert (told.tokens, told.stored_tokens, told.new_tokens) == (length, 0, 0)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_on_sequences(limit: int) -> None:
    """The oldest go whole, at once, and only they are told of."""
    events = Events()
    cache = make_cache(emit=events.append, max_sequences=limit)
    for prompt in range(5):
        insert(cache, [prompt] * 10, **TINY)
        assert cache.tree.sequences.total() == min(prompt + 1, limit)
    hits = [fetch(cache, [prompt] * 11) for prompt in range(5)]
    assert hits == [0] * (5 - limit) + [10] * limit
    assert events.causes() == {"count": 3 * (5 - limit)}


def test_trimming_evicts_at_once() -> None:
    """By sequences, by bytes, by both, and below zero is nothing."""
    events = Events()
    cache = make_cache(emit=events.append)
    for prompt in range(5):
        insert(cache, [prompt] * 8, **TINY)
    most = cache.tree.used_bytes
    cache.trim_to(n_sequences=3)
    cache.tree.check()
    assert events.causes() == {"trim": 4}
    held = cache.tree.used_bytes
    cache.trim_to(n_bytes=held - 1)
    cache.tree.check()
    assert fetch(cache, [2] * 9) == 4
    cache.trim_to(n_sequences=1, n_bytes=held)
    cache.tree.check()
    assert [fetch(cache, [prompt] * 9) for prompt in range(5)] == [0, 0, 4, 0, 0]
    cache.trim_to(n_bytes=-5)
    assert cache.tree.used_bytes == 0
    cache.trim_to(n_sequences=-5)
    assert events.causes() == {"trim": 10}
    assert sum(event.nbytes for event in events.of(Evict)) == most


# Events


def test_one_event_for_each_request() -> None:
    """A miss, an insert, a hit, with what they are about; evictions besides."""
    events = Events()
    cache = make_cache(emit=events.append)
    fetched_from(cache, range(11))
    insert(cache, range(10), **TINY)
    fetched_from(cache, range(11))
    insert(cache, range(12), **TINY)
    insert(cache, range(12), **TINY)
    assert [event for event in events if isinstance(event, Miss)] == [Miss(11)]
    assert [(e.prompt_tokens, e.hit_tokens) for e in events.of(Hit)] == [(11, 10)]
    inserts = [(e.tokens, e.stored_tokens, e.new_tokens) for e in events.of(Insert)]
    assert inserts == [(10, 10, 10), (12, 12, 4), (12, 12, 0)]
    assert len(events) == 5
    assert all(0 < event.seconds < 10 for event in events.of(Hit, Insert))


def test_labels_are_counted() -> None:
    """Sequences and bytes by upstream's kind of sequence."""
    cache = make_cache()
    insert(cache, range(8), label="system", **TINY)
    insert(cache, range(20), label="user", **TINY)
    insert(cache, [*range(8), *range(50, 70)], label="user", **TINY)
    assert +cache.tree.sequences == {"user": 2}
    by_label = +cache.tree.bytes_by_label
    assert 0 < by_label["system"] < by_label["user"]
    assert sum(by_label.values()) == cache.tree.used_bytes


# Images


def test_a_hit_does_not_end_inside_of_an_image() -> None:
    """Upstream embeds an image whole or not at all: a part of its tokens is as good as none.

    Whether its last blocks had no room, the prompt ends with it, or another one follows.
    """
    image, other = [-7] * 10, [-9] * 5
    cache = make_cache(block_tokens=4)
    prompt = [1, 2, 3, 4, 5, *image, *other, 6, 7]
    insert(cache, prompt, **TINY)
    for asked, hit in [
        (prompt, 21),
        ([*prompt, 8], 22),
        (prompt[:15], 5),
        (prompt[:16], 15),
        ([*prompt[:15], 8], 15),
        ([*prompt[:20], 8], 20),
        ([*prompt[:5], -8], 5),
        (image, 0),
    ]:
        assert fetch(cache, asked) == hit
    cache.trim_to(n_bytes=cache.tree.used_bytes // 2)
    left = cache.tree.match(space_of(cache), np.array(prompt)).tokens
    assert 5 < left < 15
    assert fetch(cache, prompt) == 5
