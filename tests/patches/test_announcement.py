"""The line that says what the prefix cache will do with a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlx_lm_kvcache_plugin.codecs.packing import TensorSpec
from mlx_lm_kvcache_plugin.codecs.registry import BUILT_IN, CodecRegistry
from mlx_lm_kvcache_plugin.patches.announcement import announcement, layers_of
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget
from tests.store.caches import Machine


class Model:
    """Fills its caches with nothing but shapes.

    Args:
        widths: of keys and values, for each layer.
        make: makes the cache of a layer.
    """

    def __init__(
        self,
        *widths: tuple[int, int],
        make: Callable[[], Any] = KVCache,
        dtype: mx.Dtype = mx.bfloat16,
    ) -> None:
        self.widths, self.make, self.dtype = widths, make, dtype

    def make_cache(self) -> list[Any]:
        return [self.make() for _ in self.widths]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> None:
        assert tokens.shape == (1, 1)
        for layer, widths in zip(cache, self.widths, strict=True):
            keys, values = (mx.zeros((1, 2, 1, width), self.dtype) for width in widths)
            for one in layer.caches if isinstance(layer, CacheList) else [layer]:
                if isinstance(one, ArraysCache):
                    one[0] = keys
                else:
                    one.update_and_fetch(keys, values)


def cache_for(budget: Budget | None = None, **settings: Any) -> PrefixCache:
    registry = CodecRegistry()
    for name, factory in BUILT_IN.items():
        registry.register(name, factory)
    return PrefixCache(
        Settings.resolve(settings),
        registry,
        budget or Budget(limit_bytes=GIB, probe=Machine().probe),
    )


ALIKE = [(64, 64)] * 3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kv_cache_bits": 4}, "codec rotated, keys 4 bits, values 4 bits, group size 64,"),
        (
            {"kv_cache_bits": 5, "kv_cache_value_bits": 4, "kv_cache_group_size": 32},
            "codec rotated, keys 5 bits, values 4 bits, group size 32,",
        ),
        ({"kv_cache_codec": "affine"}, "codec affine, keys 8 bits, values 8 bits, group size 64,"),
        ({"cache_memory_mb": 100}, "codec raw,"),
    ],
)
def test_codec_bits_and_group_size(settings: dict[str, Any], expected: str) -> None:
    """And the size of a block. Full precision has neither bits nor groups."""
    line = announcement(cache_for(**settings), Model(*ALIKE))
    assert line.startswith(f"prefix cache: {expected} blocks of 128 tokens; ")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(*ALIKE), "3 of 3 layers quantized"),
        (Model((192, 128), (192, 128)), "2 of 2 layers quantized"),
        (Model((512, 64)), "1 of 1 layers quantized"),
        (
            Model((80, 80), (112, 112)),
            "0 of 2 layers quantized, 2 tensors raw: no group size divides their width of 80, "
            "2 tensors raw: no group size divides their width of 112",
        ),
        (
            Model((64, 80), (64, 64)),
            "1 of 2 layers quantized, 1 tensors raw: no group size divides their width of 80",
        ),
        (Model((128, 0)), "1 of 1 layers quantized"),
        (
            Model((64, 64), dtype=mx.int32),
            "0 of 1 layers quantized, 2 tensors raw: they hold int32",
        ),
        (
            Model(*ALIKE, make=lambda: RotatingKVCache(16)),
            "all 3 layers kept whole and raw as checkpoints (RotatingKVCache)",
        ),
        (
            Model(*ALIKE, make=lambda: CacheList(ArraysCache(1), KVCache())),
            "all 3 layers kept whole and raw as checkpoints (ArraysCache, KVCache)",
        ),
    ],
)
def test_how_many_layers_are_quantized_and_why_not_all(model: Model, expected: str) -> None:
    """Tensor by tensor, with the reason of those that stay raw."""
    line = announcement(cache_for(kv_cache_bits=4), model)
    assert f"blocks of 128 tokens; {expected}; limit " in line


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_smaller_group_size_is_no_reason(group_size: int) -> None:
    """Widths of 64 and 96 take groups of 64 and 32, though 128 was asked for."""
    cache = cache_for(kv_cache_bits=4, kv_cache_group_size=group_size)
    used = {64: min(64, group_size), 96: 32}
    told = [f", groups of {g} for a width of {dim}" for dim, g in used.items() if g != group_size]
    assert f"; 1 of 1 layers quantized{''.join(told)}; " in announcement(cache, Model((64, 96)))


def test_full_precision_quantizes_nothing() -> None:
    """And needs no reason for it."""
    line = announcement(cache_for(cache_memory_mb=1), Model((80, 80), (64, 64)))
    assert "; all 2 layers in full precision; " in line


def test_a_fixed_limit() -> None:
    """In bytes, and whence it came."""
    budget = Budget(limit_bytes=123 << 20, probe=Machine().probe)
    line = announcement(cache_for(budget, kv_cache_bits=8), Model(*ALIKE))
    assert line.endswith("; limit 128,974,848 bytes (a fixed limit)")


def test_a_share_is_resolved_once_the_model_is_there() -> None:
    """Of what is available then, and not at the start."""
    machine = Machine(available_bytes=10 * GIB)
    budget = Budget(percent=0.25, probe=machine.probe)
    cache = cache_for(budget, kv_cache_bits=8)
    machine.available_bytes = 4 * GIB
    line = announcement(cache, Model(*ALIKE))
    assert line.endswith("; limit 1,073,741,824 bytes (25% of the 4,294,967,296 bytes available)")
    assert budget.limit_bytes == GIB


def test_a_model_that_takes_more_than_tokens_is_announced_all_the_same() -> None:
    """Its layers are known with its first request; the limit holds before."""

    class Choosy(Model):
        def __call__(self, tokens: mx.array, cache: list[Any]) -> None:
            raise TypeError("no image")

    cache = cache_for(Budget(percent=0.5, probe=Machine(8 * GIB).probe), kv_cache_bits=8)
    line = announcement(cache, Choosy(*ALIKE))
    assert "codec rotated" in line and "no image" in line and "limit 4,294,967,296 bytes" in line
    assert cache.budget.limit_bytes == 4 * GIB


def test_nothing_is_computed_for_it() -> None:
    """A large model would be slow to say anything: only shapes are asked for."""
    caches = layers_of(Model((1 << 28, 1 << 28), (1 << 28, 1 << 28), dtype=mx.float32))
    assert caches[1].keys.shape == (1, 2, 256, 1 << 28)  # 512 GiB, had it been made


def test_what_is_announced_is_what_is_done() -> None:
    """The same widths, the same decision."""
    cache = cache_for(kv_cache_bits=4)
    packer = cache.packers.for_specs([TensorSpec(2, w, mx.bfloat16) for w in (64, 80)]).blocks
    assert [codec.name for codec in packer.codecs] == ["rotated", "raw"]
