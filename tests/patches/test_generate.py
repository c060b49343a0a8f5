"""The patch of `mlx_lm.generate`: refused where it does not fit, and what its functions do."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_lm_kvcache_plugin import patches
from mlx_lm_kvcache_plugin.patches import generate as patch
from mlx_lm_kvcache_plugin.plugins import plugins
from tests.patches.generating import (
    LAYOUTS,
    NAME,
    PROMPT,
    Script,
    folder_of,
    fresh_module,
    load,
    steps,
    tokenizer_of,
)
from tests.patches.refusals import check_refusal

RAW = {"MLX_LM_KV_CACHE_CODEC": "raw"}

PROMPTS = [PROMPT, PROMPT[:120], [*PROMPT[:150], *b"another end"], list(b"short")]


@pytest.fixture(autouse=True)
def fresh_plugins() -> Iterator[None]:
    plugins.cache_clear()
    yield
    plugins.cache_clear()


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line is pytest's; ours is empty."""
    monkeypatch.setattr(sys, "argv", [NAME])


@pytest.fixture
def module() -> Any:
    return fresh_module()


@pytest.fixture(scope="module")
def stock() -> Any:
    return fresh_module()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda name: folder_of(name, root)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch, **RAW)


@pytest.fixture
def llama(folder: Callable[[str], Path]) -> Any:
    return load(folder("llama"))


@pytest.fixture
def tokenizer(folder: Callable[[str], Path]) -> Any:
    return tokenizer_of(folder("llama"))


# Shapes


def idle() -> None:
    """Looks up nothing."""


def no_step(prompt: Any, model: Any) -> None: ...


class NoBatches:
    def next_generated(self) -> None: ...


class OtherBatches:
    def _make_batch(self, n: int) -> None: ...

    def next_generated(self) -> None: ...

    def _next(self) -> None:
        """Makes its batches otherwise."""


WRONG_SHAPES: dict[str, tuple[str, Any, str]] = {
    "no argparse": ("argparse", None, "has no argparse"),
    "no step": ("generate_step", None, "has no generate_step"),
    "no draft": ("speculative_generate_step", None, "has no speculative_generate_step"),
    "no stream": ("stream_generate", None, "has no stream_generate"),
    "no batches": ("batch_generate", None, "has no batch_generate"),
    "no generator": ("BatchGenerator", None, "has no BatchGenerator"),
    "no parser": ("setup_arg_parser", None, "has no setup_arg_parser"),
    "no main": ("main", None, "has no main"),
    "a step without a cache": (
        "generate_step",
        no_step,
        "mlx_lm.generate.generate_step does not take max_tokens, ",
    ),
    "a step that is no function": (
        "generate_step",
        functools.partial(no_step),
        "mlx_lm.generate.generate_step is not a plain function",
    ),
    "a stream of other steps": (
        "stream_generate",
        idle,
        "idle does not use generate_step, speculative_generate_step",
    ),
    "a parser of another kind": ("setup_arg_parser", idle, "idle does not use argparse"),
    "a main without a parser": ("main", idle, "idle does not use generate, "),
    "other parameters": (
        "BatchGenerator",
        NoBatches,
        "NoBatches._make_batch does not take (n)",
    ),
    "other batches": (
        "BatchGenerator",
        OtherBatches,
        "OtherBatches._next does not use _make_batch",
    ),
}


