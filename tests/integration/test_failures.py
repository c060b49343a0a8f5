"""Clients that hang up, and failures inside of the cache: the answers stay right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from mlx_lm_kvcache_plugin.codecs.packing import Packer
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.codecs.rotated import RotatedCodec
from mlx_lm_kvcache_plugin.events import Insert
from mlx_lm_kvcache_plugin.store.tree import BlockTree
from tests.integration.clients import MODES, common_prefix, same_answer
from tests.integration.local_server import LocalServer
from tests.models import chat_tokens, prompt


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [0, 1, 5])
def test_a_client_that_hangs_up(
    model: Path, loaded: Any, cold: LocalServer, mode: str, chunks: int
) -> None:
    """Twice in mid-stream, then the same prompt in full.

    Whatever was stored has exactly the tokens that were computed.
    """
    text = prompt("hang up", 300)
    with LocalServer("--model", str(model), "--kv-cache-codec", "raw") as server:
        for _ in range(2):
            body = {"prompt": text, "max_tokens": 200, **MODES[mode]}
            server.disconnect("/v1/completions", body, after=chunks)
            server.settle()
        for sequence in server.sequences():
            # Greedy: what was generated before the client was gone is what any request gets.
            whole = [*text.encode(), *cold.text(text, max_tokens=200).tokens]
            assert common_prefix(sequence, whole) == len(sequence)
        server.check_rows(loaded)
        answer = server.text(text, max_tokens=40, **MODES[mode])
        assert same_answer(answer, cold.text(text, max_tokens=40))
        if mode == "sequential" or chunks:  # else it may have been gone before the prefill
            assert answer.cached_tokens == 299
        server.check_rows(loaded)
        assert server.is_alive() and not server.recorder.errors


@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_hangs_up_in_a_chat(model: Path, loaded: Any, mode: str) -> None:
    """The system prompt that was prefilled for it serves the next chat, batched as it is stored."""
    system = {"role": "system", "content": prompt("You are", 200)}
    chats = [[system, {"role": "user", "content": f"{n} {prompt('Hi', 50)}"}] for n in range(3)]
    with LocalServer("--model", str(model), "--kv-cache-codec", "raw") as server:
        for chat in chats[:2]:
            body = {"messages": chat, "max_tokens": 200, **MODES[mode]}
            server.disconnect("/v1/chat/completions", body, after=3)
            server.settle()
        answer = server.chat(chats[2], **MODES[mode])
        shared = common_prefix(chat_tokens(chats[1]), chat_tokens(chats[2]))
        assert answer.cached_tokens == shared
        server.check_rows(loaded)


@pytest.mark.parametrize("others", [1, 3])
def test_one_of_a_batch_hangs_up(model: Path, cold: LocalServer, others: int) -> None:
    """The others of its batch are answered as if it had never been there."""
    texts = [prompt(f"other {n}", 100 + 50 * n) for n in range(others)]
    with LocalServer("--model", str(model), "--kv-cache-codec", "raw") as server:
        asked = [server.start(text, max_tokens=60) for text in texts]
        body = {"prompt": prompt("gone", 170), "max_tokens": 200}
        server.disconnect("/v1/completions", body, after=4)
        for text, future in zip(texts, asked, strict=True):
            assert same_answer(future.result(), cold.text(text, max_tokens=60))
        assert server.is_alive()


def failing(times: int, after: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but for some calls after the first few it raises."""
    calls = iter(range(10**9))

    def call(*arguments: Any, **options: Any) -> Any:
        if after <= next(calls) < after + times:
            raise RuntimeError("out of luck")
        return function(*arguments, **options)

    return call


def state(tree: BlockTree) -> tuple[object, ...]:
    """All that is counted, and all that is stored."""
    counts = (tree.used_bytes, tree.tokens, dict(+tree.sequences), dict(+tree.bytes_by_label))
    return *counts, {(id(node), node.key) for node in tree}


CRASHES = {
    "codec, first block": (RotatedCodec, "encode", 0),
    "codec, second run of blocks": (RotatedCodec, "encode", 1),
    "codec, tail": (Packer, "encode", 2),
    "tree": (BlockTree, "add", 5),
    "memory probe, before": (psutil, "virtual_memory", 1),
    "memory probe, between runs": (psutil, "virtual_memory", 2),
}
"""What fails, and after how many calls: those of one long insert without a hit before it."""


@pytest.mark.parametrize("crash", CRASHES)
def test_a_crash_in_the_middle_of_an_insert(light_model: Path, crash: str) -> None:
    """The insert is skipped whole, nothing is half stored, counts stay, the request is answered."""
    owner, name, after = CRASHES[crash]
    short, long = prompt("short", 100), prompt("long", 17 * 128 + 50)
    with LocalServer("--model", str(light_model), "--kv-cache-bits", "8") as server:
        server.text(short, seed=1)
        server.settle()
        before = state(server.cache.tree)
        inserts = server.recorder.events.of(Insert)
        failure = failing(1000, after, getattr(owner, name))
        with mock.patch.object(owner, name, failure):
            answer = server.text(long, seed=1)
            server.settle()
        assert len(answer.text) == 8
        assert state(server.cache.tree) == before
        (error,) = server.recorder.errors
        assert (error.operation, error.cause) == ("insert", "RuntimeError: out of luck")
        assert server.recorder.events.of(Insert) == inserts
        (warning,) = server.messages(logging.WARNING)
        assert "insert failed" in warning and "out of luck" in warning
        # Over with it: all is as if it had never happened.
        assert server.text(long, seed=1).cached_tokens == 0
        assert server.text(long, seed=1).cached_tokens == len(long) - 1
        assert server.text(short, seed=1).cached_tokens == 99
        assert server.is_alive()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["encode", "decode", "virtual_memory", "touch"])
def test_whatever_fails_always_is_a_miss(
    model: Path, cold: LocalServer, mode: str, what: str
) -> None:
    """Request after request: right answers, one log line for each cause, every failure counted."""
    owners = {"virtual_memory": psutil, "touch": BlockTree}
    owner: Any = owners.get(what, RawCodec)
    text = prompt("fails", 300)
    with LocalServer("--model", str(model), "--kv-cache-codec", "raw") as server:
        server.text(text, **MODES[mode])
        server.settle()
        with mock.patch.object(owner, what, failing(1000, 0, getattr(owner, what))):
            for number in range(3):
                longer = f"{text} {prompt(str(number), 200)}"
                answer = server.text(longer, **MODES[mode])
                server.settle()
                assert same_answer(answer, cold.text(longer, **MODES[mode]))
                assert answer.cached_tokens == 0 or what == "encode"
        operations = {error.operation for error in server.recorder.errors}
        assert len(server.recorder.errors) >= 3
        assert len(server.messages(logging.WARNING)) == len(operations)
        assert server.text(text, **MODES[mode]).cached_tokens == 299
        assert server.is_alive()


def test_a_plugin_that_fails_on_events_is_set_aside(model: Path) -> None:
    """It is named in the log once, and the server goes on."""
    with LocalServer("--model", str(model), "--kv-cache-bits", "8") as server:
        with mock.patch.object(server.recorder, "events", None):
            for _ in range(3):
                server.text(prompt("event", 200))
            server.settle()
        (warning,) = server.messages(logging.WARNING)
        assert "'recorder' is set aside" in warning
        assert server.text(prompt("event", 200)).cached_tokens == 199
