"""Packs the windows of a model: for each layer the rows of the last tokens, as many as it holds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from .base import Codec
from .packing import Packer, Payload
from .tensors import Tensor, TensorSpec

MOST_LENGTHS = 16
"""How many combinations of lengths are remembered: a full window has one, a chunk any number."""


class WindowTensor(Tensor, Protocol):
    """The keys or values of a layer that holds the last tokens alone."""

    @property
    def length(self) -> int:
        """How many rows it holds."""


@dataclass(frozen=True, slots=True)
class WindowPayload:
    """The windows of all layers at one position. Immutable.

    Attributes:
        lengths: how many rows each tensor has.
        payloads: one for each length, the longest first.
    """

    lengths: tuple[int, ...]
    payloads: tuple[Payload, ...]

    @property
    def nbytes(self) -> int:
        held = [self.lengths, self.payloads]
        own = object.__sizeof__(self) + sum(map(sys.getsizeof, held))
        return own + sum(payload.nbytes for payload in self.payloads)


class WindowPacker:
    """Encodes and decodes windows, each row for itself: they slide, so they are encoded anew.

    Args:
        specs: what each tensor looks like.
        codec: a near exact one.
    """

    def __init__(self, specs: Sequence[TensorSpec], codec: Codec) -> None:
        self.specs = tuple(specs)
        self._codec = codec
        self._runs = functools.lru_cache(MOST_LENGTHS)(self._runs_of)

    def encode(self, windows: Sequence[WindowTensor]) -> WindowPayload:
        """Args: windows: in the order of the specs."""
        lengths = tuple(window.length for window in windows)
        payloads = [
            packer.encode([windows[index] for index in members], 0, length)[0]
            for length, members, packer in self._runs(lengths)
        ]
        return WindowPayload(lengths, tuple(payloads))

    def decode(self, payload: WindowPayload) -> list[mx.array]:
        """All windows, [heads, length, dim] each, evaluated."""
        found: dict[int, mx.array] = {}
        runs = self._runs(payload.lengths)
        for (length, members, packer), packed in zip(runs, payload.payloads, strict=True):
            for batch in packer.batches(length):
                tensors = packer.decode(batch, [packed], length)
                found.update(zip([members[place] for place in batch], tensors, strict=True))
        mx.eval(found)
        return [found[index] for index in range(len(self.specs))]

    def _runs_of(self, lengths: tuple[int, ...]) -> list[tuple[int, list[int], Packer]]:
        """For each length the tensors that have it, and what packs them."""
        runs = []
        for length in sorted(set(lengths), reverse=True):
            members = [index for index, other in enumerate(lengths) if other == length]
            specs = [self.specs[index] for index in members]
            runs.append((length, members, Packer(specs, self._codec, self._codec, True)))
        return runs
