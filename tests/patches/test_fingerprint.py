"""The fingerprint of a model: the same for the same numbers, another one for any others."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.optimizers import SGD
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

from mlx_lm_kvcache_plugin.patches import fingerprint as patch
from mlx_lm_kvcache_plugin.patches.fingerprint import fingerprint
from tests import models
from tests.families import CONFIGURATIONS, reason_to_skip
from tests.patches.generating import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(folder: Path) -> Any:
    return load(folder)


def test_it_is_that_of_the_content(folder: Path, model: Any, tmp_path: Path) -> None:
    """Loaded twice, and from another path, it is the same model."""
    copied = models.llama(tmp_path / "elsewhere")
    assert len(fingerprint(model)) == 32
    assert fingerprint(model) == fingerprint(model) == fingerprint(load(folder))
    assert fingerprint(model) == fingerprint(load(copied))


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_it_is_the_same_in_any_process(folder: Path, model: Any, seed: str) -> None:
    """Whatever the hashes of its strings are."""
    code = (
        "from pathlib import Path; from mlx_lm.utils import load_model; "
        "from mlx_lm_kvcache_plugin.patches.fingerprint import fingerprint; "
        f"print(fingerprint(load_model(Path({str(folder)!r}))[0]).hex())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == fingerprint(model).hex(), run.stderr


def train(model: Any) -> None:
    def loss(model: Any) -> mx.array:
        return model(mx.array([[65, 66, 67]])).mean()

    _, gradients = nn.value_and_grad(model, loss)(model)
    SGD(learning_rate=1e-3).update(model, gradients)


def scale_in_place(model: Any) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight *= 1.001
    assert model.model.layers[0].self_attn.k_proj.weight is weight


def add_adapter(model: Any, scale: float = 2.0) -> None:
    attention = model.model.layers[0].self_attn
    mx.random.seed(0)
    attention.q_proj = LoRALinear.from_base(attention.q_proj, r=4, scale=scale)


def give_frequencies(model: Any, first: float = 1.0) -> None:
    model.model.layers[0].self_attn._freqs = mx.array([first, 2.0])


def quantize(model: Any, **options: Any) -> None:
    nn.quantize(model, **options)


def add_attribute(model: Any, value: Any) -> None:
    model.model.layers[1].mlp.more = value


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Config:
    theta: float
    inner: Any = None


def act(x: mx.array, by: int = 1) -> mx.array:
    return x * by


def times(by: Any) -> Callable[[mx.array], mx.array]:
    return lambda x: x * by


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "a training step": train,
    "a weight in place": scale_in_place,
    "an adapter": add_adapter,
    "an adapter of another scale": lambda model: add_adapter(model, 3.0),
    "frequencies": give_frequencies,
    "other frequencies": lambda model: give_frequencies(model, 1.5),
    "a base": lambda model: setattr(model.model.layers[0].self_attn.rope, "base", 5.0),
    "an argument": lambda model: setattr(model.args, "rope_theta", 5.0),
    "half precision": lambda model: model.set_dtype(mx.float16),
    "another half precision": lambda model: model.set_dtype(mx.bfloat16),
    "quantized": lambda model: quantize(model),
    "quantized otherwise": lambda model: quantize(model, bits=8),
    "quantized in other groups": lambda model: quantize(model, group_size=32),
    "training": lambda model: model.train(),
    "a layer less": lambda model: model.model.layers.pop(),
    "layers in another order": lambda model: model.model.layers.reverse(),
    "a number": lambda model: add_attribute(model, 1),
    "a float": lambda model: add_attribute(model, 1.0),
    "a truth": lambda model: add_attribute(model, True),
    "a string": lambda model: add_attribute(model, "1"),
    "a tuple": lambda model: add_attribute(model, (1, None)),
    "a list": lambda model: add_attribute(model, [1, None]),
    "a dict": lambda model: add_attribute(model, {"a": 1}),
    "a dict of numbers": lambda model: add_attribute(model, {1: 1}),
    "a dict of numbers as strings": lambda model: add_attribute(model, {"1": 1}),
    "a dict of both": lambda model: add_attribute(model, {1: 1, "1": 1}),
    "a nested dict": lambda model: add_attribute(model, {"a": {"a": 1}}),
    "a set": lambda model: add_attribute(model, {"a", "b", "c"}),
    "an enum": lambda model: add_attribute(model, Colour.RED),
    "another enum": lambda model: add_attribute(model, Colour.BLUE),
    "a config": lambda model: add_attribute(model, Config(1.0)),
    "another config": lambda model: add_attribute(model, Config(2.0)),
    "a nested config": lambda model: add_attribute(model, Config(2.0, Config(1.0))),
    "an array in a config": lambda model: add_attribute(model, Config(2.0, mx.array(1.0))),
    "another array in a config": lambda model: add_attribute(model, Config(2.0, mx.array(2.0))),
    "a dtype": lambda model: add_attribute(model, mx.float16),
    "another dtype": lambda model: add_attribute(model, mx.bfloat16),
    "a function": lambda model: add_attribute(model, act),
    "another function": lambda model: add_attribute(model, train),
    "a partial": lambda model: add_attribute(model, functools.partial(act, by=2)),
    "another partial": lambda model: add_attribute(model, functools.partial(act, by=3)),
    "a function with a closure": lambda model: add_attribute(model, times(2)),
    "another closure": lambda model: add_attribute(model, times(3)),
    "an array in a closure": lambda model: add_attribute(model, times(mx.array(2))),
    "a bound method": lambda model: add_attribute(model, Config(1.0).__eq__),
    "another bound method": lambda model: add_attribute(model, Config(2.0).__eq__),
    "a module of Python": lambda model: add_attribute(model, dataclasses),
    "a class": lambda model: add_attribute(model, Config),
    "a numpy array": lambda model: add_attribute(model, np.arange(3)),
    "another numpy array": lambda model: add_attribute(model, np.arange(1, 4)),
    "a number of numpy": lambda model: add_attribute(model, np.float32(1)),
    "an object": lambda model: add_attribute(model, SimpleNamespace()),
    "another object": lambda model: add_attribute(model, SimpleNamespace(a=1)),
    "an object with weights": lambda model: add_attribute(model, SimpleNamespace(a=mx.ones(2))),
    "no elements": lambda model: give_frequencies(model) or add_attribute(model, mx.zeros((0, 3))),
}


def test_whatever_the_numbers_depend_on_counts(folder: Path) -> None:
    """Each change gives another fingerprint, and the same one when made again."""
    found: dict[bytes, str] = {}
    for name, change in CHANGES.items():
        both = []
        for _ in range(2):
            model = load(folder)
            change(model)
            both.append(fingerprint(model))
        assert both[0] == both[1], name
        assert both[0] not in found, (name, found[both[0]])
        found[both[0]] = name


def test_another_model_of_the_same_shapes(model: Any, tmp_path: Path) -> None:
    other = load(models.llama(tmp_path / "other", seed=1))
    theta = load(models.llama(tmp_path / "theta", rope_theta=5e5))
    assert len({fingerprint(each) for each in (model, other, theta)}) == 3


def test_what_says_nothing_about_the_numbers(model: Any) -> None:
    """Which weights are trained; and that the model was used."""
    before = fingerprint(model)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[65, 66]]), cache=caches))
    model.freeze()
    assert fingerprint(model) == before


def test_a_copy_is_the_same(model: Any) -> None:
    """Other objects with the same numbers."""
    before = fingerprint(model)
    model.update(tree_map(lambda array: mx.array(np.array(array)), model.parameters()))
    assert fingerprint(model) == before == fingerprint(copy.deepcopy(model))


def test_what_is_shared_or_in_a_circle(model: Any) -> None:
    """It comes to an end, and what is one object is not taken for two."""
    shared = [1, 2]
    model.more = shared
    model.others = shared
    model.model.layers[0].parent = model
    assert fingerprint(model) == fingerprint(model)


@pytest.mark.parametrize("shape", [(4096, 512), (512, 4096), (300, 64), (8, 256, 96), (70_000,)])
def test_a_few_rows_or_columns_do_not_change_unseen(shape: tuple[int, ...]) -> None:
    """A sixteenth of an axis, in one place, as one of its heads would be."""
    stock = mx.random.normal(shape)
    before = fingerprint([stock])
    for axis, length in enumerate(shape):
        width = max(1, -(-length // 16))
        for start in range(0, length - width + 1, max(1, width // 2)):
            changed = np.array(stock)
            changed[(slice(None),) * axis + (slice(start, start + width),)] = 0
            assert fingerprint([mx.array(changed)]) != before, (axis, start)


def test_small_arrays_are_looked_at_whole() -> None:
    for place in range(0, patch.WHOLE, 37):
        stock = mx.zeros(patch.WHOLE)
        before = fingerprint([stock])
        stock[place] = 1
        assert fingerprint([stock]) != before


@pytest.mark.parametrize("dtype", [mx.bool_, mx.uint8, mx.int64, mx.bfloat16, mx.complex64])
def test_arrays_of_any_dtype(dtype: mx.Dtype) -> None:
    ones, zeros = (make((3, 2000)).astype(dtype) for make in (mx.ones, mx.zeros))
    assert fingerprint([ones]) == fingerprint([mx.ones((3, 2000)).astype(dtype)])
    assert fingerprint([ones]) != fingerprint([zeros])
    assert fingerprint([ones.T]) != fingerprint([ones])


# Code


LAYER = """
import mlx.nn as nn

