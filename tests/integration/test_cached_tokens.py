"""`usage.prompt_tokens_details.cached_tokens`: right for every way to ask, and for every source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.integration.clients import MODES, Answer, Client
from tests.integration.local_server import LocalServer
from tests.models import prompt

STREAMS = {"whole": {}, "stream": {"stream": True}}
KINDS = ("chat", "text")
WAYS = list(product(KINDS, MODES, STREAMS))
TOKENS = 200
CUT = 150


@dataclass(frozen=True)
class Way:
    """One way to ask. Nothing that is asked in one has anything in common with another's."""

    kind: str
    mode: str
    stream: str

    def ask(self, server: Client, length: int = TOKENS, end: str = "") -> Answer:
        """Ask for the first tokens of a prompt, and something else behind them."""
        place = WAYS.index((self.kind, self.mode, self.stream))
        text = prompt(chr(ord("A") + place), TOKENS)[:length] + end
        options: dict[str, Any] = {**MODES[self.mode], **STREAMS[self.stream]}
        if self.kind == "text":
            return server.text(text, **options)
        role = "system" if place % 2 else "user"  # the template begins with it
        messages = [{"role": role, "content": text}, {"role": "user", "content": "Well?"}]
        return server.chat(messages, **options)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def in_memory(model: Path, disk: Path) -> Iterator[LocalServer]:
    """One that has been asked nothing yet."""
    arguments = ("--kv-cache-bits", "8", "--kv-cache-dir", str(disk))
    with LocalServer("--model", str(model), *arguments) as server:
        yield server


@pytest.fixture(params=WAYS, ids=["-".join(way) for way in WAYS])
def way(request: pytest.FixtureRequest) -> Way:
    return Way(*request.param)


def test_in_memory(in_memory: LocalServer, way: Way) -> None:
    """Nothing for what is new; all but the last token of what was asked before; or the part."""
    asked: list[tuple[int, int]] = []

    def ask(length: int = TOKENS, end: str = "") -> int | None:
        answer = way.ask(in_memory, length, end)
        in_memory.settle()
        assert answer.cached_tokens == answer.longest_hit
        asked.append((answer.prompt_tokens, answer.cached_tokens or 0))
        return answer.cached_tokens

    before = in_memory.stats()["hit_rate"]["start"]
    most = 1 if way.kind == "chat" else 0  # all chats begin with a role
    assert (ask() or 0) <= most
    assert ask() == asked[0][0] - 1
    assert (ask(CUT, "!!") or 0) - CUT in (0, 1)
    after = in_memory.stats()["hit_rate"]["start"]
    assert after["requests"] - before["requests"] == 3
    assert after["prompt_tokens"] - before["prompt_tokens"] == sum(each for each, _ in asked)
    assert after["hit_tokens"] - before["hit_tokens"] == sum(each for _, each in asked)


@pytest.fixture(scope="module")
def restarted(model: Path, disk: Path, in_memory: LocalServer) -> Iterator[LocalServer]:
    """Another one on the same folder, which has been asked nothing yet."""
    for each in WAYS:
        Way(*each).ask(in_memory)
    in_memory.settle()
    assert in_memory.tier.flush()
    arguments = ("--kv-cache-bits", "8", "--kv-cache-dir", str(disk))
    with LocalServer("--model", str(model), *arguments) as server:
        yield server


def test_from_disk(restarted: LocalServer, way: Way) -> None:
    """What another server stored counts as what this one did."""
    read = restarted.stats()["disk"]["restored_tokens"]
    again = way.ask(restarted)
    restarted.settle()
    assert again.cached_tokens == again.prompt_tokens - 1
    assert restarted.stats()["disk"]["restored_tokens"] > read
    assert way.ask(restarted, CUT, "??").cached_tokens == CUT + (way.kind == "chat")


@pytest.mark.slow
def test_without_a_cache(cold: LocalServer, way: Way) -> None:
    """Nothing, however often."""
    assert [way.ask(cold, CUT).cached_tokens for _ in range(2)] == [0, 0]


def test_nothing_failed(in_memory: LocalServer, restarted: LocalServer) -> None:
    """In all of that."""
    for server in (in_memory, restarted):
        assert server.is_alive() and server.stats()["errors"] == {}
