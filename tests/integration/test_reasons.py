"""Why no more of a request was a hit, as statistics and the log tell it; and that all adds up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.events import Insert, Reason
from mlx_lm_kvcache_plugin.store.budget import GIB
from tests import models
from tests.integration.clients import MODES, Answer
from tests.integration.local_server import LocalServer
from tests.integration.test_failures import failing
from tests.integration.test_restart import slow
from tests.models import prompt

RAW = ("--kv-cache-codec", "raw")
TEXT = prompt("A text to come back to", 300)
OTHER = prompt("Something else", 450)
LEFT = TEXT[:100] + "!" * 200
"""It leaves what is stored, with most of it to be computed."""

MATCH = re.compile(
    r"match (?P<hit>[0-9,]+) of (?P<prompt>[0-9,]+) tokens"
    r"(?: \(blocks (?P<blocks>[0-9]+), tail (?P<tail>[0-9]+)(?P<checkpoint>, checkpoint)?\)"
    r", decoded in [0-9]+ ms)?(?:; (?P<why>.+))?"
)
"""The line of the log for a request."""


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[LocalServer]:
    """One that keeps full precision and has room for everything."""
    with LocalServer("--model", str(model), *RAW) as server:
        yield server


@pytest.fixture
def server(running: LocalServer) -> LocalServer:
    """The same, with nothing in it."""
    running.settle()
    running.delete()
    return running


def matches(server: LocalServer) -> list[re.Match[str]]:
    """All lines of the log that are about a request."""
    lines = [line for line in server.messages() if line.startswith("match ")]
    found = [MATCH.fullmatch(line) for line in lines]
    assert all(found), lines
    return [match for match in found if match]


@contextmanager
def counted(
    server: LocalServer, reason: str, text: str, *, hit_tokens: int = 0, token: int = 0
) -> Iterator[None]:
    """Check that the one request that is made meanwhile ends for this reason.

    Args:
        text: the reason as people read it.
        hit_tokens: how many of its tokens are a hit.
        token: where it ceases to be in common with what is stored.
    """
    server.settle()
    before, lines = server.stats(), len(matches(server))
    yield
    server.settle()
    after = server.stats()
    (last, *_) = after["last_misses"]
    missed = last["prompt_tokens"] - hit_tokens
    for each in Reason:
        was, now, is_it = before["misses"][each], after["misses"][each], each == reason
        grown = {key: now[key] - was[key] for key in was}
        assert grown == {
            "requests": is_it,
            "misses": is_it and not hit_tokens,
            "tokens": is_it * missed,
        }
    assert (last["reason"], last["text"]) == (reason, text)
    assert (last["hit_tokens"], last["token"]) == (hit_tokens, token)
    if reason not in (Reason.DISABLED, Reason.ERROR):
        (line,) = matches(server)[lines:]
        assert line["why"] == text


# The reasons


@pytest.mark.parametrize("mode", ["batched", slow("sequential")])
def test_it_goes_on_where_what_is_stored_ends(server: LocalServer, mode: str) -> None:
    """As each turn of a chat does: that is no miss to look into, unless most of it is new."""
    text = prompt(f"{mode} goes on", 300)
    text += server.text(text, **MODES[mode]).text
    server.settle()
    before = server.stats()
    server.text(text + "!" * 50, **MODES[mode])
    server.settle()
    after = server.stats()
    assert (
        after["misses"]["nothing stored"]["tokens"] - 50
        == (before["misses"]["nothing stored"]["tokens"])
    )
    assert len(after["last_misses"]) == len(before["last_misses"])
    why = "nothing stored beyond token 308"
    assert matches(server)[-1]["why"] == why
    server.delete()
    server.text(text[:300], **MODES[mode])
    with counted(server, "nothing stored", why, hit_tokens=308, token=308):
        server.text(text + "!" * 400, **MODES[mode])


@pytest.mark.parametrize("mode", ["batched", slow("sequential")])
def test_it_diverges(server: LocalServer, mode: str) -> None:
    """At the right token: at the first, in the middle of a block, and between two."""
    for tokens in (0, 100, 128, 299):
        server.delete()
        server.text(TEXT, **MODES[mode])
        why = f"diverged at token {tokens}"
        with counted(server, "diverged", why, hit_tokens=tokens, token=tokens):
            server.text(TEXT[:tokens] + f"!{mode}" * 20, **MODES[mode])


def test_nothing_is_stored(model: Path, tmp_path: Path) -> None:
    """At all, and then of the model that is asked; back at the first one, all is there."""
    other = models.llama(tmp_path, seed=1)
    with LocalServer(*RAW) as server:
        with counted(server, "nothing stored", "nothing stored"):
            server.text(TEXT, model=str(model))
        with counted(server, "other model", "other model"):
            server.text(TEXT, model=str(other))
        assert server.text(TEXT, model=str(model)).cached_tokens == 299
        server.settle()
        told = server.stats()
        loaded = {each["model"]: each["is_loaded"] for each in told["models"]}
        assert loaded == {str(model): True, str(other): False}
        roots = {root["model"]: root["nodes"] for root in told["sequences"]["roots"]}
        assert roots[str(model)][0]["words"] == TEXT[:24]
        assert roots[str(other)][0]["words"] is None  # its tokenizer is gone


EVICTING: dict[str, tuple[tuple[str, ...], str]] = {
    "memory": ((*RAW, "--cache-memory-mb", "1"), "memory"),
    "count": ((*RAW, "--prompt-cache-size", "1"), "count"),
    "ceiling": ((*RAW, "--prompt-cache-bytes", "900000"), "memory"),
}


@pytest.mark.parametrize("mode", ["batched", slow("sequential")])
@pytest.mark.parametrize("kind", ["memory", "count", slow("ceiling")])
def test_it_was_evicted(model: Path, kind: str, mode: str) -> None:
    """For want of bytes, or by the number of sequences that was asked for."""
    arguments, cause = EVICTING[kind]
    with LocalServer("--model", str(model), *arguments) as server:
        server.text(TEXT, **MODES[mode])
        server.text(OTHER, **MODES[mode])
        with counted(server, "evicted", f"evicted from token 0 on ({cause})"):
            server.text(TEXT, **MODES[mode])
        told = server.stats()
        assert told["last_misses"][0]["cause"] == cause
        assert told["evictions"][cause]["blocks"] >= 3
        assert told["evictions"][cause]["bytes"] >= 300 * 2048


def test_its_end_was_evicted(model: Path) -> None:
    """What is left of it is a hit; the token is where that ends."""
    with LocalServer("--model", str(model), *RAW, "--cache-memory-mb", "1") as server:
        server.text(TEXT)
        server.text(TEXT[:128] + OTHER[:300])
        server.settle()
        with counted(
            server, "evicted", "evicted from token 128 on (memory)", hit_tokens=128, token=128
        ):
            server.text(TEXT)


def test_memory_was_short(model: Path) -> None:
    """The machine's, not the budget's: said apart, while it lasts and after."""
    memory = SimpleNamespace(total=16 * GIB, available=8 * GIB)
    with (
        mock.patch.object(psutil, "virtual_memory", lambda: memory),
        LocalServer("--model", str(model), *RAW) as server,
    ):
        server.text(TEXT)
        server.settle()
        memory.available = GIB // 2
        with counted(server, "diverged", "diverged at token 0"):
            server.text(OTHER)
        told = server.stats()["memory"]
        assert told["is_short"] is True and told["used_bytes"] == 0
        memory.available = 8 * GIB
        with counted(server, "evicted", "evicted from token 0 on (pressure)"):
            server.text(TEXT)
        assert server.stats()["memory"]["is_short"] is False


def test_it_was_cleared(server: LocalServer) -> None:
    """By somebody who wanted nothing kept of it, not even that it was there."""
    server.text(TEXT)
    server.settle()
    server.delete()
    with counted(server, "nothing stored", "nothing stored"):
        server.text(TEXT)


def test_a_prompt_of_one_token(server: LocalServer) -> None:
    """That one is always computed."""
    server.text(TEXT)
    with counted(server, "below one token", "below one token"):
        server.text("A")


@pytest.mark.parametrize("family", ["gemma", *map(slow, ("mamba", "lfm"))])
def test_a_layer_cannot_be_cut(tmp_path: Path, family: str) -> None:
    """More is in common, but for windows and states there is no checkpoint so early."""
    folder = models.FAMILIES[family](tmp_path)
    with LocalServer("--model", str(folder), *RAW) as server:
        server.text(TEXT, seed=1)
        text = "a layer is not restorable before token 100"
        with counted(server, "not restorable", text, token=100):
            server.text(LEFT, seed=1)
        assert server.text(TEXT, seed=1).cached_tokens == 299
        assert matches(server)[-1]["checkpoint"]
        assert server.stats()["memory"]["checkpoints"] >= 2


def test_nothing_is_kept(model: Path) -> None:
    """Every request is computed in full, and that is counted; the endpoints answer all the same."""
    with LocalServer("--model", str(model), "--disable-prefix-cache") as server:
        for _ in range(2):
            with counted(server, "disabled", "disabled"):
                server.text(TEXT)
        told = server.stats()
        assert told["enabled"] is False
        assert not any(value for key, value in told["memory"].items() if key != "origin")
        assert (told["models"], told["disk"], told["errors"]) == ([], None, {})
        assert told["hit_rate"]["start"]["rate"] == 0
        assert told["sizing"]["text"] is None
        assert server.delete().json == {"freed_bytes": 0, "deleted_files": 0}
        assert server.explain({"prompt": TEXT}).status == 409
        assert b"mlx_lm_kvcache_enabled 0.0" in server.get("/metrics").body
        assert server.get("/cache").status == 200


@pytest.mark.parametrize("mode", ["batched", slow("sequential")])
def test_something_failed(server: LocalServer, mode: str) -> None:
    """A codec that raises: a miss of its own kind, and what it was."""
    server.text(TEXT, **MODES[mode])
    server.settle()
    before = server.stats()["errors"].get("fetch", 0)
    with mock.patch.object(RawCodec, "decode", failing(1000, 0, RawCodec.decode)):
        for _ in range(2):
            with counted(server, "error", "error"):
                server.text(LEFT, **MODES[mode])
    told = server.stats()
    assert told["errors"]["fetch"] == before + 2
    assert told["last_error"] == "fetch: RuntimeError: out of luck"
    assert server.text(TEXT, **MODES[mode]).cached_tokens == 299


# What is stored, and what is not


def test_there_is_no_room_for_a_state(tmp_path: Path) -> None:
    """It is not stored, and that is counted."""
    folder = models.mamba(tmp_path)
    with LocalServer("--model", str(folder), *RAW, "--prompt-cache-bytes", "2000") as server:
        server.text(TEXT, seed=1)
        server.settle()
        told = server.stats()["inserts"]
        assert (told["count"], told["new_tokens"]) == (0, 0)
        assert told["skipped"]["no room"] >= 1


def test_what_could_not_be_stored(server: LocalServer) -> None:
    """A codec that raises: counted apart from what was stored."""
    before = server.stats()
    with mock.patch.object(RawCodec, "encode", failing(1000, 0, RawCodec.encode)):
        server.text(TEXT, seed=1)
        server.settle()
    failed = server.stats()
    assert failed["inserts"]["skipped"]["error"] == failed["errors"]["insert"] >= 1
    assert failed["memory"]["tokens"] == 0
    for key in ("count", "new_tokens"):
        assert failed["inserts"][key] == before["inserts"][key]
    server.text(TEXT, seed=1)
    server.settle()
    stored = server.stats()
    assert stored["inserts"]["count"] > before["inserts"]["count"]
    assert stored["inserts"]["new_tokens"] - before["inserts"]["new_tokens"] == 308
    assert stored["memory"]["tokens"] == 308


# The log


def test_one_line_for_each_request(light_model: Path) -> None:
    """How much, in what, how fast, and why no more."""
    long = prompt("long", 2000)
    with LocalServer("--model", str(light_model), *RAW) as server:
        for text in (long, long, long[:1500] + "!" * 200, long[:128]):
            server.text(text, seed=1)
        server.settle()
        lines = [line for line in server.messages() if line.startswith("match ")]
        decoded = "decoded in N ms"
        assert [re.sub(r"decoded in [0-9]+ ms", decoded, line) for line in lines] == [
            "match 0 of 2,000 tokens; nothing stored",
            f"match 1,999 of 2,000 tokens (blocks 15, tail 79), {decoded}",
            f"match 1,500 of 1,700 tokens (blocks 11, tail 92), {decoded}; diverged at token 1,500",
            f"match 127 of 128 tokens (blocks 0, tail 127), {decoded}",
        ]


@pytest.mark.parametrize("mode", MODES)
def test_a_line_for_each_of_many(server: LocalServer, mode: str) -> None:
    """Also of requests that come together, whatever becomes of them."""
    before = len(matches(server))
    with server.held():
        asked = [server.start(TEXT[: 50 * n], **MODES[mode]) for n in range(1, 6)]
    answers = [each.result() for each in asked]
    server.settle()
    lines = matches(server)[before:]
    found = {(int(line["prompt"]), int(line["hit"])) for line in lines}
    assert found == {(each.prompt_tokens, each.cached_tokens) for each in answers}
    assert len(lines) == 5


# That it adds up


class Ledger:
    """Adds up what the answers themselves say."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def add(self, ask: Callable[..., Answer], *arguments: Any, **options: Any) -> None:
        self.answers.append(ask(*arguments, **options))

    @property
    def sums(self) -> dict[str, int]:
        return {
            "requests": len(self.answers),
            "prompt_tokens": sum(each.prompt_tokens for each in self.answers),
            "hit_tokens": sum(each.cached_tokens or 0 for each in self.answers),
        }