class Layer(nn.Module):
    def __call__(self, x):
        return x * {factor}
"""


def layer_of(source: str, file: str) -> Any:
    names: dict[str, Any] = {"__name__": "custom_model"}
    exec(compile(source, file, "exec"), names)
    return names["Layer"]()


def test_the_code_of_a_models_own_file_counts(tmp_path: Path) -> None:
    """Custom model files all go by one name, and are no modules that could be found."""
    found = []
    for folder, factor in (("a", 1), ("b", 1), ("c", 2)):
        file = tmp_path / folder / "layer.py"
        file.parent.mkdir()
        file.write_text(LAYER.format(factor=factor), encoding="utf-8")
        found.append(fingerprint(layer_of(file.read_text(encoding="utf-8"), str(file))))
    assert found[0] == found[1] != found[2]


def test_the_code_of_a_notebook_counts() -> None:
    """It has no file."""
    found = [
        fingerprint(layer_of(LAYER.format(factor=factor), "<cell>"))
        for factor in ("1", "1", "2", "max({1, 2} & {2, 3})", "(lambda: 1)()")
    ]
    assert found[0] == found[1] and len(set(found)) == 4


def test_a_method_that_is_replaced_counts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(model)
    kind = type(model.model.layers[0])
    stock = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, *args: stock(self, *args))
    assert fingerprint(model) != before
    monkeypatch.undo()
    assert fingerprint(model) == before


def test_what_a_replaced_method_brings_along_counts(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is the same, and what it steers by is not."""
    kind = type(model.model.layers[0])
    stock = kind.__call__

    def steer(by: float) -> bytes:
        monkeypatch.setattr(kind, "__call__", lambda self, *args: stock(self, *args) + by)
        return fingerprint(model)

    assert steer(1.0) == steer(1.0) != steer(2.0)


