"""The rotated codec on a CPU: numpy in place of MLX's kernels, and the same bytes.

MLX's kernels for rotating and quantizing are made for GPUs; on a CPU they run at a tenth of what
numpy's matrix product does, whose own BLAS comes with it. Rotating and packing are products with
constant matrices here. A test holds each function to MLX's operations, bit for bit.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .base import Array, Parts, for_numpy, on_cpu, rows_of, width_of
from .device import MEAN
from .rotation import grid_offset, is_power_of_two, matrix, mix_groups, norm, spread_groups
from .tensors import PIECE_ELEMENTS

PACKED_BITS = (2, 4, 8)
"""Codes of so many bits never straddle two words."""

APART = 4096
"""What keeps the sums of two rows apart: those of 64 codes of 4 bits stay below 1,024, and both
together are exact in float32."""

EPSILON = np.float32(1e-7)
"""The smallest scale that `mx.quantize` gives."""

WIDTH = 64
"""The widest matrix that rows are multiplied with, and how many rows at once: OpenBLAS shares
larger products out among threads that spin, and then one takes 0.7 s where 0.1 ms would do if
another process wants the cores."""


def applies(dim: int, bits: int) -> bool:
    """Whether this is the way to encode and decode tensors of that width."""
    return on_cpu() and bits in PACKED_BITS and is_power_of_two(dim)


class _Scratch(threading.local):
    """Arrays of one thread that are written to again and again.

    Fresh memory comes from the system page by page, which takes longer than the work on it.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def get(self, name: str, *shape: int) -> Array:
        """An array of float32 that holds anything, and is overwritten by the next of its name."""
        size = math.prod(shape)
        if size > PIECE_ELEMENTS:  # a block of very many heads: not to be kept for ever
            return np.empty(shape, np.float32)
        array = self._arrays.get(name)
        if array is None or array.size < size:
            array = self._arrays[name] = np.empty(size, np.float32)
        return array[:size].reshape(shape)


_scratch = _Scratch()


def encode(x: mx.array, group_size: int, bits: int) -> tuple[Array, ...]:
    """Centre, rotate and quantize.

    Args:
        x: [blocks, heads, tokens, dim].

    Returns:
        Packed codes, scales, biases (not yet float16) and means.
    """
    blocks, heads, tokens, dim = x.shape
    floats = _floats(np.asarray(for_numpy(x)), x.dtype)
    means = _centre(floats)
    found = _quantize(_rotate(floats.reshape(-1, dim)), group_size, bits)
    packed, scales, biases = (part.reshape(blocks, heads, tokens, -1) for part in found)
    return packed, scales, biases, means


def _floats(given: Array, dtype: mx.Dtype) -> Array:
    """A copy as float32; numpy has bfloat16 as its bits alone."""
    floats = _scratch.get("given", *given.shape)
    if dtype != mx.bfloat16:
        floats[...] = given
        return floats
    bits = floats.view(np.uint32)
    bits[...] = given
    bits <<= 16
    return floats


def _centre(x: Array) -> Array:
    """Subtract the mean of each block's channels, put the rest on a grid; the means."""
    blocks, heads, tokens, dim = x.shape
    with np.errstate(all="ignore"):  # what is not finite is kept raw by whoever asked
        # As `mx.mean` does it; to divide would be another number now and then.
        means: Array = x.sum(axis=2, keepdims=True) * np.float32(1 / tokens)
        means = means.astype(np.float16)
        x -= means.astype(np.float32)
        flat = x.reshape(blocks, heads, 1, tokens * dim)
        peak = np.maximum(flat.max(axis=3, keepdims=True), -flat.min(axis=3, keepdims=True))
        offset = grid_offset(peak, dim)
        x += offset
        x -= offset
    return means