def test_all_of_it_adds_up(model: Path, tmp_path: Path) -> None:
    """Two models, chats and texts, evictions, a clearing: whatever is told twice is the same."""
    folders = [str(model), str(models.gemma(tmp_path / "gemma"))]
    ledger = Ledger()
    with LocalServer(*RAW, "--cache-memory-mb", "2") as server:
        for turn, mode in enumerate(MODES):
            for folder in folders:
                options = {"model": folder, **MODES[mode]}
                ledger.add(server.text, TEXT + "?" * turn, **options)
                ledger.add(server.text, prompt(f"{turn}", 400), **options)
                ledger.add(server.chat, [{"role": "user", "content": TEXT}], **options)
                server.settle()
                check_sums(server.stats(), ledger)
            if not turn:
                check_clearing(server)
        told = server.stats()
        assert told["evictions"]["memory"]["blocks"] > 0
        inserts = server.recorder.events.of(Insert)
        assert told["inserts"]["count"] == len(inserts)
        assert told["inserts"]["new_tokens"] == sum(event.new_tokens for event in inserts)
        assert {each["model"] for each in told["models"]} == set(folders)
        assert told["memory"]["limit_bytes"] == 2 << 20
        check_metrics(server, told)


def check_clearing(server: LocalServer) -> None:
    """Clear, and compare what is told of it with what was there."""
    before = server.stats()
    assert server.delete().json["freed_bytes"] == before["memory"]["used_bytes"]
    after = server.stats()["evictions"]["cleared"]
    nodes = sum(before["memory"][key] for key in ("blocks", "tails", "checkpoints"))
    assert after["blocks"] - before["evictions"]["cleared"]["blocks"] == nodes
    freed = after["bytes"] - before["evictions"]["cleared"]["bytes"]
    assert freed == before["memory"]["used_bytes"]


