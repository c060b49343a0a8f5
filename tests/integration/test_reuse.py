"""What is reused, to the token, and how little is decoded for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mlx_lm_kvcache_plugin.codecs.packing import Packer
from tests import models
from tests.integration.clients import MODES, same_answer
from tests.integration.local_server import LocalServer
from tests.models import prompt


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "length",
    [1, 128, 129, 300, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 127, 256))],
)
def test_an_exact_hit_computes_the_last_token(
    model: Path, cold: LocalServer, mode: str, length: int
) -> None:
    """A prompt again, and with its answer behind it, which is all stored: the server survives."""
    options = MODES[mode]
    text = prompt("", length)
    with LocalServer("--model", str(model), "--kv-cache-codec", "raw") as server:
        first = server.text(text, **options)
        longer = text + first.text
        for again in (text, longer, text, longer + "?", longer, text[:-1] or text, text):
            answer = server.text(again, **options)
            assert same_answer(answer, cold.text(again, **options))
            assert answer.cached_tokens == answer.longest_hit < len(again)
        assert server.is_alive()


@pytest.mark.parametrize("mode", MODES)
def test_an_exact_hit_of_a_chat(model: Path, mode: str) -> None:
    """A whole chat sent again, as a client does whose connection broke."""
    messages = [
        {"role": "system", "content": prompt("You are", 140)},
        {"role": "user", "content": "Hello"},
    ]
    with LocalServer("--model", str(model), "--kv-cache-codec", "raw") as server:
        answers = [server.chat(messages, **MODES[mode]) for _ in range(3)]
        assert answers[0].text == answers[1].text == answers[2].text
        assert answers[1].cached_tokens == answers[1].prompt_tokens - 1
        assert server.is_alive()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("codec", ["raw", "affine", "rotated"])
def test_a_block_is_split_to_the_token(
    model: Path, loaded: Any, cold: LocalServer, mode: str, codec: str
) -> None:
    """Prompts that share 200, 300 and 511 tokens with a stored one: those rows are decoded alone.

    No token is lost or doubled: what is stored afterwards is what the model computes.
    """
    text = prompt("base", 600)
    with LocalServer("--model", str(model), "--kv-cache-codec", codec) as server:
        server.text(text, **MODES[mode])
        for shared in (200, 300, 511):
            other = text[:shared] + prompt("!", 89)
            with mock.patch.object(Packer, "decode", autospec=True, side_effect=Packer.decode) as d:
                answer = server.text(other, **MODES[mode])
            assert answer.cached_tokens == answer.longest_hit == shared
            assert sum(call.args[3] for call in d.call_args_list) == shared
            if codec == "raw":
                assert same_answer(answer, cold.text(other, **MODES[mode]))
        server.check_rows(loaded, 1e-3 if codec == "raw" else 0.1)


@pytest.mark.parametrize("short_first", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_short_stored_prefix_hides_no_longer_match(
    light_model: Path, mode: str, short_first: bool
) -> None:
    """[0:200] on its own, and a long prompt that shares 3,200 tokens with the request."""
    text = prompt("long", 4000)
    stored = [text[:200], text] if short_first else [text, text[:200]]
    with LocalServer("--model", str(light_model), "--kv-cache-codec", "raw") as server:
        for one in stored:
            server.text(one, max_tokens=1, **MODES[mode])
        answer = server.text(text[:3200] + prompt("!", 40), max_tokens=1, **MODES[mode])
        assert answer.cached_tokens == 3200


@pytest.mark.parametrize("codec", ["raw", "rotated"])
def test_a_cached_and_a_fresh_request_share_a_batch(model: Path, codec: str) -> None:
    """Prefilled and decoded together, each gets the tokens that it gets when alone."""
    stored, fresh = prompt("stored", 300), prompt("fresh", 250)
    cached = stored[:280] + prompt("!", 30)
    arguments = ("--model", str(model), "--kv-cache-codec", codec)
    with LocalServer(*arguments) as server, LocalServer(*arguments) as alone:
        for each in (server, alone):
            each.text(stored, max_tokens=20)
        with server.held():
            asked = [server.start(text, max_tokens=20) for text in (cached, fresh)]
            server.wait_until(lambda: server.generator.requests.qsize() == 2)
        together = [future.result() for future in asked]
        assert server.prefilled_together == server.decoded_together == 2
        for text, answer in zip((cached, fresh), together, strict=True):
            other = alone.text(text, max_tokens=20)
            assert same_answer(answer, other)
            assert answer.cached_tokens == other.cached_tokens
        assert [answer.cached_tokens for answer in together] == [280, 0]


def test_a_request_joins_a_batch_that_is_decoding(model: Path, cold: LocalServer) -> None:
    """A hit of one length beside sequences of others, over many joins and leaves."""
    text = prompt("many", 260)
    texts = [text[:n] + prompt(str(n), 20) for n in (40, 100, 128, 200, 255, 260)]
    lengths = [30, 5, 17, 9, 24, 12]
    with LocalServer("--model", str(model), "--kv-cache-codec", "raw") as server:
        server.text(text)
        asked = [server.start(t, max_tokens=n) for t, n in zip(texts, lengths, strict=True)]
        for text, length, future in zip(texts, lengths, asked, strict=True):
            assert same_answer(future.result(), cold.text(text, max_tokens=length))
        assert server.is_alive()


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_word(model: Path, loaded: Any, cold: LocalServer, mode: str) -> None:
    """It ends the answer and is not part of it, but was computed, and so it is stored."""
    text = prompt("stop", 140)
    answer = cold.text(text, max_tokens=30).text
    stop = answer[10]
    shown = answer[: answer.index(stop)]
    with LocalServer("--model", str(model), "--kv-cache-codec", "raw") as server:
        stopped = server.text(text, max_tokens=30, stop=stop, stream=True, **MODES[mode])
        assert (stopped.text, stopped.finish_reason) == (shown, "stop")
        assert [*text.encode(), *(shown + stop).encode()] in server.sequences()
        server.check_rows(loaded)
        longer = text + shown + stop + "?"
        assert server.text(longer, **MODES[mode]).cached_tokens == len(longer) - 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [1, 50, 128])
def test_a_prefill_in_steps(
    model: Path, loaded: Any, cold: LocalServer, mode: str, step: int
) -> None:
    """Whatever the steps, what is stored is what was computed."""
    arguments = ("--kv-cache-codec", "raw", "--prefill-step-size", str(step))
    with LocalServer("--model", str(model), *arguments) as server:
        text = prompt("steps", 150)
        for each in (text, text[:70] + prompt("!", 100)):
            answer = server.text(each, **MODES[mode])
            assert same_answer(answer, cold.text(each))
            assert answer.cached_tokens == answer.longest_hit
        server.check_rows(loaded)


@pytest.mark.parametrize("codec", ["raw", "rotated"])
def test_a_draft_model(model: Path, cold: LocalServer, codec: str, tmp_path: Path) -> None:
    """Its layers are stored beside the model's, as many tokens of both as were computed."""
    draft = models.llama(tmp_path, num_hidden_layers=1, seed=1)
    arguments = ("--model", str(model), "--draft-model", str(draft), "--kv-cache-codec", codec)
    text = prompt("draft", 200)
    with LocalServer(*arguments) as server:
        first = server.text(text, max_tokens=20)
        again = server.text(text, max_tokens=20)
        longer = text + first.text[:10] + prompt("!", 30)
        other = server.text(longer, max_tokens=20)
        assert again.cached_tokens == 199
        assert 200 <= other.cached_tokens <= 210
        if codec == "raw":
            for answer, sent in ((first, text), (again, text), (other, longer)):
                assert answer.text == cold.text(sent, max_tokens=20).text
        server.settle()
        key = server.generator.model_provider.model_key
        caches, rest = server.prompt_cache.fetch_nearest_cache(key, list(text.encode()))
        assert [cache.offset for cache in caches] == [199] * (2 + 1) and len(rest) == 1
        assert server.is_alive() and not server.recorder.errors


def test_drafts_are_models_of_their_own(model: Path, cold: LocalServer, tmp_path: Path) -> None:
    """The same model without a draft, with one and with another: never a hit across.

    It would leave the draft without its past. Each comes back to what it stored itself, model and
    draft at the same token.
    """
    drafts = [
        str(models.llama(tmp_path / str(layers), num_hidden_layers=layers, seed=layers))
        for layers in (1, 2)
    ]
    text = prompt("draft", 200)
    right = cold.text(text)
    with LocalServer("--model", str(model), "--kv-cache-codec", "raw") as server:
        for cached in (0, 199, 199):
            for options in ({}, *({"draft_model": draft} for draft in drafts)):
                answer = server.text(text, **options)
                assert (answer.cached_tokens, answer.text) == (cached, right.text)
                server.settle()
                key = server.generator.model_provider.model_key
                caches, _ = server.prompt_cache.fetch_nearest_cache(key, list(text.encode()))
                layers = 2 + (0 if key[2] is None else 1 + drafts.index(key[2]))
                assert [cache.offset for cache in caches] == [199] * layers
        assert server.is_alive() and not server.recorder.errors
