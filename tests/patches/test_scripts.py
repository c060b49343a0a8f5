"""Scripts over the store of their process: what they compute is what they would have without it."""

from __future__ import annotations

import gc
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_lm_kvcache_plugin import fingerprint as fingerprints
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.patches import opening, scripts
from mlx_lm_kvcache_plugin.patches.prompt_cache import PrefixPromptCache
from mlx_lm_kvcache_plugin.plugins import plugins
from tests.patches.generating import (
    LAYOUTS,
    PROMPT,
    Script,
    assert_same,
    folder_of,
    fresh_module,
    interrupted,
    load,
    steps,
    tokenizer_of,
)

__all__ = ["interrupted"]

RAW = {"MLX_LM_KV_CACHE_CODEC": "raw"}

PIECE = 64
"""A prefill step that cuts the prompt in a few pieces."""

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(autouse=True)
def fresh_plugins() -> Iterator[None]:
    plugins.cache_clear()
    yield
    plugins.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda name: folder_of(name, root)


@pytest.fixture(scope="module")
def stock() -> Any:
    """Upstream's module as it is."""
    return fresh_module()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """One whose store keeps full precision, with checkpoints on the way."""
    return Script(monkeypatch, **RAW, MLX_LM_KV_CACHE_CHECKPOINT_TOKENS="64")


@pytest.fixture
def llama(folder: Callable[[str], Path]) -> Any:
    return load(folder("llama"))


# Stopped early


@every_layout
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_caller_that_stops_early_has_stored_what_was_computed(
    script: Script, stock: Any, folder: Callable[[str], Path], layout: str, tokens: int
) -> None:
    """Stopped twice after some tokens, the third run is what it is without the plugin."""
    model, tokenizer = load(folder(layout)), tokenizer_of(folder(layout))
    expected = list(stock.stream_generate(model, tokenizer, PROMPT, max_tokens=12))
    for _ in range(2):
        for place, _ in enumerate(script.module.stream_generate(model, tokenizer, PROMPT)):
            if place == tokens - 1:
                break
        assert max(script.inserts) == len(PROMPT) + tokens
    found = list(script.module.stream_generate(model, tokenizer, PROMPT, max_tokens=12))
    assert script.hits == [len(PROMPT) - 1] * 2
    assert [r.text for r in found] == [r.text for r in expected]
    assert {r.prompt_tokens for r in found} == {len(PROMPT)}
    assert_same([(r.token, r.logprobs) for r in found], [(r.token, r.logprobs) for r in expected])
    script.check()


@every_layout
def test_a_generator_that_is_never_started_looks_nothing_up(
    script: Script, folder: Callable[[str], Path], layout: str
) -> None:
    script.module.generate_step(mx.array(PROMPT), load(folder(layout))).close()
    assert not script.events


@every_layout
def test_what_was_generated_is_reused_by_the_next_turn(
    script: Script, stock: Any, folder: Callable[[str], Path], layout: str
) -> None:
    """All of it, as a chat sends it back, with a question behind."""
    model = load(folder(layout))
    answer = [token for token, _ in steps(script.module, model, PROMPT)]
    turn = [*PROMPT, *answer, *b"and then?"]
    assert_same(steps(script.module, model, turn), steps(stock, model, turn))
    assert script.last_hit == len(PROMPT) + len(answer)


