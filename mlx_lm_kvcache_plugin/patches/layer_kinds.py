"""Upstream's classes of cache objects, each taken apart and put together again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..codecs.tensors import TensorSpec
from ..hookspecs import hookimpl
from ..layers import STATEFUL, TOKEN_WISE, WINDOW, Layer, LayerKind, LayerKinds
from ..plugins import plugins
from .snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """Keys or values, [1, heads, tokens and padding, dim], of which `length` rows are in use."""

    array: mx.array
    length: int

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.array.shape[1], self.array.shape[3], self.array.dtype)

    def rows(self, start: int, stop: int) -> mx.array:
        return self.array[0, :, start:stop]


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """The keys or values of a `QuantizedKVCache`: packed words, scales and biases."""

    parts: tuple[mx.array, mx.array, mx.array]
    group_size: int
    bits: int

    @property
    def spec(self) -> TensorSpec:
        packed, scales, _ = self.parts
        return TensorSpec(packed.shape[1], packed.shape[3] * 32 // self.bits, scales.dtype)

    def rows(self, start: int, stop: int) -> mx.array:
        packed, scales, biases = (part[0, :, start:stop] for part in self.parts)
        return mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)


class TokenWise:
    """Keys and values of every token, each row for itself: `keys`, `values` and an `offset`.

    Args:
        make: makes an empty cache object.
        takes_room: whether its arrays may be longer than what is in them.
    """

    name = TOKEN_WISE

    def __init__(self, make: Callable[[], Any], takes_room: bool = False) -> None:
        self._make = make
        self.takes_room = takes_room

    def take(self, cache: Any) -> Layer[Any] | None:
        if type(cache) is QuantizedKVCache:
            keys: Any = cache.keys
            values: Any = cache.values
            sides = [
                QuantizedTensor(tuple(s), cache.group_size, cache.bits) for s in (keys, values)
            ]
            return Layer(rows=tuple(sides)) if _is_single(sides[0].parts[0]) else None
        return Layer(rows=_tensors(cache, cache.offset)) if _is_single(cache.keys) else None

    def restore(self, layer: Layer[mx.array], tokens: int) -> Any:
        return _filled(self._make(), layer.rows, offset=tokens)


class Rotating:
    """A `RotatingKVCache`: all rows until it is full, then those of the last `max_size` tokens.

    More rows than that, as a long prompt leaves them, are dropped by upstream itself before anyone
    looks at them. In temporal order the next row to go is the first one behind the `keep` rows.
    """

    name = WINDOW

    def take(self, cache: Any) -> Layer[Any] | None:
        if not _is_single(cache.keys):
            return None
        fixed = (cache.max_size, cache.keep)
        held = min(cache.offset, cache.max_size)
        if cache._idx == cache.offset <= min(cache.max_size, cache.keys.shape[2]):
            return Layer(fixed, rows=_tensors(cache, held))
        sides = [
            self._last(cache._temporal_order(side), held, cache.keep)
            for side in (cache.keys, cache.values)
        ]
        return Layer(fixed, window=tuple(PlainTensor(side, side.shape[2]) for side in sides))

    @staticmethod
    def _last(ordered: mx.array, rows: int, keep: int) -> mx.array:
        surplus = ordered.shape[2] - rows
        if surplus <= 0:
            return ordered
        kept, rest = ordered[..., :keep, :], ordered[..., keep + surplus :, :]
        return mx.concatenate([kept, rest], axis=2) if keep else rest

    def restore(self, layer: Layer[mx.array], tokens: int) -> Any:
        max_size, keep = cast(tuple[int, int], layer.fixed)
        sides = layer.rows or layer.window
        cache: Any = RotatingKVCache(max_size, keep)  # type: ignore[no-untyped-call]
        return _filled(cache, sides, offset=tokens, _idx=sides[0].shape[1])


class Chunked:
    """A `ChunkedKVCache`: all rows until its front is dropped, then those of the last chunk."""

    name = WINDOW

    def take(self, cache: Any) -> Layer[Any] | None:
        held = cache.offset - cache.start_position
        if not _is_single(cache.keys) or held < 0:
            return None
        tensors = _tensors(cache, held)
        if cache.start_position:
            return Layer(cache.chunk_size, window=tensors)
        return Layer(cache.chunk_size, rows=tensors)

    def restore(self, layer: Layer[mx.array], tokens: int) -> Any:
        sides = layer.rows or layer.window
        start = tokens - sides[0].shape[1]
        # mlx-lm 0.31 drops by the length of the buffer, which has to be what upstream makes it.
        padding = -sides[0].shape[1] % ChunkedKVCache.step
        padded = tuple(mx.pad(side, [(0, 0), (0, padding), (0, 0)]) for side in sides)
        cache: Any = ChunkedKVCache(layer.fixed)  # type: ignore[no-untyped-call]
        return _filled(cache, padded, offset=tokens, start_position=start)


class State:
    """Anything, kept whole and raw: recurrent state, and what nobody knows."""

    name = STATEFUL

    def take(self, cache: Any) -> Layer[Any]:
        return Layer(state=cache)

    def restore(self, layer: Layer[mx.array], tokens: int) -> Any:
        return layer.state


@dataclass(frozen=True, slots=True)
class Empty:
    """A cache object that nothing was written to, to be had anew."""

    cache_class: type
    snapshot: Snapshot = field(compare=False)


class Unused:
    """A cache object that its model does not use, or not yet."""

    name = "unused"

    def take(self, cache: Any) -> Layer[Any]:
        return Layer(Empty(type(cache), Snapshot.of([cache])))

    def restore(self, layer: Layer[mx.array], tokens: int) -> Any:
        assert isinstance(layer.fixed, Empty)
        return layer.fixed.snapshot.restore()[0]


STATE, UNUSED = State(), Unused()

_PLAIN = TokenWise(KVCache, takes_room=True)

BUILT_IN: dict[type, LayerKind] = {
    KVCache: _PLAIN,
    QuantizedKVCache: _PLAIN,  # what comes back is plain: a batch takes no other
    ConcatenateKVCache: TokenWise(ConcatenateKVCache),
    RotatingKVCache: Rotating(),
    ChunkedKVCache: Chunked(),
    ArraysCache: STATE,
}


class BuiltInLayerKinds:
    """The kinds of upstream's own classes, registered through the hook that anyone may use."""

    NAME = "built-in layer kinds"

    @staticmethod
    @hookimpl(tryfirst=True)
    def kvcache_register_layer_kinds(register: Callable[[type, LayerKind], None]) -> None:
        for cache_class, kind in BUILT_IN.items():
            register(cache_class, kind)


