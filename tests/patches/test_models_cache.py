"""Upstream's cache objects at the border: what is read of them, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_lm_kvcache_plugin.patches.models_cache import (
    Snapshot,
    caches_from,
    can_be_cut,
    computed_tokens,
    tensors_of,
)
from mlx_lm_kvcache_plugin.prefix_cache import Fetched

HEADS, DIM = 2, 64


def rows(tokens: int, *, seed: int = 0, dim: int = DIM, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Keys or values as a model hands them to its cache: [1, heads, tokens, dim]."""
    values = np.random.default_rng(seed).standard_normal((1, HEADS, tokens, dim))
    return mx.array(values.astype(np.float32)).astype(dtype)


def filled(cache: Any, *steps: int, dtype: mx.Dtype = mx.float32, values_dim: int = DIM) -> Any:
    """A cache after calls with that many tokens each."""
    for seed, tokens in enumerate(steps):
        values = rows(tokens, seed=seed + 100, dim=values_dim, dtype=dtype)
        cache.update_and_fetch(rows(tokens, seed=seed, dtype=dtype), values)
    return cache


def plain(*steps: int, **options: Any) -> Any:
    return filled(KVCache(), *steps, **options)


def trimmed(cache: Any, tokens: int) -> Any:
    cache.trim(tokens)
    return cache


def arrays(*slots: mx.array | None, left_padding: list[int] | None = None) -> Any:
    """Recurrent state; a slot may be empty."""
    cache = ArraysCache(len(slots), left_padding=left_padding)
    for index, slot in enumerate(slots):
        cache[index] = slot
    return cache


def chunked() -> Any:
    """20 tokens of which the last 8 are kept, as the front is trimmed between two chunks."""
    cache = filled(ChunkedKVCache(8), 20)
    cache.start_position = 12
    cache.keys, cache.values = cache.keys[..., 12:20, :], cache.values[..., 12:20, :]
    return cache


class LayerCache:
    """As a model file defines one for itself: no base class, and arrays wherever it likes."""

    def __init__(self) -> None:
        self.offset = 0
        self.window: mx.array | None = None
        self.pending: dict[str, Any] = {"rows": None, "groups": [1, (2, "three")]}

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        old = self.window
        self.window = keys if old is None else mx.concatenate([old, keys], axis=2)[:, :, -5:]
        self.pending["rows"] = values[:, :, -1:]
        self.offset += keys.shape[2]
        return self.window, self.pending["rows"]

    def is_trimmable(self) -> bool:
        return False


KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: plain(10, 1, 1),
    "plain, padded to its end": lambda: plain(256),
    "plain, trimmed": lambda: trimmed(plain(300), 50),
    "plain, bfloat16": lambda: plain(10, 1, dtype=mx.bfloat16),
    "plain, without values": lambda: plain(10, values_dim=0),
    "live-quantized": lambda: filled(QuantizedKVCache(64, 4), 10, 1),
    "quantized later": lambda: plain(10).to_quantized(32, 8),
    "concatenating": lambda: filled(ConcatenateKVCache(), 5, 1),
    "rotating, not yet full": lambda: filled(RotatingKVCache(16), 5, 1, 1),
    "rotating, wrapped": lambda: filled(RotatingKVCache(16, keep=4), 20, *[1] * 9),
    "rotating, wrapped token by token": lambda: filled(RotatingKVCache(8), *[1] * 21),
    "chunked": chunked,
    "arrays": lambda: arrays(rows(3), rows(4, seed=1)[0]),
    "arrays, bfloat16": lambda: arrays(rows(3, dtype=mx.bfloat16)),
    "arrays, one empty": lambda: arrays(None, rows(4)),
    "arrays, padded": lambda: arrays(rows(3), left_padding=[2]),
    "nested": lambda: CacheList(arrays(rows(3)), plain(9)),
    "nested, one unused": lambda: CacheList(plain(9), KVCache()),
    "of a model file": lambda: filled(LayerCache(), 4, 3),
    "empty": lambda: KVCache(),
}


