"""Payloads as plain data and named arrays, as a file holds them, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Array
from .packing import Payload
from .windows import WindowPayload

Plain = dict[str, Any]
"""What JSON holds."""

RAW = "raw"
"""Begins the names of the tensors that were kept raw for once."""

STATE = "state."
"""Begins the names of the arrays in states."""


def payload_to(payload: Payload, within: str = "") -> tuple[Plain, dict[str, Array]]:
    """What it takes to make this payload again; the arrays are its own.

    Args:
        within: begins the names of the arrays.
    """
    arrays = {
        f"{within}{group}.{part}": array
        for group, parts in enumerate(payload.groups)
        for part, array in enumerate(parts)
    }
    arrays |= {f"{within}{RAW}.{index}": array for index, array in payload.exceptions.items()}
    plain = {
        "tokens": payload.tokens,
        "is_near_exact": payload.is_near_exact,
        "encodings": payload.encodings,
    }
    return plain, arrays


def payload_from(plain: Plain, arrays: Mapping[str, Array], within: str = "") -> Payload:
    """Undo `payload_to`. The arrays must own their data, so that they are counted."""
    groups: dict[int, dict[int, Array]] = defaultdict(dict)
    exceptions: dict[int, Array] = {}
    for name, array in arrays.items():
        if name.startswith(within):
            group, _, part = name.removeprefix(within).partition(".")
            if group == RAW:
                exceptions[int(part)] = array
            else:
                groups[int(group)][int(part)] = array
    return Payload(
        tuple(_in_order(parts) for parts in _in_order(groups)),
        exceptions,
        plain["tokens"],
        is_near_exact=plain["is_near_exact"],
        encodings=plain["encodings"],
    )


def windows_to(windows: WindowPayload) -> tuple[Plain, dict[str, Array]]:
    """What it takes to make these windows again."""
    plain: list[Plain] = []
    arrays: dict[str, Array] = {}
    for number, payload in enumerate(windows.payloads):
        own, its_arrays = payload_to(payload, _run(number))
        plain.append(own)
        arrays |= its_arrays
    return {"lengths": list(windows.lengths), "payloads": plain}, arrays


def windows_from(plain: Plain, arrays: Mapping[str, Array]) -> WindowPayload:
    """Undo `windows_to`."""
    payloads = [
        payload_from(own, arrays, _run(number)) for number, own in enumerate(plain["payloads"])
    ]
    return WindowPayload(tuple(plain["lengths"]), tuple(payloads))


def states_to(arrays: Sequence[Array]) -> dict[str, Array]:
    """The arrays in states, by name."""
    return {f"{STATE}{number}": array for number, array in enumerate(arrays)}


def states_from(arrays: Mapping[str, Array]) -> list[Array]:
    """Undo `states_to`, whatever else is among them."""
    numbers = range(sum(name.startswith(STATE) for name in arrays))
    return [arrays[f"{STATE}{number}"] for number in numbers]


def _run(number: int) -> str:
    return f"windows.{number}."


def _in_order(numbered: Mapping[int, Any]) -> tuple[Any, ...]:
    return tuple(numbered[number] for number in range(len(numbered)))
