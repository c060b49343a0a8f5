"""What a codec is, and what the built-in ones share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Parts = tuple[Array, ...]
"""One tensor of one block as host arrays; what each of them means is the codec's affair."""


@dataclass(frozen=True, slots=True)
class CodecOptions:
    """What a codec is built from.

    Attributes:
        bits: bits per element that the user asked for.
        group_size: the most elements that may share a scale.
    """

    bits: int
    group_size: int


@runtime_checkable
class Codec(Protocol):
    """Encodes the keys or the values of a layer, block by block, and decodes runs of blocks.

    Tensors have the shape [blocks, heads, tokens, dim]. Blocks have nothing to do with one another,
    nor have heads: layers that look alike go through it together, as more blocks when they are
    encoded and as more heads when they are decoded. A codec keeps nothing between calls, which come
    from several threads on a CPU: the same parts decode to the same numbers in any process.

    One that has an attribute `marks_unfit`, and it is true, promises that a part is not finite
    wherever a block is not; for others the caller looks at all numbers itself.
    """

    @property
    def name(self) -> str:
        """The name that `--kv-cache-codec` takes."""

    def group_size_for(self, dim: int) -> int | None:
        """The group size for tensors of this width (0: no groups), None where they stay raw."""

    def encode(self, x: mx.array, *, first: bool) -> tuple[mx.array, ...]:
        """Encode blocks.

        Args:
            x: [blocks, heads, tokens, dim], of any floating dtype. What comes of a block that is
                not all finite does not matter: the caller keeps that tensor of it raw.
            first: whether each of them begins a sequence: attention sinks sit there.

        Returns:
            The parts, each with a leading axis of blocks, a second one of heads, and a dtype that
            numpy knows. If one of them is not finite, the caller keeps that tensor of that block
            raw instead.
        """

    def decode(self, blocks: Sequence[Parts], rows: int, dtype: mx.Dtype) -> mx.array:
        """Decode the first `rows` tokens of consecutive blocks.

        Args:
            blocks: the parts of each block, without the leading axis; all but the last are wanted
                whole. The first of them may be one that was encoded with `first`.
            rows: how many tokens are wanted.
            dtype: what the tensor had when it was encoded.

        Returns:
            [heads, rows, dim] of that dtype.
        """


def on_cpu() -> bool:
    """Whether MLX computes on a CPU here."""
    return bool(mx.default_device() == mx.Device(mx.cpu))


def for_numpy(x: mx.array) -> mx.array:
    """The same numbers of a dtype that numpy has: the bits of bfloat16 travel as integers."""
    return x.view(mx.uint16) if x.dtype == mx.bfloat16 else x


def to_host(x: mx.array) -> Array:
    """Copy an array out of MLX, as `for_numpy` gives it."""
    return np.array(for_numpy(x))


def from_host(array: Array, dtype: mx.Dtype) -> mx.array:
    """Undo `to_host` for an array of that dtype."""
    if dtype == mx.bfloat16:
        return mx.array(array).view(dtype)
    return mx.array(array, dtype=dtype)


def width_of(packed: Any, bits: int) -> int:
    """How many codes of so many bits a row of words of 32 bits has."""
    return int(packed.shape[-1]) * 32 // bits


def largest_group_size(dim: int, most: int, sizes: Sequence[int]) -> int | None:
    """The largest of `sizes` up to `most` that divides `dim`, or None (also for a width of 0)."""
    fitting = [size for size in sizes if size <= most and dim and dim % size == 0]
    return max(fitting, default=None)


def rows_of(blocks: Sequence[Parts], part: int, rows: int) -> Array:
    """Put the rows of one part, each [heads, tokens, ...], one after the other, `rows` in all."""
    pieces, left = [], rows
    for parts in blocks:
        piece = parts[part][:, :left]
        pieces.append(piece)
        left -= piece.shape[1]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)


def join_rows(blocks: Sequence[Parts], part: int, rows: int) -> mx.array:
    """The same as an array of MLX."""
    return mx.array(rows_of(blocks, part, rows))
