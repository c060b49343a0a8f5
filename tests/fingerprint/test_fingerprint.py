"""The fingerprint of a model: the same for the same numbers, another one for any others."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import gc
import importlib
import logging
import operator
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.optimizers import SGD
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import base, llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

from mlx_lm_kvcache_plugin.codecs.base import CodecOptions
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.codecs.rotated import RotatedCodec
from mlx_lm_kvcache_plugin.fingerprint import fingerprint, weights
from mlx_lm_kvcache_plugin.fingerprint import walk as patch
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
        "from mlx_lm_kvcache_plugin.fingerprint import fingerprint; "
        f"print(fingerprint(load_model(Path({str(folder)!r}))[0]).hex())"
    )
    assert in_process(code, seed) == fingerprint(model).hex()


def in_process(code: str, seed: str) -> str:
    """What another process prints."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert not run.returncode, run.stderr
    return run.stdout.strip()


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


# Weights


SHAPES = [
    (4096, 512),
    (512, 4096),
    (300, 64),
    (8, 256, 96),
    (70_000,),
    (64, 33),
    (500, 4, 1),
    (3, 2),
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint8, mx.uint32])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_change_of_an_array_goes_unseen(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    """A single element, row or column; or two of them in each other's place."""
    stock = mx.random.randint(1, 200, shape).astype(dtype)
    found = [fingerprint([stock]), fingerprint([mx.array(stock)])]
    assert found[0] == found[1]
    for axis, length in enumerate(shape):
        for place in (0, length // 3, length - 1):
            row = (slice(None),) * axis + (place,)
            element = tuple(place if each == axis else 0 for each in range(len(shape)))
            for where in (row, element):
                changed = mx.array(stock)
                changed[where] = 201
                found.append(fingerprint([changed]))
        if length > 1:
            order = [length - 1, *range(1, length - 1), 0]
            found.append(fingerprint([mx.take(stock, mx.array(order), axis=axis)]))
    assert found[0] not in found[2:]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_what_keeps_the_sums_of_rows_and_columns(dtype: mx.Dtype) -> None:
    """Signs, powers of two, and the rows of a permutation."""
    eye = mx.eye(512)
    signs = mx.hadamard_transform(eye, scale=1.0)
    some = mx.random.normal((512, 512))
    swapped = mx.array([1, 0, *range(2, 512)])
    arrays = [eye, eye[swapped], signs, signs[swapped], signs[:, swapped], -signs, signs.T[::-1]]
    arrays += [some, -some, 2 * some, some[swapped], mx.where(mx.arange(512) < 2, -some, some)]
    found = {fingerprint([each.astype(dtype)]) for each in arrays}
    assert len(found) == len(arrays)


DTYPES = [
    *(mx.bool_, mx.uint8, mx.int16, mx.int64, mx.float16, mx.bfloat16, mx.complex64),
    *(mx.float64,),
]


@pytest.mark.parametrize(
    "shape", [(), (0, 3), (1,), (3, 2000), (2000, 3), (999, 5), (2, 3, 4, 500)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_any_dtype_and_shape(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    """However they lie in memory."""
    with mx.stream(mx.cpu):
        ones, zeros = (make(shape).astype(dtype) for make in (mx.ones, mx.zeros))
        lies = mx.contiguous(ones.T).T
        assert fingerprint([ones]) == fingerprint([mx.array(ones)]) == fingerprint([lies])
        assert fingerprint([ones]) == fingerprint([lies])  # by their samples
        assert (fingerprint([ones]) == fingerprint([zeros])) == (ones.size == 0)
        assert (fingerprint([ones.T]) == fingerprint([ones])) == (ones.ndim < 2)


def test_the_sums_are_exact() -> None:
    """They wrap around as those of NumPy do, whatever the number of rows."""
    array = mx.full((3, 70_000), 0xFFFF, dtype=mx.uint16)
    words = np.full((3, 35_000), 0xFFFFFFFF, np.uint32)
    words *= np.uint32(weights.GOLDEN_WORD)
    words ^= words >> np.uint32(22)
    factors = np.array(weights._factors(35_000))
    assert factors.dtype == np.uint32 and len(set(factors.tolist())) > 34_900
    expected = (words * factors).sum(-1, dtype=np.uint32)
    assert np.array_equal(np.array(weights._sum_rows(array)), expected)


def test_reading_takes_little_memory() -> None:
    for array in (mx.zeros((8192, 4096)), mx.zeros((4096, 8192)).T):
        mx.eval(array)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        weights._read_whole(array)
        assert mx.get_peak_memory() - before < 4 * weights.CHUNK_BYTES


IN_PLACE: dict[str, Callable[[mx.array], Any]] = {
    "add": lambda array: operator.iadd(array, 1e-3),
    "scale": lambda array: operator.imul(array, 1.001),
    "set": lambda array: array.__setitem__(slice(None), mx.ones(array.shape)),
    "set some heads": lambda array: array.__setitem__(slice(64, 128), 0),
    "another dtype": lambda array: operator.iadd(array, mx.zeros(1, dtype=mx.complex64)),
}


@pytest.mark.parametrize("reads_in_place", [True, False])
@pytest.mark.parametrize("name", IN_PLACE)
def test_arrays_that_change_in_place(
    monkeypatch: pytest.MonkeyPatch, name: str, reads_in_place: bool
) -> None:
    """Seen by their samples, and then read whole."""
    monkeypatch.setattr(weights, "READS_IN_PLACE", reads_in_place)
    stock = mx.random.normal((512, 512))
    for array in (stock, stock.T):
        before = fingerprint([array])
        assert fingerprint([array]) == before
        changed = IN_PLACE[name](array)
        assert changed is None or changed is array
        after = fingerprint([array])
        assert after != before
        assert after == fingerprint([array + 0])


def test_small_arrays_are_looked_at_whole_each_time() -> None:
    for place in range(0, weights.WHOLE, 37):
        stock = mx.zeros(weights.WHOLE)
        before = fingerprint([stock])
        stock[place] = 1
        assert fingerprint([stock]) != before


def test_arrays_are_read_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[mx.array] = []
    whole = weights._read_whole
    monkeypatch.setattr(weights, "_read_whole", lambda array: reads.append(array) or whole(array))
    fingerprint(model)
    assert len(reads) == len(tree_flatten(model.parameters()))
    fingerprint(model)
    model.model.layers[0].self_attn.k_proj.weight = mx.zeros((128, 64))
    fingerprint(model)
    assert len(reads) == len(tree_flatten(model.parameters())) + 1


def test_nothing_is_kept_alive(folder: Path) -> None:
    """Neither a model nor its arrays, and nothing stays behind of them."""
    gc.collect()
    known = len(weights._reads)
    model = load(folder)
    model.model.layers[0].mlp.more = times(mx.ones(3))
    fingerprint(model)
    arrays = [weakref.ref(array) for _, array in tree_flatten(model.parameters())]
    assert len(weights._reads) == known + len(arrays) + 1
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None and not any(array() is not None for array in arrays)
    assert len(weights._reads) == known


def test_an_id_that_another_array_had_is_not_believed() -> None:
    array, other = mx.zeros((64, 64)), mx.zeros((64, 64))
    expected = fingerprint([array])
    fingerprint([other])
    wrong = dataclasses.replace(weights._reads[id(other)], digest=b"of what was here before")
    weights._reads[id(array)] = wrong
    assert fingerprint([array]) == expected
    weights._forget(id(array), wrong.array)  # too late: it is another's by now
    assert weights._reads[id(array)].array() is array


# Objects


class Slots:
    __slots__ = ("__hidden", "empty", "value")

    def __init__(self, value: Any, hidden: Any = 0) -> None:
        self.value = value
        self.__hidden = hidden


class MoreSlots(Slots):
    __slots__ = ("more",)


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedConfig:
    theta: float


class Name(str):
    pass


def test_objects_count_by_what_they_hold() -> None:
    """In slots, in a type of Python's, or beside what their base holds."""
    makes: list[Callable[[], Any]] = [
        lambda: Slots(1),
        lambda: Slots(2),
        lambda: Slots(1, 1),
        lambda: MoreSlots(1),
        lambda: MoreSlots(2),
        lambda: SlottedConfig(1.0),
        lambda: SlottedConfig(2.0),
        lambda: Slots(mx.array([1])),
        lambda: Slots(mx.array([2])),
        lambda: range(3),
        lambda: range(4),
        lambda: Decimal("1.5"),
        lambda: Decimal("1.25"),
        lambda: deque([1]),
        lambda: deque([2]),
        lambda: Name("a"),
        lambda: Name("b"),
        lambda: "a",
        lambda: OrderedDict(a=1),
        lambda: OrderedDict(a=2),
        lambda: np.array([{"a": 1}, None]),
        lambda: {(1, "a"): 1, None: 2},
        lambda: {(1, "b"): 1, None: 2},
        lambda: threading.Lock(),
        lambda: logging.getLogger("a"),
        lambda: Path("a"),
    ]
    found = [fingerprint([make()]) for make in makes]
    assert len(set(found)) == len(makes)
    assert found == [fingerprint([make()]) for make in makes]


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


def test_a_method_that_is_wrapped_counts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the wrapper does, what it brings along, and what it wraps."""
    kind = type(model.model.layers[0])
    stock = kind.__call__

    def wrapped(function: Any, by: float) -> Any:
        @functools.wraps(function)
        def steer(*args: Any) -> Any:
            return function(*args) * by

        return steer

    def found(function: Any) -> bytes:
        monkeypatch.setattr(kind, "__call__", function)
        return fingerprint(model)

    other = wrapped(lambda self, *args: args[0], 2.0)
    functions = [stock, wrapped(stock, 2.0), wrapped(stock, 3.0), wrapped(other, 2.0)]
    functions += [mx.compile(other), staticmethod(other), functools.partial(other, by=1)]
    assert len({found(each) for each in functions}) == len(functions)
    assert found(wrapped(stock, 2.0)) == found(functions[1])


def test_a_function_that_a_models_module_imported_counts(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(model)
    stock = llama.scaled_dot_product_attention
    monkeypatch.setattr(
        llama,
        "scaled_dot_product_attention",
        functools.wraps(stock)(lambda *args, **more: stock(*args, **more) * 2),
    )
    assert fingerprint(model) != before
    monkeypatch.undo()
    assert fingerprint(model) == before
    monkeypatch.setattr(base, "create_causal_mask", lambda *args: None)  # two names away
    assert fingerprint(model) != before


@pytest.mark.parametrize("module", [mx.fast, mx, nn])
def test_a_function_put_into_mlx_counts(
    model: Any, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    before = fingerprint(model)
    name = {mx.fast: "scaled_dot_product_attention", mx: "softmax", nn: "silu"}[module]
    stock = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **more: stock(*args, **more))
    after = fingerprint(model)
    monkeypatch.setattr(module, name, functools.partial(stock))
    assert len({before, after, fingerprint(model)}) == 3


READING = """
import mlx.core as mx
import mlx.nn as nn
import types

class Layer(nn.Module):
    by = {by}

    def __call__(self, x):
        def inner(x):
            return scaled(x)
        return inner(x) * TABLE.by if self else helpers.by(x) * self.by

    @functools.lru_cache
    def cached(self):
        return 0

def scaled(x):
    return x * SCALE

by, SCALE, TABLE = None, {scale}, {table}
helpers = types.ModuleType("helpers")
helpers.by = {helper}
"""


@pytest.mark.parametrize("name", ["by", "scale", "table", "helper"])
def test_what_code_reads_by_a_global_name_counts(name: str) -> None:
    values = {"by": "1", "scale": "1.0", "table": "None", "helper": "None"}
    choices = ["1", "(1, 2)", "[1, {'a': None}]", "mx.array([1, 2])", "mx.array([1, 3])"]
    choices += ["nn.Linear", "functools.partial(max, 1)", "functools.partial(max, 2)"]
    choices += ["(lambda x: x)", "(lambda x: x + 1)", "type('Scale', (), {'by': 1})"]
    choices += ["type('Scale', (), {'by': 2})", "functools.lru_cache(lambda: 1)"]
    choices += [
        "functools.lru_cache(lambda: 2)",
        "list(range(300))",
        "mx.float16",
        "nn.Linear(2, 2)",
    ]
    found = []
    for choice in choices * 2:
        mx.random.seed(0)
        names: dict[str, Any] = {"__name__": "custom_model", "functools": functools}
        # The same code for all, so that the values alone count.
        code = READING.format(**{each: f"VALUES[{each!r}]" for each in values})
        names["VALUES"] = values | {name: eval(choice, {"mx": mx, "nn": nn, **names})}
        exec(compile(code, "<cell>", "exec"), names)
        del names["VALUES"]
        found.append(fingerprint(names["Layer"]()))
    assert found[: len(choices)] == found[len(choices) :]
    assert len(set(found)) == len(choices)


def test_a_file_that_comes_in_play_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an editable package, whose version does not tell."""
    found = []
    for folder, text in (("a", ""), ("b", ""), ("c", "# edited"), ("d", "# edited otherwise")):
        package = tmp_path / folder / "edited_models"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "base.py").write_text(f"def mask(x):\n    return x\n{text}\n")
        model = LAYER.format(factor="mask(1)")
        (package / "model.py").write_text(f"from .base import mask\n{model}")
        monkeypatch.syspath_prepend(package.parent)
        found.append(fingerprint(importlib.import_module("edited_models.model").Layer()))
        for name in [name for name in sys.modules if name.startswith("edited_models")]:
            del sys.modules[name]
    assert found[0] == found[1] and len(set(found)) == 3


def test_code_that_goes_in_circles_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "custom_model"}
    code = LAYER.format(factor="f0()") + "".join(
        f"\ndef f{place}():\n    return f{(place + 1) % 3000}() + Layer\n" for place in range(3000)
    )
    exec(compile(code, "<cell>", "exec"), names)
    whole = fingerprint(names["Layer"]())
    assert fingerprint(names["Layer"]()) == whole
    monkeypatch.setattr(patch, "MOST_OBJECTS", 100)
    assert fingerprint(names["Layer"]()) != whole


def test_codecs_have_one_that_stays() -> None:
    """Over their use, and from process to process."""
    options = CodecOptions(bits=8, group_size=64)
    codecs = RotatedCodec(options), RawCodec(options)
    before = fingerprint(codecs)
    codecs[0].encode(mx.random.normal((1, 2, 64, 64)), first=True)
    assert fingerprint(codecs) == before
    assert fingerprint((RotatedCodec(CodecOptions(bits=4, group_size=64)), codecs[1])) != before
    code = (
        "from mlx_lm_kvcache_plugin.codecs.base import CodecOptions\n"
        "from mlx_lm_kvcache_plugin.codecs.raw import RawCodec\n"
        "from mlx_lm_kvcache_plugin.codecs.rotated import RotatedCodec\n"
        "from mlx_lm_kvcache_plugin.fingerprint import fingerprint\n"
        "options = CodecOptions(bits=8, group_size=64)\n"
        "print(fingerprint((RotatedCodec(options), RawCodec(options))).hex())"
    )
    assert {in_process(code, seed) for seed in ("1", "2")} == {before.hex()}


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
