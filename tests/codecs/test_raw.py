"""The raw codec gives back what it got, bit for bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin.codecs.base import CodecOptions
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec

DTYPES = {
    "float16": np.uint16,
    "bfloat16": np.uint16,
    "float32": np.uint32,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
}
"""Dtypes of MLX, and what carries their bits in numpy."""


def bits_of(x: mx.array) -> bytes:
    return np.array(x.view(mx.uint8)).tobytes()


def round_trip(x: mx.array, rows: int) -> mx.array:
    codec = RawCodec()
    parts = [np.array(part) for part in codec.encode(x, first=True)]
    return codec.decode([tuple(part[0] for part in parts)], rows, x.dtype)


@pytest.mark.parametrize("dim", [0, 1, 64])
@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_comes_back(name: str, dim: int) -> None:
    """Random bits: subnormal numbers, infinities and NaNs with a payload are among them."""
    dtype = getattr(mx, name)
    width = np.dtype(DTYPES[name]).itemsize
    random = np.random.default_rng(0).bytes(2 * 5 * dim * width)
    bits = np.frombuffer(random, DTYPES[name]).reshape(1, 2, 5, dim)
    x = mx.array(bits).view(dtype)
    decoded = round_trip(x, 3)
    assert decoded.dtype == dtype
    assert decoded.shape == (2, 3, dim)
    assert bits_of(decoded) == bits_of(x[0, :, :3])


def test_nan_payloads_and_infinities_are_data() -> None:
    """A signalling NaN stays one: nothing is computed with what is stored."""
    bits = np.array([0x7F81, 0xFFC3, 0x7F80, 0xFF80, 0x8000, 0x0001], np.uint16)
    x = mx.array(bits.reshape(1, 1, 1, 6)).view(mx.bfloat16)
    assert bits_of(round_trip(x, 1)) == bits.tobytes()


def test_options_change_nothing() -> None:
    """Full precision has no bits and no groups to choose."""
    x = mx.arange(64, dtype=mx.float32).reshape(1, 1, 1, 64)
    plain = RawCodec().encode(x, first=False)
    asked = RawCodec(CodecOptions(2, 32)).encode(x, first=False)
    assert [bits_of(part) for part in asked] == [bits_of(part) for part in plain]
