"""Copies of states in host memory: to the bit, independent, and of any thread."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin.patches.snapshot import Snapshot
from tests.patches.cache_objects import (
    KINDS,
    LayerCache,
    arrays,
    arrays_in,
    bits,
    filled,
    in_another_thread,
    plain,
    rows,
    same,
    spoil,
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_the_object_to_the_bit(kind: str) -> None:
    """Class, arrays, and whatever else is kept beside them, objects inside of objects too."""
    (restored,) = Snapshot.of([KINDS[kind]()]).restore()
    assert same(restored, KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_independent(kind: str) -> None:
    """Of its source, which goes on, and of each object that was restored from it."""
    source = KINDS[kind]()
    snapshot = Snapshot.of([source])
    for cache in (source, *snapshot.restore()):
        spoil(cache)
    (restored,) = snapshot.restore()
    assert same(restored, KINDS[kind]())


def test_what_is_changed_in_place_was_copied() -> None:
    """Lists and dicts of the source, and those of what was restored."""
    source = filled(LayerCache(), 4, 3)
    snapshot = Snapshot.of([source])
    for cache in (source, *snapshot.restore()):
        cache.pending["groups"].append(4)
        cache.pending["more"] = 5
    assert same(snapshot.restore(), [filled(LayerCache(), 4, 3)])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_restored_serves_any_thread(kind: str) -> None:
    """MLX can evaluate a lazy array on the thread alone that made it: none of them is lazy."""
    snapshot = in_another_thread(lambda: Snapshot.of([KINDS[kind]()]))
    restored = in_another_thread(snapshot.restore)
    mx.eval([array + 0 for array in arrays_in(restored)])
    assert same(restored, [KINDS[kind]()])


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
        (restored,) = Snapshot.of([arrays(state)]).restore()
        assert same(restored[0], state)


def test_numbers_that_are_none_come_back() -> None:
    """NaN with its payload, infinities and both zeros, in bfloat16 too."""
    for dtype in (mx.float32, mx.bfloat16):
        words = mx.array([0x7FC1, 0xFF80, 0x7F80, 0x8000, 0], mx.uint16)
        state = words.view(mx.bfloat16).astype(dtype) if dtype == mx.float32 else words.view(dtype)
        (restored,) = Snapshot.of([arrays(state)]).restore()
        assert bits(restored[0]) == bits(state)


@pytest.mark.parametrize(
    "value",
    [None, 7, -1.5, True, "words", (1, [2, {"three": 4}]), {"a": None}, frozenset({1}), LayerCache],
    ids=str,
)
def test_what_is_no_array_comes_back(value: Any) -> None:
    """Numbers, words, classes, and what holds them."""
    cache = LayerCache()
    cache.pending = value
    (restored,) = Snapshot.of([cache]).restore()
    assert restored.pending == value and type(restored.pending) is type(value)


def test_a_snapshot_is_charged_for_what_it_holds() -> None:
    """Its arrays, and little beside them."""
    array_bytes = 2 * rows(256).nbytes
    assert array_bytes < Snapshot.of([plain(10)]).nbytes < array_bytes + 4096
    array_bytes = rows(50).nbytes
    assert array_bytes < Snapshot.of([arrays(rows(50))]).nbytes < array_bytes + 4096


def test_a_snapshot_of_a_view_holds_the_view_alone() -> None:
    """What a recurrent layer keeps is often the end of something large."""
    end = rows(1000)[:, :, -3:]
    assert Snapshot.of([arrays(end)]).nbytes < rows(3).nbytes + 4096


def test_a_dtype_is_kept_as_it_is() -> None:
    """It cannot be copied; a class from a model file may well hold one."""
    cache = LayerCache()
    cache.pending["dtype"] = mx.float16
    (restored,) = Snapshot.of([cache]).restore()
    assert restored.pending["dtype"] == mx.float16
