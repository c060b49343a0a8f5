"""The benchmark of fidelity on a tiny model: rows, targets, and the figure from its data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fidelity
from benchmarks.fidelity import LENGTHS, Plan, data_of, draw, rows_of, run
from benchmarks.texts import TEXTS, text
from tests import models

SHORT = {"statuses": 256, "chat about strings": 384}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("llama"))


def test_texts_are_long_and_of_different_kinds(folder: Path) -> None:
    """Some 3 bytes a token at least, which is what the most detailed of them take."""
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(folder)
    texts = {name: text(name, tokenizer) for name in TEXTS}
    assert len(set(texts.values())) == len(texts) >= 8
    for name, content in texts.items():
        assert len(content.encode()) > 2 * (LENGTHS[name] + fidelity.SCORED_TOKENS)
    assert "<|assistant|>" in texts["chat about strings"] and "def " in texts["code, argparse"]


def test_the_figures_of_a_model(folder: Path) -> None:
    """Ratios by document; targets for the model that has some; data that JSON holds."""
    settings = (fidelity.RAW, fidelity.ROTATED_8, fidelity.ROTATED_4, fidelity.AFFINE_4)
    plan = Plan("tiny", folder, settings, SHORT, scored_tokens=32)
    evaluation = run(plan)
    ratio, bits, close, same = rows_of(plan, evaluation)
    one, other = (
        evaluation.of(each)[1].score.kl for each in (fidelity.ROTATED_4, fidelity.AFFINE_4)
    )
    assert ratio.low <= one / other <= ratio.high
    assert 4.5 < bits.value < 5 and "384 tokens" in bits.what
    assert close.low <= close.value <= close.high
    assert same.at_least and same.note == "of 2"
    assert all(row.limit is not None for row in (ratio, bits, close, same))
    without = rows_of(replace(plan, has_targets=False), evaluation)
    assert all(row.limit is None for row in without)

    found = data_of(plan, evaluation)
    data = {name: [{"model": "tiny", **each} for each in rows] for name, rows in found.items()}
    assert [each["bits"] for each in data["settings"]] == [None, 8, 4, 4]
    assert {"codec", "kl", "top1", "same_greedy", "documents"} <= data["settings"][0].keys()
    assert json.loads(json.dumps(data)) == data
    pytest.importorskip("matplotlib")
    (axes,) = draw(data).axes
    assert [line.get_label() for line in axes.lines] == ["tiny, rotated", "tiny, affine"]
    assert [note.get_text() for note in axes.texts] == ["4", "8", "4"]
