"""Every model file of mlx-lm has a tiny configuration, whose answers tell right from wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.families import (
    CONFIGURATIONS,
    EXCLUDED,
    SPLIT_SENSITIVE,
    reason_to_skip,
)
from tests.families.speed import fast_for_each_layout
from tests.models import prompt
from tests.weights import PRINTABLE

PROMPT = list(prompt("What is it that all of this is about?", 150).encode())
CHANGES = {"100 back": 100, "in the last 20": 12}
CHANGED_TOKENS = 3
NOISE = 1e-3
"""What tests/integration allows logprobs to differ by."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and the logprob of each."""

    tokens: list[int]
    logprobs: list[float]


def answer(model: Any, pieces: Sequence[list[int]], tokens: int = 8) -> Answer:
    """What comes after these pieces of a prompt, computed one after the other."""
    caches = make_prompt_cache(model)
    chosen, logprobs = [], []
    for piece in pieces:
        logits = model(mx.array([piece]), cache=caches)
    for _ in range(tokens):
        last = logits[0, -1].astype(mx.float32)
        token = int(mx.argmax(last))
        chosen.append(token)
        logprobs.append(float(last[token] - mx.logsumexp(last)))
        logits = model(mx.array([[token]]), cache=caches)
    return Answer(chosen, logprobs)


def difference(one: Answer, other: Answer) -> float:
    """Between the logprobs of tokens, up to and with the first one that is not the same."""
    pairs = list(zip(one.tokens, other.tokens, strict=True))
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
    return float(np.abs(np.subtract(one.logprobs, other.logprobs))[: same + 1].max())


def changed(back: int) -> list[int]:
    """The prompt with some of its tokens, that far from its end, replaced by others."""
    start = len(PROMPT) - back
    return [*PROMPT[:start], *b"?" * CHANGED_TOKENS, *PROMPT[start + CHANGED_TOKENS :]]


@pytest.mark.parametrize("name", fast_for_each_layout(CONFIGURATIONS))
def test_a_model_answers_what_was_asked(name: str, family_folder: Callable[[str], Path]) -> None:
    """It runs; its answer is text, varies, and hangs on tokens near and far."""
    if reason := reason_to_skip(name):
        pytest.skip(reason)
    model, _ = load_model(family_folder(name))
    first = answer(model, [PROMPT], tokens=40)
    assert set(first.tokens) <= set(PRINTABLE)
    assert len(set(first.tokens)) > 3
    other = answer(model, [list(prompt("No", 150).encode())])
    assert other.tokens != first.tokens[:8]
    first = Answer(first.tokens[:8], first.logprobs[:8])
    for back in CHANGES.values():
        assert difference(answer(model, [changed(back)]), first) > 5 * NOISE
    pieces = [PROMPT[:70], PROMPT[70:149], PROMPT[149:]]
    assert (difference(answer(model, pieces), first) < NOISE) == (name not in SPLIT_SENSITIVE)


def test_every_model_file_is_here() -> None:
    """Each file of the installed mlx-lm has a configuration, or is excluded for a reason."""
    (folder,) = map(Path, mlx_lm.models.__path__)
    files = {file.stem for file in folder.glob("*.py")}
    assert files <= CONFIGURATIONS.keys() | EXCLUDED.keys()
    assert not CONFIGURATIONS.keys() & EXCLUDED.keys()
    assert all(EXCLUDED.values())
