"""Random prompts of models whose caches look different: nothing is counted wrong or mixed up."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_lm_kvcache_plugin.events import Error
from mlx_lm_kvcache_plugin.patches.prompt_cache import PrefixPromptCache
from tests.events import Events
from tests.families import reason_to_skip
from tests.patches.faces import are_at, make_face
from tests.patches.test_every_model import MODEL, logits_after

LAYOUTS = {
    "rows of all tokens": "llama",
    "rows, some of no width": "minimax_m3_vl",
    "rows, nested": "deepseek_v32",
    "rows, and a layer that is not used": "nemotron-nas",
    "windows": "gemma3_text",
    "windows of twice the layers": "iquestloopcoder",
    "chunks": "llama4",
    "states": "mamba2",
    "states beside rows": "lfm2",
    "states and windows": "recurrent_gemma",
    "states, windows and rows": "gear",
    "states and windows, nested": "baichuan_m1",
    "a class of the model's own": "deepseek_v41",
}
OPERATIONS = 200
BLOCK_TOKENS = 8
WORDS = (b"a..", b"b............")
DEPTH = 5
NODE_BYTES = 2048
"""The most that a node takes beside its numbers."""


def random_prompt(chance: random.Random) -> tuple[int, ...]:
    """A few words: many prompts begin alike, and part within a block or at its end."""
    words = chance.choices(WORDS, k=chance.randint(1, DEPTH))
    return tuple(b"".join(words))


def array_bytes(*roots: Any) -> int:
    """The bytes of all arrays that can be reached from these objects."""
    total, seen, waiting = 0, set(), list(roots)
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(found))
        if isinstance(found, np.ndarray):
            total += found.nbytes
        waiting += gc.get_referents(found)
    return total


def check(face: PrefixPromptCache) -> None:
    """The tree is sound, and what it says it holds is what can be found in it."""
    assert face.cache is not None
    face.cache.tree.check()
    held = array_bytes(*(node.payload for node in face.cache.tree))
    assert held <= face.nbytes <= held + NODE_BYTES * (len(face.cache.tree) + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_prompts(layout: str, family_folder: Callable[[str], Path]) -> None:
    """Inserts, fetches and trims: every hit goes on as if the whole prompt had been computed."""
    name = LAYOUTS[layout]
    if reason := reason_to_skip(name):
        pytest.skip(reason)
    model, _ = load_model(family_folder(name))
    chance, events = random.Random(layout), Events()
    face = make_face("raw", block_tokens=BLOCK_TOKENS, emit=events.append)

    @cache
    def computed(tokens: tuple[int, ...]) -> tuple[list[Any], np.ndarray]:
        caches = make_prompt_cache(model)
        return caches, logits_after(model, list(tokens), caches)

    hits = 0
    for _ in range(OPERATIONS):
        tokens = random_prompt(chance)
        operation = chance.choices(["insert", "fetch", "trim"], [10, 10, 1])[0]
        if operation == "insert":
            face.insert_cache(MODEL, list(tokens), computed(tokens)[0])
        elif operation == "trim":
            face.trim_to(n_bytes=int(face.nbytes * chance.random()))
        else:
            caches, rest = face.fetch_nearest_cache(MODEL, list(tokens))
            assert list(tokens)[len(tokens) - len(rest) :] == rest != []
            if caches is not None:
                hits += 1
                assert are_at(caches, len(tokens) - len(rest))
                logits = logits_after(model, rest, caches)
                assert np.allclose(logits, computed(tokens)[1], atol=1e-3)
        check(face)
        assert not events.of(Error)
    assert hits > 20
