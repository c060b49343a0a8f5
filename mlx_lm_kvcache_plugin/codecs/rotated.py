"""Affine quantization of rotated, centred blocks: the same bits, a fraction of the error.

A block's channels have means of very different size (keys above all), and a few channels dwarf
the others. Subtracting the mean and rotating by a Hadamard matrix leaves values of one size that
few bits describe well. The idea is that of KIVI (arXiv:2402.02750: statistics along tokens) and
QuaRot (arXiv:2404.00456: Hadamard rotation); both are undone exactly on decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .affine import AffineCodec, dequantize, quantize
from .base import CodecOptions, Parts

SINK_TOKENS = 4
"""The first tokens of a sequence draw attention whatever they say (StreamingLLM,
arXiv:2309.17453) and are far out of line: they stay float16, out of their block's statistics."""

MEAN, SINKS = 3, 4
"""Where the parts that `quantize` does not know stand."""


def hadamard_applies(dim: int) -> bool:
    """Whether `mx.hadamard_transform` is right for this width: m * 2^k with m in 1, 12, 20, 28.

    It does not refuse all others: in mlx 0.32.4, on a CPU, a width of 36 comes out wrong, 576 as
    NaN, and the heap is damaged.
    """
    odd = dim // (dim & -dim) if dim else 0
    return odd == 1 or (odd in (3, 5, 7) and dim % 4 == 0)


def rotate(x: mx.array) -> mx.array:
    """Multiply the last axis by an orthonormal Hadamard matrix, where there is one."""
    return mx.hadamard_transform(x) if hadamard_applies(x.shape[-1]) else x


def unrotate(x: mx.array) -> mx.array:
    """Undo `rotate`."""
    dim = x.shape[-1]
    if hadamard_applies(dim) and (dim % 5 == 0 or dim % 7 == 0):  # built on 20 or 28: asymmetric
        return x @ rotate(mx.eye(dim)).T
    return rotate(x)


class RotatedCodec:
    """The default: sinks apart, mean subtracted, Hadamard-rotated, then affine."""

    name = "rotated"

    def __init__(self, options: CodecOptions) -> None:
        self._bits = options.bits
        self._affine = AffineCodec(options)

    def group_size_for(self, dim: int) -> int | None:
        return self._affine.group_size_for(dim)

    def encode(self, x: mx.array, *, first: bool) -> tuple[mx.array, ...]:
        group_size = self.group_size_for(x.shape[-1])
        assert group_size is not None, "the caller keeps such tensors raw"
        x = x.astype(mx.float32)
        sinks: tuple[mx.array, ...] = ()
        if first:
            sinks, x = _set_sinks_aside(x)
        mean = mx.mean(x, axis=2, keepdims=True).astype(mx.float16)
        return *quantize(rotate(x - mean), group_size, self._bits), mean, *sinks

    def decode(self, blocks: Sequence[Parts], rows: int, dtype: mx.Dtype) -> mx.array:
        x = unrotate(dequantize(blocks, rows, self._bits)) + _spread_means(blocks, rows)
        if len(blocks[0]) > SINKS:
            sinks = mx.array(blocks[0][SINKS])[:, :rows].astype(mx.float32)
            x = mx.concatenate([sinks, x[:, sinks.shape[1] :]], axis=1)
        return x.astype(dtype)


def _set_sinks_aside(x: mx.array) -> tuple[tuple[mx.array, ...], mx.array]:
    """The sinks of [1, heads, tokens, dim] in float16, and the rest with a later token for them."""
    sinks, rest = x[:, :, :SINK_TOKENS], x[:, :, SINK_TOKENS:]
    stand_in = rest[:, :, :1] if rest.shape[2] else mx.zeros_like(sinks[:, :, :1])
    return (sinks.astype(mx.float16),), mx.concatenate(
        [mx.broadcast_to(stand_in, sinks.shape), rest], axis=2
    )


def _spread_means(blocks: Sequence[Parts], rows: int) -> mx.array:
    """The mean that belongs to each of the first `rows` tokens: [heads, rows, dim]."""
    means = mx.array(np.concatenate([parts[MEAN] for parts in blocks], axis=1))
    tokens = blocks[0][0].shape[1]
    return mx.repeat(means, tokens, axis=1)[:, :rows].astype(mx.float32)
