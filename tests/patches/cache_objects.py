"""Cache objects of all kinds and in all states, and what becomes of them at the border."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_lm_kvcache_plugin.layers import Fetched, LayerKinds, Layers
from mlx_lm_kvcache_plugin.patches.layer_kinds import BUILT_IN
from mlx_lm_kvcache_plugin.patches.models_cache import put_together, take_apart

HEADS, DIM = 2, 64
WINDOW = 16
CHUNK = 8

KEY_TOKENS = 10_000
"""A key longer than any of the caches, for states that cannot tell how many tokens they are of."""


def known_kinds() -> LayerKinds:
    """Those of upstream's own classes."""
    kinds = LayerKinds()
    for cache_class, kind in BUILT_IN.items():
        kinds.register(cache_class, kind)
    return kinds


# Making them


def rows(tokens: int, *, seed: int = 0, dim: int = DIM, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Keys or values as a model hands them to its cache: [1, heads, tokens, dim].

    The first of them are the same for any number of tokens.
    """
    values = np.random.default_rng(seed).standard_normal((tokens, HEADS, dim), np.float32)
    return mx.array(values.swapaxes(0, 1)[None]).astype(dtype)


def filled(cache: Any, *steps: int, dtype: mx.Dtype = mx.float32, values_dim: int = DIM) -> Any:
    """A cache after calls with that many tokens each, which are the same however they are cut."""
    keys = rows(sum(steps), seed=1, dtype=dtype)
    values = rows(sum(steps), seed=2, dim=values_dim, dtype=dtype)
    end = 0
    for tokens in steps:
        start, end = end, end + tokens
        cache.update_and_fetch(keys[:, :, start:end], values[:, :, start:end])
    return cache


def plain(*steps: int, **options: Any) -> Any:
    return filled(KVCache(), *steps, **options)


def rotating(*steps: int, keep: int = 0, **options: Any) -> Any:
    return filled(RotatingKVCache(WINDOW, keep=keep), *steps, **options)


def trimmed(cache: Any, tokens: int) -> Any:
    cache.trim(tokens)
    return cache


def arrays(*slots: mx.array | None, left_padding: list[int] | None = None) -> Any:
    """Recurrent state; a slot may be empty."""
    cache = ArraysCache(len(slots), left_padding=left_padding)
    for index, slot in enumerate(slots):
        cache[index] = slot
    return cache


def integers(*shape: int) -> mx.array:
    """Tokens, or what a model counts."""
    return mx.array(np.random.default_rng(3).integers(-(2**20), 2**20, shape), mx.int32)


def drop_front(cache: Any) -> None:
    """What `maybe_trim_front` means; mlx-lm 0.31 counts rows that are not in use yet."""
    held = cache.offset - cache.start_position
    surplus = held - cache.chunk_size
    if cache.keys is not None and surplus > 0:
        cache.start_position += surplus
        cache.keys = cache.keys[..., surplus:held, :]
        cache.values = cache.values[..., surplus:held, :]


def chunked(*steps: int) -> Any:
    """The front is dropped between two steps, and behind the last."""
    cache = ChunkedKVCache(CHUNK)
    whole = plain(*steps)
    end = 0
    for tokens in steps:
        start, end = end, end + tokens
        cache.update_and_fetch(whole.keys[:, :, start:end], whole.values[:, :, start:end])
        drop_front(cache)
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


class OwnKVCache(KVCache):  # type: ignore[misc]
    """Adds to upstream's what nobody knows."""


def batch_of_two() -> Any:
    """Two sequences side by side."""
    cache = KVCache()
    cache.update_and_fetch(*(mx.concatenate([rows(5, seed=s)] * 2) for s in (1, 2)))
    return cache


TOKEN_WISE_KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: plain(10, 1, 1),
    "plain, padded to its end": lambda: plain(256),
    "plain, trimmed": lambda: trimmed(plain(300), 50),
    "plain, bfloat16": lambda: plain(10, 1, dtype=mx.bfloat16),
    "plain, without values": lambda: plain(10, values_dim=0),
    "plain, integers": lambda: plain(10, dtype=mx.int32),
    "concatenating": lambda: filled(ConcatenateKVCache(), 5, 1),
    "rotating, not yet full": lambda: rotating(5, 1, 1),
    "rotating, trimmed": lambda: trimmed(rotating(12), 5),
    "rotating, full to the brim": lambda: rotating(WINDOW),
    "rotating, full to the brim token by token": lambda: rotating(*[1] * WINDOW),
    "chunked, nothing dropped": lambda: chunked(5, 3),
}
"""What has a row for each token."""

