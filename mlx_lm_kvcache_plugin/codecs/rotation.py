"""Hadamard rotations, computed on whole numbers so that their sums are exact.

Sums of float32 depend on their order, which differs from kernel to kernel and from one BLAS to
another. Sums of whole numbers below 2**24 do not: a block that is put on a grid of whole steps
before it is rotated comes out the same everywhere, and so does what codes are rotated back to.
The functions that say so take arrays of MLX and of numpy alike.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np

from .base import Array

EXACT_BITS = 23
"""float32 holds all whole numbers up to 2**24; half of them leave room for roundings."""


def hadamard_applies(dim: int) -> bool:
    """Whether `mx.hadamard_transform` is right for this width: m * 2^k with m in 1, 12, 20, 28.

    It does not refuse all others: in mlx 0.32.4, on a CPU, a width of 36 comes out wrong, 576 as
    NaN, and the heap is damaged.
    """
    odd = dim // (dim & -dim) if dim else 0
    return odd == 1 or (odd in (3, 5, 7) and dim % 4 == 0)


def is_power_of_two(dim: int) -> bool:
    """Whether the matrix for this width is made of those for any smaller power of two."""
    return dim > 0 and dim & (dim - 1) == 0


def norm(dim: int) -> float:
    """What makes `rotate` orthonormal; 1 where nothing is rotated."""
    return float(dim**-0.5) if hadamard_applies(dim) else 1.0


def rotate(x: mx.array) -> mx.array:
    """Multiply the last axis by a matrix of 1 and -1, where there is a Hadamard matrix."""
    return mx.hadamard_transform(x, scale=1.0) if hadamard_applies(x.shape[-1]) else x


def unrotate(x: mx.array) -> mx.array:
    """Multiply the last axis by that matrix transposed: undoes `rotate`, but for its norm."""
    dim = x.shape[-1]
    if hadamard_applies(dim) and (dim % 5 == 0 or dim % 7 == 0):  # built on 20 or 28: asymmetric
        return x @ rotate(mx.eye(dim)).T
    return rotate(x)


@functools.cache
def matrix(dim: int) -> Array:
    """Sylvester's matrix for a power of two, as `rotate` has it."""
    if dim == 1:
        return np.ones((1, 1), np.float32)
    return np.kron(np.array([[1, 1], [1, -1]], np.float32), matrix(dim // 2))


def grid_offset(peak: Any, dim: int) -> Any:
    """What, added and subtracted again, rounds numbers so that sums of `dim` of them are exact.

    Args:
        peak: their largest magnitude; an array of float32.
    """
    bits = mx.uint32 if isinstance(peak, mx.array) else np.uint32
    floats = mx.float32 if isinstance(peak, mx.array) else np.float32
    exponent = (peak.view(bits) & 0x7F800000).view(floats)  # the power of two below it
    step = 2.0 ** (1 - (EXACT_BITS - (dim - 1).bit_length()))
    return exponent * (1.5 * 2.0**EXACT_BITS * step)


def spread_groups(products: Any, scales: Any, biases: Any) -> Any:
    """Rotate whole rows back, whose groups are `scale * code + bias`.

    The matrix of a row is that of its groups times that of a group, so a group's scale and bias
    wait until its codes have been summed: those sums are exact.

    Args:
        products: [..., groups, group_size], each group of codes times its `matrix`; overwritten.
        scales, biases: [..., groups], float32.

    Returns:
        [..., groups, group_size].
    """
    products *= scales[..., None]
    products[..., 0] += biases * products.shape[-1]
    return mix_groups(products)


def mix_groups(x: Any) -> Any:
    """Multiply the last axis but one, a power of two, by its `matrix`."""
    groups, width = x.shape[-2:]
    stack = mx.stack if isinstance(x, mx.array) else np.stack
    step = 1
    while step < groups:
        pairs = x.reshape(*x.shape[:-2], -1, 2, step, width)
        one, other = pairs[..., 0, :, :], pairs[..., 1, :, :]
        x = stack([one + other, one - other], axis=-3).reshape(x.shape)
        step *= 2
    return x
