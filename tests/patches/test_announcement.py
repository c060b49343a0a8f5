"""The line that says what the prefix cache will do with a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_lm_kvcache_plugin.codecs.registry import BUILT_IN, CodecRegistry
from mlx_lm_kvcache_plugin.codecs.tensors import TensorSpec
from mlx_lm_kvcache_plugin.patches.announcement import announcement, layers_of
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget
from tests.patches.cache_objects import known_kinds
from tests.store.caches import Machine


class Model:
    """Fills its caches with nothing but shapes.

    Args:
        layers: for each the widths of keys and values, and what makes its cache if it is no plain
            one.
    """

    def __init__(
        self,
        *layers: tuple[int, int] | tuple[int, int, Callable[[], Any]],
        dtype: mx.Dtype = mx.bfloat16,
    ) -> None:
        self.layers, self.dtype = layers, dtype

    def make_cache(self) -> list[Any]:
        return [layer[2]() if len(layer) == 3 else KVCache() for layer in self.layers]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> None:
        assert tokens.shape == (1, 1)
        for layer, (width, other, *_) in zip(cache, self.layers, strict=True):
            keys, values = (mx.zeros((1, 2, 1, w), self.dtype) for w in (width, other))
            for one in layer.caches if isinstance(layer, CacheList) else [layer]:
                if isinstance(one, ArraysCache):
                    one[0] = keys
                elif not isinstance(one, Unused):
                    one.update_and_fetch(keys, values)


class Unused(KVCache):  # type: ignore[misc]
    """Made, and never written to."""


def window() -> Any:
    return RotatingKVCache(16)


def state() -> Any:
    return ArraysCache(1)


def cache_for(budget: Budget | None = None, **settings: Any) -> PrefixCache:
    registry = CodecRegistry()
    for name, factory in BUILT_IN.items():
        registry.register(name, factory)
    return PrefixCache(
        Settings.resolve(settings),
        registry,
        budget or Budget(limit_bytes=GIB, probe=Machine().probe),
    )


def announced(cache: PrefixCache, model: Any, draft_model: Any = None) -> str:
    return announcement(cache, known_kinds(), model, draft_model)


ALIKE = [(64, 64)] * 3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kv_cache_bits": 4}, "codec rotated, 4 bits, group size 64,"),
        (
            {"kv_cache_bits": 5, "kv_cache_value_bits": 4, "kv_cache_group_size": 32},
            "codec rotated, keys 5 bits, values 4 bits, group size 32,",
        ),
        ({"kv_cache_codec": "affine"}, "codec affine, 8 bits, group size 64,"),
        ({"cache_memory_mb": 100}, "codec raw,"),
    ],
)
def test_codec_bits_and_group_size(settings: dict[str, Any], expected: str) -> None:
    """And the size of a block. Full precision has neither bits nor groups."""
    line = announced(cache_for(**settings), Model(*ALIKE))
    assert line.startswith(f"prefix cache: {expected} blocks of 128 tokens; ")
    assert "\n" not in line


PLAIN, WINDOW, STATE = (64, 64), (64, 64, window), (64, 64, state)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(*ALIKE), "3 layers: 3 token-wise at 4 bits"),
        (Model((192, 128), (192, 128)), "2 layers: 2 token-wise at 4 bits"),
        (Model((512, 64)), "1 layer: 1 token-wise at 4 bits"),
        (Model((128, 0)), "1 layer: 1 token-wise at 4 bits"),
        (
            Model(*([WINDOW] * 5 + [PLAIN]) * 3),
            "18 layers: 15 windows at 8 bits, 3 token-wise at 4 bits",
        ),
        (
            Model(PLAIN, WINDOW, STATE, PLAIN),
            "4 layers: 2 token-wise at 4 bits, 1 window at 8 bits, 1 state raw",
        ),
        (
            Model((64, 64, lambda: ChunkedKVCache(16)), (64, 64, QuantizedKVCache)),
            "2 layers: 1 window at 8 bits, 1 token-wise at 4 bits",
        ),
        (Model(STATE, STATE), "2 layers: 2 states raw"),
        (Model((80, 80), (80, 80)), "2 layers: 2 token-wise raw: head_dim 80"),
        (
            Model((80, 80), (112, 112)),
            "2 layers: 1 token-wise raw: head_dim 80, 1 token-wise raw: head_dim 112",
        ),
        (Model((80, 112)), "1 layer: 1 token-wise raw: head_dim 80 and head_dim 112"),
        (
            Model((64, 80), (64, 64)),
            "2 layers: 1 token-wise at 4 bits, in part raw: head_dim 80, 1 token-wise at 4 bits",
        ),
        (Model((80, 80, window)), "1 layer: 1 window raw: head_dim 80"),
        (Model((64, 64), dtype=mx.int32), "1 layer: 1 token-wise raw: dtype int32"),
        (
            Model((64, 64, lambda: CacheList(state(), KVCache())), PLAIN),
            "3 layers: 1 state raw, 2 token-wise at 4 bits",
        ),
        (Model(PLAIN, (64, 64, Unused)), "2 layers: 1 token-wise at 4 bits, 1 unused"),
    ],
)
def test_what_becomes_of_the_layers(model: Model, expected: str) -> None:
    """How many of each kind, how each is kept, and why some stay raw."""
    line = announced(cache_for(kv_cache_bits=4), model)
    assert f"blocks of 128 tokens; {expected}; limit " in line


def test_keys_and_values_may_have_different_bits() -> None:
    """Windows have 8, whatever was asked for."""
    cache = cache_for(kv_cache_bits=5, kv_cache_value_bits=4)
    line = announced(cache, Model(PLAIN, WINDOW))
    assert "codec rotated, keys 5 bits, values 4 bits, group size 64" in line
    assert "; 2 layers: 1 token-wise at keys 5 bits, values 4 bits, 1 window at 8 bits;" in line


def test_a_draft_model_has_layers_too() -> None:
    """They are stored beside the model's."""
    line = announced(cache_for(kv_cache_bits=4), Model(*ALIKE), Model(PLAIN, WINDOW))
    assert "; 5 layers: 4 token-wise at 4 bits, 1 window at 8 bits; " in line


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_smaller_group_size_is_no_reason(group_size: int) -> None:
    """Widths of 64 and 96 take groups of 64 and 32, though 128 was asked for."""
    cache = cache_for(kv_cache_bits=4, kv_cache_group_size=group_size)
    used = {64: min(64, group_size), 96: 32}
    told = [f", groups of {g} for a width of {dim}" for dim, g in used.items() if g != group_size]
    expected = f"; 1 layer: 1 token-wise at 4 bits{''.join(told)}; "
    assert expected in announced(cache, Model((64, 96)))


