"""The caches of every model of tests/families, stored and fetched without a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_lm_kvcache_plugin.events import Error
from mlx_lm_kvcache_plugin.prefix_cache import BLOCK_TOKENS
from tests.events import Events
from tests.families import CONFIGURATIONS, reason_to_skip
from tests.families.speed import fast_for_each_layout
from tests.models import prompt
from tests.patches.faces import are_at, make_face
from tests.weights import PRINTABLE

MODEL = ("model", None, None)
PROMPT = list(prompt("Two whole blocks of tokens, and a tail behind them", 300).encode())
CUT = [*PROMPT[:200], *b"?????"]

CODECS = {"raw": None, "rotated": 8}
ERRORS = {"raw": 1e-5, "rotated": 0.1}
"""How far logits may be off, relative to their spread. At 8 bits 0.06 was the most that a model
showed, and 0.02 the median: their attention is far sharper than any real one's."""

NAMES = [name for name in CONFIGURATIONS if reason_to_skip(name) is None]


def logits_after(model: Any, tokens: list[int], caches: list[Any]) -> np.ndarray:
    """The logits of what can be answered."""
    logits = model(mx.array([tokens]), cache=caches)[0, -1].astype(mx.float32)
    return np.array(logits)[list(PRINTABLE)]


@pytest.mark.parametrize("name", fast_for_each_layout(NAMES))
def test_what_is_fetched_goes_on_where_it_was_stored(
    name: str, family_folder: Callable[[str], Path]
) -> None:
    """The next token is the same; every layer stands at the end of the hit, and no other."""
    model, _ = load_model(family_folder(name))
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([PROMPT[:-1]]), cache=caches))
    events = Events()
    faces = {
        codec: make_face(codec, bits=bits, block_tokens=BLOCK_TOKENS, emit=events.append)
        for codec, bits in CODECS.items()
    }
    for face in faces.values():
        face.insert_cache(MODEL, PROMPT[:-1], caches)
    wanted = logits_after(model, PROMPT[-1:], caches)
    for codec, face in faces.items():
        for fetch in (face.fetch_nearest_cache, face.fetch_alone):
            for tokens in (CUT, PROMPT):
                fetched, rest = fetch(MODEL, tokens)
                assert are_at(fetched or [], len(tokens) - len(rest))
            assert fetched is not None and rest == PROMPT[-1:]
            errors = logits_after(model, rest, fetched) - wanted
            assert np.sqrt(np.mean(errors**2)) <= ERRORS[codec] * wanted.std()
    assert not events.of(Error)
