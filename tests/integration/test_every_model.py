"""Every model of tests/families on the real server: a hit changes nothing, wherever it ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from transformers import PreTrainedTokenizerFast

from tests.families import (
    CONFIGURATIONS,
    SPLIT_SENSITIVE,
    reason_to_skip,
)
from tests.families.speed import fast_for_each_layout
from tests.integration import models_page
from tests.integration.clients import same_answer
from tests.integration.hits import PLACES, Seen, see
from tests.integration.local_server import LocalServer

NAMES = [name for name in CONFIGURATIONS if reason_to_skip(name) is None]


@pytest.fixture(scope="module")
def seen(family_folder: Callable[[str], Path]) -> Iterator[Callable[[str], Seen]]:
    """What a model answered: two servers for all of them, which load one after the other."""
    first = ("--model", str(family_folder(NAMES[0])))
    with (
        # Upstream's way to a tokenizer checks the configuration of models that it knows itself.
        mock.patch("mlx_lm.tokenizer_utils.AutoTokenizer", PreTrainedTokenizerFast),
        LocalServer(*first, "--kv-cache-codec", "raw") as ours,
        LocalServer(*first, "--disable-prefix-cache") as cold,
    ):
        yield cache(lambda name: see(ours, cold, name, family_folder(name)))
        assert ours.is_alive() and not ours.recorder.errors


@pytest.mark.parametrize("name", fast_for_each_layout(NAMES))
def test_answers_after_a_hit_are_the_cold_ones(name: str, seen: Callable[[str], Seen]) -> None:
    """Token by token, with the same logprobs, asked alone or among others."""
    answers = seen(name)
    for hits in answers.hits.values():
        for place in PLACES:
            hit, cold = hits[place], answers.cold[place]
            assert hit.cached_tokens or place == "cut"
            if name not in SPLIT_SENSITIVE:
                assert same_answer(hit, cold)


@pytest.mark.slow
@pytest.mark.skipif(not models_page.tells_of_this_mlx_lm(), reason="the page tells of another")
def test_the_page_tells_what_was_seen(
    seen: Callable[[str], Seen], family_folder: Callable[[str], Path]
) -> None:
    """docs/models.md is what comes out of it here."""
    text = models_page.page(
        {name: seen(name) for name in NAMES},
        {name: models_page.layers(family_folder(name)) for name in NAMES},
    )
    if os.environ.get(models_page.WRITE):
        models_page.PAGE.write_text(text, encoding="utf-8")
    assert models_page.PAGE.read_text(encoding="utf-8") == text