@every_layout
@pytest.mark.parametrize("place", range(5))
def test_an_interrupt_between_two_steps_of_the_prefill(
    script: Script, stock: Any, folder: Callable[[str], Path], layout: str, place: int
) -> None:
    """It is passed on, and what was computed before it is kept."""
    model, calls = load(folder(layout)), []

    def report(computed: int, total: int) -> None:
        calls.append(computed)
        if len(calls) == place + 1:
            raise KeyboardInterrupt

    options = {"prefill_step_size": PIECE}
    with pytest.raises(KeyboardInterrupt):
        steps(script.module, model, PROMPT, prompt_progress_callback=report, **options)
    script.check()
    found = steps(script.module, model, PROMPT, **options)
    assert_same(found, steps(stock, model, PROMPT, **options))
    computed = min(place * PIECE, len(PROMPT) - 1)
    if layout == "llama":
        assert script.last_hit in (max(0, computed - PIECE), computed)
    assert script.last_hit <= computed


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", [1, 2, 3, 4, 7, 8, 9, 10, 13, 14])
def test_an_interrupt_inside_of_the_model(
    script: Script,
    stock: Any,
    llama: Any,
    interrupted: Callable[[int, bool], None],
    place: int,
    after: bool,
) -> None:
    """With a layer ahead of the others: only what all of them had finished is kept."""
    expected = steps(stock, llama, PROMPT, prefill_step_size=PIECE)
    interrupted(place, after)
    with pytest.raises(KeyboardInterrupt):
        steps(script.module, llama, PROMPT, prefill_step_size=PIECE)
    script.check()
    stored = script.inserts[-1] if script.inserts else 0
    assert_same(steps(script.module, llama, PROMPT, prefill_step_size=PIECE), expected)
    assert script.last_hit == min(stored, len(PROMPT) - 1)
    assert stored >= PIECE * ((place - 1) // 2) or place > 8


@pytest.mark.parametrize("place", [1, 2, 5])
@pytest.mark.parametrize("layout", ["llama", "gemma"])
def test_an_interrupt_while_tokens_are_sampled(
    script: Script, stock: Any, folder: Callable[[str], Path], layout: str, place: int
) -> None:
    model, calls = load(folder(layout)), []

    def sample(logprobs: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) == place:
            raise KeyboardInterrupt
        return mx.argmax(logprobs, axis=-1)

    with pytest.raises(KeyboardInterrupt):
        steps(script.module, model, PROMPT, sampler=sample)
    script.check()
    assert_same(steps(script.module, model, PROMPT), steps(stock, model, PROMPT))
    assert script.last_hit == len(PROMPT) - 1


# Prompts of all lengths


@every_layout
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_few_tokens(
    script: Script, stock: Any, folder: Callable[[str], Path], layout: str, max_tokens: int
) -> None:
    """None or one: the caches stand for as many as were yielded."""
    model = load(folder(layout))
    assert len(steps(script.module, model, PROMPT, max_tokens=max_tokens)) == max_tokens
    assert max(script.inserts) == len(PROMPT) + max_tokens
    longer = [*PROMPT, *steps(stock, model, PROMPT, max_tokens=1)[:1][0][:1], 65]
    assert_same(steps(script.module, model, longer), steps(stock, model, longer))


def test_no_limit(script: Script, llama: Any) -> None:
    """-1 goes on until the caller has had enough."""
    generator = script.module.generate_step(mx.array(PROMPT), llama, max_tokens=-1)
    for _ in range(300):
        next(generator)
    generator.close()
    assert script.inserts == [len(PROMPT) + 300]


@every_layout
def test_a_prompt_of_one_token_and_the_same_prompt_ten_times(
    script: Script, stock: Any, folder: Callable[[str], Path], layout: str
) -> None:
    model = load(folder(layout))
    for prompt in ([65], PROMPT[:2], PROMPT):
        expected = steps(stock, model, prompt)
        for _ in range(10):
            assert_same(steps(script.module, model, prompt), expected)
    script.check()
    assert script.last_hit == len(PROMPT) - 1


def test_an_empty_prompt_is_upstreams_error(
    script: Script, stock: Any, llama: Any, folder: Callable[[str], Path]
) -> None:
    tokenizer = tokenizer_of(folder("llama"))
    messages = []
    for module in (stock, script.module):
        with pytest.raises(ValueError) as caught:
            module.generate(llama, tokenizer, "")
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and not script.events


@pytest.mark.parametrize(
    ("arguments", "options"),
    [((), {}), ((mx.array([1]),), {}), ((mx.array([1]), None), {"colour": 1})],
)
def test_wrong_arguments_are_refused_when_called(
    script: Script, stock: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """With upstream's own words."""
    messages = []
    for module in (stock, script.module):
        with pytest.raises(TypeError) as caught:
            module.generate_step(*arguments, **options)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64])
def test_a_prompt_of_any_whole_numbers(script: Script, llama: Any, dtype: mx.Dtype) -> None:
    seen: list[mx.Dtype] = []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.dtype)
        return logits

    for _ in range(2):
        prompt = mx.array(PROMPT).astype(dtype)
        list(script.module.generate_step(prompt, llama, max_tokens=1, logits_processors=[process]))
    assert script.last_hit == len(PROMPT) - 1
    assert seen[:2] == seen[2:]


