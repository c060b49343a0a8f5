"""What a server reuses of a stored prompt, wherever the next one leaves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.families import NEVER_IN_A_BATCH, bears_company
from tests.integration.clients import MODES, Answer
from tests.integration.local_server import LocalServer
from tests.models import prompt

PROMPT = prompt("Once upon a time there was a prompt", 150)
CUT_TOKENS = 100
MORE = "And then?"
OTHER = prompt("\n", 20)  # a token that neither the prompt nor an answer has
UNRELATED = prompt("Who else is here", 60)

PLACES = ("end", "answer", "other answer", "cut")
"""Where a prompt leaves what is stored: nowhere, behind its answer, before that, or far before."""


@dataclass(frozen=True)
class Seen:
    """The answers of a model, by place.

    Attributes:
        cold: of a server that prefills everything.
        hits: of one that reuses what it can, by the way that it was asked.
    """

    cold: dict[str, Answer]
    hits: dict[str, dict[str, Answer]]


def see(ours: LocalServer, cold: LocalServer, name: str, folder: Path) -> Seen:
    """Ask both servers the same of a model."""
    options: dict[str, Any] = {"model": str(folder)}
    alone = {**options, **MODES["sequential"]}
    texts = prompts(cold.text(PROMPT, **alone).text)
    hits = {}
    for mode in MODES:
        if mode == "batched" and name in NEVER_IN_A_BATCH:
            continue
        ours.prompt_cache.trim_to(n_bytes=0)
        ours.text(PROMPT, **options, **MODES[mode])
        if mode == "batched" and bears_company(name):
            hits[mode] = together(ours, texts, options)
        else:
            hits[mode] = one_by_one(ours, texts, {**options, **MODES[mode]})
        ours.settle()
    return Seen(one_by_one(cold, texts, alone), hits)


def prompts(answer: str) -> dict[str, str]:
    """What is asked once `PROMPT` got this answer, by place."""
    return {
        "end": PROMPT,
        "answer": PROMPT + answer + MORE,
        "other answer": PROMPT + OTHER,
        "cut": PROMPT[:CUT_TOKENS] + OTHER,
    }


def one_by_one(
    server: LocalServer, texts: dict[str, str], options: dict[str, Any]
) -> dict[str, Answer]:
    """One after the other."""
    return {place: server.text(text, **options) for place, text in texts.items()}


def together(
    server: LocalServer, texts: dict[str, str], options: dict[str, Any]
) -> dict[str, Answer]:
    """All at once, and another one with them that is none of these."""
    with server.held():
        other = server.start(UNRELATED, **options)
        futures = {place: server.start(text, **options) for place, text in texts.items()}
    other.result()
    return {place: future.result() for place, future in futures.items()}
