"""The yardstick: what the smallest change that a cache can suffer does to what a model expects.

In bfloat16 a model cannot be told from itself any better than this: whatever changes a cache at
all, an 8-bit codec or one bit of one token, makes its arithmetic round otherwise from there on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

_WORDS = {2: mx.uint16, 4: mx.uint32}
"""What has the bits of a number, by its bytes."""


def rounded(caches: Sequence[Any]) -> list[Any]:
    """Copies of cache objects with the last bit of every number in them turned over."""
    copies: list[Any] = turned(list(copy.deepcopy(caches)))
    return copies


def turned(value: Any) -> Any:
    """A value with the last bit of every number in its arrays turned over; objects in place."""
    if isinstance(value, mx.array):
        return turn_last_bit(value) if mx.issubdtype(value.dtype, mx.floating) else value
    if isinstance(value, list | tuple):
        return type(value)(map(turned, value))
    if isinstance(value, dict):
        return {key: turned(item) for key, item in value.items()}
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        vars(value).update(turned(vars(value)))
    return value


def turn_last_bit(numbers: mx.array) -> mx.array:
    """The neighbour of each floating number that differs in the last bit."""
    word = _WORDS[numbers.dtype.size]
    return (numbers.view(word) ^ mx.array(1, word)).view(numbers.dtype)
