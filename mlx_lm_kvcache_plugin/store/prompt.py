"""The tokens of a prompt, as everybody who looks at them takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .blocks import Tokens


class Prompt:
    """A prompt, of which an array is made once, and only as far as somebody looks.

    That takes longer than to look it up, and most prompts are stored for a part of the way alone.
    A slice of it is an array, which nobody may change.
    """

    __slots__ = ("_ids", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._ids = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, part: slice) -> Tokens:
        start, end, _ = part.indices(len(self))
        seen = len(self._ids)
        if end > seen:
            more = self._tokens[seen : max(end, 2 * seen)]  # or many looks would copy it many times
            self._ids = np.concatenate([self._ids, np.asarray(more, np.int64)])
        return self._ids[start:end]


TokenIds = Sequence[int] | Tokens | Prompt
"""What can be looked up."""
