"""Code by content: functions, and the files that they stand in."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, type(...)})
"""Types of values that are told by their repr."""

COMPILED: type = type(mx.compile(abs))
"""It passes on the attributes of the function that it compiles."""

FUNCTION_OF: dict[type, str] = {
    staticmethod: "__func__",
    classmethod: "__func__",
    MethodType: "__func__",
    property: "fget",
    functools.cached_property: "func",
    functools.partialmethod: "func",
}
"""What holds a function, and where."""

MOST_CODES = 10_000

MOST_ITEMS = 256
"""A table of a module's counts if it has no more items than this."""

MLX = os.path.dirname(str(mx.__file__)) + os.sep
PYTHON = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


class Origin(Enum):
    """Where code is from."""

    MLX = auto()
    PYTHON = auto()
    INSTALLED = auto()
    OTHER = auto()  # a script, a notebook, a model's own file, an editable package


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """What there is to know of a code object, which never changes.

    Attributes:
        digest: of it, and of its file as that was when it was first seen.
        names: that it looks up, globals or attributes.
    """

    digest: str
    names: tuple[str, ...]
    origin: Origin


_facts: dict[int, tuple[CodeType, CodeFacts]] = {}  # with the objects: an id must stay theirs


def code_facts(code: CodeType) -> CodeFacts:
    """Its facts; the second time, at no cost."""
    known = _facts.get(id(code))
    if known is None:
        if len(_facts) >= MOST_CODES:
            _facts.clear()
        names: dict[str, None] = {}
        itself = repr((_code_itself(code, names), file_digest(code.co_filename)))
        digest = hashlib.blake2b(itself.encode("utf-8", "surrogatepass"), digest_size=16)
        facts = CodeFacts(digest.hexdigest(), tuple(names), origin_of_file(code.co_filename))
        known = _facts[id(code)] = code, facts
    return known[1]


def _code_itself(code: CodeType, names: dict[str, None]) -> Any:
    """The code as plain data; adds to the names that it looks up."""
    names.update(dict.fromkeys(code.co_names))
    constants = [
        _code_itself(value, names) if isinstance(value, CodeType) else key_of(value)
        for value in code.co_consts
    ]
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    variables = code.co_varnames, code.co_cellvars, code.co_freevars
    return code.co_qualname, code.co_code, code.co_names, constants, counts, variables


def file_digest(path: str) -> str:
    """Of its content; nothing if there is no such file, as for a notebook's."""
    try:
        status = os.stat(path)
        return _file_digest(path, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError):
        return ""


@functools.lru_cache(maxsize=1024)
def _file_digest(path: str, mtime_ns: int, size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.blake2b(file.read(), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=4096)
def origin_of_file(path: str) -> Origin:
    if path.startswith(MLX):
        return Origin.MLX
    if any(part in path for part in INSTALLED):
        return Origin.INSTALLED
    return Origin.PYTHON if path.startswith((*PYTHON, "<frozen ")) else Origin.OTHER


def origin_of_module(name: str) -> Origin:
    """By the file that it was loaded from."""
    if name in sys.builtin_module_names:
        return Origin.PYTHON
    if name.partition(".")[0] == "mlx":
        return Origin.MLX
    return origin_of_file(str(getattr(sys.modules.get(name), "__file__", "")))


def package_of(module: str) -> str:
    return module.partition(".")[0]


def put_into_mlx() -> Iterator[tuple[str, Any]]:
    """Functions that a script put in the place of mlx's, which code finds in its modules."""
    for module in _mlx_modules():
        for name, value in vars(module).items():
            if type(value) in (FunctionType, COMPILED):
                code = getattr(value, "__code__", None)
                if code is not None and origin_of_file(code.co_filename) is not Origin.MLX:
                    yield f"{module.__name__}.{name}", value
            elif type(value) is functools.partial:
                yield f"{module.__name__}.{name}", value


@functools.cache
def _mlx_modules() -> list[ModuleType]:
    below = [value for value in vars(mx).values() if isinstance(value, ModuleType)]
    return [mx, *(each for each in below if each.__name__.startswith(mx.__name__)), nn]


# Values


def content_of(value: Any) -> list[Any] | None:
    """What an object of one of Python's or NumPy's types holds beside its attributes."""
    if isinstance(value, list | tuple | deque):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=key_of)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).digest()]
    if isinstance(value, np.ndarray | np.generic):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    for plain in (int, float, complex, str, bytes):
        if isinstance(value, plain):
            return [plain.__repr__(value)]
    return [] if isinstance(value, dict) else None


def is_table(value: Any) -> bool:
    """Whether it is made of plain values and arrays alone, and no more than a few."""
    todo, items = [value], 0
    while todo:
        each = todo.pop()
        kind = type(each)
        if kind in (tuple, list, set, frozenset, dict):
            items += len(each)
            if items > MOST_ITEMS:
                return False
            todo += [*each, *each.values()] if kind is dict else each
        elif kind not in PLAIN and kind is not mx.array and kind is not mx.Dtype:
            return False
    return True


def function_in(value: Any) -> Any:
    """The function that a member of a class is or holds, or that an object wraps; or None."""
    kind = type(value)
    if kind is FunctionType or kind is COMPILED:
        return value
    if kind in FUNCTION_OF:
        return getattr(value, FUNCTION_OF[kind])
    attributes = getattr(value, "__dict__", None)
    return attributes.get("__wrapped__") if type(attributes) is dict else None


def slots_of(value: Any) -> dict[str, Any]:
    """What stands in the slots of an object."""
    found = {}
    for base in type(value).__mro__:
        if "__slots__" in vars(base):
            for name, member in vars(base).items():
                if isinstance(member, MemberDescriptorType):
                    with suppress(AttributeError):  # an empty one
                        found[f"{base.__qualname__}.{name}"] = member.__get__(value)
    return found


def reduced(value: Any) -> list[Any]:
    """What copies of it would be made from, if they can be made."""
    try:
        made_from = value.__reduce_ex__(2)
    except Exception:
        return []
    return list(made_from[1:3]) if isinstance(made_from, tuple) else []


# Names


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def key_of(value: Any) -> str:
    """A value in words that are the same in every process: of an object, no more than its kind."""
    if isinstance(value, frozenset | set):  # whose order differs from process to process
        return f"{{{', '.join(sorted(map(key_of, value)))}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(key_of, value))})"
    if isinstance(value, Enum):
        return f"{name_of(type(value))}.{value.name}"
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, mx.Dtype):
        return str(value)
    is_plain = type(value) in PLAIN or isinstance(value, slice)
    return repr(value) if is_plain else name_of(type(value))
