"""Packs sequences: whole blocks by the codec that was asked for, tails and windows near exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import mlx.core as mx

from ..errors import CodecError
from ..settings import Settings
from .affine import AffineCodec
from .base import Codec, CodecOptions
from .packing import Packer, Payload
from .raw import RawCodec
from .registry import CodecRegistry
from .tensors import Room, TensorSpec
from .threads import map_pieces
from .windows import WindowPacker

TAIL_BITS = 8
"""Tails are encoded anew as they grow, and end up inside of blocks, and windows are encoded anew as
they slide: they have to be near exact."""

MOST_ENCODINGS = 2
"""A sequence that leaves another inside of a block takes over rows that were decoded, and encodes
them anew with its own. After so many times its block is encoded near exactly, as tails are: else
every parting would add an error of the codec's size."""


@dataclass(frozen=True, slots=True)
class SequencePacker:
    """Encodes blocks one way and tails another, near exact one, and decodes sequences of both."""

    blocks: Packer
    tails: Packer

    def for_block(self, encodings: int) -> Packer:
        """What encodes a block some of whose rows were encoded so often before."""
        return self.tails if encodings >= MOST_ENCODINGS else self.blocks

    def decode(
        self, payloads: Sequence[Payload], tokens: int, room: Room | None = None
    ) -> list[mx.array]:
        """Each tensor's first `tokens` rows, evaluated: [heads, tokens, dim].

        Args:
            payloads: consecutive blocks and perhaps a tail; all but the last are wanted whole.
            tokens: how many in all.
            room: how many rows of zeros follow, and in which tensors.
        """
        runs = self._runs(payloads, tokens)
        rows = [tokens] * len(self.blocks.specs)
        if room is not None:
            rows = [tokens + room.rows * taker for taker in room.takers]

        def decode_batch(batch: Sequence[int]) -> list[mx.array]:
            pieces = [packer.decode(batch, run, length) for packer, run, length in runs]
            if rows[batch[0]] > tokens:
                return list(_with_room(pieces, rows[batch[0]]))
            return list(pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2))

        batches = [
            [index for index in batch if rows[index] == length]
            for batch in self.blocks.batches(tokens)
            for length in sorted({rows[index] for index in batch})
        ]
        found: dict[int, mx.array] = {}
        for batch, tensors in zip(batches, map_pieces(decode_batch, batches), strict=True):
            found.update(zip(batch, tensors, strict=True))
        return [found[index] for index in range(len(found))]

    def _runs(
        self, payloads: Sequence[Payload], tokens: int
    ) -> list[tuple[Packer, list[Payload], int]]:
        """What was encoded alike, and how many rows are wanted of each."""
        runs, left = [], tokens
        for is_near_exact, group in groupby(payloads, key=attrgetter("is_near_exact")):
            packer, run = self.tails if is_near_exact else self.blocks, list(group)
            length = min(left, sum(payload.tokens for payload in run))
            runs.append((packer, run, length))
            left -= length
        if left:
            raise CodecError(f"{tokens} tokens are wanted, and the blocks have {tokens - left}")
        return runs


def _with_room(pieces: Sequence[mx.array], rows: int) -> mx.array:
    """Pieces of [tensors, heads, some rows, dim] one after the other, and zeros behind them."""
    tensors, heads, _, dim = pieces[0].shape
    joined, start = mx.zeros((tensors, heads, rows, dim), pieces[0].dtype), 0
    for piece in pieces:  # each is written into the one array: nothing else is as large
        joined[:, :, start : start + piece.shape[2]] = piece
        start += piece.shape[2]
    return joined


class SequencePackers:
    """Makes the packers of a model, by what its tensors look like.

    Args:
        settings: codec, bits and group size.
        registry: where the codec is found.

    Attributes:
        codecs: for keys, for values, and for tails and windows.
    """

    def __init__(self, settings: Settings, registry: CodecRegistry) -> None:
        self._key_codec, self._value_codec = registry.create_pair(settings)
        self._tail_codec: Codec = RawCodec()
        if settings.codec != RawCodec.name:
            self._tail_codec = AffineCodec(CodecOptions(TAIL_BITS, settings.group_size))
        self.codecs = (self._key_codec, self._value_codec, self._tail_codec)

    def for_specs(self, specs: Sequence[TensorSpec]) -> SequencePacker:
        """Args: specs: of the keys and the values of each layer in turn."""
        return SequencePacker(
            Packer(specs, self._key_codec, self._value_codec),
            Packer(specs, self._tail_codec, self._tail_codec, is_near_exact=True),
        )

    def for_windows(self, specs: Sequence[TensorSpec]) -> WindowPacker:
        """Args: specs: of the tensors of all windows in turn."""
        return WindowPacker(specs, self._tail_codec)
