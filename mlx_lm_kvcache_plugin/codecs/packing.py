"""Packs one block of all layers into a payload of a few host buffers, and unpacks it.

The tensors of a model (the keys and the values of each layer) that look alike are stacked, so a
payload costs a handful of numpy arrays however many layers there are, and nothing in it belongs
to MLX: it can be counted to the byte, kept and freed on any thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

import mlx.core as mx

from ..errors import CodecError
from .base import Array, Codec, Parts
from .encoding import Run, encode_run
from .raw import RawCodec
from .tensors import Tensor, TensorSpec, even_share

_RAW = RawCodec()


class Payload:
    """One block of every layer in host memory. Immutable.

    Attributes:
        groups: for each group of like tensors the parts, stacked along a new first axis.
        exceptions: tensors, by index, that were kept raw for once, [heads, tokens, dim].
        tokens: how many it stands for.
        is_near_exact: whether it was encoded as tails are.
        encodings: how often the numbers of any of its rows went through the codec for blocks.
        nbytes: everything this object holds, its Python objects included.
    """

    __slots__ = (
        "__weakref__",
        "encodings",
        "exceptions",
        "groups",
        "is_near_exact",
        "nbytes",
        "tokens",
    )

    def __init__(
        self,
        groups: tuple[Parts, ...],
        exceptions: dict[int, Array],
        tokens: int,
        *,
        is_near_exact: bool,
        encodings: int,
    ) -> None:
        self.groups = groups
        self.tokens = tokens
        self.exceptions = exceptions
        self.is_near_exact = is_near_exact
        self.encodings = encodings
        held = [groups, exceptions, *groups, *exceptions.values()]
        held += [array for parts in groups for array in parts]
        self.nbytes = object.__sizeof__(self) + sum(map(sys.getsizeof, held))


class Packer:
    """Encodes and decodes the blocks of one model. Stateless after construction.

    Args:
        specs: what each tensor looks like: keys of layer 0, values of layer 0, keys of layer 1, ...
        key_codec, value_codec: for tensors of even and of odd index. A tensor that its codec does
            not take (by width or dtype) is stored raw.
        is_near_exact: whether what it encodes may be encoded again without a trace.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        key_codec: Codec,
        value_codec: Codec,
        is_near_exact: bool = False,
    ) -> None:
        self.specs = tuple(specs)
        self.is_near_exact = is_near_exact
        self.codecs = tuple(
            _codec_for(spec, value_codec if index % 2 else key_codec)
            for index, spec in enumerate(self.specs)
        )
        groups: dict[tuple[TensorSpec, int], list[int]] = {}
        for index, (spec, codec) in enumerate(zip(self.specs, self.codecs, strict=True)):
            groups.setdefault((spec, id(codec)), []).append(index)
        self._groups = tuple(groups.values())
        self._places = {
            index: (group, place)
            for group, members in enumerate(self._groups)
            for place, index in enumerate(members)
        }

    def encode(
        self,
        tensors: Sequence[Tensor],
        start: int,
        tokens: int,
        blocks: int = 1,
        encodings: int = 0,
    ) -> list[Payload]:
        """Encode consecutive blocks, layer by layer.

        Args:
            tensors: in the order of `specs`.
            start: position of the first block's first token in its sequence.
            tokens: tokens of each block.
            blocks: how many.
            encodings: how often some of their rows went through the codec for blocks before.
        """
        encodings += not self.is_near_exact
        exceptions: list[dict[int, Array]] = [{} for _ in range(blocks)]
        groups = []
        for members in self._groups:
            run, some = Run(start, tokens, blocks), [tensors[index] for index in members]
            encoded, unfit = encode_run(self.codecs[members[0]], some, run)
            groups.append(encoded)
            for (place, block), raw in unfit.items():
                exceptions[block][members[place]] = raw
        return [
            Payload(
                tuple(group[block] for group in groups),
                exceptions[block],
                tokens,
                is_near_exact=self.is_near_exact,
                encodings=encodings,
            )
            for block in range(blocks)
        ]

    def batches(self, rows: int) -> list[Sequence[int]]:
        """All tensors by index, together those that are decoded in one go: many short ones."""
        found: list[Sequence[int]] = []
        for members in self._groups:
            count = even_share(len(members), self.specs[members[0]].in_piece(rows))
            found += [members[place : place + count] for place in range(0, len(members), count)]
        return found

    def decode(self, batch: Sequence[int], payloads: Sequence[Payload], rows: int) -> mx.array:
        """The first `rows` tokens of consecutive blocks: [tensors, heads, rows, dim], lazy.

        Args:
            batch: tensors that look alike.
            payloads: all but the last are wanted whole.
        """
        if len(batch) > 1 and any(payload.exceptions.keys() & set(batch) for payload in payloads):
            return mx.concatenate([self.decode([index], payloads, rows) for index in batch])
        spec, pieces = self.specs[batch[0]], []
        for codec, blocks, length in self._runs(batch, payloads, rows):
            piece = codec.decode(blocks, length, spec.dtype)
            shape = (len(batch) * spec.heads, length, spec.dim)
            if (piece.shape, piece.dtype) != (shape, spec.dtype):
                raise CodecError(f"a codec decoded {piece.dtype} {piece.shape}, not {spec}")
            mx.async_eval(piece)  # type: ignore[no-untyped-call]  # while the next is made ready
            pieces.append(piece)
        decoded = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
        return mx.unflatten(decoded, 0, (len(batch), spec.heads))

    def _runs(
        self, batch: Sequence[int], payloads: Sequence[Payload], rows: int
    ) -> Iterator[tuple[Codec, list[Parts], int]]:
        """What is decoded in one go: by which codec, which parts, and how many rows of them."""
        first, left = batch[0], rows
        group, places = self._places[first][0], self._places_of(batch)
        for is_raw, alike in groupby(payloads, lambda payload: first in payload.exceptions):
            run = list(alike)
            at_once = self.specs[first].in_piece(run[0].tokens)
            for start in range(0, len(run), at_once):
                some = run[start : start + at_once]
                length = min(left, sum(payload.tokens for payload in some))
                if is_raw:
                    yield _RAW, [(payload.exceptions[first],) for payload in some], length
                else:
                    parts = [_as_one(payload.groups[group], places) for payload in some]
                    yield self.codecs[first], parts, length
                left -= length

    def _places_of(self, batch: Sequence[int]) -> slice | list[int]:
        """Where tensors that look alike stand in their group; a slice copies nothing."""
        places = [self._places[index][1] for index in batch]
        run = range(places[0], places[0] + len(places))
        return slice(run.start, run.stop) if places == list(run) else places


def _as_one(parts: Parts, places: slice | list[int]) -> Parts:
    """The parts of some tensors of a group, with all their heads as those of one."""
    some = [part[places] for part in parts]
    return tuple(part.reshape(len(part) * part.shape[1], *part.shape[2:]) for part in some)


def _codec_for(spec: TensorSpec, codec: Codec) -> Codec:
    floating = mx.issubdtype(spec.dtype, mx.floating)
    return codec if floating and codec.group_size_for(spec.dim) is not None else _RAW