def check_sums(told: dict[str, Any], ledger: Ledger) -> None:
    """Compare what is told in one place with what is told in another."""
    start = told["hit_rate"]["start"]
    assert {key: start[key] for key in ledger.sums} == ledger.sums
    assert start["rate"] == start["hit_tokens"] / start["prompt_tokens"]
    assert told["hit_rate"]["15m"] == start
    for key in ledger.sums:
        assert sum(bucket[key] for bucket in told["history"]) == start[key]
    # Of a prompt that is a hit but for its last token, that one has no reason to be computed.
    whole = [each for each in ledger.answers if each.cached_tokens == each.prompt_tokens - 1]
    reasons = told["misses"].values()
    computed = start["prompt_tokens"] - start["hit_tokens"]
    assert sum(each["tokens"] for each in reasons) == computed - len(whole)
    assert sum(each["requests"] for each in reasons) == start["requests"] - len(whole)
    misses = sum(not each.cached_tokens for each in ledger.answers)
    assert sum(each["misses"] for each in reasons) == misses
    assert told["timing"]["decode"]["count"] == start["requests"] - misses
    memory = told["memory"]
    for key in ("used_bytes", "blocks", "tails", "checkpoints", "tokens"):
        assert sum(each[key] for each in told["models"]) == memory[key]
    assert memory["used_bytes"] <= memory["limit_bytes"]
    nodes = [node for root in told["sequences"]["roots"] for node in flat(root["nodes"])]
    # A root takes some bytes too, and is no node.
    roots = len(told["sequences"]["roots"])
    assert 0 < memory["used_bytes"] - sum(node["bytes"] for node in nodes) < 4096 * roots
    assert sum(node["tokens"] for node in nodes) == memory["tokens"]
    leaves = sum(not node["children"] for node in nodes)
    assert leaves == memory["sequences"] == told["sequences"]["total"]
    assert told["sizing"]["prompt_tokens"] == start["prompt_tokens"]
    assert told["sizing"]["hit_rate"] == start["rate"]