def arrays_in(value: Any) -> Iterator[mx.array]:
    """All arrays inside of cache objects."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, dict):
        yield from arrays_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays_in(item)
    elif hasattr(value, "__dict__"):
        yield from arrays_in(vars(value))


def same(one: Any, other: Any) -> bool:
    """Whether two values are alike to the bit, arrays and objects inside of them too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, mx.array):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dict__"):
        return same(vars(one), vars(other))
    return bool(one == other)


def bits(array: mx.array) -> bytes:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array).tobytes()


def leaves(cache: Any) -> list[Any]:
    return list(cache.caches) if isinstance(cache, CacheList) else [cache]


def visible(cache: Any) -> Any:
    """A cache without the rows that a `KVCache` keeps for tokens to come."""
    if type(cache) is KVCache and cache.keys is not None:
        end = cache.offset
        return cache.keys[:, :, :end], cache.values[:, :, :end], end
    return [visible(one) for one in cache.caches] if isinstance(cache, CacheList) else cache


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


# Snapshots


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_the_cache_to_the_bit(kind: str) -> None:
    """Class, arrays, and whatever else is kept beside them; a plain cache without its padding."""
    source, (restored,) = KINDS[kind](), Snapshot([KINDS[kind]()]).restore()
    assert type(restored) is type(source)
    assert same(visible(restored), visible(source))


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.startswith(("arrays", "nested"))])
def test_a_snapshot_goes_on_as_the_cache_does(kind: str) -> None:
    """With the same tokens behind it, each of several, the model sees the same as ever."""
    source, (restored,) = KINDS[kind](), Snapshot([KINDS[kind]()]).restore()
    values_dim = 0 if kind == "plain, without values" else DIM
    for tokens in (1, 1, 7, 1):
        new = [rows(tokens, seed=7), rows(tokens, seed=8, dim=values_dim)]
        if "bfloat16" in kind:
            new = [x.astype(mx.bfloat16) for x in new]
        assert same(restored.update_and_fetch(*new), source.update_and_fetch(*new))
        assert restored.offset == source.offset


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_independent(kind: str) -> None:
    """Of its source, which goes on, and of each cache that was restored from it."""
    source = KINDS[kind]()
    snapshot = Snapshot([source])
    for cache in (source, *snapshot.restore()):
        for leaf in leaves(cache):
            if hasattr(leaf, "update_and_fetch"):
                values_dim = 0 if kind == "plain, without values" else DIM
                leaf.update_and_fetch(rows(3, seed=9), rows(3, seed=9, dim=values_dim))
        for array in arrays_in(cache):
            array[...] = 0
    (restored,) = snapshot.restore()
    assert same(visible(restored), visible(KINDS[kind]()))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_restored_serves_any_thread(kind: str) -> None:
    """MLX can evaluate a lazy array on the thread alone that made it: none of them is lazy."""
    snapshot = in_another_thread(lambda: Snapshot([KINDS[kind]()]))
    restored = in_another_thread(snapshot.restore)
    mx.eval([array + 0 for array in arrays_in(restored)])
    assert same([visible(cache) for cache in restored], [visible(KINDS[kind]())])


@pytest.mark.parametrize(
    "dtype",
    [mx.float16, mx.bfloat16, mx.float32, mx.float64, mx.int32, mx.int64, mx.bool_, mx.complex64],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3, 4)], ids=str)
