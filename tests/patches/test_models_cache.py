"""A model's prompt cache at the border: what is stored of its layers, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from mlx_lm_kvcache_plugin.codecs.tensors import TensorSpec
from mlx_lm_kvcache_plugin.patches.models_cache import (
    empty_caches,
    leaves_of,
    needs_checkpoints,
    put_together,
    take_apart,
)
from tests.patches.cache_objects import (
    DIM,
    HEADS,
    KINDS,
    NESTED_KINDS,
    QUANTIZED_KINDS,
    STATE_KINDS,
    TOKEN_WISE_KINDS,
    WINDOW_KINDS,
    LayerCache,
    arrays,
    arrays_in,
    chunked,
    fetched_of,
    filled,
    in_another_thread,
    known_kinds,
    plain,
    rotating,
    rows,
    same,
    spoil,
    taken,
    trimmed,
    visible,
)

Make = Callable[[], list[Any]]


def brought_back(caches: Sequence[Any], tokens: int | None = None) -> list[Any]:
    return put_together(fetched_of(taken(caches), tokens))


# How many tokens


@pytest.mark.parametrize(
    ("make", "key_tokens", "expected"),
    [
        (lambda: [plain(10), plain(10)], 10, 10),
        (lambda: [plain(10), plain(10)], 14, 10),
        (lambda: [plain(10), plain(10)], 8, 8),
        (lambda: [plain(10), plain(10), plain(7)], 12, 7),
        (lambda: [trimmed(plain(300), 40)], 300, 260),
        (lambda: [filled(QuantizedKVCache(), 10), plain(9)], 11, 9),
        (lambda: [filled(RotatingKVCache(8), 20), plain(20)], 20, 20),
        (lambda: [filled(RotatingKVCache(8), 20), plain(20)], 23, 20),
        (lambda: [filled(RotatingKVCache(8), 20), plain(20)], 19, None),
        (lambda: [filled(RotatingKVCache(8), 20), plain(19)], 20, None),
        (lambda: [rotating(20), filled(RotatingKVCache(8), 19)], 20, None),
        (lambda: [rotating(10), plain(8)], 12, 8),
        (lambda: [rotating(10), plain(8)], 7, 7),
        (lambda: [arrays(rows(3)), plain(20)], 20, 20),
        (lambda: [arrays(rows(3)), plain(20)], 25, 20),
        (lambda: [arrays(rows(3)), plain(20), plain(19)], 25, None),
        (lambda: [arrays(rows(3))], 20, 20),
        (lambda: [CacheList(arrays(rows(3)), plain(20))], 21, 20),
        (lambda: [CacheList(plain(20), KVCache())], 20, 20),
        (lambda: [filled(LayerCache(), 6)], 9, 6),
        (lambda: [filled(LayerCache(), 6)], 5, None),
        (lambda: [chunked(20)], 20, 20),
        (lambda: [arrays(None, rows(4))], 20, 20),
        (lambda: [KVCache(), KVCache()], 0, None),
        (lambda: [KVCache(), KVCache()], 5, None),
        (lambda: [ArraysCache(2)], 5, None),
        (lambda: [trimmed(plain(5), 5)], 5, None),
        (lambda: [plain(5)], 0, None),
        (lambda: [], 5, None),
    ],
)
def test_offsets_are_believed_and_not_the_key(
    make: Make, key_tokens: int, expected: int | None
) -> None:
    """Drafts store their caches under a longer key, and their own layers may lag behind.

    Rows may be left out; windows and states may not. None where nothing can be stored.
    """
    layers = take_apart(make(), key_tokens, known_kinds())
    assert (layers.tokens if layers is not None else None) == expected


def test_layers_that_lag_behind_come_back_even() -> None:
    """As many tokens of each as all of them have."""
    back = brought_back([plain(17), plain(17), plain(15)])
    assert [cache.offset for cache in back] == [15] * 3
    assert all(same(visible(cache), visible(plain(15))) for cache in back)


# What is stored of which


def lengths(caches: Sequence[Any]) -> tuple[int, list[int], int]:
    """How many tensors in blocks, how many rows in each window, and how many states."""
    layers = taken(caches)
    return len(layers.rows), [tensor.length for tensor in layers.windows], layers.layout.states


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: [plain(10), plain(10)], (4, [], 0)),
        (lambda: [rotating(40), plain(40)], (2, [16, 16], 0)),
        (lambda: [rotating(16), plain(16)], (4, [], 0)),
        (lambda: [filled(RotatingKVCache(8), 12), rotating(12), plain(12)], (4, [8, 8], 0)),
        (lambda: [arrays(rows(3)), plain(12)], (2, [], 1)),
        (lambda: [arrays(rows(3)), rotating(20), plain(20)], (2, [16, 16], 1)),
        (lambda: [CacheList(arrays(rows(3)), plain(9)), plain(9)], (4, [], 1)),
        (lambda: [CacheList(plain(9), KVCache()), plain(9)], (4, [], 0)),
    ],
)
def test_each_layer_is_stored_in_its_own_way(
    make: Make, expected: tuple[int, list[int], int]
) -> None:
    """Rows in blocks, windows and states at checkpoints, whatever stands beside them."""
    assert lengths(make()) == expected
    assert taken(make()).layout.needs_checkpoint == bool(expected[1] or expected[2])


@pytest.mark.parametrize("window", [16, 20])
@pytest.mark.parametrize("pattern", [2, 6])
def test_windows_beside_plain_layers(window: int, pattern: int) -> None:
    """A model in which every second or sixth layer sees all tokens, and the others a window.

    A prompt longer than the window: the plain layers live in blocks and share them, the windows
    are exact, and all go on as they would have.
    """
    is_plain = [(layer + 1) % pattern == 0 for layer in range(12)]

    def make() -> list[Any]:
        return [plain(100) if one else filled(RotatingKVCache(window), 100) for one in is_plain]

    layers = taken(make())
    assert len(layers.rows) == 2 * sum(is_plain) and len(layers.windows) == 24 - len(layers.rows)
    assert {tensor.length for tensor in layers.windows} == {window}
    back = brought_back(make())
    for one, other in zip(back, make(), strict=True):
        assert same(visible(one), visible(other))
        new = rows(1, seed=7), rows(1, seed=8)
        one.update_and_fetch(*new), other.update_and_fetch(*new)
        assert same(visible(one), visible(other))


@pytest.mark.parametrize("beside", [{}, WINDOW_KINDS, STATE_KINDS], ids=["rows", "window", "state"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_beside_it_changes_nothing(kind: str, beside: dict[str, Any]) -> None:
    """Any layer comes back as it was, among layers of any kind; draft models follow the main one.

    Offsets have to agree unless everything can be cut.
    """
    probe = KINDS[kind]()
    offsets = [leaf.offset for leaf in leaves_of([probe]) if hasattr(leaf, "offset")]
    tokens = offsets[0] if offsets else 20
    others = [plain(tokens)]
    if beside is WINDOW_KINDS:
        others.append(filled(RotatingKVCache(4), tokens))
    if beside is STATE_KINDS:
        others.append(arrays(rows(3)))
    first, layer, *back = brought_back([*others[:1], probe, *others[1:]])
    assert same(visible([first, *back]), visible(others))
    wanted = KINDS[kind]()
    assert same(visible(layer), visible(wanted)) or kind in QUANTIZED_KINDS
    if kind in QUANTIZED_KINDS:
        assert same(visible(layer)[1:], visible(wanted)[1:])


# Nothing but zeros


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32], ids=str)
@pytest.mark.parametrize("width", [0, 32])
@pytest.mark.parametrize("tokens", [1, 10, 300])
def test_values_that_are_none_are_not_stored(tokens: int, width: int, dtype: mx.Dtype) -> None:
    """An indexer has keys alone: upstream gives it values of no width, or zeros.

    They come back in their shape and dtype all the same.
    """

    def make() -> list[Any]:
        cache = KVCache()
        values = mx.zeros((1, HEADS, tokens, width), dtype)
        cache.update_and_fetch(rows(tokens), values)
        return [plain(tokens), cache]

    layers = taken(make())
    assert len(layers.rows) == 3
    for cut in {1, tokens}:
        back = put_together(fetched_of(layers, cut))
        values = back[1].values
        assert (values.shape, values.dtype) == ((1, HEADS, cut, width), dtype)
        assert not mx.any(values).item()
        assert same(back[1].keys, rows(cut))


def test_a_single_number_is_stored() -> None:
    """Though the first row and all but one number are zeros: it is not looked at alone."""
    cache = plain(300)
    cache.values = mx.zeros_like(cache.values)
    cache.values[0, 1, 299, 63] = 1e-30
    (back,) = brought_back([cache])
    assert len(taken([cache]).rows) == 2
    assert same(visible(back), visible(cache))


def test_only_the_rows_in_use_are_looked_at() -> None:
    """What a cut left behind in the buffer is no number of these tokens."""
    cache = plain(10)
    cache.values = mx.zeros_like(cache.values)
    cache.values[0, 0, 9, 0] = 1
    assert len(taken([cache]).rows) == 2
    assert len(taken([trimmed(cache, 1)]).rows) == 1


def test_zeros_in_a_window_are_kept() -> None:
    """They are few."""
    cache = RotatingKVCache(4)
    cache.update_and_fetch(rows(9), mx.zeros((1, HEADS, 9, 16)))
    layers = taken([cache])
    assert [(tensor.spec.dim, tensor.length) for tensor in layers.windows] == [(DIM, 4), (16, 4)]


def test_nothing_is_computed_unless_it_is_measured() -> None:
    """The line at the start wants shapes alone: a huge cache is not made for it."""
    cache = KVCache()
    huge = mx.zeros((1, 2, 1, 1 << 28))
    cache.update_and_fetch(huge, huge)
    layers = taken([cache], measured=False)
    assert [spec.dim for spec in layers.layout.rows] == [1 << 28] * 2


# What a model looks like


def test_a_layout_says_what_it_takes() -> None:
    """Equal for any number of tokens, and for quantized caches, whose rows are plain ones."""
    assert taken([plain(10)]).layout == taken([plain(300)]).layout
    assert taken([plain(10)]).layout == taken([plain(10).to_quantized(64, 8)]).layout
    spec = TensorSpec(HEADS, DIM, mx.float32)
    assert taken([plain(10)]).layout.rows == (spec, spec)
    assert taken([rotating(40)]).layout.windows == (spec, spec)


DIFFERENT: dict[str, Make] = {
    "one layer": lambda: [plain(10)],
    "two layers": lambda: [plain(10), plain(10)],
    "another dtype": lambda: [plain(10, dtype=mx.bfloat16)],
    "narrower values": lambda: [plain(10, values_dim=32)],
    "a window that is not full": lambda: [rotating(10)],
    "a window that is full": lambda: [rotating(40)],
    "another window": lambda: [filled(RotatingKVCache(8), 40)],
    "nested": lambda: [CacheList(plain(10))],
    "a list": lambda: [[plain(10)]],
    "a state": lambda: [arrays(rows(3)), plain(10)],
    "a chunk": lambda: [chunked(5)],
}


def test_layouts_tell_models_apart() -> None:
    """What would be put together otherwise is another layout."""
    layouts = [taken(make()).layout for make in DIFFERENT.values()]
    assert len(set(layouts)) == len(layouts) == len(DIFFERENT)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([rotating(10), plain(10)], [rotating(40), plain(40)], True),
        ([plain(10, values_dim=0)], [plain(10, values_dim=0)], True),
        ([CacheList(plain(9), KVCache())], [CacheList(plain(9), plain(9))], True),
        ([arrays(rows(3)), plain(9)], [arrays(rows(4)), plain(9)], True),
        ([plain(9)], [plain(9), plain(9)], False),
        ([plain(9)], [plain(9, dtype=mx.bfloat16)], False),
        ([plain(9, values_dim=32)], [plain(9)], False),
    ],
)
def test_one_model_shows_more_than_one_layout(
    one: list[Any], other: list[Any], expected: bool
) -> None:
    """A window that fills up, a layer that comes into use; but never other widths or dtypes."""
    assert taken(one).layout.is_of_same_model(taken(other).layout) is expected


# Nesting


@pytest.mark.parametrize("kind", NESTED_KINDS)
def test_what_is_nested_comes_back_nested(kind: str) -> None:
    """`CacheList`s, lists and tuples, in one another, each of its own class."""
    (back,) = brought_back([NESTED_KINDS[kind]()])
    assert type(back) is type(NESTED_KINDS[kind]())
    assert same(visible(back), visible(NESTED_KINDS[kind]()))


def test_a_layer_that_is_not_in_use_forces_no_checkpoints() -> None:
    """A draft of a later token, say, that upstream makes a cache for and leaves alone."""
    caches = [CacheList(plain(9), KVCache()), CacheList(plain(9), RotatingKVCache(4)), KVCache()]
    assert not taken(caches).layout.needs_checkpoint
    first, second, third = brought_back(caches, 5)
    assert same(visible(first[0]), visible(plain(5)))
    for unused in (first[1], second[1], third):
        assert unused.keys is None and unused.offset == 0
    assert second[1].max_size == 4


def test_what_comes_back_can_be_written_to() -> None:
    """Also what was not in use: nobody else has it."""
    fetched = fetched_of(taken([CacheList(plain(9), KVCache())]))
    (one,), (other,) = put_together(fetched), put_together(fetched)
    for leaf in one.caches:
        spoil(leaf) if leaf.keys is not None else leaf.update_and_fetch(rows(1), rows(1))
    assert same(visible(other), visible(CacheList(plain(9), KVCache())))


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_serves_any_thread(kind: str) -> None:
    """Whoever fetched it may hand it on: nothing in it is left to compute."""
    fetched = in_another_thread(lambda: fetched_of(taken([KINDS[kind](), KINDS[kind]()])))
    back = in_another_thread(lambda: put_together(fetched))
    mx.eval([array + 0 for array in arrays_in(back)])
    assert len(back) == 2


def test_a_hit_can_join_a_batch() -> None:
    """Beside a prompt that has no cache yet."""
    cache, _ = brought_back([plain(5), plain(5)])
    batch = KVCache.merge([cache, KVCache()])
    assert batch.size() == 5
    keys, _ = batch.update_and_fetch(*(mx.concatenate([rows(1, seed=s)] * 2) for s in (1, 2)))
    assert same(keys[:1, :, :5], plain(5).keys[:, :, :5])


# What a model needs


def model_of(*caches: Callable[[], Any]) -> Any:
    """As far as upstream asks it for its caches."""

    class Model:
        def make_cache(self) -> list[Any]:
            return [make() for make in caches]

    return Model()


@pytest.mark.parametrize(
    ("makers", "expected"),
    [
        ([KVCache], False),
        ([KVCache, QuantizedKVCache], False),
        ([lambda: CacheList(KVCache(), KVCache())], False),
        ([KVCache, lambda: RotatingKVCache(8)], True),
        ([KVCache, lambda: ArraysCache(2)], True),
        ([lambda: CacheList(KVCache(), ArraysCache(2))], True),
        ([lambda: [KVCache(), ArraysCache(2)]], True),
        ([LayerCache], True),
        ([], False),
    ],
)
def test_which_models_need_checkpoints(makers: list[Any], expected: bool) -> None:
    """Those with a layer that cannot be cut anywhere once a prompt is long."""
    assert needs_checkpoints(empty_caches(model_of(*makers)), known_kinds()) is expected


@pytest.mark.parametrize("kind", {**TOKEN_WISE_KINDS, **WINDOW_KINDS, **QUANTIZED_KINDS})
def test_states_are_charged_for_and_nothing_else_is(kind: str) -> None:
    """Before anything is copied: whether there is room for them at all."""
    assert taken([KINDS[kind]()]).state_bytes == 0
    state = arrays(rows(3), None, rows(5))
    layers = taken([state, *([KINDS[kind]()] if "plain" in kind else [])], 1000)
    assert layers.state_bytes == rows(3).nbytes + rows(5).nbytes


def test_a_state_that_does_not_tell_its_size_is_stored() -> None:
    """Its size is known once it is copied."""
    layers = taken([filled(LayerCache(), 4)])
    assert layers.state_bytes == 0
    assert layers.freeze().nbytes > rows(5).nbytes // 2


def test_nothing_but_zeros_is_nothing_to_store() -> None:
    """There is not a tensor left that a block could hold."""
    zeros = mx.zeros((1, HEADS, 20, DIM))
    cache: Any = KVCache()
    cache.update_and_fetch(zeros, zeros)
    assert take_apart([cache], 20, known_kinds()) is None


def test_what_is_known_to_be_no_zeros_is_not_looked_at() -> None:
    """A look computes what upstream took out of a batch, perhaps for nothing."""
    written: set[tuple[int, int]] = set()
    assert take_apart([plain(20)], 20, known_kinds(), written=written) is not None
    assert written == {(0, 0), (0, 1)}
    cache = plain(20)
    cache.keys = cache.values = mx.zeros((1, HEADS, 256, DIM))
    layers = take_apart([cache], 20, known_kinds(), written=written)
    assert layers is not None and len(layers.rows) == 2