def test_a_stream_of_the_callers(script: Script, stock: Any, llama: Any) -> None:
    """Where upstream takes one, as its third argument."""
    if "stream" not in inspect.signature(stock.generate_step).parameters:
        pytest.skip("this mlx-lm has its own stream only")
    stream = mx.new_stream(mx.default_device())
    expected = steps(stock, llama, PROMPT)
    for _ in range(2):
        generator = script.module.generate_step(mx.array(PROMPT), llama, stream, max_tokens=12)
        assert_same([(token, np.array(logprobs)) for token, logprobs in generator], expected)
    assert script.last_hit == len(PROMPT) - 1


# What the caller sees on the way


def test_the_progress_is_that_of_the_whole_prompt(script: Script, llama: Any) -> None:
    """It begins with what was reused."""
    seen: list[tuple[int, int]] = []
    steps(script.module, llama, PROMPT[:100])
    steps(
        script.module,
        llama,
        PROMPT,
        prefill_step_size=PIECE,
        prompt_progress_callback=lambda *progress: seen.append(progress),
    )
    total = len(PROMPT)
    assert seen == [(computed, total) for computed in (100, 164, total - 1, total)]


@every_layout
def test_processors_see_what_they_see_without_the_plugin(
    script: Script, stock: Any, folder: Callable[[str], Path], layout: str
) -> None:
    """Token by token, whatever this upstream shows them; and the penalties come out the same."""
    model = load(folder(layout))

    def shown(module: Any) -> list[list[int]]:
        seen: list[list[int]] = []

        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            seen.append(tokens.tolist())
            return logits

        penalties = make_logits_processors(repetition_penalty=1.5, repetition_context_size=500)
        found.append(steps(module, model, PROMPT, logits_processors=[process, *penalties]))
        return seen

    found: list[Any] = []
    assert shown(stock) == shown(script.module) == shown(script.module)
    assert script.last_hit == len(PROMPT) - 1
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_seeded_sampling_draws_the_same(script: Script, stock: Any, llama: Any) -> None:
    """Nothing of ours draws a random number."""

    def drawn(module: Any) -> list[int]:
        mx.random.seed(7)
        sampler = make_sampler(temp=1.0, top_p=0.95)
        return [token for token, _ in steps(module, llama, PROMPT, sampler=sampler, max_tokens=30)]

    assert drawn(stock) == drawn(script.module) == drawn(script.module)
    assert script.last_hit == len(PROMPT) - 1


def test_quantized_caches_are_kept_apart(script: Script, stock: Any, llama: Any) -> None:
    """By bits, by group size, by where they begin, and from plain ones."""
    variants: list[dict[str, Any]] = [
        {},
        {"kv_bits": 8, "quantized_kv_start": 0},
        {"kv_bits": 4, "quantized_kv_start": 0},
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
        {"kv_bits": 8, "quantized_kv_start": 100},
    ]
    for options in variants:
        found = steps(script.module, llama, PROMPT, **options)
        assert script.last_hit == 0
        assert_same(found, steps(stock, llama, PROMPT, **options))
    for options in variants:
        found = steps(script.module, llama, PROMPT, max_tokens=1, **options)
        assert script.last_hit == len(PROMPT) - 1
        # Quantized anew from what was read back: not quite what it was.
        error = 2e-3 if not options else 1.0 if options["kv_bits"] == 8 else 10.0
        assert_same(found, steps(stock, llama, PROMPT, max_tokens=1, **options), error)


# The caller's own business


@pytest.mark.parametrize("name", ["generate_step", "generate", "stream_generate"])
def test_a_callers_own_cache_is_never_touched(
    script: Script, stock: Any, folder: Callable[[str], Path], name: str
) -> None:
    """Neither read nor stored, and it holds what stock leaves in it."""
    model, tokenizer = load(folder("llama")), tokenizer_of(folder("llama"))
    held = []
    for module in (stock, script.module, script.module):
        caches = make_prompt_cache(model)
        if name == "generate_step":
            steps(module, model, PROMPT, prompt_cache=caches)
        else:
            list(getattr(module, name)(model, tokenizer, PROMPT, prompt_cache=caches))
        held.append([cache.offset for cache in caches])
    assert held[0] == held[1] == held[2] and held[0][0] > len(PROMPT)
    assert not script.events and script.scripts.face is None


