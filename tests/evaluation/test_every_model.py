"""The evaluation on every model of tests/families: full precision is exact, whatever a cache is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mlx_lm.utils import load_model

from mlx_lm_kvcache_plugin.evaluation import scoring
from mlx_lm_kvcache_plugin.evaluation.choices import make_settings
from mlx_lm_kvcache_plugin.evaluation.documents import Document
from mlx_lm_kvcache_plugin.evaluation.engine import evaluate
from tests.families import CONFIGURATIONS, reason_to_skip
from tests.families.speed import fast_for_each_layout
from tests.models import prompt

NAMES = [name for name in CONFIGURATIONS if reason_to_skip(name) is None]

RAW, EIGHT = make_settings("raw"), make_settings("rotated", 8)

DOCUMENT = Document.of("bytes", list(prompt("a whole block and a tail", 160 + 9).encode()), 160)


@pytest.mark.parametrize("name", fast_for_each_layout(NAMES))
def test_every_model_can_be_evaluated(
    name: str, family_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "GREEDY_TOKENS", 4)
    model, _ = load_model(family_folder(name))
    evaluation = evaluate(model, [DOCUMENT], [RAW, EIGHT])
    (exact,), (close,) = map(evaluation.of, (RAW, EIGHT))
    assert exact.score.kl < 1e-6 and exact.score.top1 == 1 and exact.score.same_tokens == 4
    assert 0 <= close.score.kl < 1
    assert evaluation.rounding[0].kl < 0.01
    assert exact.footprint.held_bytes >= exact.footprint.codec_bytes == exact.footprint.full_bytes
