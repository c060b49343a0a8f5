"""A model's identity by content: everything that the numbers in its caches depend on.

Scripts train models, merge adapters and change weights in place, so nothing is remembered between
two calls, and no path or id takes part: the same model under another path is the same.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from math import gcd
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

DIGEST_BYTES = 32

SAMPLES = 256
"""Elements of an array that are looked at, about. All of them would cost as much as a token."""

WHOLE = 1024
"""An array of no more elements than this is looked at whole."""

GOLDEN = 0.6180339887
"""Steps by this share of a row fall on columns that lie evenly, however many they are."""

NOT_NUMBERS = frozenset({"_no_grad"})
"""Attributes of modules that say nothing about what they compute: which weights are trained."""

PLAIN = (type(None), bool, int, float, complex, str, bytes)


def fingerprint(model: Any) -> bytes:
    """The same for models that compute the same, in any process; another one if in doubt."""
    walk = _Walk()
    facts = walk.describe(model)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(repr((_versions(), facts)).encode())
    digest.update(walk.sampled())
    return digest.digest()


@functools.cache
def _versions() -> tuple[str, str]:
    return version("mlx"), version("mlx-lm")


class _Walk:
    """One walk through a model: what it is made of, as plain data, and its arrays on the way."""

    def __init__(self) -> None:
        self._samples: dict[mx.Dtype, list[mx.array]] = {}
        self._seen: dict[int, tuple[int, Any]] = {}  # with the objects: an id must stay theirs
        self._classes: set[type] = set()

    def describe(self, value: Any) -> Any:
        """A value as plain data, whose repr is the same in every process."""
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, mx.array):
            self._samples.setdefault(value.dtype, []).append(_sample(value))
            return "array", value.shape, str(value.dtype)
        if id(value) in self._seen:
            return "seen", self._seen[id(value)][0]
        self._seen[id(value)] = (len(self._seen), value)
        return self._describe_object(value)

    def _describe_object(self, value: Any) -> Any:
        if isinstance(value, Module):
            own = {k: v for k, v in vars(value).items() if k not in NOT_NUMBERS}
            return self._class(type(value)), self._mapping(own), self._mapping(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._class(type(value)), self._mapping(vars(value) if _open(value) else {})
        if isinstance(value, dict):
            return self._mapping(value)
        if isinstance(value, list | tuple):
            return type(value).__name__, [self.describe(item) for item in value]
        if isinstance(value, set | frozenset):
            return "set", sorted(repr(self.describe(item)) for item in value)
        if isinstance(value, functools.partial):
            return "partial", [self.describe(v) for v in (value.func, value.args, value.keywords)]
        return self._describe_other(value)

    def _describe_other(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return "method", self.describe(value.__func__), self.describe(value.__self__)
        if isinstance(value, np.ndarray):
            return "ndarray", value.shape, str(value.dtype), value.tobytes()
        if isinstance(value, np.generic | mx.Dtype):
            return str(type(value)), str(value)
        if isinstance(value, enum.Enum):
            return _name(type(value)), value.name
        if isinstance(value, type | ModuleType):
            return _name(value) if isinstance(value, type) else value.__name__
        own = getattr(value, "__dict__", {})
        return self._class(type(value)), getattr(value, "__qualname__", ""), self._mapping(own)

    def _function(self, function: FunctionType) -> Any:
        """Its code, and what it brings along: a change made by a patch may be in there alone."""
        brought = [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty one
                brought.append(cell.cell_contents)
        return "function", _code_facts(function.__code__), [self.describe(v) for v in brought]

    def _mapping(self, mapping: Any) -> list[tuple[str, Any]]:
        named = {k if isinstance(k, str) else _key(k): v for k, v in mapping.items()}
        return [(name, self.describe(named[name])) for name in sorted(named)]

    def _class(self, kind: type) -> Any:
        """A class; the first time, with the code that it consists of."""
        if kind in self._classes:
            return _name(kind)
        self._classes.add(kind)
        end = Module if Module in kind.__mro__ else object  # what is above them is no model's
        bases = kind.__mro__[: kind.__mro__.index(end)]
        return _name(kind), [
            (_name(base), [(name, self.describe(method)) for name, method in _methods(base)])
            for base in bases
        ]

    def sampled(self) -> bytes:
        """The bytes of all samples, computed at once."""
        parts = [mx.concatenate(arrays).view(mx.uint8) for arrays in self._samples.values()]
        return np.array(mx.concatenate(parts)).tobytes() if parts else b""


def _key(key: Any) -> str:
    return "\0" + (repr(key) if isinstance(key, PLAIN) else _name(type(key)))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _open(value: Any) -> bool:
    return hasattr(value, "__dict__")


def _sample(array: mx.array) -> mx.array:
    """Elements from all over an array, so that no few rows or columns can change unseen."""
    flat = array.reshape(-1)
    return flat if array.size <= WHOLE else flat[:: _step(array.size, array.shape[-1])]


@functools.cache
def _step(size: int, columns: int) -> int:
    """A step that comes by all columns, and by rows that lie evenly."""
    step = max(1, size // SAMPLES)
    if step > columns:
        step += round(GOLDEN * columns) - step % columns
    while gcd(step, columns) > 1:
        step += 1
    return step


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for name, member in sorted(vars(kind).items()):
        function = getattr(member, "__func__", getattr(member, "fget", member))
        function = getattr(function, "__wrapped__", function)
        if isinstance(function, FunctionType):
            yield name, function


def _code_facts(code: CodeType) -> Any:
    """Which code it is: by the content of its file and the line, or if there is none by itself."""
    try:
        status = os.stat(code.co_filename)
        digest = _file_digest(code.co_filename, status.st_mtime_ns, status.st_size)
    except OSError:  # a notebook has none
        return _code_itself(code)
    return code.co_qualname, code.co_firstlineno, digest


@functools.lru_cache(maxsize=256)
def _file_digest(path: str, mtime_ns: int, size: int) -> bytes:
    with open(path, "rb") as file:
        return hashlib.blake2b(file.read(), digest_size=DIGEST_BYTES).digest()


def _code_itself(code: CodeType) -> Any:
    constants = [
        _code_itself(value) if isinstance(value, CodeType) else _constant(value)
        for value in code.co_consts
    ]
    return code.co_qualname, code.co_code, code.co_names, constants


def _constant(value: Any) -> str:
    is_set = isinstance(value, frozenset)  # whose order differs from process to process
    return repr(sorted(map(repr, value))) if is_set else repr(value)
