"""The CPU's way through the rotated codec: the bytes and the numbers of MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin.codecs import device, host
from mlx_lm_kvcache_plugin.codecs.base import Array, CodecOptions, Parts
from mlx_lm_kvcache_plugin.codecs.rotated import RotatedCodec

TOKENS = 7
"""Tokens of a block: with three heads, rows that are not multiplied 64 at a time, and a number that
one is not to be divided by without a rounding."""

BLOCKS = 3

SHAPES = [(32, 32), (64, 32), (64, 64), (128, 32), (128, 64), (128, 128), (256, 64), (512, 128)]
"""Widths and group sizes."""


def like_keys(dim: int, dtype: mx.Dtype, tokens: int = TOKENS) -> mx.array:
    """Channels of very different means and sizes: [blocks, heads, tokens, dim]."""
    random = np.random.default_rng(dim)
    sizes = np.exp(2 * random.normal(size=dim))
    x = random.normal(size=(BLOCKS, 3, tokens, dim)) * sizes + 5 * random.normal(size=dim)
    return mx.array(x).astype(dtype)


def on_device(x: mx.array, group_size: int, bits: int) -> tuple[Array, ...]:
    parts = device.encode(x.astype(mx.float32), group_size, bits)
    return tuple(map(np.array, parts))


def same_parts(one: tuple[Array, ...], other: tuple[Array, ...]) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("bits", host.PACKED_BITS)
@pytest.mark.parametrize(("dim", "group_size"), SHAPES)
def test_the_bytes_are_those_of_mlx(dim: int, group_size: int, bits: int, dtype: mx.Dtype) -> None:
    """Codes, scales, biases and means, to the bit."""
    x = like_keys(dim, dtype)
    assert same_parts(host.encode(x, group_size, bits), on_device(x, group_size, bits))


def tied(dim: int) -> Array:
    """Whole numbers, whose rotated sums are as often as not just between two codes."""
    return np.random.default_rng(0).integers(-4, 5, (2, 2, 16, dim)).astype(np.float32)


ODD_NUMBERS = {
    "ties": tied(64),
    "zeros": np.zeros((2, 2, 16, 64), np.float32),
    "one value": np.full((2, 2, 16, 64), 3.5, np.float32),
    "faint": tied(64) * np.float32(1e-6),
    "large": tied(64) * np.float32(1e4),
    "all positive": tied(64) + np.float32(1000),
}


@pytest.mark.parametrize("bits", host.PACKED_BITS)
@pytest.mark.parametrize("x", ODD_NUMBERS.values(), ids=ODD_NUMBERS)
def test_the_bytes_are_those_of_mlx_at_the_edges(x: Array, bits: int) -> None:
    """Where rounding is a close call, or nothing is left once the mean is gone."""
    assert same_parts(host.encode(mx.array(x), 64, bits), on_device(mx.array(x), 64, bits))


@pytest.mark.parametrize("bits", host.PACKED_BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
def test_what_is_not_finite_shows(bad: float, bits: int) -> None:
    """In the parts of its block alone, so that the caller keeps that one raw."""
    x = tied(64)
    x[1, 0, 5, 7] = bad
    parts = RotatedCodec(CodecOptions(bits, 64)).encode(mx.array(x), first=False)
    finite = [np.isfinite(np.array(part)).all(axis=(1, 2, 3)) for part in parts[1:]]
    assert np.logical_and.reduce(finite).tolist() == [True, False]


def blocks_of(parts: tuple[Array, ...]) -> list[Parts]:
    packed, scales, biases, means = parts
    half = (packed, scales.astype(np.float16), biases.astype(np.float16), means)
    return [tuple(part[block] for part in half) for block in range(len(packed))]


@pytest.mark.parametrize("rows", [1, TOKENS, 2 * TOKENS + 7, BLOCKS * TOKENS])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("bits", host.PACKED_BITS)
@pytest.mark.parametrize(("dim", "group_size"), SHAPES)
def test_the_numbers_are_those_of_mlx(
    dim: int, group_size: int, bits: int, dtype: mx.Dtype, rows: int
) -> None:
    """To the bit, rounded to the dtype of the tensor as MLX rounds."""
    blocks = blocks_of(host.encode(like_keys(dim, dtype), group_size, bits))[: -(-rows // TOKENS)]
    found = host.decode(blocks, rows, bits, dtype)
    wanted = device.decode(blocks, rows, bits).astype(dtype)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert mx.array_equal(found.view(mx.uint8), wanted.view(mx.uint8))


def test_ties_are_rounded_to_even() -> None:
    """What is just between two numbers of bfloat16."""
    floats = (np.arange(2**18, dtype=np.uint32) * 0x4000).view(np.float32)[: 0x7F80 * 4]
    wanted = mx.array(floats).astype(mx.bfloat16)
    found = host._result(floats.copy(), mx.bfloat16)
    assert mx.array_equal(found.view(mx.uint16), wanted.view(mx.uint16))


def test_what_was_decoded_stays(dtype: mx.Dtype = mx.float32) -> None:
    """Memory is used again inside, and never that of a result."""
    blocks = blocks_of(host.encode(like_keys(64, dtype), 64, 4))
    first = host.decode(blocks, TOKENS, 4, dtype)
    copy = np.array(first)
    host.decode(blocks[1:], TOKENS, 4, dtype)
    assert np.array_equal(np.array(first), copy)


def test_the_given_array_stays() -> None:
    """A cache that is encoded goes on being used."""
    x = like_keys(64, mx.float32)
    copy = np.array(x)
    host.encode(x, 64, 4)
    assert np.array_equal(np.array(x), copy)
