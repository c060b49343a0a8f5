"""The small texts of a namespace: what it stands for, and its models' layouts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, BinaryIO

from .access import BrokenFile, open_file, read_text
from .names import FORMAT, LAYOUT_BYTES, layout_digest

ABOUT = "about.json"

_LAYOUT = re.compile(rf"layout-[0-9a-f]{{{2 * LAYOUT_BYTES}}}\.json")


def layout_filename(digest: bytes) -> str:
    return f"layout-{digest.hex()}.json"


def is_layout_filename(filename: str) -> bool:
    return _LAYOUT.fullmatch(filename) is not None


def read_layout(filename: str, file: BinaryIO) -> tuple[bytes, str]:
    """A layout's digest and text.

    Raises:
        BrokenFile: the text does not have the digest of its name.
        OSError: it is not readable.
    """
    text = read_text(file)
    digest = layout_digest(text)
    if filename != layout_filename(digest):
        raise BrokenFile("its text does not have the digest of its name")
    return digest, text


def about_text(about: Mapping[str, str]) -> str:
    """The content of the file that tells people what a namespace is."""
    return json.dumps({"format": FORMAT, **about}, indent=2) + "\n"


def read_about(path: str) -> dict[str, Any] | None:
    """What such a file says; None if it is not there, or not ours."""
    try:
        with open_file(path) as file:
            about = json.loads(read_text(file))
    except (OSError, BrokenFile, ValueError, RecursionError):
        return None
    return about if isinstance(about, dict) and about.get("format") == FORMAT else None
