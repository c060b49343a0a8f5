"""What the rotated codec adds to quantizing: means, and sinks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_lm_kvcache_plugin.codecs.base import CodecOptions, Parts
from mlx_lm_kvcache_plugin.codecs.device import MEAN
from mlx_lm_kvcache_plugin.codecs.rotated import SINK_TOKENS, SINKS, RotatedCodec


def normal(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(3).normal(size=shape).astype(np.float32))


def encode(codec: RotatedCodec, x: mx.array, first: bool = False) -> Parts:
    return tuple(np.array(part)[0] for part in codec.encode(x, first=first))


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
