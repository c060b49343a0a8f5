"""A plugin that knows the cache objects of one model: keys and values in a single array."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_lm_kvcache_plugin import hookimpl
from mlx_lm_kvcache_plugin.codecs.tensors import TensorSpec
from mlx_lm_kvcache_plugin.layers import TOKEN_WISE, Layer


class PairedCache:
    """As the model's file defines it."""

    def __init__(self):
        self.pair = None  # keys and values, [2, heads, tokens, dim]
        self.offset = 0

    def empty(self):
        return self.pair is None

    def update_and_fetch(self, keys, values):
        new = mx.concatenate([keys, values])
        self.pair = new if self.pair is None else mx.concatenate([self.pair, new], axis=2)
        self.offset += keys.shape[2]
        return self.pair[:1], self.pair[1:]


@dataclass(frozen=True)
class Side:
    """Keys or values, [heads, tokens, dim]: a row for each token."""

    array: mx.array

    @property
    def spec(self) -> TensorSpec:
        heads, _, dim = self.array.shape
        return TensorSpec(heads, dim, self.array.dtype)

    def rows(self, start: int, stop: int) -> mx.array:
        return self.array[:, start:stop]


class Paired:
    """Takes such a cache apart, and makes a new one of what comes back."""

    name = TOKEN_WISE

    def take(self, cache: PairedCache) -> Layer:
        return Layer(rows=(Side(cache.pair[0]), Side(cache.pair[1])))

    def restore(self, layer: Layer, tokens: int) -> PairedCache:
        cache = PairedCache()
        cache.pair, cache.offset = mx.stack(layer.rows), tokens
        mx.eval(cache.pair)
        return cache


@hookimpl
def kvcache_register_layer_kinds(register):
    register(PairedCache, Paired())