def flat(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These and all below them."""
    return [each for node in nodes for each in (node, *flat(node["children"]))]


def check_metrics(server: LocalServer, told: dict[str, Any]) -> None:
    """Compare some of each kind with the same in the statistics."""
    lines = server.get("/metrics").body.decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    prefix = "mlx_lm_kvcache_"
    expected = {
        "memory_used_bytes": told["memory"]["used_bytes"],
        "requests_total": told["hit_rate"]["start"]["requests"],
        "hit_tokens_total": told["hit_rate"]["start"]["hit_tokens"],
        'stops_total{reason="diverged"}': told["misses"]["diverged"]["requests"],
        'evicted_bytes_total{cause="cleared"}': told["evictions"]["cleared"]["bytes"],
        "decode_seconds_count": told["timing"]["decode"]["count"],
    }
    for each in told["models"]:
        expected[f'model_tokens{{model="{each["model"]}"}}'] = each["tokens"]
    assert {name: float(found[prefix + name]) for name in expected} == expected


@pytest.mark.parametrize("mode", ["batched", slow("sequential")])
def test_the_limit_is_the_one_that_rules(model: Path, mode: str) -> None:
    """`--prompt-cache-bytes`, less what is being decoded with, where that is less."""
    arguments = (*RAW, "--cache-memory-mb", "64", "--prompt-cache-bytes", "3000000")
    with LocalServer("--model", str(model), *arguments) as server:
        server.text(TEXT, **MODES[mode])
        server.settle()
        told = server.stats()
        assert 2_000_000 < told["memory"]["limit_bytes"] <= 3_000_000
        assert told["sizing"]["limit_bytes"] == told["memory"]["limit_bytes"]
        assert told["memory"]["used_bytes"] == server.prompt_cache.nbytes