@pytest.mark.parametrize(
    "own",
    [
        {"prompt_cache": []},
        {"max_kv_size": 64},
        {"input_embeddings": mx.zeros((4, 8))},
    ],
)
def test_upstream_gets_just_what_the_caller_gave(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    """The same objects, by the same names, and the generator is upstream's own."""
    script, calls = Script(monkeypatch, **RAW), []
    prompt, model = mx.array(PROMPT), object()
    generator = script.module.generate_step(prompt, model, **own)
    assert generator.gi_code is script.stock["generate_step"].__code__
    given = generator.gi_frame.f_locals
    calls.append(given)
    assert given["prompt"] is prompt and given["model"] is model
    assert all(given[name] is value for name, value in own.items())
    assert not script.events and script.scripts.face is None


def test_a_prompt_that_is_no_array_of_tokens_goes_to_upstream(script: Script, llama: Any) -> None:
    """Which refuses a list, and floats."""
    for prompt in (PROMPT, mx.zeros((2, 3), mx.int32), mx.array([1.0, 2.0])):
        with pytest.raises(Exception):  # noqa: B017  # whatever upstream says of it
            list(script.module.generate_step(prompt, llama))
    assert not script.events


# Two models


def test_two_models_never_meet(script: Script, stock: Any, folder: Callable[[str], Path]) -> None:
    for layout in LAYOUTS * 2:
        model = load(folder(layout))
        assert_same(steps(script.module, model, PROMPT), steps(stock, model, PROMPT))
    # The second round hits, though each model was loaded anew.
    assert script.hits == [len(PROMPT) - 1] * len(LAYOUTS)


def test_weights_that_change_in_place_are_another_model(
    script: Script, stock: Any, llama: Any
) -> None:
    """And when they change back, they are the first one again."""
    steps(script.module, llama, PROMPT)
    weight = llama.model.layers[0].self_attn.k_proj.weight
    weight *= 1.5
    assert llama.model.layers[0].self_attn.k_proj.weight is weight
    assert_same(steps(script.module, llama, PROMPT), steps(stock, llama, PROMPT))
    assert script.last_hit == 0
    weight /= 1.5
    steps(script.module, llama, PROMPT)
    assert script.hits in ([], [len(PROMPT) - 1])  # the way back may round


# Drafts


def test_weights_that_change_while_a_generator_waits(
    script: Script, stock: Any, llama: Any
) -> None:
    """What was computed half by the one and half by the other model is neither's."""
    expected = steps(stock, llama, PROMPT)
    old = dict(tree_flatten(llama.parameters()))
    waiting = script.module.generate_step(mx.array(PROMPT), llama, max_tokens=12)
    tokens = [int(next(waiting)[0]) for _ in range(3)]
    llama.load_weights([(name, weight * 1.5) for name, weight in old.items()])
    tokens += [int(token) for token, _ in waiting]
    llama.load_weights(list(old.items()))
    assert tokens != [token for token, _ in expected]
    following = [*PROMPT, *tokens]
    assert_same(steps(script.module, llama, following), steps(stock, llama, following))
    assert script.hits == []


def speculative(module: Any, model: Any, draft: Any, **options: Any) -> list[Any]:
    options = {"max_tokens": 24, "num_draft_tokens": 3, **options}
    generator = module.speculative_generate_step(mx.array(PROMPT), model, draft, **options)
    return [(int(t), np.array(logprobs), from_draft) for t, logprobs, from_draft in generator]


@pytest.fixture
def draft(folder: Callable[[str], Path]) -> Any:
    """The model with a little noise, so that some of its tokens are right."""
    model = load(folder("llama"))
    head = model.lm_head.weight
    head += 0.3 * mx.random.normal(head.shape, key=mx.random.key(3)) * mx.abs(head).mean()
    return model


@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 1}, {"max_tokens": 1}])
def test_a_draft_is_the_same_over_the_store(
    script: Script, stock: Any, llama: Any, draft: Any, options: dict[str, Any]
) -> None:
    """Tokens, logprobs, and whose each token is; and no hit without the draft, or with another."""
    expected = speculative(stock, llama, draft, **options)
    for _ in range(3):
        found = speculative(script.module, llama, draft, **options)
        assert_same(found, expected)
        assert [each[2] for each in found] == [each[2] for each in expected]
        script.check()
    assert script.hits == [len(PROMPT) - 1] * 2
    steps(script.module, llama, PROMPT)
    assert script.last_hit == 0
    speculative(script.module, llama, llama, **options)
    assert script.last_hit == 0