def test_a_wrapper_that_is_no_module(model: Any, tmp_path: Path) -> None:
    """It is what it holds."""
    other = load(models.llama(tmp_path / "other", seed=1))
    found = [fingerprint(SimpleNamespace(model=each)) for each in (model, model, other)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("package", ["mlx", "mlx-lm"])
def test_the_versions_count(model: Any, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    before = fingerprint(model)
    monkeypatch.setattr(patch, "version", lambda name: "9" if name == package else "1")
    patch._versions.cache_clear()
    try:
        assert fingerprint(model) != before
    finally:
        patch._versions.cache_clear()


CHANGED_BY_USE = {"plamo3"}
"""Models that write to themselves when they are first used: their first prompt is never found."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_model_has_one_that_stays(family_folder: Callable[[str], Path], name: str) -> None:
    """Loaded twice and used."""
    if reason := reason_to_skip(name):
        pytest.skip(reason)
    model, other = load(family_folder(name)), load(family_folder(name))
    before = fingerprint(model)
    assert fingerprint(other) == before
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[65, 66, 67]]), cache=caches))
    after = fingerprint(model)
    mx.eval(model(mx.array([[68]]), cache=caches))
    assert fingerprint(model) == after
    assert (after == before) == (name not in CHANGED_BY_USE)
