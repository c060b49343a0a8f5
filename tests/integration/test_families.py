"""Layers that no one may cut at any token: kept whole, never wrong, never worse than stock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import models
from tests.integration.clients import MODES, Answer, Client, same_answer
from tests.integration.local_server import LocalServer
from tests.models import WINDOW, prompt

KINDS = {
    "gemma": "KVCache, RotatingKVCache",
    "mamba": "ArraysCache",
    "lfm": "ArraysCache, KVCache",
}

Servers = dict[str, LocalServer]


@pytest.fixture(scope="module", params=KINDS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.FAMILIES[family](tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[Servers]:
    """Ours, which would quantize if it could, stock's, and one that keeps nothing."""
    arguments = ("--model", str(folder))
    with (
        LocalServer(*arguments, "--kv-cache-bits", "4") as ours,
        LocalServer(*arguments) as stock,
        LocalServer(*arguments, "--disable-prefix-cache") as none,
    ):
        yield {"ours": ours, "stock": stock, "none": none}
        assert ours.is_alive() and not ours.recorder.errors


def chats(server: Client, mode: str, length: int) -> list[Answer]:
    """Two chats with the same system prompt, of two turns each, then the first one goes on."""
    system = prompt(f"{mode} {length}", length)
    answers: list[Answer] = []
    turns: dict[str, list[dict[str, str]]] = {"one": [], "two": []}
    for chat in ("one", "one", "two", "two", "one"):
        messages = turns[chat] or [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt(f"{len(messages)} {chat}", length)})
        answers.append(server.chat(messages, **MODES[mode]))
        messages.append({"role": "assistant", "content": answers[-1].text})
        turns[chat] = messages
    return answers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [10, WINDOW + 3, 150])
def test_chats(servers: Servers, mode: str, length: int) -> None:
    """Answers are the cold ones; each hit is at least as long as stock's."""
    ours, stock, cold = (chats(server, mode, length) for server in servers.values())
    assert all(map(same_answer, ours, cold))
    for our_answer, stock_answer in zip(ours, stock, strict=True):
        assert our_answer.cached_tokens >= stock_answer.cached_tokens
    assert ours[1].cached_tokens == ours[1].longest_hit > ours[0].prompt_tokens
    assert len({answer.text for answer in cold}) == 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 8, WINDOW - 1, WINDOW, WINDOW + 1, 300])
def test_an_exact_hit(servers: Servers, mode: str, length: int) -> None:
    """The same text again and again, and with its answer behind it: stock dies of this."""
    text = prompt(f"{mode[0]}{length}"[:length], length)
    first = servers["ours"].text(text, **MODES[mode])
    for again in (text, text + first.text, text, text + first.text + "?"):
        answer = servers["ours"].text(again, **MODES[mode])
        assert same_answer(answer, servers["none"].text(again, **MODES[mode]))
        assert answer.cached_tokens <= answer.longest_hit
    assert answer.cached_tokens == length + 8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shared", [5, 20, WINDOW + 2, 140])
def test_a_prompt_that_leaves_a_stored_one(servers: Servers, mode: str, shared: int) -> None:
    """At a position that no state was kept for: right, whatever is reused."""
    text = prompt(f"leaves {mode} {shared}", 200)
    for server in servers.values():
        server.text(text, **MODES[mode])
    other = text[:shared] + prompt("!", 30)
    ours, stock, cold = (server.text(other, **MODES[mode]) for server in servers.values())
    assert same_answer(ours, cold)
    assert ours.cached_tokens >= stock.cached_tokens


def test_states_are_kept_whole_and_raw(folder: Path, family: str) -> None:
    """The start line says which layers are the reason; one state for each prompt is what counts."""
    with LocalServer("--model", str(folder), "--kv-cache-bits", "4") as server:
        server.settle()
        (line,) = server.messages()
        assert f"all 2 layers kept whole and raw as checkpoints ({KINDS[family]})" in line
        server.text(prompt("a", 150), seed=1)
        server.settle()
        payloads = [node.payload for node in server.cache.tree if node.payload is not None]
        assert len(payloads) == 1
        assert server.prompt_cache.nbytes > payloads[0].nbytes


def test_the_budget_holds_for_states_too(folder: Path) -> None:
    """Prompt after prompt, none of which fits beside many others."""
    arguments = ("--model", str(folder), "--prompt-cache-bytes", "400000")
    with LocalServer(*arguments, "--kv-cache-bits", "8") as server:
        for name in "abcdefghij":
            server.text(prompt(name, 90), seed=1)
        server.settle()
        held = [insertion.held_bytes for insertion in server.watch.insertions]
        assert len(held) == 10 and 0 < max(held) <= 400_000
        assert server.text(prompt("j", 90) + "?" * 10, seed=1).cached_tokens <= 98
        assert server.is_alive() and not server.recorder.errors
