"""What the rotated codec is made of: the rotation and its inverse, means, and sinks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin.codecs.base import CodecOptions, Parts
from mlx_lm_kvcache_plugin.codecs.rotated import (
    MEAN,
    SINK_TOKENS,
    SINKS,
    RotatedCodec,
    hadamard_applies,
    rotate,
    unrotate,
)

LARGEST_WIDTH = 2048

HADAMARD_WIDTHS = sorted(
    m * 2**k for m in (1, 12, 20, 28) for k in range(12) if m * 2**k <= LARGEST_WIDTH
)


def normal(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(3).normal(size=shape).astype(np.float32))


def encode(codec: RotatedCodec, x: mx.array, first: bool = False) -> Parts:
    return tuple(np.array(part)[0] for part in codec.encode(x, first=first))


def test_widths_that_can_be_rotated() -> None:
    """Only m * 2^k with m in 1, 12, 20, 28; mlx neither refuses all others nor survives them."""
    applies = [width for width in range(LARGEST_WIDTH + 1) if hadamard_applies(width)]
    assert applies == HADAMARD_WIDTHS
    assert not set(applies) & {0, 3, 5, 6, 7, 10, 14, 36, 44, 60, 72, 144, 288, 576, 1152}


@pytest.mark.parametrize("width", HADAMARD_WIDTHS)
def test_unrotating_undoes_rotating(width: int) -> None:
    """In either order, and lengths stay: the matrix is orthonormal, if not always symmetric."""
    x = normal(3, width)
    rotated = rotate(x)
    assert mx.allclose(unrotate(rotated), x, rtol=0, atol=2e-5)
    assert mx.allclose(rotate(unrotate(x)), x, rtol=0, atol=2e-5)
    assert mx.allclose(mx.linalg.norm(rotated, axis=-1), mx.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("width", HADAMARD_WIDTHS[1:])
def test_rotating_spreads_an_outlier(width: int) -> None:
    """One large channel becomes all channels of one size: that is what it is for."""
    outlier = mx.zeros((1, width))
    outlier[0, width // 2] = 1.0
    assert mx.allclose(mx.abs(rotate(outlier)), mx.array(width**-0.5), rtol=1e-4)


@pytest.mark.parametrize("width", [36, 44, 72, 576, 1, 15, 35])
def test_other_widths_stay_as_they_are(width: int) -> None:
    """Where there is no such matrix nothing is rotated, there and back."""
    x = normal(2, width)
    assert mx.array_equal(rotate(x), x)
    assert mx.allclose(unrotate(x), x, rtol=0, atol=1e-6)


def test_the_mean_of_each_channel_costs_no_bits() -> None:
    """Rows that all are alike come back to the precision of the float16 mean, even at 2 bits."""
    x = mx.broadcast_to(normal(1, 2, 1, 64) * 10, (1, 2, 8, 64))
    codec = RotatedCodec(CodecOptions(2, 64))
    decoded = codec.decode([encode(codec, x)], 8, mx.float32)
    assert mx.allclose(decoded, x[0], rtol=2**-10, atol=1e-3)


def test_sinks_come_back_in_float16() -> None:
    """The first tokens of a sequence are as exact as float16, at 2 bits too; no others are."""
    x = normal(1, 2, 16, 64) * 5
    codec = RotatedCodec(CodecOptions(2, 64))
    decoded = codec.decode([encode(codec, x, first=True)], 16, mx.float32)
    error = mx.abs(decoded - x[0]).max(axis=(0, 2))
    assert SINK_TOKENS == 4
    assert mx.array_equal(decoded[:, :4], x[0, :, :4].astype(mx.float16).astype(mx.float32))
    assert error[4:].min() > 0.5


def test_sinks_are_kept_once_for_a_sequence() -> None:
    """Only the block that begins a sequence pays for them."""
    codec = RotatedCodec(CodecOptions(4, 64))
    x = normal(1, 2, 16, 64)
    assert len(encode(codec, x)) == MEAN + 1
    assert encode(codec, x, first=True)[SINKS].shape == (2, SINK_TOKENS, 64)


def test_sinks_leave_the_statistics_alone() -> None:
    """A later token stands in for them: the mean is that of the rest and the stand-in."""
    x = normal(1, 2, 16, 64)
    x[:, :, :4] = 1000.0
    mean = encode(RotatedCodec(CodecOptions(4, 64)), x, first=True)[MEAN]
    expected = (4 * x[0, :, 4] + x[0, :, 4:].sum(axis=1)) / 16
    assert np.allclose(mean[:, 0], np.array(expected), atol=2e-3)
