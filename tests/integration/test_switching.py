"""One server and several models, one after the other: what each stored is for itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from mlx_lm_kvcache_plugin.events import Evict
from tests import models
from tests.integration.clients import MODES, same_answer
from tests.integration.local_server import LocalServer
from tests.models import WINDOW, prompt

LORA = {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of rows alone, one with windows, one with states, and another of rows alone."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "rows": model,
        "windows": models.gemma(folder / "windows"),
        "states": models.lfm(folder / "states"),
        "other rows": models.llama(folder / "rows", seed=1),
    }


@pytest.fixture(scope="module")
def anything() -> Iterator[LocalServer]:
    """A server without a model of its own that prefills everything."""
    with LocalServer("--disable-prefix-cache") as server:
        yield server


def adapter(folder: Path, model: Path, seed: int) -> Path:
    """A low-rank adapter of that model with random weights."""
    folder.mkdir(parents=True)
    loaded, _ = load_model(model)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    linear_to_lora_layers(loaded, 2, LORA)
    generator = np.random.default_rng(seed)
    weights = {
        name: mx.array(generator.standard_normal(weight.shape).astype(np.float32) / 8)
        for name, weight in tree_flatten(loaded.parameters())
        if "lora_" in name
    }
    assert len(weights) == 8
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


@pytest.mark.parametrize(
    ("mode", "length"),
    [
        ("batched", WINDOW - 10),
        ("sequential", 300),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [("sequential", WINDOW - 10), ("batched", 300)]
            + [(mode, 3 * WINDOW) for mode in MODES]
        ),
    ],
)
def test_models_take_turns(
    folders: dict[str, Path], anything: LocalServer, mode: str, length: int
) -> None:
    """The same prompts of all of them in turn, shorter and longer than a window.

    Never a hit across them; each comes back to what it stored itself, and answers as ever.
    """
    with LocalServer("--kv-cache-codec", "raw") as server:
        first = {}
        for turn in range(3):
            for name, folder in folders.items():
                options = {"model": str(folder), **MODES[mode]}
                text = prompt("turns", length)
                if turn == 2:
                    text += first[name].text + "?"
                answer = server.text(text, **options)
                assert same_answer(answer, anything.text(text, **options))
                first.setdefault(name, answer)
                assert answer.cached_tokens == (0, length - 1, length + 8)[turn]
        assert len({answer.text for answer in first.values()}) == len(folders)
        assert server.is_alive() and not server.recorder.errors


def test_short_and_long_prompts_of_two_models(
    folders: dict[str, Path], anything: LocalServer
) -> None:
    """A window that was full, one that never was, and rows beside them, in turns."""
    with LocalServer("--kv-cache-codec", "raw") as server:
        for length in (20, 200, WINDOW, 20, 200):
            for name in ("windows", "rows"):
                for end in ("", "!" * 5):
                    text, options = prompt("in turns", length) + end, {"model": str(folders[name])}
                    answer = server.text(text, **options)
                    assert same_answer(answer, anything.text(text, **options))
                    assert answer.cached_tokens <= answer.longest_hit
        assert answer.cached_tokens >= 199
        assert not server.recorder.errors


def test_what_is_not_loaded_goes_first(folders: dict[str, Path]) -> None:
    """Room for two prompts: that of the model that was left goes, though it was used last."""
    with LocalServer("--cache-memory-mb", "1") as server:

        def ask(name: str, text: str) -> int:
            answer = server.text(prompt(text, 200), model=str(folders[name]), seed=1)
            server.settle()
            return answer.cached_tokens or 0

        assert [ask("rows", "a"), ask("other rows", "b")] == [0, 0]
        assert not server.recorder.events.of(Evict)
        assert ask("rows", "c") == 0
        assert ask("rows", "a") == 199
        assert ask("other rows", "b") == 0


def test_an_adapter_makes_another_model(model: Path, anything: LocalServer, tmp_path: Path) -> None:
    """None, one and another one of the same model: never a hit across, and a hit for each."""
    adapters = [str(adapter(tmp_path / str(seed), model, seed)) for seed in (1, 2)]
    text = prompt("adapted", 200)
    with LocalServer("--kv-cache-codec", "raw") as server:
        answers = []
        for cached in (0, 199):
            for more in ({}, *({"adapters": path} for path in adapters)):
                options = {"model": str(model), **more}
                answers.append(server.text(text, **options))
                assert same_answer(answers[-1], anything.text(text, **options))
                assert answers[-1].cached_tokens == cached
        assert len({answer.text for answer in answers}) == 3
        assert server.is_alive() and not server.recorder.errors


def test_checkpoints_are_set_for_the_model_that_is_loaded(folders: dict[str, Path]) -> None:
    """And for no other, whichever came before it."""
    arguments = ("--kv-cache-codec", "raw", "--kv-cache-checkpoint-tokens", "64")
    # Without a model at the start, upstream would not batch the very first request.
    with LocalServer("--model", str(folders["rows"]), *arguments) as server:
        for turn, name in enumerate(("rows", "windows", "rows", "states", "other rows")):
            server.watch.insertions.clear()
            server.text(prompt(f"{turn} on its way", 150), model=str(folders[name]))
            server.settle()
            ends = [len(insertion.tokens) for insertion in server.watch.insertions]
            assert ends == ([149, 158] if "rows" in name else [64, 128, 149, 158])