QUANTIZED_KINDS: dict[str, Callable[[], Any]] = {
    "live-quantized": lambda: filled(QuantizedKVCache(64, 4), 10, 1),
    "quantized later": lambda: plain(10).to_quantized(32, 8),
}

WINDOW_KINDS: dict[str, Callable[[], Any]] = {
    "rotating, one more than full": lambda: rotating(WINDOW, 1),
    "rotating, wrapped": lambda: rotating(20, *[1] * 9, keep=4),
    "rotating, wrapped token by token": lambda: rotating(*[1] * 37),
    "rotating, as a long prompt leaves it": lambda: rotating(3 * WINDOW),
    "rotating, bfloat16": lambda: rotating(20, dtype=mx.bfloat16),
    "chunked, its front dropped": lambda: chunked(20),
    "chunked, its front dropped by the way": lambda: chunked(5, 7, 1, 1, 9),
}
"""What has the rows of the last tokens alone."""

STATE_KINDS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: arrays(rows(3), rows(4, seed=1)[0]),
    "arrays, bfloat16": lambda: arrays(rows(3, dtype=mx.bfloat16)),
    "arrays, integers": lambda: arrays(integers(1, 7), rows(2)),
    "arrays, the first one empty": lambda: arrays(None, rows(4)),
    "arrays, the last one empty": lambda: arrays(rows(4), None),
    "arrays, padded": lambda: arrays(rows(3), left_padding=[2]),
    "of a model file": lambda: filled(LayerCache(), 4, 3),
    "a subclass of a plain one": lambda: filled(OwnKVCache(), 10),
    "two sequences side by side": batch_of_two,
}
"""What is kept whole."""

NESTED_KINDS: dict[str, Callable[[], Any]] = {
    "nested": lambda: CacheList(arrays(rows(3)), plain(9)),
    "nested, all plain": lambda: CacheList(plain(9), plain(9, dtype=mx.bfloat16)),
    "nested, one unused": lambda: CacheList(plain(9), KVCache()),
    "nested twice": lambda: CacheList(CacheList(plain(9), rotating(9)), arrays(rows(3))),
    "a list": lambda: [plain(9), rotating(9)],
    "a tuple in a list": lambda: [(plain(9), plain(9)), arrays(rows(3))],
}

KINDS = {
    **TOKEN_WISE_KINDS,
    **QUANTIZED_KINDS,
    **WINDOW_KINDS,
    **STATE_KINDS,
    **NESTED_KINDS,
}


# Taking them apart and putting them together


def taken(caches: Sequence[Any], key_tokens: int = KEY_TOKENS, **options: Any) -> Layers:
    """All layers apart; it is an error if they cannot be."""
    layers = take_apart(list(caches), key_tokens, known_kinds(), **options)
    assert layers is not None
    return layers


def copied(tensor: mx.array) -> mx.array:
    """An array of its own, evaluated."""
    copy = tensor + mx.zeros_like(tensor)
    mx.eval(copy)
    return copy


def fetched_of(layers: Layers, tokens: int | None = None) -> Fetched:
    """What the store would hand out for the first `tokens` of them, in full precision."""
    tokens = layers.tokens if tokens is None else tokens
    return Fetched(
        layers.layout,
        tokens,
        [copied(tensor.rows(0, tokens)) for tensor in layers.rows],
        [copied(tensor.rows(0, tensor.length)) for tensor in layers.windows],
        layers.freeze().restore(),
    )