def test_full_precision_quantizes_nothing() -> None:
    """And needs no reason for it."""
    line = announced(cache_for(cache_memory_mb=1), Model((80, 80), WINDOW, STATE, (64, 64)))
    expected = "2 token-wise in full precision, 1 window in full precision, 1 state raw"
    assert f"; 4 layers: {expected}; " in line


def test_a_fixed_limit() -> None:
    """In bytes, and whence it came."""
    budget = Budget(limit_bytes=123 << 20, probe=Machine().probe)
    line = announced(cache_for(budget, kv_cache_bits=8), Model(*ALIKE))
    assert line.endswith("; limit 128,974,848 bytes (a fixed limit)")


def test_a_folder_is_named_with_its_own_limit() -> None:
    cache = cache_for(kv_cache_dir=Path("kv"), kv_cache_disk_mb=2048)
    text = announcement(cache, known_kinds(), Model((64, 64)))
    assert text.endswith("; on disk in kv, limit 2,048 MB")
    assert "disk" not in announcement(cache_for(kv_cache_bits=8), known_kinds(), Model((64, 64)))


def test_a_share_is_resolved_once_the_model_is_there() -> None:
    """Of what is available then, and not at the start."""
    machine = Machine(available_bytes=10 * GIB)
    budget = Budget(percent=0.25, probe=machine.probe)
    cache = cache_for(budget, kv_cache_bits=8)
    machine.available_bytes = 4 * GIB
    line = announced(cache, Model(*ALIKE))
    assert line.endswith("; limit 1,073,741,824 bytes (25% of the 4,294,967,296 bytes available)")
    assert budget.limit_bytes == GIB


def test_a_model_that_takes_more_than_tokens_is_announced_all_the_same() -> None:
    """Its layers are known with its first request; the limit holds before."""

    class Choosy(Model):
        def __call__(self, tokens: mx.array, cache: list[Any]) -> None:
            raise TypeError("no image")

    cache = cache_for(Budget(percent=0.5, probe=Machine(8 * GIB).probe), kv_cache_bits=8)
    line = announced(cache, Choosy(*ALIKE))
    assert "codec rotated" in line and "no image" in line and "limit 4,294,967,296 bytes" in line
    assert cache.budget.limit_bytes == 4 * GIB


def test_nothing_is_computed_for_it() -> None:
    """A large model would be slow to say anything: only shapes are asked for."""
    huge = Model((1 << 28, 1 << 28), (1 << 28, 1 << 28), dtype=mx.float32)
    assert layers_of(huge)[1].keys.shape == (1, 2, 256, 1 << 28)  # 512 GiB, had it been made
    assert "; 2 layers: 2 token-wise at 4 bits; " in announced(cache_for(kv_cache_bits=4), huge)


def test_what_is_announced_is_what_is_done() -> None:
    """The same widths, the same decision."""
    cache = cache_for(kv_cache_bits=4)
    packer = cache.packers.for_specs([TensorSpec(2, w, mx.bfloat16) for w in (64, 80)]).blocks
    assert [codec.name for codec in packer.codecs] == ["rotated", "raw"]