@pytest.mark.parametrize("tokens", range(1, 10))
def test_a_draft_that_is_stopped_early(
    script: Script, stock: Any, llama: Any, draft: Any, tokens: int
) -> None:
    expected = speculative(stock, llama, draft)
    generator = script.module.speculative_generate_step(
        mx.array(PROMPT), llama, draft, num_draft_tokens=3
    )
    for _ in range(tokens):
        next(generator)
    generator.close()
    script.check()
    assert_same(speculative(script.module, llama, draft), expected)
    assert script.last_hit == len(PROMPT) - 1
    longer = [*PROMPT, *(token for token, *_ in expected[:tokens]), 65]
    found = script.module.speculative_generate_step(mx.array(longer), llama, draft, max_tokens=8)
    stocks = stock.speculative_generate_step(mx.array(longer), llama, draft, max_tokens=8)
    assert [each[0] for each in found] == [each[0] for each in stocks]
    assert len(PROMPT) + tokens - 2 <= script.last_hit <= len(PROMPT) + tokens


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", range(1, 40, 3))
def test_an_interrupt_with_a_draft(
    script: Script,
    stock: Any,
    llama: Any,
    draft: Any,
    interrupted: Callable[[int, bool], None],
    place: int,
    after: bool,
) -> None:
    """Upstream's clean-up does not know how far it came: only what is sure is kept."""
    expected = speculative(stock, llama, draft)
    interrupted(place, after)
    with pytest.raises(KeyboardInterrupt):
        speculative(script.module, llama, draft)
    script.check()
    assert_same(speculative(script.module, llama, draft), expected)
    answer = [token for token, *_ in expected]
    longer = [*PROMPT, *answer, 65]
    found = script.module.speculative_generate_step(mx.array(longer), llama, draft, max_tokens=8)
    stocks = stock.speculative_generate_step(mx.array(longer), llama, draft, max_tokens=8)
    assert [each[0] for each in found] == [each[0] for each in stocks]


def test_a_draft_with_quantized_caches_is_upstreams(script: Script, llama: Any, draft: Any) -> None:
    """It loses the quantized objects; so nothing of them is stored."""
    speculative(script.module, llama, draft, kv_bits=8)
    assert not script.events


def test_a_draft_through_the_upper_functions(
    script: Script, stock: Any, llama: Any, draft: Any, folder: Callable[[str], Path]
) -> None:
    tokenizer = tokenizer_of(folder("llama"))
    options = {"draft_model": draft, "max_tokens": 20}
    expected = stock.generate(llama, tokenizer, PROMPT, **options)
    for _ in range(2):
        assert script.module.generate(llama, tokenizer, PROMPT, **options) == expected
    assert script.last_hit == len(PROMPT) - 1


# Threads and the collector


def test_threads_wait_for_each_other(script: Script, stock: Any, llama: Any) -> None:
    """Each gets what it gets alone."""
    prompts = [PROMPT[:100] + PROMPT[start:] for start in range(100, 108)]
    expected = [[token for token, _ in steps(stock, llama, prompt)] for prompt in prompts]
    mx.eval(llama.parameters())
    found: dict[int, list[int]] = {}

    def work(place: int) -> None:
        for _ in range(3):
            found[place] = [token for token, _ in steps(script.module, llama, prompts[place])]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(prompts))] == expected
    script.check()