def test_any_dtype_and_shape_comes_back(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    """Scalars, nothing at all, and numbers that numpy does not know."""
    with mx.stream(mx.cpu):
        state = mx.array(np.arange(np.prod(shape, dtype=int)).reshape(shape)).astype(dtype)
        (restored,) = Snapshot([arrays(state)]).restore()
        assert same(restored[0], state)


def test_numbers_that_are_none_come_back() -> None:
    """NaN with its payload, infinities and both zeros, in bfloat16 too."""
    for dtype in (mx.float32, mx.bfloat16):
        words = mx.array([0x7FC1, 0xFF80, 0x7F80, 0x8000, 0], mx.uint16)
        state = words.view(mx.bfloat16).astype(dtype) if dtype == mx.float32 else words.view(dtype)
        (restored,) = Snapshot([arrays(state)]).restore()
        assert bits(restored[0]) == bits(state)


def test_a_snapshot_is_charged_for_what_it_holds() -> None:
    """Ten tokens of a buffer of 256 rows, and little beside them."""
    array_bytes = 2 * HEADS * 10 * DIM * 4
    assert array_bytes < Snapshot([plain(10)]).nbytes < array_bytes + 4096
    array_bytes = rows(50).nbytes
    assert array_bytes < Snapshot([arrays(rows(50))]).nbytes < array_bytes + 4096


def test_a_snapshot_of_a_view_holds_the_view_alone() -> None:
    """What a recurrent layer keeps is often the end of something large."""
    end = rows(1000)[:, :, -3:]
    assert Snapshot([arrays(end)]).nbytes < rows(3).nbytes + 4096


# What can be cut

CUTTABLE: dict[str, tuple[Callable[[], Any], bool]] = {
    "plain": (lambda: plain(10), True),
    "live-quantized": (lambda: filled(QuantizedKVCache(), 10), True),
    "rotating, not yet full": (lambda: filled(RotatingKVCache(16), 10), True),
    "rotating, full": (lambda: filled(RotatingKVCache(16), 16), False),
    "rotating, wrapped": (lambda: filled(RotatingKVCache(16), 10, *[1] * 10), False),
    "chunked": (chunked, False),
    "concatenating": (lambda: filled(ConcatenateKVCache(), 10), False),
    "arrays": (lambda: arrays(rows(3)), False),
    "nested": (lambda: CacheList(plain(10), plain(10)), True),
    "nested, one fixed": (lambda: CacheList(arrays(rows(3)), plain(10)), False),
    "of a model file": (lambda: filled(LayerCache(), 10), False),
}


@pytest.mark.parametrize("kind", CUTTABLE)
def test_what_can_be_cut(kind: str) -> None:
    """Only what `trim` shortens by exactly what it is asked to, and only if all layers can be."""
    make, expected = CUTTABLE[kind]
    assert can_be_cut([make()]) is expected
    assert can_be_cut([plain(10), make()]) is expected
    assert Snapshot([make(), plain(10)]).can_be_cut is expected


@pytest.mark.parametrize("kind", [kind for kind, (_, cuttable) in CUTTABLE.items() if cuttable])
@pytest.mark.parametrize("surplus", [1, 3, 9])
def test_a_cut_leaves_what_fewer_tokens_would_have_left(kind: str, surplus: int) -> None:
    """The model that goes on with it sees the same as if the rest had never been."""
    whole = CUTTABLE[kind][0]()
    fetched = Fetched(10 - surplus, checkpoint=Snapshot([whole]), surplus_tokens=surplus)
    (cut,) = caches_from(fetched)
    for cache, source in zip(leaves(cut), leaves(whole), strict=True):
        assert cache.offset == 10 - surplus
        keys, values = cache.update_and_fetch(rows(2, seed=5), rows(2, seed=6))
        source.trim(surplus)
        assert same((keys, values), source.update_and_fetch(rows(2, seed=5), rows(2, seed=6)))


# Plain caches as tensors


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_plain_caches_are_tensors(dtype: mx.Dtype) -> None:
    """Keys and values of each layer in turn; rows are those that were appended."""
    caches = [plain(200, 1, 99, dtype=dtype), plain(300, dtype=dtype, values_dim=32)]
    tensors = tensors_of(caches)
    assert tensors is not None
    shapes = [(tensor.spec.heads, tensor.spec.dim, tensor.spec.dtype) for tensor in tensors]
    assert shapes == [(HEADS, DIM, dtype)] * 3 + [(HEADS, 32, dtype)]
    sources = [caches[0].keys, caches[0].values, caches[1].keys, caches[1].values]
    for tensor, source in zip(tensors, sources, strict=True):
        for start, stop in ((0, 300), (0, 1), (128, 256), (299, 300), (5, 5)):
            assert same(tensor.rows(start, stop), source[0, :, start:stop])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_live_quantized_caches_are_dequantized(bits: int, group_size: int, dtype: mx.Dtype) -> None:
    """Rows are the numbers that upstream attends to, in the model's dtype."""
    cache = plain(40, dtype=dtype).to_quantized(group_size, bits)
    tensors = tensors_of([cache])
    assert tensors is not None
    for tensor, side in zip(tensors, (cache.keys, cache.values), strict=True):
        assert (tensor.spec.heads, tensor.spec.dim, tensor.spec.dtype) == (HEADS, DIM, dtype)
        whole = mx.dequantize(*side, group_size=group_size, bits=bits)
        assert same(tensor.rows(3, 40), whole[0, :, 3:40])
        assert tensor.rows(0, 40).dtype == dtype


def test_live_quantized_layers_may_stand_beside_plain_ones() -> None:
    """As a draft model's do, which are never quantized."""
    tensors = tensors_of([plain(40), plain(40).to_quantized(64, 8)])
    assert tensors is not None
    assert len({tensor.spec for tensor in tensors}) == 1


PLAIN = tuple(kind for kind in KINDS if kind.startswith("plain"))


@pytest.mark.parametrize("kind", KINDS)
def test_other_caches_are_no_tensors(kind: str) -> None:
    """One layer of another kind, or one that holds nothing, and all are kept whole."""
    expected = kind in (*PLAIN, "live-quantized", "quantized later")
    assert (tensors_of([KINDS[kind]()]) is not None) is expected
    assert (tensors_of([plain(10), KINDS[kind](), plain(10)]) is not None) is expected


def test_a_batch_is_no_tensor() -> None:
    """Caches that hold several sequences side by side have no rows of one."""
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((2, HEADS, 5, DIM)), mx.zeros((2, HEADS, 5, DIM)))
    assert tensors_of([cache]) is None
    assert tensors_of([cache.to_quantized(64, 8)]) is None


