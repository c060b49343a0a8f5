"""Where models that can be resumed at checkpoints alone get them, on both paths of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import models
from tests.integration.clients import MODES, same_answer
from tests.integration.local_server import LocalServer
from tests.models import chat_tokens, prompt

EVERY = 64
STEP = 32
"""A prompt that is served alone is computed in steps: a checkpoint is at the end of one."""

ARGUMENTS = ("--kv-cache-codec", "raw", "--prefill-step-size", str(STEP))


@pytest.fixture(scope="module", params=["gemma", "mamba", "lfm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A window beside rows, states alone, and a state beside rows."""
    return models.FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def without(folder: Path) -> Iterator[LocalServer]:
    """A server that prefills everything: what it answers is right."""
    with LocalServer("--model", str(folder), "--disable-prefix-cache") as server:
        yield server


def serving(folder: Path, every: int = EVERY) -> LocalServer:
    return LocalServer(
        "--model", str(folder), *ARGUMENTS, "--kv-cache-checkpoint-tokens", str(every)
    )


def stored(server: LocalServer) -> list[tuple[int, str]]:
    """At how many tokens the caches were handed in since this was last asked, and as what."""
    server.settle()
    found = [(len(each.tokens), each.cache_type) for each in server.watch.insertions]
    server.watch.insertions.clear()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_long_prompt_gets_them_on_its_way(folder: Path, without: LocalServer, mode: str) -> None:
    """As far apart as was asked for, and before the last token, where the answer begins.

    A prompt that leaves this one resumes at one of them, and is answered as a cold one.
    """
    text = prompt("on its way", 200)
    with serving(folder) as server:
        answer = server.text(text, **MODES[mode])
        assert same_answer(answer, without.text(text))
        ends = [EVERY, 2 * EVERY, 3 * EVERY, 199]
        assert stored(server) == [*((end, "prompt") for end in ends), (208, "assistant")]
        for shared, hits in ((199, [199]), (150, [EVERY, 2 * EVERY]), (EVERY - 1, [0])):
            other = text[:shared] + "!" * 20
            answer = server.text(other, **MODES[mode])
            assert answer.cached_tokens in hits
            assert same_answer(answer, without.text(other))
        assert not server.recorder.errors


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_goes_on_gets_more(folder: Path, without: LocalServer, mode: str) -> None:
    """Behind the hit, at the same places as if there had been none, or a step after the hit."""
    text = prompt("goes on", 300)
    with serving(folder) as server:
        server.text(text[:100], max_tokens=1, **MODES[mode])
        stored(server)
        answer = server.text(text, **MODES[mode])
        assert answer.cached_tokens == 99
        assert same_answer(answer, without.text(text))
        on_the_way = [end for end, kind in stored(server) if kind == "prompt" and end < 299]
        assert on_the_way == ([128, 192, 256] if mode == "batched" else [163, 227, 291])


@pytest.mark.parametrize("mode", MODES)
def test_none_on_the_way_if_so_asked(folder: Path, mode: str) -> None:
    """`--kv-cache-checkpoint-tokens 0`: at a prompt's end and at its answer's, and nowhere else."""
    with serving(folder, every=0) as server:
        server.text(prompt("none", 300), **MODES[mode])
        assert [end for end, _ in stored(server)] == [299, 308]


def test_the_segments_of_a_chat_stay(folder: Path, without: LocalServer) -> None:
    """Where the system prompt ends and where the user's turn does, each under upstream's word."""
    messages = [
        {"role": "system", "content": prompt("system", 100)},
        {"role": "user", "content": prompt("user", 60)},
    ]
    opened = len(chat_tokens(messages[:1]))
    whole = len(chat_tokens(messages))
    with serving(folder) as server:
        answer = server.chat(messages)
        assert same_answer(answer, without.chat(messages))
        assert stored(server) == [
            (EVERY, "prompt"),
            (opened, "system"),
            (2 * EVERY, "prompt"),
            (whole - 1, "user"),
            (whole + 8, "assistant"),
        ]


@pytest.mark.parametrize("mode", MODES)
def test_a_users_turn_is_told_from_others(folder: Path, mode: str) -> None:
    """The next question leaves there, however many tool calls there are behind it."""
    messages = [{"role": "user", "content": prompt("ask", 40)}]
    with serving(folder) as server:
        server.chat(messages, **MODES[mode])
        assert (len(chat_tokens(messages)) - 1, "user") in stored(server)


@pytest.mark.parametrize("mode", MODES)
def test_a_chat_that_upstream_leaves_whole(folder: Path, without: LocalServer, mode: str) -> None:
    """One whose last message is no user's, as that of an agent: a prompt, and no answer of ours."""
    messages = [
        {"role": "user", "content": prompt("do", 30)},
        {"role": "assistant", "content": prompt("done", 100)},
    ]
    whole = len(chat_tokens(messages))
    with serving(folder) as server:
        answer = server.chat(messages, **MODES[mode])
        assert same_answer(answer, without.chat(messages))
        assert stored(server) == [
            (EVERY, "prompt"),
            (2 * EVERY, "prompt"),
            (whole - 1, "prompt"),
            (whole + 8, "assistant"),
        ]


def test_several_prompts_in_one_batch(folder: Path, without: LocalServer) -> None:
    """Each gets its own, wherever the others are."""
    texts = [prompt(name, tokens) for name, tokens in (("short", 40), ("mid", 140), ("long", 270))]
    if "mamba" in folder.name:
        pytest.skip("upstream's layers of it do not know of the padding of a batch")
    with serving(folder) as server:
        with server.held():
            asked = [server.start(text) for text in texts]
            server.wait_until(lambda: server.generator.requests.qsize() == len(texts))
        for text, future in zip(texts, asked, strict=True):
            assert same_answer(future.result(), without.text(text))
        ends = [end for end, kind in stored(server) if kind == "prompt"]
        assert sorted(ends) == [39, 64, 64, 128, 128, 139, 192, 256, 269]


@pytest.mark.parametrize("mode", MODES)
def test_a_model_of_rows_alone_is_left_as_it_is(model: Path, cold: LocalServer, mode: str) -> None:
    """It can be resumed anywhere: its prompts are cut no further, and nothing watches them."""
    text = prompt("rows", 300)
    with serving(model) as server:
        answer = server.text(text, **MODES[mode])
        assert same_answer(answer, cold.text(text))
        expected = [(308, "assistant")]
        assert stored(server) == [(299, "assistant")] * (mode == "batched") + expected
        other = text[:150] + "!" * 20
        assert server.text(other, **MODES[mode]).cached_tokens == 150