@pytest.mark.parametrize("operation", ["fetch_alone", "insert_cache"])
def test_a_generator_that_is_collected_inside_stores_nothing(
    script: Script, stock: Any, llama: Any, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """The collector runs anywhere, also in the middle of the store."""
    steps(script.module, llama, PROMPT[:10])
    inside: list[Any] = []
    method = getattr(PrefixPromptCache, operation)

    def collect(self: Any, *arguments: Any, **options: Any) -> Any:
        if inside:
            before = len(script.inserts)
            inside.pop().close()
            assert len(script.inserts) == before
        return method(self, *arguments, **options)

    generator = script.module.generate_step(mx.array(PROMPT), llama)
    next(generator)
    monkeypatch.setattr(PrefixPromptCache, operation, collect)
    inside.append(generator)
    assert_same(steps(script.module, llama, PROMPT[:50]), steps(stock, llama, PROMPT[:50]))
    assert not inside
    script.check()


def test_a_generator_that_is_collected_in_a_codecs_thread_stores_nothing(
    script: Script, stock: Any, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which works for a thread that holds the store meanwhile: it must not wait for it."""
    inside: list[Any] = []
    encode = RawCodec.encode

    def collect(self: Any, *arguments: Any, **options: Any) -> Any:
        if inside:
            inside.pop().close()
        return encode(self, *arguments, **options)

    generator = script.module.generate_step(mx.array(PROMPT), llama)
    next(generator)
    monkeypatch.setattr(RawCodec, "encode", collect)
    inside.append(generator)
    assert_same(steps(script.module, llama, PROMPT[:50]), steps(stock, llama, PROMPT[:50]))
    assert not inside
    script.check()


def test_a_generator_in_a_circle_is_stored_when_it_is_collected(script: Script, llama: Any) -> None:
    generator = script.module.generate_step(mx.array(PROMPT), llama)
    next(generator)
    circle: list[Any] = [generator]
    circle.append(circle)
    del generator, circle
    gc.collect()
    assert script.inserts == [len(PROMPT) + 1]


# Failures


def test_a_failure_of_ours_is_a_miss(
    script: Script,
    stock: Any,
    llama: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Told once."""

    def fail(model: Any) -> bytes:
        raise LookupError("a bug of ours")

    monkeypatch.setattr(opening, "fingerprint", fail)
    for _ in range(3):
        assert_same(steps(script.module, llama, PROMPT), steps(stock, llama, PROMPT))
    assert not script.events
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "LookupError" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MLX_LM_KV_CACHE_BITS", "7", "MLX_LM_KV_CACHE_BITS: 7 is not one of"),
        ("MLX_LM_KV_CACHE_CODEC", "none", "there is no codec named 'none'"),
    ],
)
def test_a_wrong_variable_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
    stock: Any,
    llama: Any,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    message: str,
) -> None:
    """On stderr, in one line; and the script runs as ever."""
    script = Script(monkeypatch, **{variable: value})
    for _ in range(2):
        assert_same(steps(script.module, llama, PROMPT), steps(stock, llama, PROMPT))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and message in said and not script.events


def test_a_cache_that_is_disabled_is_none(
    monkeypatch: pytest.MonkeyPatch, llama: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(monkeypatch, MLX_LM_DISABLE_PREFIX_CACHE="1")
    steps(script.module, llama, PROMPT)
    assert script.scripts.face is None and not script.events
    assert capsys.readouterr().err == ""


def test_several_ranks_go_without(
    script: Script,
    stock: Any,
    llama: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each alone would wait for the others in the middle of the model; one line says so."""

    class TwoRanks:
        size = 2

    monkeypatch.setattr(scripts, "Ranks", TwoRanks)
    for _ in range(2):
        assert_same(steps(script.module, llama, PROMPT), steps(stock, llama, PROMPT))
    assert not script.events
    assert [record.getMessage() for record in caplog.records] == [
        "prefix cache: nothing is reused with 2 ranks, outside of the server"
    ]


def test_the_environment_is_read_by_the_first_prompt(
    script: Script, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_LM_KV_CACHE_CODEC")
    monkeypatch.setenv("MLX_LM_KV_CACHE_BITS", "4")
    assert script.scripts.face is None
    steps(script.module, llama, PROMPT)
    face = script.scripts.face
    assert face is not None and face.cache is not None and face.cache.settings.key_bits == 4
    assert os.environ["MLX_LM_KV_CACHE_BITS"] == "4"


def test_models_are_looked_at_anew_by_every_prompt(
    script: Script, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is computed and before it is stored: it may have been trained meanwhile."""
    seen: list[bytes] = []

    def watch(model: Any) -> bytes:
        found = fingerprints.fingerprint(model)
        seen.extend([found] * (model is llama))
        return found

    monkeypatch.setattr(opening, "fingerprint", watch)
    for _ in range(3):
        steps(script.module, llama, PROMPT)
    assert len(seen) == 6 and len(set(seen)) == 1
