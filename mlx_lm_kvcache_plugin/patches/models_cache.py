"""Upstream's cache objects, translated at the border. Nothing behind it ever sees one.

Two translations: a list whose layers are all plain `KVCache` (or its live-quantized form) becomes
tensors, rows per token; any other list becomes a snapshot, whole and raw.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from ..codecs.base import from_host, to_host
from ..codecs.packing import TensorSpec
from ..errors import KVCachePluginError
from ..fetched import Fetched

LayerCaches = list[Any]
"""Upstream's prompt cache: one cache object for each layer."""


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """The keys or values of a `KVCache`: [1, heads, tokens and padding, dim]."""

    array: mx.array

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


KVTensor = PlainTensor | QuantizedTensor


def tensors_of(caches: LayerCaches) -> list[KVTensor] | None:
    """Keys and values of each layer in turn; None if a layer is of another kind."""
    if not are_rows_per_token(caches):
        return None
    return [
        QuantizedTensor(tuple(side), cache.group_size, cache.bits)
        if type(cache) is QuantizedKVCache
        else PlainTensor(side)
        for cache in caches
        for side in (cache.keys, cache.values)
    ]


def are_rows_per_token(caches: LayerCaches) -> bool:
    """Whether every layer is plain, or plain and live-quantized, and holds one sequence."""
    return bool(caches) and all(
        type(cache) in (KVCache, QuantizedKVCache)
        and cache.keys is not None
        and (cache.keys[0] if type(cache) is QuantizedKVCache else cache.keys).shape[0] == 1
        for cache in caches
    )


def leaves_of(caches: Sequence[Any]) -> Iterator[Any]:
    """All cache objects, those inside of `CacheList`s too."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves_of(cache.caches)
        else:
            yield cache


def computed_tokens(caches: LayerCaches, key_tokens: int) -> int | None:
    """How many tokens the layers really stand for; None if they do not agree, or for none.

    The layers' offsets are to be believed, and not the key: speculative decoding stores its
    caches under a key that is longer than they are, and its draft layers may lag behind.
    """
    filled = [cache for cache in leaves_of(caches) if not _is_empty(cache)]
    if not filled:
        return None
    offsets = {cache.offset for cache in filled if isinstance(getattr(cache, "offset", None), int)}
    if not offsets:
        return key_tokens
    if are_rows_per_token(caches):
        return int(min(key_tokens, *offsets))
    agreed = int(offsets.pop())
    return None if offsets or agreed > key_tokens else agreed


def _is_empty(cache: Any) -> bool:
    if isinstance(cache, ArraysCache):  # which only looks at its first slot
        return all(array is None for array in cache.cache)
    try:
        return bool(cache.empty())
    except (AttributeError, NotImplementedError):
        return False


def caches_from(fetched: Fetched) -> LayerCaches:
    """Upstream's cache objects for what was fetched."""
    if fetched.tensors is not None:
        tensors = [tensor[None] for tensor in fetched.tensors]
        mx.eval(tensors)  # a lazy array could not be evaluated on another thread
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return [_plain_cache(keys, values) for keys, values in pairs]
    assert isinstance(fetched.checkpoint, Snapshot)
    caches = fetched.checkpoint.restore()
    for cache in leaves_of(caches) if fetched.surplus_tokens else ():
        if cache.trim(fetched.surplus_tokens) != fetched.surplus_tokens:
            raise KVCachePluginError(f"a {type(cache).__name__} could not be cut as it should")
    return caches


def _plain_cache(keys: mx.array, values: mx.array) -> Any:
    """A `KVCache` that holds exactly these rows, [1, heads, tokens, dim]."""
    cache: Any = KVCache()  # type: ignore[no-untyped-call]
    cache.keys, cache.values, cache.offset = keys, values, keys.shape[2]
    return cache


EXACTLY_TRIMMABLE = (KVCache, QuantizedKVCache, RotatingKVCache)
"""Whose `trim` takes off what it was asked to, if `is_trimmable` says that it may, and leaves what
goes on as if the rest had never been. `ChunkedKVCache` takes off less, `ConcatenateKVCache` appends
behind what it should have forgotten."""


def can_be_cut(caches: LayerCaches) -> bool:
    """Whether every layer can be shortened to any number of tokens."""
    return all(
        type(cache) in EXACTLY_TRIMMABLE and cache.is_trimmable() for cache in leaves_of(caches)
    )


class Snapshot:
    """A prompt cache of any kind, copied whole to host memory, bit for bit.

    It goes by attributes, so that classes from model files are copied like upstream's own.

    Attributes:
        nbytes: everything it holds.
        can_be_cut: whether it can be shortened to any number of tokens once it is restored.
    """

    __slots__ = ("_layers", "can_be_cut", "nbytes")

    def __init__(self, caches: LayerCaches) -> None:
        self.can_be_cut = can_be_cut(caches)
        sizes: list[int] = [object.__sizeof__(self)]
        self._layers = [_freeze(cache, sizes.append) for cache in caches]
        self.nbytes = sum(sizes)

    def restore(self) -> LayerCaches:
        """New cache objects in the same state, evaluated."""
        return [_thaw(layer) for layer in self._layers]


def _without_padding(cache: Any) -> Any:
    """A `KVCache` without the rows that it keeps for tokens to come; any other as it is."""
    if type(cache) is not KVCache or cache.keys is None or cache.values is None:
        return cache
    keys, values = cache.keys, cache.values
    return _plain_cache(keys[:, :, : cache.offset], values[:, :, : cache.offset])


@dataclass(frozen=True, slots=True)
class _HostArray:
    """An array of MLX in host memory, and the dtype that it had."""

    array: Any
    dtype: mx.Dtype


@dataclass(frozen=True, slots=True)
class _HostObject:
    """An object that may hold arrays, by its class and its attributes."""

    kind: type
    attributes: dict[str, Any]


def _freeze(value: Any, count: Callable[[int], None]) -> Any:
    """Copy a value to host memory, arrays and cache objects inside of it too."""
    value = _without_padding(value)
    if isinstance(value, mx.array):
        frozen: Any = _HostArray(to_host(value), value.dtype)
        count(sys.getsizeof(frozen.array))
    elif isinstance(value, list | tuple):
        frozen = type(value)(_freeze(item, count) for item in value)
    elif isinstance(value, dict):
        frozen = {key: _freeze(item, count) for key, item in value.items()}
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        frozen = _HostObject(type(value), _freeze(vars(value), count))
        count(sys.getsizeof(frozen.attributes))
    else:
        frozen = copy.deepcopy(value)
    count(sys.getsizeof(frozen))
    return frozen


def _thaw(frozen: Any) -> Any:
    """Undo `_freeze`."""
    if isinstance(frozen, _HostArray):
        array = from_host(frozen.array, frozen.dtype)
        mx.eval(array)
        return array
    if isinstance(frozen, _HostObject):
        value: Any = object.__new__(frozen.kind)
        vars(value).update(_thaw(frozen.attributes))
        return value
    if isinstance(frozen, list | tuple):
        return type(frozen)(_thaw(item) for item in frozen)
    if isinstance(frozen, dict):
        return {key: _thaw(item) for key, item in frozen.items()}
    return copy.deepcopy(frozen)
