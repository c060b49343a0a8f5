"""The rotated codec in operations of MLX: what a GPU runs, and what defines its bytes."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .affine import dequantize
from .base import Array, Parts, join_rows, width_of
from .rotation import grid_offset, is_power_of_two, norm, rotate, spread_groups, unrotate

MEAN = 3
"""Which part holds the means of a block's channels: [heads, 1, dim]."""


def encode(x: mx.array, group_size: int, bits: int) -> tuple[mx.array, ...]:
    """Centre, rotate and quantize.

    Args:
        x: [blocks, heads, tokens, dim], float32.

    Returns:
        Packed codes, scales, biases (not yet float16) and means.
    """
    dim = x.shape[-1]
    mean = mx.mean(x, axis=2, keepdims=True).astype(mx.float16)
    centred = x - mean.astype(mx.float32)
    peak = mx.abs(centred).max(axis=(2, 3), keepdims=True)
    offset = grid_offset(peak, dim)
    rotated = rotate((centred + offset) - offset)
    packed, scales, biases = mx.quantize(rotated, group_size=group_size, bits=bits)
    return packed, scales * norm(dim), biases * norm(dim), mean


def decode(blocks: Sequence[Parts], rows: int, bits: int) -> mx.array:
    """Undo `encode` for the first `rows` tokens of consecutive blocks: [heads, rows, dim]."""
    rows_back = _exactly if is_power_of_two(width_of(blocks[0][0], bits)) else _directly
    return rows_back(blocks, rows, bits) + _spread_means(blocks, rows)


def _exactly(blocks: Sequence[Parts], rows: int, bits: int) -> mx.array:
    """Rotate the codes back before they are scaled: their sums are exact."""
    packed, scales, biases = (join_rows(blocks, part, rows) for part in range(3))
    dim = width_of(packed, bits)
    scales, biases = (part.astype(mx.float32) * norm(dim) for part in (scales, biases))
    ones, zeros = mx.ones_like(scales), mx.zeros_like(scales)
    group_size = dim // scales.shape[-1]
    codes = mx.dequantize(packed, ones, zeros, group_size=group_size, bits=bits)
    products = rotate(mx.unflatten(codes, -1, (-1, group_size)))
    return mx.flatten(spread_groups(products, scales, biases), -2)


def _directly(blocks: Sequence[Parts], rows: int, bits: int) -> mx.array:
    """For matrices that do not divide into groups."""
    rotated = dequantize(blocks, rows, bits)
    return unrotate(rotated) * norm(rotated.shape[-1])


def _spread_means(blocks: Sequence[Parts], rows: int) -> mx.array:
    """The mean that belongs to each of the first `rows` tokens: [heads, rows, dim]."""
    means: Array = np.concatenate([parts[MEAN] for parts in blocks], axis=1)
    tokens = blocks[0][0].shape[1]
    return mx.repeat(mx.array(means), tokens, axis=1)[:, :rows].astype(mx.float32)
