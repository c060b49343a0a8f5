"""What goes through a codec: the keys or values of a layer, and how many of them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

PIECE_ELEMENTS = 2**19
"""How many numbers go through a codec in one go: enough to keep a GPU busy and to make light of the
calls, so few that what they need beside the result is little and stays in a CPU's caches."""


def even_share(count: int, most: int) -> int:
    """How many of so many are taken at once, at most so many, so that all shares are alike."""
    return -(-count // -(-count // most)) if count else most


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the keys or values of one layer look like: [heads, any number of tokens, dim]."""

    heads: int
    dim: int
    dtype: mx.Dtype

    def in_piece(self, tokens: int) -> int:
        """How many times so many tokens make a piece; at least one."""
        return max(1, PIECE_ELEMENTS // max(1, self.heads * tokens * self.dim))


@dataclass(frozen=True, slots=True)
class Room:
    """Room for rows that the model will add, behind those that are decoded.

    Attributes:
        rows: for how many.
        takers: for each tensor, whether it gets any.
    """

    rows: int
    takers: tuple[bool, ...]


class Tensor(Protocol):
    """The keys or values of one layer, of which any rows can be had in full precision."""

    @property
    def spec(self) -> TensorSpec: ...

    def rows(self, start: int, stop: int) -> mx.array:
        """[heads, stop - start, dim], perhaps lazy."""
