"""Copies of any objects in host memory, bit for bit.

They go by attributes, so that classes from model files are copied like upstream's own.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..codecs.base import from_host, to_host


class Snapshot:
    """Objects as they are now, arrays and objects inside of them too. Immutable.

    Args:
        frozen: what `freeze` made of a list of objects.

    Attributes:
        frozen: as it was given.
        nbytes: everything it holds.
    """

    __slots__ = ("frozen", "nbytes")

    def __init__(self, frozen: list[Any]) -> None:
        self.frozen = frozen
        self.nbytes = object.__sizeof__(self) + sum(_sizes(frozen))

    @classmethod
    def of(cls, objects: Sequence[Any]) -> Snapshot:
        """Copy these objects."""
        return cls(freeze(list(objects)))

    def restore(self) -> list[Any]:
        """New objects in the same state, evaluated."""
        objects: list[Any] = _thaw(self.frozen)
        return objects


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array of MLX in host memory, and the dtype that it had."""

    array: Any
    dtype: mx.Dtype


@dataclass(frozen=True, slots=True)
class HostObject:
    """An object that may hold arrays, by its class and its attributes."""

    kind: type
    attributes: dict[str, Any]


def freeze(value: Any) -> Any:
    """Copy a value to host memory, arrays and cache objects inside of it too."""
    if isinstance(value, mx.array):
        return HostArray(to_host(value), value.dtype)
    if isinstance(value, list | tuple):
        return type(value)(freeze(item) for item in value)
    if isinstance(value, dict):
        return {key: freeze(item) for key, item in value.items()}
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return HostObject(type(value), freeze(vars(value)))
    return _copied(value)


def _sizes(frozen: Any) -> Iterator[int]:
    """What a frozen value and everything inside of it take."""
    yield sys.getsizeof(frozen)
    if isinstance(frozen, HostArray):
        yield sys.getsizeof(frozen.array)
    elif isinstance(frozen, HostObject):
        yield from _sizes(frozen.attributes)
    elif isinstance(frozen, list | tuple | dict):
        for item in frozen.values() if isinstance(frozen, dict) else frozen:
            yield from _sizes(item)


def _thaw(frozen: Any) -> Any:
    """Undo `freeze`."""
    if isinstance(frozen, HostArray):
        array = from_host(frozen.array, frozen.dtype)
        mx.eval(array)
        return array
    if isinstance(frozen, HostObject):
        value: Any = object.__new__(frozen.kind)
        vars(value).update(_thaw(frozen.attributes))
        return value
    if isinstance(frozen, list | tuple):
        return type(frozen)(_thaw(item) for item in frozen)
    if isinstance(frozen, dict):
        return {key: _thaw(item) for key, item in frozen.items()}
    return _copied(frozen)


def _copied(value: Any) -> Any:
    """A copy of anything else; a dtype is not to be copied, and need not be."""
    return value if isinstance(value, mx.Dtype) else copy.deepcopy(value)
