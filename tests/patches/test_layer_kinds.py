"""Every kind of cache object in every state: taken apart and put together, it goes on as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_lm_kvcache_plugin.errors import LayerKindError
from mlx_lm_kvcache_plugin.layers import STATEFUL, TOKEN_WISE, WINDOW, Layer, LayerKinds
from mlx_lm_kvcache_plugin.patches.layer_kinds import (
    BUILT_IN,
    STATE,
    UNUSED,
    PlainTensor,
    QuantizedTensor,
    is_empty,
)
from tests.patches import cache_objects as objects
from tests.patches.cache_objects import (
    CHUNK,
    DIM,
    HEADS,
    QUANTIZED_KINDS,
    STATE_KINDS,
    TOKEN_WISE_KINDS,
    WINDOW_KINDS,
    arrays,
    arrays_in,
    brought_back,
    chunked,
    drop_front,
    filled,
    in_another_thread,
    known_kinds,
    plain,
    rotating,
    rows,
    same,
    spoil,
    step,
    taken,
    trimmed,
    visible,
)

Make = Callable[[], Any]

PLAIN_KINDS = {**TOKEN_WISE_KINDS, **WINDOW_KINDS, **STATE_KINDS}
LEAF_KINDS = {**PLAIN_KINDS, **QUANTIZED_KINDS}

GOING_ON = [(1,) * 20, (1, 1, 7, 1), (objects.WINDOW + 3, 1), (3, 1, 300, 1)]
"""Tokens that come later, in steps of so many."""


def go_on(cache: Any, steps: Sequence[int]) -> list[Any]:
    """All that a model sees in these steps, the front of chunks dropped before each."""
    seen = []
    for seed, tokens in enumerate(steps):
        if type(cache) is ChunkedKVCache:
            drop_front(cache)
        seen.append(step(cache, tokens, 10 * seed + 50))
    return seen


# The contract


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_what_comes_back_looks_as_it_did(kind: str) -> None:
    """Its class, its rows in their order, its numbers to the bit, and how many tokens it is of."""
    assert same(visible(brought_back(PLAIN_KINDS[kind]())), visible(PLAIN_KINDS[kind]()))


@pytest.mark.parametrize("kind", [kind for kind in PLAIN_KINDS if not kind.startswith("arrays")])
@pytest.mark.parametrize("steps", GOING_ON, ids=str)
def test_what_comes_back_goes_on_as_it_would_have(kind: str, steps: tuple[int, ...]) -> None:
    """Whatever steps follow, a model sees the same rows, and is told to look at the same."""
    source, back = PLAIN_KINDS[kind](), brought_back(PLAIN_KINDS[kind]())
    assert same(go_on(back, steps), go_on(source, steps))
    assert same(visible(back), visible(source))


@pytest.mark.parametrize("kind", LEAF_KINDS)
def test_what_comes_back_is_independent(kind: str) -> None:
    """Of the object that was taken apart, and of whatever else comes of the same layers."""
    source = LEAF_KINDS[kind]()
    layers = taken([source])
    fetched = [objects.fetched_of(layers) for _ in range(2)]
    one, other = (objects.put_together(each)[0] for each in fetched)
    for cache in (source, one):
        spoil(cache)
    assert same(visible(other), visible(LEAF_KINDS[kind]()))


@pytest.mark.parametrize("kind", LEAF_KINDS)
def test_what_comes_back_serves_any_thread(kind: str) -> None:
    """MLX can evaluate a lazy array on the thread alone that made it: none of them is lazy."""
    fetched = in_another_thread(lambda: objects.fetched_of(taken([LEAF_KINDS[kind]()])))
    (back,) = in_another_thread(lambda: objects.put_together(fetched))
    mx.eval([array + 0 for array in arrays_in(back)])
    assert same(visible(back), visible(LEAF_KINDS[kind]()))


@pytest.mark.parametrize("kind", LEAF_KINDS)
def test_it_can_be_taken_apart_again(kind: str) -> None:
    """As often as it is stored and fetched, it stays what it is."""
    back = brought_back(brought_back(LEAF_KINDS[kind]()))
    assert same(visible(back), visible(LEAF_KINDS[kind]()))


@pytest.mark.parametrize("kind", LEAF_KINDS)
def test_what_is_known_of_a_kind_is_what_it_does(kind: str) -> None:
    """Only rows can be cut; a layer that needs no checkpoint has nothing else, and some rows."""
    cache = LEAF_KINDS[kind]()
    known = BUILT_IN.get(type(cache), STATE)
    layers = taken([cache])
    assert bool(layers.rows) is (kind in TOKEN_WISE_KINDS or kind in QUANTIZED_KINDS)
    assert bool(layers.windows) is (kind in WINDOW_KINDS)
    assert bool(layers.layout.states) is (kind in STATE_KINDS)
    if known.name == TOKEN_WISE and kind != "two sequences side by side":
        assert not layers.layout.needs_checkpoint
    hash(layers.layout)


@pytest.mark.parametrize("kind", {**TOKEN_WISE_KINDS, **QUANTIZED_KINDS})
def test_rows_can_be_cut_anywhere(kind: str) -> None:
    """The first of them are what fewer tokens would have left, and go on as that would."""
    whole = LEAF_KINDS[kind]()
    tokens = whole.offset
    for cut in sorted({1, 2, tokens // 2, tokens - 1, tokens}):
        back = brought_back(LEAF_KINDS[kind](), cut)
        fewer = trimmed(LEAF_KINDS[kind](), tokens - cut)
        if isinstance(fewer, ConcatenateKVCache):  # upstream trims its count alone
            fewer.keys, fewer.values = (x[:, :, :cut] for x in (fewer.keys, fewer.values))
        if kind in QUANTIZED_KINDS:
            assert_is_dequantized(back, fewer)
        else:
            assert same(visible(back), visible(fewer))
            assert same(go_on(back, (1, 3, 1)), go_on(fewer, (1, 3, 1)))


def assert_is_dequantized(back: Any, source: Any) -> None:
    assert type(back) is KVCache and type(source) is QuantizedKVCache
    assert back.offset == source.offset == back.keys.shape[2]
    assert same(visible(back)[2], visible(source)[2])


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_what_was_quantized_comes_back_plain(kind: str) -> None:
    """With the numbers that upstream attends to: a batch takes plain ones, and no other."""
    assert_is_dequantized(brought_back(LEAF_KINDS[kind]()), LEAF_KINDS[kind]())


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_quantized_rows_are_in_the_models_dtype(
    width: int, group_size: int, dtype: mx.Dtype
) -> None:
    """Whatever the bits and the groups; a run of rows can be had by itself."""
    cache = plain(40, dtype=dtype).to_quantized(group_size, width)
    layers = taken([cache])
    for tensor, side in zip(layers.rows, (cache.keys, cache.values), strict=True):
        assert isinstance(tensor, QuantizedTensor)
        assert (tensor.spec.heads, tensor.spec.dim, tensor.spec.dtype) == (HEADS, DIM, dtype)
        whole = mx.dequantize(*side, group_size=group_size, bits=width)
        assert same(tensor.rows(3, 40), whole[0, :, 3:40])
        assert tensor.rows(0, 40).dtype == dtype


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_plain_rows_are_those_that_were_appended(dtype: mx.Dtype) -> None:
    """Without the padding of the buffer; keys and values may differ in width."""
    cache = plain(200, 1, 99, dtype=dtype, values_dim=32)
    keys, values = taken([cache]).rows
    for tensor, source, width in ((keys, cache.keys, DIM), (values, cache.values, 32)):
        assert isinstance(tensor, PlainTensor) and tensor.length == 300
        assert (tensor.spec.heads, tensor.spec.dim, tensor.spec.dtype) == (HEADS, width, dtype)
        for start, stop in ((0, 300), (0, 1), (128, 256), (299, 300), (5, 5)):
            assert same(tensor.rows(start, stop), source[0, :, start:stop])


# Rotating windows

LENGTHS = [1, 15, 16, 17, 32, 40, 48]
"""A window of 16: prompts of one less, as many, one more, and up to three times as many."""

WAYS: dict[str, Callable[[int], list[int]]] = {
    "at once": lambda tokens: [tokens],
    "token by token": lambda tokens: [1] * tokens,
    "in steps": lambda tokens: [7] * (tokens // 7) + [tokens % 7] * (tokens % 7 > 0),
    "at once, then token by token": lambda tokens: [tokens // 2, *[1] * (tokens - tokens // 2)],
    "token by token, then at once": lambda tokens: [*[1] * (tokens // 2), tokens - tokens // 2],
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_window_goes_on_wherever_it_was(length: int, keep: int, way: str) -> None:
    """Shorter than the window, as long and longer, however it was filled, with and without keep."""
    steps = [tokens for tokens in WAYS[way](length) if tokens]
    for following in GOING_ON:
        source, back = (rotating(*steps, keep=keep) for _ in range(2))
        back = brought_back(back)
        assert (back.offset, back.keep, back.max_size) == (length, keep, objects.WINDOW)
        # In order, so that the next row to go is the first one behind those that are kept.
        assert back._idx == back.keys.shape[2] == min(length, objects.WINDOW)
        assert same(visible(back), visible(source))
        assert same(go_on(back, following), go_on(source, following))


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("length", [17, 24, 48])
def test_a_window_holds_what_it_is_wide(length: int, keep: int) -> None:
    """And not the whole step of a prefill, which upstream drops with the next token."""
    source = rotating(length, keep=keep)
    assert source.keys.shape[2] == length
    for tensor in taken([source]).windows:
        assert tensor.length == objects.WINDOW
    back = brought_back(source)
    kept = [*range(keep), *range(length - objects.WINDOW + keep, length)]
    whole = plain(length)
    assert same(back.keys, whole.keys[:, :, mx.array(kept)])
    assert same(back.values, whole.values[:, :, mx.array(kept)])


@pytest.mark.parametrize("length", [8, 16, 17, 48])
def test_a_window_can_join_a_batch(length: int) -> None:
    """Beside a shorter one, as upstream merges them, it is the same as the original."""
    merged = []
    for cache in (rotating(length), brought_back(rotating(length))):
        batch = RotatingKVCache.merge([cache, rotating(5)])
        seen = batch.update_and_fetch(*(mx.concatenate([rows(1, seed=s)] * 2) for s in (8, 9)))
        merged.append([*seen, batch.offset, batch.left_padding])
    assert same(*merged)


def test_windows_of_two_sizes_are_not_alike() -> None:
    """What is put together is told by the size and by the rows that are kept."""
    layouts = {
        taken([filled(RotatingKVCache(size, keep), 30)]).layout
        for size in (16, 20)
        for keep in (0, 4)
    }
    assert len(layouts) == 4


# Chunks


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
@pytest.mark.parametrize("way", WAYS)
def test_a_chunk_goes_on_wherever_it_was(length: int, way: str) -> None:
    """With the position at which its first row stands."""
    steps = [tokens for tokens in WAYS[way](length) if tokens]
    for following in GOING_ON:
        source, back = chunked(*steps), brought_back(chunked(*steps))
        assert (back.offset, back.chunk_size) == (length, CHUNK)
        assert back.start_position == source.start_position == max(0, length - CHUNK)
        assert same(go_on(back, following), go_on(source, following))


@pytest.mark.parametrize("length", [100, 500, 512, 513, 700, 1300])
def test_a_chunk_drops_its_front_by_upstreams_own_rule(length: int) -> None:
    """mlx-lm 0.31 counts all rows of the buffer, also those that are not in use yet.

    A buffer of another length would lose rows of the present chunk too early.
    """

    def fill() -> Any:
        cache = ChunkedKVCache(512)
        for start in range(0, length, 256):
            cache.maybe_trim_front()
            new = plain(length)
            part = slice(start, min(start + 256, length))
            cache.update_and_fetch(new.keys[:, :, part], new.values[:, :, part])
        return cache

    source, back = fill(), brought_back(fill())
    for seed in range(40):
        for cache in (source, back):
            cache.maybe_trim_front()
        new = rows(1, seed=seed + 50), rows(1, seed=seed + 150)
        assert same(back.update_and_fetch(*new), source.update_and_fetch(*new))
        assert back.start_position == source.start_position


def test_a_chunk_that_lost_all_of_its_rows_is_kept_whole() -> None:
    """As mlx-lm 0.31 leaves one that is narrower than its buffer."""
    cache = filled(ChunkedKVCache(8), 20)
    cache.start_position, cache.keys, cache.values = 248, *(rows(8, seed=s) for s in (1, 2))
    assert taken([cache]).layout.states == 1
    assert same(brought_back(cache), cache)


def test_a_chunk_whose_front_is_gone_is_no_rows() -> None:
    """It cannot be cut: what it dropped is lost."""
    layers = taken([chunked(20)])
    assert [tensor.length for tensor in layers.windows] == [CHUNK] * 2
    assert layers.layout.needs_checkpoint and not layers.rows


# What nothing was written to, and what nobody knows

EMPTY: dict[str, Make] = {
    "plain": KVCache,
    "quantized": QuantizedKVCache,
    "concatenating": ConcatenateKVCache,
    "rotating": lambda: RotatingKVCache(12, keep=3),
    "chunked": lambda: ChunkedKVCache(5),
    "arrays": lambda: ArraysCache(3),
    "arrays, padded": lambda: ArraysCache(2, left_padding=[1]),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_nothing_comes_back_as_nothing(kind: str) -> None:
    """With its sizes, so that it can be written to."""
    assert is_empty(EMPTY[kind]())
    layer = UNUSED.take(EMPTY[kind]())
    assert not layer.rows and not layer.window and layer.state is None
    one, other = (UNUSED.restore(layer, 10) for _ in range(2))
    assert same(one, EMPTY[kind]()) and one is not other


@pytest.mark.parametrize("kind", LEAF_KINDS)
def test_what_was_written_to_is_not_empty(kind: str) -> None:
    """Upstream looks at the first slot of an `ArraysCache` alone, whose second may be in use."""
    assert not is_empty(LEAF_KINDS[kind]())


def test_a_class_that_does_not_tell_is_not_empty() -> None:
    """Better keep a state for nothing than lose one."""

    class Base:
        def empty(self) -> bool:
            raise NotImplementedError

    assert not is_empty(Base()) and not is_empty(object())


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_a_state_comes_back_to_the_bit(kind: str) -> None:
    """All of its attributes, whatever class it is of."""
    back, source = brought_back(STATE_KINDS[kind]()), STATE_KINDS[kind]()
    assert type(back) is type(source) and vars(back).keys() == vars(source).keys()
    assert same([*arrays_in(visible(back))], [*arrays_in(visible(source))])


@pytest.mark.parametrize(
    "make",
    [
        lambda: arrays(rows(3), left_padding=[2]),
        lambda: arrays(None, rows(4), left_padding=[1]),
        lambda: arrays(rows(4), None, rows(2)),
    ],
)
def test_an_empty_slot_and_padding_at_the_left_come_back(make: Make) -> None:
    """A recurrent state as a batch leaves it: a slot that no layer uses, or a shorter prompt."""
    source, back = make(), brought_back(make())
    assert [slot is None for slot in back.cache] == [slot is None for slot in source.cache]
    for cache in (source, back):
        cache.advance(1)
    assert same([back.make_mask(4)], [source.make_mask(4)]) and same(back, source)


def test_keys_of_other_axes_are_kept_whole() -> None:
    """What is stored by rows is [1, heads, tokens, dim]; of anything else nobody knows the rows."""
    cache = KVCache()
    cache.keys = cache.values = rows(5)[0]
    cache.offset = 5
    layers = taken([cache])
    assert layers.layout.states == 1 and not layers.rows
    assert same(brought_back(cache), cache)


# Kinds by class


class Kind:
    """Just enough of one."""

    name = TOKEN_WISE

    def take(self, cache: Any) -> Layer[Any] | None:
        return None

    def restore(self, layer: Layer[mx.array], tokens: int) -> Any:
        return None


def test_the_built_in_kinds() -> None:
    """By upstream's classes, each by exactly that class."""
    assert {cache_class.__name__: kind.name for cache_class, kind in BUILT_IN.items()} == {
        "KVCache": TOKEN_WISE,
        "QuantizedKVCache": TOKEN_WISE,
        "ConcatenateKVCache": TOKEN_WISE,
        "RotatingKVCache": WINDOW,
        "ChunkedKVCache": WINDOW,
        "ArraysCache": STATEFUL,
    }
    assert known_kinds().get(objects.OwnKVCache) is None


def test_a_class_has_one_kind() -> None:
    """The first one that was registered."""
    kinds, kind = LayerKinds(), Kind()
    kinds.register(KVCache, kind)
    with pytest.raises(LayerKindError, match="KVCache has a layer kind already"):
        kinds.register(KVCache, Kind())
    assert kinds.get(KVCache) is kind


@pytest.mark.parametrize(
    ("cache_class", "kind"),
    [("KVCache", Kind()), (KVCache, None), (KVCache, Kind), (KVCache(), Kind()), (None, None)],
)
def test_what_is_no_class_or_no_kind_is_refused(cache_class: Any, kind: Any) -> None:
    """At once, and not when a request comes."""
    kinds = LayerKinds()
    with pytest.raises(LayerKindError, match="not a class and a layer kind"):
        kinds.register(cache_class, kind)
