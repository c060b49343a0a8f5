"""Documents through the real store: what comes back, what it takes, and what is made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.errors import KVCachePluginError
from mlx_lm_kvcache_plugin.evaluation.choices import make_settings
from mlx_lm_kvcache_plugin.evaluation.documents import Document
from mlx_lm_kvcache_plugin.evaluation.engine import evaluate, steps
from mlx_lm_kvcache_plugin.evaluation.footprint import Footprint, store_and_fetch
from mlx_lm_kvcache_plugin.evaluation.scoring import GREEDY_TOKENS, Score, read
from mlx_lm_kvcache_plugin.evaluation.summary import Loss, Room, Summary
from mlx_lm_kvcache_plugin.patches.layer_kinds import known_kinds
from mlx_lm_kvcache_plugin.patches.models import load
from mlx_lm_kvcache_plugin.patches.models_cache import empty_caches
from tests import models

PREFIX_TOKENS = 512
RAW, ROTATED_8, ROTATED_3 = (
    make_settings(*each) for each in (("raw",), ("rotated", 8), ("rotated", 3))
)
AFFINE_4 = make_settings("affine", 4)
SETTINGS = [RAW, ROTATED_8, ROTATED_3, AFFINE_4]


def documents(count: int = 1) -> list[Document]:
    texts = [models.prompt(f"number {n} ", PREFIX_TOKENS + 33) for n in range(count)]
    return [Document.of(text[:9], list(text.encode()), PREFIX_TOKENS) for text in texts]


@pytest.fixture(scope="module", params=["llama", "gemma", "lfm", "mamba"])
def found(request: pytest.FixtureRequest, model_folder) -> tuple[str, dict[Any, Summary]]:
    """The name of a model, and a summary for each setting."""
    model, _ = load(str(model_folder(request.param)))
    evaluation = evaluate(model, documents(2), SETTINGS)
    return request.param, {each.settings: each for each in evaluation.summaries()}


def test_full_precision_is_exact(found) -> None:
    """The zero of the scale, for plain layers, windows, states and both."""
    loss = found[1][RAW].loss
    assert (loss.documents, loss.same_greedy) == (2, 2)
    assert (loss.kl, loss.top1, loss.perplexity_ratio) == pytest.approx((0, 1, 1), abs=1e-6)


def test_fewer_bits_cost_more_and_take_less(found) -> None:
    name, summaries = found
    exact, more, fewer = (summaries[each] for each in (RAW, ROTATED_8, ROTATED_3))
    if name == "mamba":  # nothing but states, which are kept exactly
        assert exact.loss == more.loss == fewer.loss
        assert exact.room == more.room == fewer.room
        return
    assert exact.loss.kl < more.loss.kl < fewer.loss.kl
    assert exact.loss.top1 >= more.loss.top1 > fewer.loss.top1
    assert exact.room.bytes_per_token > more.room.bytes_per_token > fewer.room.bytes_per_token


def test_the_bits_per_element_are_the_codecs(found) -> None:
    """Nominal bits, scales and biases; of windows, which are near exact whatever the bits, more."""
    name, summaries = found
    raw, rotated, affine = (summaries[each].room for each in (RAW, ROTATED_3, AFFINE_4))
    if name == "mamba":
        assert raw.codec_bits_per_element is None and not affine.is_smaller
        return
    assert raw.codec_bits_per_element == raw.full_bits_per_element == 32
    assert not raw.is_smaller and affine.is_smaller and rotated.is_smaller
    windows = 32 / (PREFIX_TOKENS + 32) if name == "gemma" else 0  # one layer of two has 32 rows
    assert affine.codec_bits_per_element == pytest.approx(4.5 + 4 * windows, abs=0.01)
    assert 3.5 < rotated.codec_bits_per_element - 5 * windows < 4
    for room in (raw, rotated, affine):
        assert 0 < room.bits_per_element - room.codec_bits_per_element < 1


def test_a_document_is_read_once_and_every_step_is_told(model_folder) -> None:
    told = []
    model, _ = load(str(model_folder("llama")))
    evaluation = evaluate(model, documents(2), SETTINGS, lambda *each: told.append(each))
    names = [document.name for document in documents(2)]
    what = ["reading", "rounding", "raw -", "rotated 8", "rotated 3", "affine 4"]
    assert told == [(name, each) for name in names for each in what]
    assert len(told) == steps(documents(2), SETTINGS)
    assert [each.document.name for each in evaluation.of(RAW)] == names
    assert len(evaluation.rounding) == 2


def test_a_model_whose_caches_cannot_be_stored_is_refused(model_folder) -> None:
    """Layers that stand for different numbers of tokens, beside a window that cannot be cut."""
    model, _ = load(str(model_folder("gemma")))
    caches = empty_caches(model)
    read(model, caches, list(range(64)))
    caches[1].trim(5)
    with pytest.raises(KVCachePluginError, match="cannot be stored"):
        store_and_fetch(caches, list(range(64)), ROTATED_8, known_kinds())


def test_a_summary_is_the_mean_of_its_documents() -> None:
    """Perplexities by their logarithms; bytes and bits by what all of them hold together."""
    scores = [Score(0.1, 1.0, 0.2, GREEDY_TOKENS), Score(0.3, 0.5, 0.0, GREEDY_TOKENS - 1)]
    loss = Loss.of(scores)
    assert (loss.documents, loss.same_greedy) == (2, 1)
    assert (loss.kl, loss.top1) == pytest.approx((0.2, 0.75))
    assert loss.perplexity_ratio == pytest.approx(1.10517, rel=1e-5)
    held = Footprint(
        tokens=10, elements=80, full_bytes=160, held_bytes=70, state_bytes=10, codec_bytes=40
    )
    longer = replace(held, tokens=30, elements=240, full_bytes=480, held_bytes=130, codec_bytes=120)
    room = Room.of([held, longer])
    assert room == Room(16, (200 - 20) * 8 / 320, 160 * 8 / 320, 200 / 40)
