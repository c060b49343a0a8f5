"""A model's identity by content: everything that the numbers in its caches depend on.

No path or id takes part: the same model under another path, or in another process, is the same.
Scripts train models, merge adapters and patch functions, so all of a model is looked at by every
call. Of its weights, an array is read whole when it is first seen (`weights`), so what is loaded,
replaced, trained or merged is told by all of it. From then on samples tell whether it changed in
place: a change in place of a few rows or elements of one array, between two calls of one process,
is all of the weights that can go unseen.

Of code, that of the classes counts, with the files that it stands in, and what it comes by through
global names: functions, classes, layers, dataclasses, and small tables of plain values and arrays.
Of other objects with a global name only the type counts; of mlx, Python and further installed
packages, the version or the files that come in play, and the functions that a script put into mlx.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from .code import (
    COMPILED,
    PLAIN,
    Origin,
    code_facts,
    content_of,
    file_digest,
    function_in,
    is_table,
    key_of,
    name_of,
    origin_of_module,
    package_of,
    put_into_mlx,
    reduced,
    slots_of,
)
from .weights import DIGEST_BYTES, digests

NOT_NUMBERS = frozenset({"_no_grad"})
"""Attributes of modules that say nothing about what they compute: which weights are trained."""

OWN_PACKAGE = package_of(__name__)

FOLLOWED_PACKAGES = frozenset({"mlx_lm", OWN_PACKAGE})
"""Installed packages whose names are followed, beside those of the model's own classes."""

MOST_OBJECTS = 50_000
"""No more names are followed once a walk has come by as many."""


def fingerprint(model: Any) -> bytes:
    """The same for models that compute the same, in any process; another one if in doubt.

    All of the weights count, but for an array that was changed in place, on the same object, since
    the last call in this process: that shows if it meets one of about 256 elements from all over.
    """
    walk = _Walk(model)
    digest = hashlib.blake2b(repr(_versions()).encode(), digest_size=DIGEST_BYTES)
    digest.update("\n".join(walk.facts).encode("utf-8", "surrogatepass"))
    for each in digests(walk.arrays):
        digest.update(each)
    return digest.digest()


@functools.cache
def _versions() -> tuple[str, str]:
    return version("mlx"), version("mlx-lm")


