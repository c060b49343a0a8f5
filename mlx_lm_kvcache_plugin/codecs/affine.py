"""Group-wise affine quantization, as `mx.quantize` does it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..options import KV_CACHE_GROUP_SIZES
from .base import CodecOptions, Parts, join_rows, largest_group_size, width_of

SMALLEST_NORMAL = 2.0**-14
"""Of float16: scales below it lose precision, and a GPU may flush them to zero."""


def quantize(x: mx.array, group_size: int, bits: int) -> tuple[mx.array, ...]:
    """Quantize along the last axis: packed words, scales and biases.

    From float32 and with float16 scales, whatever the model's dtype: bfloat16 scales double the
    error at 8 bits and drift with every re-encoding. Blocks whose numbers are too faint for such
    scales get scales that are not finite, so that they stay raw; blocks of zeros do not.

    Args:
        x: [blocks, heads, tokens, dim].
    """
    packed, scales, biases = mx.quantize(x.astype(mx.float32), group_size=group_size, bits=bits)
    return packed, *to_half(scales, biases)


def to_half(scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
    """Scales and biases of [blocks, heads, tokens, groups] in float16; NaN for faint blocks."""
    largest, offset = (mx.abs(y).max(axis=(1, 2, 3), keepdims=True) for y in (scales, biases))
    faint = (largest < SMALLEST_NORMAL) & (offset > 0)
    scales = mx.where(faint, mx.nan, scales)
    return scales.astype(mx.float16), biases.astype(mx.float16)


def dequantize(blocks: Sequence[Parts], rows: int, bits: int) -> mx.array:
    """Undo `quantize` for the first three parts of each block: [heads, rows, dim], float32."""
    packed, scales, biases = (join_rows(blocks, part, rows) for part in range(3))
    return mx.dequantize(
        packed,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=width_of(packed, bits) // scales.shape[-1],
        bits=bits,
    )


class AffineCodec:
    """Every token for itself: it can be cut and continued anywhere without a trace."""

    name = "affine"

    def __init__(self, options: CodecOptions) -> None:
        self._options = options

    def group_size_for(self, dim: int) -> int | None:
        return largest_group_size(dim, self._options.group_size, KV_CACHE_GROUP_SIZES)

    def encode(self, x: mx.array, *, first: bool) -> tuple[mx.array, ...]:
        group_size = self.group_size_for(x.shape[-1])
        assert group_size is not None, "the caller keeps such tensors raw"
        return quantize(x, group_size, self._options.bits)

    def decode(self, blocks: Sequence[Parts], rows: int, dtype: mx.Dtype) -> mx.array:
        return dequantize(blocks, rows, self._options.bits).astype(dtype)