def brought_back(cache: Any, tokens: int | None = None) -> Any:
    """A cache object after its way through the border and back, cut to `tokens` if it says so."""
    (back,) = put_together(fetched_of(taken([cache]), tokens))
    return back


# Looking at them


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


def visible(cache: Any) -> Any:
    """All that can ever be seen of a cache: no rows for tokens to come, or that are forgotten.

    Where rows rotate, they are in the order of their tokens.
    """
    if isinstance(cache, CacheList):
        return visible(cache.caches)
    if isinstance(cache, list | tuple):
        return type(cache)(map(visible, cache))
    if getattr(cache, "keys", None) is None:
        return cache
    kept = {name: getattr(cache, name, None) for name in ("offset", "max_size", "keep")}
    if type(cache) is QuantizedKVCache:
        sides = [dequantized(cache, side)[:, :, : cache.offset] for side in plain_sides(cache)]
        return KVCache, kept, sides
    if type(cache) is RotatingKVCache:
        sides = [in_order(cache, side) for side in plain_sides(cache)]
    elif type(cache) is ChunkedKVCache:
        held = cache.offset - cache.start_position
        kept |= {"start": cache.start_position, "chunk": cache.chunk_size}
        sides = [side[:, :, :held] for side in plain_sides(cache)]
    elif type(cache) in (KVCache, ConcatenateKVCache):
        sides = [side[:, :, : cache.offset] for side in plain_sides(cache)]
    else:
        return cache
    return type(cache), kept, sides


def plain_sides(cache: Any) -> list[Any]:
    return [cache.keys, cache.values]


def dequantized(cache: Any, side: Any) -> mx.array:
    whole: mx.array = mx.dequantize(*side, group_size=cache.group_size, bits=cache.bits)
    return whole


def in_order(cache: Any, side: mx.array) -> mx.array:
    """The rows of a window that are still in use, in the order of their tokens."""
    ordered: mx.array = cache._temporal_order(side)[:, :, : cache.offset]
    surplus = max(0, ordered.shape[2] - cache.max_size)
    keep = cache.keep if surplus else 0
    return mx.concatenate([ordered[:, :, :keep], ordered[:, :, keep + surplus :]], axis=2)


def step(cache: Any, tokens: int, seed: int) -> Any:
    """What a model sees that gives the cache these tokens: all rows, and the mask for them.

    A single token sees them in any order: they are told by keys and values together.
    """
    held = next(arrays_in(cache))
    values_dim = cache.values.shape[3] if hasattr(cache, "values") else DIM
    masks = [
        cache.make_mask(tokens, window_size=size, return_array=True) for size in window_sizes(cache)
    ]
    new = rows(tokens, seed=seed), rows(tokens, seed=seed + 1, dim=values_dim)
    keys, values = cache.update_and_fetch(
        *(mx.concatenate([side] * held.shape[0]).astype(held.dtype) for side in new)
    )
    if tokens > 1 or not masks:
        return cache.offset, keys, values, masks
    return cache.offset, *(rows_seen(keys, values, mask) for mask in masks)


def window_sizes(cache: Any) -> list[int]:
    """What a mask may be asked for; upstream's is wrong for a smaller one where rows are kept."""
    if not isinstance(cache, RotatingKVCache):
        return []
    return [cache.max_size] if cache.keep else [cache.max_size, cache.max_size // 2]


def rows_seen(keys: mx.array, values: mx.array, mask: mx.array | None) -> list[bytes]:
    """The rows that a mask leaves, sorted."""
    tokens = range(keys.shape[2])
    seen = [mask is None or bool(mask[..., token].item()) for token in tokens]
    return sorted(
        bits(keys[:, :, token]) + bits(values[:, :, token]) for token in tokens if seen[token]
    )


def spoil(cache: Any) -> None:
    """Go on with a cache, and write into all that it holds then."""
    if hasattr(cache, "update_and_fetch") and type(cache) is not QuantizedKVCache:
        step(cache, 3, 9)
    for array in arrays_in(cache):
        array[...] = 0


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()