@pytest.mark.parametrize("asked_for", [True, False])
@pytest.mark.parametrize("kind", WRONG_SHAPES)
def test_another_shape_is_refused(
    module: Any,
    kind: str,
    asked_for: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With its reason, the module untouched; on stderr only if a variable of ours is set."""
    check_refusal(module, WRONG_SHAPES[kind], asked_for, monkeypatch, capsys)


def test_the_present_shape_is_known(module: Any) -> None:
    """That of the mlx-lm which is installed here."""
    patch.check_shape(module)


# Switching on and off


def stock_names(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in patch.REBOUND}


def parse(module: Any, *arguments: str) -> argparse.Namespace:
    namespace: argparse.Namespace = module.setup_arg_parser().parse_args(arguments)
    return namespace


def test_nothing_asked_for_changes_the_argument_parser_alone(module: Any) -> None:
    """The functions are stock's, and no plugin is loaded."""
    before = dict(vars(module))
    patches.apply(module)
    changed = {name for name in before if before[name] is not vars(module)[name]}
    assert changed == {"argparse"} and vars(module).keys() == before.keys()
    assert not plugins.cache_info().currsize
    parse(module)
    assert stock_names(module) == {name: before[name] for name in patch.REBOUND}
    assert sys.modules["argparse"] is argparse


def test_a_flag_binds_our_functions_and_its_absence_stocks(module: Any) -> None:
    """One process may parse many times: the last one counts."""
    stock = stock_names(module)
    patches.apply(module)
    for off in ((), ("--disable-prefix-cache",)):
        parse(module, "--kv-cache-bits", "4")
        assert all(getattr(module, name) is not stock[name] for name in patch.REBOUND)
        parse(module, *off)
        assert stock_names(module) == stock


def test_our_functions_look_like_upstreams(script: Script) -> None:
    """Their names, documentation and parameters."""
    for name in patch.REBOUND:
        ours, stock = getattr(script.module, name), script.stock[name]
        assert ours is not stock
        assert (ours.__name__, ours.__doc__, ours.__module__) == (name, stock.__doc__, NAME)
        assert inspect.signature(ours) == inspect.signature(stock)
    assert script.module.BatchGenerator is script.stock["BatchGenerator"]
    assert script.module.stream_generate is script.stock["stream_generate"]


@pytest.mark.parametrize("value", ["0", "off", ""])
def test_a_switch_that_is_off_asks_for_nothing(
    module: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    stock = stock_names(module)
    monkeypatch.setenv("MLX_LM_DISABLE_PREFIX_CACHE", value)
    patches.apply(module)
    assert stock_names(module) == stock


# The line among the statistics


def test_the_statistics_tell_what_was_reused(
    script: Script, stock: Any, llama: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line behind upstream's; all else is printed as ever."""
    text = stock.generate(llama, tokenizer, PROMPT, verbose=True, max_tokens=8)
    lines = capsys.readouterr().out.splitlines()
    for reused in (0, len(PROMPT) - 1):
        ours = script.module.generate(llama, tokenizer, PROMPT, verbose=True, max_tokens=8)
        assert ours == text
        found = capsys.readouterr().out.splitlines()
        assert found[-1] == f"Prefix cache: {reused} of {len(PROMPT)} prompt tokens reused"
        assert len(found) == len(lines) + 1
        assert found[:3] == lines[:3]
        for mine, stocks in zip(found[3:], lines[3:], strict=False):  # but for how fast it was
            assert mine.split()[:2] == stocks.split()[:2]


@pytest.mark.parametrize("own", [True, False])
def test_what_is_not_looked_up_has_no_line(
    script: Script, llama: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str], own: bool
) -> None:
    """The caller's own cache, or no statistics at all."""
    options = {"prompt_cache": make_prompt_cache(llama)} if own else {}
    script.module.generate(llama, tokenizer, PROMPT, verbose=own, max_tokens=4, **options)
    assert "Prefix cache" not in capsys.readouterr().out


def test_one_prompt_inside_of_another_has_no_part_in_its_line(
    script: Script, llama: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A processor that asks a model itself."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        steps(script.module, llama, PROMPT[:50], max_tokens=1)
        script.module.generate(llama, tokenizer, PROMPT[:60], max_tokens=1)
        return logits

    options = {"max_tokens": 2, "logits_processors": [process]}
    script.module.generate(llama, tokenizer, PROMPT, verbose=True, **options)
    assert f"Prefix cache: 0 of {len(PROMPT)} prompt" in capsys.readouterr().out


# Batches


def batch(module: Any, model: Any, tokenizer: Any, prompts: Any, **options: Any) -> Any:
    return module.batch_generate(model, tokenizer, prompts, **{"max_tokens": 10, **options})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_is_the_same_over_the_store(
    script: Script, stock: Any, folder: Callable[[str], Path], layout: str
) -> None:
    """The texts, and the figures of the whole prompts; and so is the next turn."""
    model, tokenizer = load(folder(layout)), tokenizer_of(folder(layout))
    prompts = PROMPTS if layout != "mamba" else PROMPTS[:1]  # upstream computes it wrongly together
    expected = batch(stock, model, tokenizer, prompts, return_prompt_caches=True)
    for _ in range(2):
        found = batch(script.module, model, tokenizer, prompts, return_prompt_caches=True)
        assert found.texts == expected.texts
        assert found.stats.prompt_tokens == expected.stats.prompt_tokens
        assert found.stats.generation_tokens == expected.stats.generation_tokens
        assert [len(each) for each in found.caches] == [len(each) for each in expected.caches]
        script.check()
    turns = [
        [*prompt, *text.encode(), *b" and then?"]
        for prompt, text in zip(prompts, found.texts, strict=True)
    ]
    before = len(script.hits)
    answers = batch(script.module, model, tokenizer, turns).texts
    assert answers == batch(stock, model, tokenizer, turns).texts
    assert len(script.hits) == before + len(turns)
    for turn, hit in zip(turns, script.hits[before:], strict=True):
        assert hit >= len(turn) - len(b" and then?") - 1


def test_the_caches_of_a_batch_are_handed_out(
    script: Script, stock: Any, llama: Any, tokenizer: Any
) -> None:
    for _ in range(2):
        mine = batch(script.module, llama, tokenizer, PROMPTS, return_prompt_caches=True).caches
        stocks = batch(stock, llama, tokenizer, PROMPTS, return_prompt_caches=True).caches
        for ours, theirs in zip(mine, stocks, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.offset == other.offset
                np.testing.assert_allclose(one.state[0], other.state[0], atol=2e-3)


def test_the_logprobs_of_a_batch(script: Script, stock: Any, llama: Any, tokenizer: Any) -> None:
    if "return_logprobs" not in inspect.signature(stock.batch_generate).parameters:
        pytest.skip("this mlx-lm returns none")
    options = {"return_logprobs": True, "return_token_ids": True}
    expected = batch(stock, llama, tokenizer, PROMPTS, **options)
    for _ in range(2):
        found = batch(script.module, llama, tokenizer, PROMPTS, **options)
        assert found.token_ids == expected.token_ids
        for mine, stocks in zip(found.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(mine, stocks, atol=2e-3)


def test_the_statistics_of_a_batch(
    script: Script, llama: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line more, over all prompts."""
    total = sum(map(len, PROMPTS))
    for reused in (0, total - len(PROMPTS)):
        batch(script.module, llama, tokenizer, PROMPTS, verbose=True)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"[batch_generate] Prefix cache: {reused} of {total} prompt tokens reused"
    batch(script.module, llama, tokenizer, PROMPTS)
    assert capsys.readouterr().out == ""


def test_a_batch_learns_from_what_finished_before(
    script: Script, stock: Any, llama: Any, tokenizer: Any
) -> None:
    """Prompts are looked up when their turn comes, so that few prefixes are held at once."""
    prompts = [[*PROMPT, *str(place).encode()] for place in range(10, 16)]
    options = {"prefill_batch_size": 2, "completion_batch_size": 2}
    expected = batch(stock, llama, tokenizer, prompts, **options)
    found = batch(script.module, llama, tokenizer, prompts, **options)
    assert found.texts == expected.texts
    assert found.stats.prompt_tokens == expected.stats.prompt_tokens
    assert len(script.hits) >= 2 and min(script.hits) >= len(PROMPT)


def test_the_processors_of_a_batch_see_the_whole_prompt(
    script: Script, stock: Any, llama: Any, tokenizer: Any
) -> None:
    def shown(module: Any) -> list[list[int]]:
        seen: list[list[int]] = []

        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            seen.append(tokens.tolist())
            return logits

        batch(module, llama, tokenizer, PROMPTS[:2], logits_processors=[process])
        return sorted(seen)

    assert shown(stock) == shown(script.module) == shown(script.module)
    assert script.hits == [len(prompt) - 1 for prompt in PROMPTS[:2]]


def test_prompts_that_are_arrays(script: Script, stock: Any, llama: Any, tokenizer: Any) -> None:
    """Taken or refused, as upstream does."""

    def outcome(module: Any, prompts: Any) -> Any:
        try:
            return batch(module, llama, tokenizer, prompts).texts
        except Exception as error:
            return type(error), str(error)

    for prompts in (
        [mx.array(PROMPT)],
        [np.array(PROMPT)],
        mx.array([PROMPT[:64], PROMPT[64:128]]),
    ):
        expected = outcome(stock, prompts)
        assert outcome(script.module, prompts) == outcome(script.module, prompts) == expected


@pytest.mark.parametrize("own", ["prompt_caches", "max_kv_size"])
def test_a_batch_of_the_callers_own_is_upstreams(
    script: Script, stock: Any, llama: Any, tokenizer: Any, own: str
) -> None:
    """Neither read nor stored."""

    def options() -> dict[str, Any]:
        if own == "max_kv_size":
            return {own: 64}
        return {own: [make_prompt_cache(llama) for _ in PROMPTS]}

    expected = batch(stock, llama, tokenizer, PROMPTS, **options()).texts
    assert batch(script.module, llama, tokenizer, PROMPTS, **options()).texts == expected
    assert not script.events and script.scripts.face is None


def test_a_batch_uses_what_the_module_says_by_then(
    script: Script, llama: Any, tokenizer: Any
) -> None:
    """Another patch that comes later counts."""
    made = []

    class Generator(script.module.BatchGenerator):  # type: ignore[misc, name-defined]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            made.append(self)
            super().__init__(*arguments, **options)

    script.module.BatchGenerator = Generator
    batch(script.module, llama, tokenizer, PROMPTS[:1])
    assert len(made) == 1 and len(script.inserts) == 1


def test_one_prompt_alone_and_in_a_batch_share(
    script: Script, stock: Any, llama: Any, tokenizer: Any
) -> None:
    """Where rows are all that there is; a state is kept apart."""
    steps(script.module, llama, PROMPT)
    batch(script.module, llama, tokenizer, PROMPTS[:1])
    assert script.hits == [len(PROMPT) - 1]


def test_a_state_of_a_batch_is_not_for_one_alone(
    script: Script, folder: Callable[[str], Path]
) -> None:
    """Some models with states take the padding of a batch for tokens."""
    model, tokenizer = load(folder("mamba")), tokenizer_of(folder("mamba"))
    found = batch(script.module, model, tokenizer, [PROMPT, PROMPT[:50]])
    turn = [*PROMPT, *found.texts[0].encode(), 65]
    steps(script.module, model, turn)
    assert script.last_hit == 0


def test_a_failure_of_ours_in_a_batch_is_a_miss(
    script: Script, stock: Any, llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = batch(stock, llama, tokenizer, PROMPTS).texts
    monkeypatch.setattr("mlx_lm_kvcache_plugin.patches.opening.fingerprint", None)
    assert batch(script.module, llama, tokenizer, PROMPTS).texts == expected
    assert not script.events


def test_a_generator_that_cannot_be_extended_is_upstreams(
    script: Script, stock: Any, llama: Any, tokenizer: Any
) -> None:
    """What another patch left in its place may be no class at all."""
    expected = batch(stock, llama, tokenizer, PROMPTS).texts
    script.module.BatchGenerator = functools.partial(script.stock["BatchGenerator"])
    assert batch(script.module, llama, tokenizer, PROMPTS).texts == expected
    assert not script.events


def test_what_waits_in_another_form_is_left_alone(
    script: Script, stock: Any, llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator of another mlx-lm may remember its prompts otherwise."""
    expected = batch(stock, llama, tokenizer, PROMPTS).texts
    monkeypatch.setattr("mlx_lm_kvcache_plugin.patches.batches._without", None)
    for _ in range(2):
        assert batch(script.module, llama, tokenizer, PROMPTS).texts == expected
    script.check()


def test_wrong_arguments_of_a_batch_are_upstreams_errors(script: Script, stock: Any) -> None:
    messages = []
    for module in (stock, script.module):
        with pytest.raises(TypeError) as caught:
            module.batch_generate()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