def _rotate(x: Array) -> Array:
    """[rows, dim] to [dim, rows], each row times its matrix."""
    rows, dim = x.shape
    width = min(dim, WIDTH)
    columns = _scratch.get("columns", dim // width, width, rows)
    for group, into in enumerate(columns):
        some = x[:, group * width : (group + 1) * width]
        for run, at_once in _runs(rows):
            few = some[run].reshape(-1, at_once, width).swapaxes(1, 2)
            out = into[:, run].reshape(width, -1, at_once).swapaxes(0, 1)
            np.matmul(matrix(width), few, out=out)
    mixed: Array = mix_groups(columns.reshape(-1, width * rows))
    return mixed.reshape(dim, rows)


def _runs(rows: int) -> list[tuple[slice, int]]:
    """Runs of rows, and how many of them are multiplied at once."""
    whole = rows - rows % WIDTH
    runs = [(slice(0, whole), WIDTH), (slice(whole, rows), rows - whole)]
    return [run for run in runs if run[0].stop > run[0].start]


def _quantize(columns: Array, group_size: int, bits: int) -> tuple[Array, Array, Array]:
    """`mx.quantize` for [dim, rows], overwritten: packed codes, scales and biases by row."""
    most = np.float32(2**bits - 1)
    grouped = columns.reshape(-1, group_size, columns.shape[1])
    with np.errstate(all="ignore"):
        scales, biases = _scales(grouped.min(axis=1), grouped.max(axis=1), most)
        grouped -= biases[:, None]
        grouped /= scales[:, None]
        np.rint(grouped, out=grouped)
        np.clip(grouped, 0, most, out=grouped)
    factor = np.float32(norm(len(columns)))
    return _pack(columns, bits), (scales * factor).T, (biases * factor).T


def _scales(low: Array, high: Array, most: np.float32) -> tuple[Array, Array]:
    """As `mx.quantize` chooses them: the edge that is farther from zero, and zero, are codes."""
    low_is_edge = np.abs(low) > np.abs(high)
    scales = np.maximum((high - low) / most, EPSILON)
    scales = np.where(low_is_edge, scales, -scales)
    edges = np.where(low_is_edge, low, high)
    zero_points = np.rint(edges / scales)
    is_apart = zero_points != 0
    scales = np.where(is_apart, edges / np.where(is_apart, zero_points, 1), scales)
    return scales, np.where(is_apart, edges, np.float32(0))


def _pack(codes: Array, bits: int) -> Array:
    """Codes of [dim, rows] in words of 32 bits, [rows, words]."""
    in_half = 16 // bits
    halves = np.zeros((len(codes) // in_half, codes.shape[1]), np.uint16)
    with np.errstate(all="ignore"):
        for place in range(in_half):
            halves |= codes[place::in_half].astype(np.uint16) << bits * place
    return np.ascontiguousarray(halves.T).view(np.uint32)


def decode(blocks: Sequence[Parts], rows: int, bits: int, dtype: mx.Dtype) -> mx.array:
    """Undo `encode` for the first `rows` tokens of consecutive blocks: [heads, rows, dim]."""
    packed, scales, biases = (rows_of(blocks, part, rows) for part in range(3))
    heads, dim, groups = len(packed), width_of(packed, bits), scales.shape[-1]
    products = _products(packed, bits, dim // groups).reshape(heads, rows, groups, -1)
    factor = np.float32(norm(dim))
    scales, biases = (part.astype(np.float32) * factor for part in (scales, biases))
    floats = spread_groups(products, scales, biases).reshape(heads, rows, dim)
    means = np.stack([parts[MEAN] for parts in blocks], axis=1).astype(np.float32)
    tokens = blocks[0][0].shape[1]
    whole = rows // tokens
    by_block = floats[:, : whole * tokens].reshape(heads, whole, tokens, dim)
    by_block += means[:, :whole]
    if whole < len(blocks):
        floats[:, whole * tokens :] += means[:, whole]
    return _result(floats, dtype)


def _products(packed: Array, bits: int, group_size: int) -> Array:
    """Each group of codes times its matrix: [groups of all rows, group_size]."""
    width = min(group_size, WIDTH)
    octets = np.ascontiguousarray(packed).view(np.uint8).reshape(-1, width * bits // 8)
    count, half = len(octets), -(-len(octets) // 2)
    if bits == 8:
        products = _scratch.get("products", count, width)
        _multiply(_unpack("codes", octets, bits), products)
    else:  # two rows in one: their sums are apart by more than they can be large
        codes = _unpack("codes", octets[:half], bits)
        codes[: count - half] += _unpack("more codes", octets[half:], bits, APART)
        products = _scratch.get("products", 2 * half, width)
        low, high = products[:half], products[half:]
        _multiply(codes, low)
        np.multiply(low, np.float32(1 / APART), out=high)
        np.rint(high, out=high)
        np.multiply(high, np.float32(APART), out=codes)
        low -= codes
    mixed: Array = mix_groups(products[:count].reshape(-1, group_size // width, width))
    return mixed


def _multiply(codes: Array, out: Array) -> None:
    """Multiply rows by their matrix, a few at a time."""
    width = codes.shape[1]
    for run, at_once in _runs(len(codes)):
        few, into = (x[run].reshape(-1, at_once, width) for x in (codes, out))
        np.matmul(few, matrix(width), out=into)


def _unpack(name: str, octets: Array, bits: int, factor: int = 1) -> Array:
    """Codes times a factor, as float32: [rows, codes]."""
    codes = _scratch.get(name, len(octets), octets.shape[1] * 8 // bits)
    if bits == 8:
        codes[...] = octets
    else:
        table = _codes_of_octets(bits, factor)
        table.take(octets, out=codes.view(table.dtype), mode="clip")
    return codes


@functools.cache
def _codes_of_octets(bits: int, factor: int) -> Array:
    """The codes in each octet, as one number so that they are taken at once."""
    codes = (np.arange(256)[:, None] >> bits * np.arange(8 // bits) & 2**bits - 1) * factor
    found: Array = codes.astype(np.float32).view(np.complex64 if bits == 4 else np.complex128)
    return found[:, 0]


def _result(floats: Array, dtype: mx.Dtype) -> mx.array:
    """An array of MLX with these numbers, which are overwritten.

    Written to by way of numpy, and rounded here, to the nearest and even, for bfloat16: MLX would
    read and write it all once more.
    """
    is_brain = dtype == mx.bfloat16
    result = mx.zeros(floats.shape, mx.uint16 if is_brain else dtype)
    if is_brain:
        bits = floats.view(np.uint32)
        odd = _scratch.get("codes", *floats.shape).view(np.uint32)
        np.right_shift(bits, 16, out=odd)
        odd &= 1
        odd += 0x7FFF
        bits += odd
        np.asarray(result)[...] = bits.view(np.uint16)[..., 1::2]
        return result.view(dtype)
    with np.errstate(over="ignore"):
        np.asarray(result)[...] = floats
    return result
