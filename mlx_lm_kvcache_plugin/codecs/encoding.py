"""Encodes runs of blocks of tensors that look alike, in pieces that suit the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .base import Array, Codec, Parts, to_host
from .raw import RawCodec
from .tensors import Tensor, even_share
from .threads import map_pieces


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks: so many of so many tokens, from a position on."""

    start: int
    tokens: int
    blocks: int

    def part(self, first: int, blocks: int) -> Run:
        """So many of its blocks."""
        return Run(self.start + first * self.tokens, self.tokens, blocks)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some of the tensors and some of the blocks: many tensors where they are short."""

    tensors: slice
    blocks: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensors.stop - self.tensors.start, self.blocks.stop - self.blocks.start


Unfit = dict[tuple[int, int], Array]
"""By tensor and block what is kept raw for once, [heads, tokens, dim]."""


def encode_run(codec: Codec, tensors: Sequence[Tensor], run: Run) -> tuple[list[Parts], Unfit]:
    """Encode consecutive blocks of tensors that look alike.

    Returns:
        For each block its parts, each with a leading axis of tensors.
    """
    if run.start == 0 and run.blocks > 1:  # the block that begins a sequence may have other parts
        found, unfit = encode_run(codec, tensors, run.part(0, 1))
        others, more = encode_run(codec, tensors, run.part(1, run.blocks - 1))
        return found + others, unfit | {(i, block + 1): raw for (i, block), raw in more.items()}
    pieces = list(_pieces(len(tensors), run.blocks, tensors[0].spec.in_piece(run.tokens)))
    mx.eval([tensor.rows(run.start, run.start + 1) for tensor in tensors])  # and what they stand on
    whole: Parts = ()
    unfit = {}
    for piece, (parts, raw) in zip(
        pieces, map_pieces(_Work(codec, tensors, run), pieces), strict=True
    ):
        whole = whole or tuple(
            np.empty((len(tensors), run.blocks, *part.shape[1:]), part.dtype) for part in parts
        )
        for target, part in zip(whole, parts, strict=True):
            target[piece.tensors, piece.blocks] = part.reshape(*piece.shape, *part.shape[1:])
        for place, array in raw.items():
            tensor, block = divmod(place, piece.shape[1])
            unfit[piece.tensors.start + tensor, piece.blocks.start + block] = array
    return [tuple(part[:, block].copy() for part in whole) for block in range(run.blocks)], unfit


def _pieces(tensors: int, blocks: int, in_piece: int) -> Iterator[_Piece]:
    blocks_at_once = min(blocks, in_piece)
    tensors_at_once = even_share(tensors, max(1, in_piece // blocks_at_once))
    for place in range(0, tensors, tensors_at_once):
        for first in range(0, blocks, blocks_at_once):
            yield _Piece(
                slice(place, min(tensors, place + tensors_at_once)),
                slice(first, min(blocks, first + blocks_at_once)),
            )


@dataclass(frozen=True, slots=True)
class _Work:
    """Encodes the pieces of a run."""

    codec: Codec
    tensors: Sequence[Tensor]
    run: Run

    def __call__(self, piece: _Piece) -> tuple[Parts, dict[int, Array]]:
        """The parts of all blocks of all tensors, and by place which of them must stay raw."""
        x = self._rows(piece)
        encoded = self.codec.encode(x, first=self.run.start == 0)
        if isinstance(self.codec, RawCodec):
            return tuple(map(np.asarray, encoded)), {}
        fit = mx.ones(len(x), mx.bool_)
        if not getattr(self.codec, "marks_unfit", False):
            fit = mx.isfinite(x.astype(mx.float32).sum(axis=(1, 2, 3)))
        mx.eval(encoded, fit)  # one wait for the device, not one for each
        parts = tuple(map(np.asarray, encoded))
        all_fit = np.logical_and.reduce([np.asarray(fit), *map(_finite_blocks, parts)])
        return parts, {place: to_host(x[place]) for place in np.flatnonzero(~all_fit).tolist()}

    def _rows(self, piece: _Piece) -> mx.array:
        """[tensors x blocks, heads, tokens, dim]."""
        tokens, blocks = self.run.tokens, piece.blocks
        start, stop = (self.run.start + block * tokens for block in (blocks.start, blocks.stop))
        rows = [tensor.rows(start, stop) for tensor in self.tensors[piece.tensors]]
        x = mx.stack(rows) if len(rows) > 1 else rows[0][None]
        return mx.flatten(mx.unflatten(x, 2, (-1, tokens)).swapaxes(1, 2), 0, 1)


def _finite_blocks(part: Array) -> Array:
    """Which blocks of a part, [blocks, ...], are all finite."""
    if part.dtype.kind != "f":
        return np.ones(len(part), bool)
    return np.asarray(np.isfinite(part).reshape(len(part), -1).all(axis=1))
