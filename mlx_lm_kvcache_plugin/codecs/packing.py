"""Packs one block of all layers into a payload of a few host buffers, and unpacks it.

The tensors of a model (the keys and the values of each layer) that look alike are stacked, so a
payload costs a handful of numpy arrays however many layers there are, and nothing in it belongs
to MLX: it can be counted to the byte, kept and freed on any thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import mlx.core as mx
import numpy as np

from .base import Array, Codec, Parts, to_host
from .raw import RawCodec

_RAW = RawCodec()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the keys or values of one layer look like: [heads, any number of tokens, dim]."""

    heads: int
    dim: int
    dtype: mx.Dtype


class Tensor(Protocol):
    """The keys or values of one layer, of which any rows can be had in full precision."""

    @property
    def spec(self) -> TensorSpec: ...

    def rows(self, start: int, stop: int) -> mx.array:
        """[heads, stop - start, dim], perhaps lazy."""


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
        groups = [
            self._encode_group(members, tensors, start, tokens, blocks, exceptions)
            for members in self._groups
        ]
        return [
            Payload(
                tuple(stacked[block] for stacked in groups),
                exceptions[block],
                tokens,
                is_near_exact=self.is_near_exact,
                encodings=encodings,
            )
            for block in range(blocks)
        ]

    def _encode_group(
        self,
        members: Sequence[int],
        tensors: Sequence[Tensor],
        start: int,
        tokens: int,
        blocks: int,
        exceptions: list[dict[int, Array]],
    ) -> list[Parts]:
        encoded = []
        for index in members:
            x = tensors[index].rows(start, start + tokens * blocks)
            x = mx.unflatten(x, 1, (blocks, tokens)).swapaxes(0, 1)
            parts, unfit = _encode_tensor(self.codecs[index], x, start == 0)
            encoded.append(parts)
            for block in unfit:
                exceptions[block][index] = to_host(x[block])
        return [
            tuple(np.stack(parts) for parts in zip(*of_block, strict=True))
            for of_block in zip(*encoded, strict=True)
        ]

    def decode(self, payloads: Sequence[Payload], rows: int) -> Iterator[mx.array]:
        """Yield each tensor's first `rows` tokens of consecutive blocks: [heads, rows, dim].

        One at a time and lazy, so that whoever evaluates them in turn needs room for one more
        tensor and not for all.
        """
        for index in range(len(self.specs)):
            yield self._decode_tensor(index, payloads, rows)

    def _decode_tensor(self, index: int, payloads: Sequence[Payload], rows: int) -> mx.array:
        dtype = self.specs[index].dtype
        pieces, left = [], rows
        for raw, group in groupby(payloads, key=lambda payload: index in payload.exceptions):
            run = list(group)
            blocks = [self._parts(index, payload) for payload in run]
            length = min(left, sum(payload.tokens for payload in run))
            codec = _RAW if raw else self.codecs[index]
            pieces.append(codec.decode(blocks, length, dtype))
            left -= length
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)

    def _parts(self, index: int, payload: Payload) -> Parts:
        if index in payload.exceptions:
            return (payload.exceptions[index],)
        group, place = self._places[index]
        return tuple(part[place] for part in payload.groups[group])


def _codec_for(spec: TensorSpec, codec: Codec) -> Codec:
    floating = mx.issubdtype(spec.dtype, mx.floating)
    return codec if floating and codec.group_size_for(spec.dim) is not None else _RAW


def _encode_tensor(codec: Codec, x: mx.array, first: bool) -> tuple[list[Parts], list[int]]:
    """Encode [blocks, heads, tokens, dim]: each block's parts, and the blocks that must stay raw.

    The parts may look into MLX's memory: stacking them is what copies them out.
    """
    runs = [(x[:1], True), (x[1:], False)] if first else [(x, False)]
    encoded = [codec.encode(run, first=begins) for run, begins in runs if run.shape[0]]
    finite = mx.isfinite(x.astype(mx.float32).sum(axis=(1, 2, 3)))
    is_raw = isinstance(codec, RawCodec)
    mx.eval(encoded if is_raw else (encoded, finite))  # one wait for the device, not one for each
    blocks = [
        parts for run in encoded for parts in zip(*(np.asarray(part) for part in run), strict=True)
    ]
    unfit = [] if is_raw else np.flatnonzero(~np.asarray(finite)).tolist()
    unfit += [] if is_raw else [b for b, parts in enumerate(blocks) if not _all_finite(parts)]
    return blocks, unfit


def _all_finite(parts: Parts) -> bool:
    return all(part.dtype.kind != "f" or bool(np.isfinite(part).all()) for part in parts)