def test_a_subclass_of_a_plain_cache_is_kept_whole() -> None:
    """Whatever it adds is not known to be rows."""

    class Own(KVCache):  # type: ignore[misc]
        pass

    cache = filled(Own(), 10)
    assert tensors_of([cache]) is None
    assert not can_be_cut([cache])
    (restored,) = Snapshot([cache]).restore()
    assert type(restored) is Own and same(restored, cache)


# How many tokens were computed


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
        (lambda: [arrays(rows(3)), plain(20)], 20, 20),
        (lambda: [arrays(rows(3)), plain(20)], 25, 20),
        (lambda: [arrays(rows(3))], 20, 20),
        (lambda: [CacheList(arrays(rows(3)), plain(20))], 21, 20),
        (lambda: [CacheList(plain(20), KVCache())], 20, 20),
        (lambda: [filled(LayerCache(), 6)], 9, 6),
        (lambda: [chunked()], 20, 20),
        (lambda: [arrays(None, rows(4))], 20, 20),
        (lambda: [KVCache(), KVCache()], 0, None),
        (lambda: [KVCache(), KVCache()], 5, None),
        (lambda: [ArraysCache(2)], 5, None),
    ],
)
def test_offsets_are_believed_and_not_the_key(
    make: Callable[[], list[Any]], key_tokens: int, expected: int | None
) -> None:
    """Drafts store their caches under a longer key; rows may be left out, a state may not.

    None where there is nothing that could be stored.
    """
    assert (computed_tokens(make(), key_tokens) or None) == expected


# What is handed back


def test_tensors_come_back_as_plain_caches() -> None:
    """Exactly the rows of the hit, ready to be merged into a batch, and to grow."""
    tensors = [rows(n, seed=seed)[0] for seed, n in enumerate([5, 5, 5, 5])]
    caches = caches_from(Fetched(5, tensors))
    assert [type(cache) for cache in caches] == [KVCache, KVCache]
    for cache, keys, values in zip(caches, tensors[::2], tensors[1::2], strict=True):
        assert cache.offset == cache.size() == 5
        assert same((cache.keys, cache.values), (keys[None], values[None]))
        cache.update_and_fetch(rows(1), rows(1))
        assert cache.offset == 6
    batch = KVCache.merge([caches[0], KVCache()])
    assert batch.size() == 6


def test_plain_caches_serve_any_thread() -> None:
    """Like those that are restored: whoever fetched them may hand them on."""
    tensors = [rows(5, seed=seed)[0] for seed in range(2)]
    mx.eval(tensors)
    (cache,) = in_another_thread(lambda: caches_from(Fetched(5, tensors)))
    assert same(cache.keys, tensors[0][None])
