"""What is compared: distributions against numpy's double precision, answers token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin.errors import KVCachePluginError
from mlx_lm_kvcache_plugin.evaluation import scoring
from mlx_lm_kvcache_plugin.evaluation.documents import Document
from mlx_lm_kvcache_plugin.evaluation.rounding import rounded, turn_last_bit, turned
from mlx_lm_kvcache_plugin.evaluation.scoring import Expected, Score, compare, expect, read, score
from mlx_lm_kvcache_plugin.patches.models import load
from mlx_lm_kvcache_plugin.patches.models_cache import empty_caches

DOCUMENT = Document.of("bytes", list(b"some bytes that are read, and a few more to score"), 25)


def logprobs(seed: int, positions: int = 5, vocabulary: int = 40) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(positions, vocabulary))
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def sums(wanted: np.ndarray, got: np.ndarray, targets: list[int]) -> list[float]:
    return compare(mx.array(wanted), mx.array(got), mx.array(targets)).tolist()


def read_document(folder: Path) -> tuple[Any, list[Any], Expected]:
    """A model, its caches after the document's prefix, and what it expects."""
    model, _ = load(str(folder))
    caches = empty_caches(model)
    read(model, caches, DOCUMENT.prefix)
    return model, caches, expect(model, caches, DOCUMENT)


def test_the_figures_are_those_of_double_precision() -> None:
    """KL in nats, equal likeliest tokens, and what the text's own tokens lost."""
    wanted, got, targets = logprobs(1), logprobs(2), [3, 0, 39, 7, 7]
    got[2] = wanted[2]  # one position whose likeliest token is surely the same
    divergence = (np.exp(wanted) * (wanted - got)).sum()
    same = (wanted.argmax(axis=-1) == got.argmax(axis=-1)).sum()
    lost = sum(wanted[place, token] - got[place, token] for place, token in enumerate(targets))
    assert 1 <= same < 5
    assert sums(wanted, got, targets) == pytest.approx([divergence, same, lost], rel=1e-5)


def test_equal_distributions_differ_in_nothing() -> None:
    assert sums(logprobs(1), logprobs(1), [1] * 5) == [0, 5, 0]


def test_a_token_that_a_model_bars_counts_for_nothing() -> None:
    """Some models give their padding tokens logits of minus infinity."""
    wanted, got = logprobs(1), logprobs(2)
    wanted[:, 4] = got[:, 4] = -math.inf
    for targets in ([1] * 5, [4] * 5):
        assert all(map(math.isfinite, sums(wanted, got, targets)))


def test_what_is_no_number_is_never_taken_for_no_difference() -> None:
    class Broken:
        """A model whose logits are none."""

        def __call__(self, tokens: mx.array, cache: object) -> mx.array:
            return mx.full((*tokens.shape, 300), math.nan)

    expected = expect(Broken(), [], DOCUMENT)
    with pytest.raises(KVCachePluginError, match="bytes: what the model expects"):
        score(Broken(), [], DOCUMENT, expected)


def test_an_answer_is_followed_to_its_first_difference_only() -> None:
    asked = []

    def answer() -> Iterator[int]:
        for token in (1, 2, 9, 4):
            asked.append(token)
            yield token

    assert scoring._alike([1, 2, 3, 4], answer()) == 2
    assert asked == [1, 2, 9]
    assert scoring._alike([1, 2, 9, 4], answer()) == 4


@pytest.mark.parametrize("name", ["llama", "gemma", "mamba", "lfm"])
def test_scoring_leaves_the_caches_as_they_are(name: str, model_folder) -> None:
    """The same ones give the same figures again, whatever their kind."""
    model, caches, expected = read_document(model_folder(name))
    exact = Score(0, 1, 0, scoring.GREEDY_TOKENS)
    assert score(model, caches, DOCUMENT, expected) == exact
    assert score(model, caches, DOCUMENT, expected) == exact


def test_reading_and_scoring_in_steps_is_the_same(
    model_folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the order of summation."""
    _, _, expected = read_document(model_folder("llama"))
    monkeypatch.setattr(scoring, "READ_AT_ONCE", 7)
    monkeypatch.setattr(scoring, "SCORED_AT_ONCE", 5)
    _, _, again = read_document(model_folder("llama"))
    assert [len(piece) for piece in again.logprobs] == [5, 5, 5, 5, 3]
    assert again.likely == expected.likely
    one, other = (np.concatenate([*map(np.array, each.logprobs)]) for each in (expected, again))
    assert np.abs(one - other).max() < 1e-3


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_last_bit_is_turned_over(dtype: mx.Dtype) -> None:
    """The smallest change there is: to a neighbour, and back."""
    numbers = mx.array([1.0, -2.5, 0.1]).astype(dtype)
    turned = turn_last_bit(numbers)
    step = mx.abs((turned - numbers).astype(mx.float32) / numbers.astype(mx.float32))
    assert turned.dtype == dtype and mx.all(turned != numbers)
    assert step.max().item() <= mx.finfo(dtype).eps
    assert mx.array_equal(turn_last_bit(turned), numbers)


def test_what_is_no_floating_number_is_left_alone() -> None:
    kept = {"positions": mx.array([1, 2]), "more": [7, None, (mx.bfloat16, len)]}
    assert turned(kept)["positions"] is kept["positions"]
    assert turned(kept) == kept


@pytest.mark.parametrize("name", ["llama", "gemma", "mamba", "lfm"])
def test_rounding_changes_copies_alone(name: str, model_folder) -> None:
    """A model goes on from them, and strays less than from zeros."""
    model, caches, expected = read_document(model_folder(name))
    found = score(model, rounded(caches), DOCUMENT, expected)
    assert 0 <= found.kl < 1e-4 and found.top1 == 1
    assert score(model, caches, DOCUMENT, expected).kl == 0
