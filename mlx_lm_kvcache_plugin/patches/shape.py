"""Checks that upstream looks as a patch expects; nothing is changed when it does not."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from ..errors import PatchRefused


def require_names(owner: ModuleType | type, names: Collection[str]) -> None:
    """Refuse a module or a class that lacks one of these names."""
    missing = sorted(name for name in names if not hasattr(owner, name))
    if missing:
        raise PatchRefused(f"{owner.__name__} has no {', '.join(missing)}")


def require_use(function: Any, names: Collection[str]) -> None:
    """Refuse a function that does not look up these names when it runs: rebinding them is vain."""
    missing = sorted(set(names) - set(function.__code__.co_names))
    if missing:
        raise PatchRefused(f"{function.__qualname__} does not use {', '.join(missing)}")


def require_parameters(owner: type, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a class whose methods have other parameters than those named."""
    for name, expected in methods.items():
        method = getattr(owner, name, None)
        found = tuple(inspect.signature(method).parameters)[1:] if method else None
        if found != expected:
            wanted = ", ".join(expected)
            raise PatchRefused(f"{owner.__name__}.{name} does not take ({wanted})")


def require_parameter(function: Any, name: str) -> None:
    """Refuse a function that takes no argument of this name."""
    if name not in inspect.signature(function).parameters:
        raise PatchRefused(f"{function.__qualname__} takes no {name}")


def require_members(owner: type, attribute: str, known: Collection[str]) -> None:
    """Refuse a class that uses a member of `self.<attribute>` which is not among those known."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except OSError:
        raise PatchRefused(f"the source of {owner.__name__} cannot be read") from None
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == attribute
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "self"
    }
    unknown = sorted(used - set(known))
    if unknown:
        raise PatchRefused(f"{owner.__name__} uses {attribute}.{', '.join(unknown)}")