def register_built_in() -> None:
    """Let plugins see upstream's own classes, before they add theirs; again changes nothing."""
    plugins().register(BuiltInLayerKinds(), BuiltInLayerKinds.NAME)


def known_kinds() -> LayerKinds:
    """Upstream's own kinds, and those of plugins."""
    register_built_in()
    return plugins().layer_kinds()


def is_empty(cache: Any) -> bool:
    """Whether nothing was written to a cache object."""
    if isinstance(cache, ArraysCache):  # which only looks at its first slot
        return all(array is None for array in cache.cache)
    try:
        return bool(cache.empty())
    except (AttributeError, NotImplementedError):
        return False


def _is_single(array: mx.array) -> bool:
    """Whether keys are those of one sequence, [1, heads, tokens, dim]."""
    return array.ndim == 4 and array.shape[0] == 1


def _tensors(cache: Any, length: int) -> tuple[PlainTensor, PlainTensor]:
    return PlainTensor(cache.keys, length), PlainTensor(cache.values, length)


def _filled(cache: Any, sides: tuple[mx.array, ...], **attributes: Any) -> Any:
    """A cache object with these keys and values, [heads, rows, dim] each."""
    cache.keys, cache.values = (side[None] for side in sides)
    vars(cache).update(attributes)
    return cache
