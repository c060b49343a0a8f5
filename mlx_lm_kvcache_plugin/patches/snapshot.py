"""Copies of any objects in host memory, bit for bit.

They go by attributes, so that classes from model files are copied like upstream's own.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..codecs.base import from_host, to_host


class Snapshot:
    """Objects as they are now, arrays and objects inside of them too. Immutable.

    Attributes:
        nbytes: everything it holds.
    """

    __slots__ = ("_frozen", "nbytes")

    def __init__(self, objects: Sequence[Any]) -> None:
        sizes: list[int] = [object.__sizeof__(self)]
        self._frozen = _freeze(list(objects), sizes.append)
        self.nbytes = sum(sizes)

    def restore(self) -> list[Any]:
        """New objects in the same state, evaluated."""
        objects: list[Any] = _thaw(self._frozen)
        return objects


@dataclass(frozen=True, slots=True)
class _HostArray:
    """An array of MLX in host memory, and the dtype that it had."""

    array: Any
    dtype: mx.Dtype


@dataclass(frozen=True, slots=True)
class _HostObject:
    """An object that may hold arrays, by its class and its attributes."""

    kind: type
    attributes: dict[str, Any]


def _freeze(value: Any, count: Callable[[int], None]) -> Any:
    """Copy a value to host memory, arrays and cache objects inside of it too."""
    if isinstance(value, mx.array):
        frozen: Any = _HostArray(to_host(value), value.dtype)
        count(sys.getsizeof(frozen.array))
    elif isinstance(value, list | tuple):
        frozen = type(value)(_freeze(item, count) for item in value)
    elif isinstance(value, dict):
        frozen = {key: _freeze(item, count) for key, item in value.items()}
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        frozen = _HostObject(type(value), _freeze(vars(value), count))
        count(sys.getsizeof(frozen.attributes))
    else:
        frozen = _copied(value)
    count(sys.getsizeof(frozen))
    return frozen


def _thaw(frozen: Any) -> Any:
    """Undo `_freeze`."""
    if isinstance(frozen, _HostArray):
        array = from_host(frozen.array, frozen.dtype)
        mx.eval(array)
        return array
    if isinstance(frozen, _HostObject):
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
