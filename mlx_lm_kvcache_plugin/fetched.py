"""What passes between the composer and the border where upstream's objects are translated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx


class Checkpoint(Protocol):
    """The state of all layers at one position, as its maker left it."""

    @property
    def nbytes(self) -> int: ...

    @property
    def can_be_cut(self) -> bool:
        """Whether its maker can shorten it to fewer tokens once it is restored."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What is known of a prompt's first tokens: either tensors or a checkpoint.

    Attributes:
        tokens: how many tokens it stands for.
        tensors: keys and values of each layer in turn, [heads, tokens, dim], evaluated.
        checkpoint: the state of all layers.
        surplus_tokens: how many tokens the checkpoint has to be cut by.
    """

    tokens: int
    tensors: list[mx.array] | None = None
    checkpoint: Checkpoint | None = None
    surplus_tokens: int = 0
