"""Affine quantization of rotated, centred blocks: the same bits, a fraction of the error.

A block's channels have means of very different size (keys above all), and a few channels dwarf
the others. Subtracting the mean and rotating by a Hadamard matrix leaves values of one size that
few bits describe well. The idea is that of KIVI (arXiv:2402.02750: statistics along tokens) and
QuaRot (arXiv:2404.00456: Hadamard rotation); both are undone exactly on decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from . import device, host
from .affine import AffineCodec, to_half
from .base import CodecOptions, Parts, width_of

SINK_TOKENS = 4
"""The first tokens of a sequence draw attention whatever they say (StreamingLLM,
arXiv:2309.17453) and are far out of line: they stay float16, out of their block's statistics."""

SINKS = 4
"""Which part holds them: [heads, sinks, dim], in the block that begins a sequence."""


class RotatedCodec:
    """The default: sinks apart, mean subtracted, Hadamard-rotated, then affine."""

    name = "rotated"
    marks_unfit = True

    def __init__(self, options: CodecOptions) -> None:
        self._bits = options.bits
        self._affine = AffineCodec(options)

    def group_size_for(self, dim: int) -> int | None:
        return self._affine.group_size_for(dim)

    def encode(self, x: mx.array, *, first: bool) -> tuple[mx.array, ...]:
        group_size = self.group_size_for(x.shape[-1])
        assert group_size is not None, "the caller keeps such tensors raw"
        sinks: tuple[mx.array, ...] = ()
        if first:
            sinks, x = _set_sinks_aside(x)
        if host.applies(x.shape[-1], self._bits):
            parts = tuple(map(mx.array, host.encode(x, group_size, self._bits)))
        else:
            parts = device.encode(x.astype(mx.float32), group_size, self._bits)
        packed, scales, biases, mean = parts
        return packed, *to_half(scales, biases), mean, *sinks

    def decode(self, blocks: Sequence[Parts], rows: int, dtype: mx.Dtype) -> mx.array:
        if host.applies(width_of(blocks[0][0], self._bits), self._bits):
            x = host.decode(blocks, rows, self._bits, dtype)
        else:
            x = device.decode(blocks, rows, self._bits).astype(dtype)
        if len(blocks[0]) > SINKS:
            sinks = mx.array(blocks[0][SINKS])[:, :rows].astype(dtype)
            x[:, : sinks.shape[1]] = sinks
        return x


def _set_sinks_aside(x: mx.array) -> tuple[tuple[mx.array, ...], mx.array]:
    """The sinks of [blocks, heads, tokens, dim] in float16; the rest, a later token for them."""
    sinks, rest = x[:, :, :SINK_TOKENS], x[:, :, SINK_TOKENS:]
    stand_in = rest[:, :, :1] if rest.shape[2] else mx.zeros_like(sinks[:, :, :1])
    return (sinks.astype(mx.float16),), mx.concatenate(
        [mx.broadcast_to(stand_in, sinks.shape), rest], axis=2
    )
