"""Real texts of different kinds that a CPython and what this package needs ship."""

from __future__ import annotations

import argparse
import errno
import inspect
import os
import pydoc_data.topics
import textwrap
import unicodedata
from collections.abc import Callable, Iterator
from http import HTTPStatus
from importlib.metadata import files
from types import ModuleType
from typing import Any

MOST_CHARACTERS = 40_000
"""Of any text: more than the longest document takes."""

CHAPTERS = ("try", "with", "for", "class", "import", "global", "raise", "yield", "lambda", "assert")
"""Short chapters of the Python reference, by the statements that they are about."""


def reference() -> str:
    """Prose with a few examples: a chapter of the Python reference."""
    return pydoc_data.topics.topics["compound"]


def licences() -> str:
    """Prose of lawyers: the licences that numpy comes with."""
    found = [path for path in files("numpy") or [] if path.name.startswith("LICENSE")]
    return max((path.read_text("utf-8") for path in found), key=len)


def source(module: ModuleType) -> str:
    """Code of the standard library."""
    return inspect.getsource(module)


def names() -> str:
    """A table: characters, and what they are called."""
    characters = map(chr, range(0xA1, 0x500))
    named = ((each, unicodedata.name(each, "")) for each in characters)
    return "\n".join(f"U+{ord(each):04X}  {each}  {name}" for each, name in named if name)


def statuses() -> str:
    """Lists: what servers answer, and what systems complain of."""
    answers = [f"{each.value} {each.phrase}: {each.description}" for each in HTTPStatus]
    errors = [f"- {name} ({n}): {os.strerror(n)}" for n, name in sorted(errno.errorcode.items())]
    return "\n".join([*answers, "", *errors])


def about_strings(tokenizer: Any) -> str:
    """A chat of many short turns: methods of `str`, and their documentation."""
    methods = [name for name in dir(str) if not name.startswith("_")]
    turns = [(f"What does str.{name} do?", inspect.getdoc(getattr(str, name))) for name in methods]
    return _chat(tokenizer, turns)


def about_statements(tokenizer: Any) -> str:
    """A chat of few long turns: statements of Python, and chapters of its reference."""
    topics = pydoc_data.topics.topics
    turns = [(f"Please explain {name} in Python.", topics[name].strip()) for name in CHAPTERS]
    return _chat(tokenizer, turns)


def _chat(tokenizer: Any, turns: list[tuple[str, str | None]]) -> str:
    def messages() -> Iterator[dict[str, str]]:
        for question, answer in turns:
            yield {"role": "user", "content": question}
            yield {"role": "assistant", "content": answer or ""}

    text: str = tokenizer.apply_chat_template(list(messages()), tokenize=False)
    return text


TEXTS: dict[str, Callable[[Any], str]] = {
    "reference": lambda _: reference(),
    "code, argparse": lambda _: source(argparse),
    "licences": lambda _: licences(),
    "chat about statements": about_statements,
    "code, textwrap": lambda _: source(textwrap),
    "chat about strings": about_strings,
    "names": lambda _: names(),
    "statuses": lambda _: statuses(),
}
"""By name; each takes the tokenizer, whose chat template some need."""


def text(name: str, tokenizer: Any) -> str:
    """The beginning of a text."""
    return TEXTS[name](tokenizer)[:MOST_CHARACTERS]