class _Walk:
    """One walk through a model.

    Attributes:
        facts: what it is made of, one after the other; the same in every process.
        arrays: that it came by.
    """

    def __init__(self, model: Any) -> None:
        self.facts: list[str] = []
        self.arrays: list[mx.array] = []
        self._say = self.facts.append
        self._seen: dict[int, tuple[int, Any]] = {}  # with the objects: an id must stay theirs
        self._later: list[Any] = []
        self._ways: dict[type, Callable[[Any], None]] = {}
        self._searched: set[tuple[int, int]] = set()
        parts = model if isinstance(model, tuple | list) else [model]
        self._packages = FOLLOWED_PACKAGES | {package_of(type(each).__module__) for each in parts}
        self.describe(model)
        for name, function in put_into_mlx():
            self._say(name)
            self._reach(function)
        for code in self._later:  # which grows meanwhile; not at once, lest the stack overflow
            self._describe_class(code) if isinstance(code, type) else self._describe_function(code)

    def describe(self, value: Any) -> None:
        kind = type(value)
        if kind in PLAIN:
            self._say(repr(value))
            return
        way = self._ways.get(kind)
        if way is None:
            way = self._ways[kind] = self._way_for(kind)
        way(value)

    def _way_for(self, kind: type) -> Callable[[Any], None]:
        if issubclass(kind, Module):
            self._packages |= {package_of(kind.__module__)}
        ways: list[tuple[Any, Callable[[Any], None]]] = [
            (mx.array, self._describe_array),
            (Module, self._describe_module),
            ((FunctionType, COMPILED), self._refer),
            (type, self._name_class),
            ((ModuleType, PurePath, logging.Logger), lambda value: self._say(name_of(kind))),
            ((enum.Enum, mx.Dtype), lambda value: self._say(key_of(value))),
        ]
        for base, way in ways:
            if issubclass(kind, base):
                return way
        return self._describe_object

    # Values

    def _is_new(self, value: Any) -> bool:
        known = self._seen.get(id(value))
        if known is not None:
            self._say(f"seen {known[0]}")
            return False
        self._seen[id(value)] = len(self._seen), value
        return True

    def _describe_array(self, array: mx.array) -> None:
        self.arrays.append(array)
        self._say("array")

    def _describe_module(self, module: Any) -> None:
        if self._is_new(module):
            self._refer(type(module))
            own = vars(module)
            self._describe_items({name: own[name] for name in own.keys() - NOT_NUMBERS})
            self._describe_items(module)

    def _describe_object(self, value: Any) -> None:
        if not self._is_new(value):
            return
        kind = type(value)
        self._name_class(kind)
        content = content_of(value)
        if isinstance(value, dict):
            self._describe_items(value)
        elif content is not None:
            self._describe_each(content)
        if kind in (dict, list, tuple):
            return
        state = slots_of(value) | getattr(value, "__dict__", {})
        self._describe_items(state)
        if content is None and not state:
            self._say(repr(getattr(value, "__qualname__", "")))
            if origin_of_module(kind.__module__) is Origin.PYTHON:
                self._describe_each(reduced(value))

    def _describe_each(self, values: Iterable[Any]) -> None:
        self._say("[")
        for value in values:
            self.describe(value)
        self._say("]")

    def _describe_items(self, mapping: Any) -> None:
        try:
            keys = sorted(mapping)
        except TypeError:
            keys = sorted(mapping, key=key_of)
        self._say("{")
        for key in keys:
            self._say(repr(key) if type(key) is str else key_of(key))
            self.describe(mapping[key])
        self._say("}")

    # Code

    def _refer(self, code: Any) -> None:
        """Name a class or function by a number, and describe it when its turn comes."""
        known = self._seen.get(id(code))
        if known is None:
            known = self._seen[id(code)] = len(self._seen), code
            self._later.append(code)
        self._say(f"code {known[0]}")

    def _name_class(self, kind: type) -> None:
        """Of the classes of Python and mlx, only layers may have been patched."""
        origin = origin_of_module(kind.__module__)
        is_layer = issubclass(kind, Module) and kind is not Module
        if origin is Origin.PYTHON or (origin is Origin.MLX and not is_layer):
            self._say(name_of(kind))
        else:
            self._refer(kind)

    def _describe_class(self, kind: type) -> None:
        self._say(name_of(kind))
        for base in kind.__bases__:
            self._name_class(base)
        for name, member in sorted(vars(kind).items()):
            if not name.startswith("__") or function_in(member) is not None:
                self._say(name)
                self._reach(member)

    def _describe_function(self, function: Any) -> None:
        """Its code, and what it brings along: a change made by a patch may be in there alone."""
        code = getattr(function, "__code__", None)
        if code is None:  # compiled from something else
            self._say(name_of(type(function)))
            return
        facts = code_facts(code)
        module = str(function.__globals__.get("__name__"))
        self._say(facts.digest)
        # What our own functions bring along is what they work with, such as the store.
        take = self._reach if package_of(module) == OWN_PACKAGE else self.describe
        take(function.__defaults__)
        take(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                take(cell.cell_contents)
            except ValueError:  # an empty one
                self._say("empty")
        for name, value in sorted(function.__dict__.items()):
            self._say(name)
            self._reach(value)
        if self._follows(facts.origin, module):
            self._look_up(facts.names, function.__globals__)

    def _follows(self, origin: Origin, module: str) -> bool:
        if origin is Origin.INSTALLED:
            return package_of(module) in self._packages
        return origin is Origin.OTHER

    def _look_up(self, names: tuple[str, ...], namespace: dict[str, Any]) -> None:
        """What code finds by these names."""
        for name in names:
            if name in namespace:
                value = namespace[name]
                self._say(name)
                self._reach(value)
                if isinstance(value, ModuleType):
                    self._search(value, names)

    def _search(self, module: ModuleType, names: tuple[str, ...]) -> None:
        place = id(module), id(names)
        if place not in self._searched:
            self._searched.add(place)
            if self._follows(origin_of_module(module.__name__), module.__name__):
                self._say(file_digest(str(getattr(module, "__file__", ""))))
                self._look_up(names, vars(module))

    def _reach(self, value: Any) -> None:
        """Describe what code comes by through a name: not all that may hang on it."""
        kind = type(value)
        if kind in PLAIN:
            self._say(repr(value))
        elif kind is FunctionType or kind is COMPILED:
            self._refer(value) if len(self._seen) < MOST_OBJECTS else self._say(name_of(kind))
        elif isinstance(value, type):
            follows = self._follows(origin_of_module(value.__module__), value.__module__)
            self._refer(value) if follows else self._say(name_of(value))
        elif (
            isinstance(value, Module | functools.partial | np.ndarray | enum.Enum)
            or is_table(value)
            or is_dataclass(value)
        ):
            self.describe(value)
        else:
            self._say(name_of(kind))
            function = function_in(value)
            if function is not None and function is not value:
                self._reach(function)
