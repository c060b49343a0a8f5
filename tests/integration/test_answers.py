"""The stock command with the plugin on: every answer is what a server without a cache gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.clients import Answer, Client, same_answer
from tests.integration.stock_server import StockServer
from tests.models import prompt

MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "batched stream": {"stream": True},
    "sequential": {"seed": 1},
    "sequential stream": {"seed": 1, "stream": True},
}
"""A request with a seed is never batched."""

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Client]]:
    """One that keeps prefixes as they are, one that keeps none, and one without the plugin."""
    logs = tmp_path_factory.mktemp("logs")
    arguments = ("--model", str(model))
    with (
        StockServer(logs / "raw", *arguments, "--kv-cache-codec", "raw") as raw,
        StockServer(logs / "none", *arguments, "--disable-prefix-cache") as none,
        StockServer(logs / "stock", *arguments, MLX_LM_KVCACHE_PLUGIN_DISABLE="1") as stock,
    ):
        yield {"raw": raw, "none": none, "stock": stock}


def two_chats(server: Client, mode: str, system: str) -> list[Answer]:
    """Three turns, and three more with the same system prompt."""
    answers = []
    for chat in ("first", "second"):
        messages = [{"role": "system", "content": prompt(system, 300)}]
        for turn in range(3):
            messages.append({"role": "user", "content": prompt(f"{turn} {chat}", 60)})
            answers.append(server.chat(messages, **MODES[mode]))
            messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


@pytest.mark.parametrize("mode", MODES)
def test_a_warm_chat_answers_as_a_cold_one(servers: dict[str, Client], mode: str) -> None:
    """Greedy tokens with the codec `raw` are those of a server that prefills everything."""
    warm = two_chats(servers["raw"], mode, f"You are {mode}")
    cold = two_chats(servers["none"], mode, f"You are {mode}")
    assert all(map(same_answer, warm, cold))
    assert len({answer.text for answer in cold}) > 3
    assert [answer.cached_tokens for answer in warm] == [answer.longest_hit for answer in warm]
    assert all(answer.cached_tokens > 300 for answer in warm[1:])
    assert all(answer.cached_tokens == 0 for answer in cold)


@pytest.mark.parametrize("mode", MODES)
def test_a_chat_is_answered_as_by_stock(servers: dict[str, Client], mode: str) -> None:
    """And never computes more than stock's own cache would let it."""
    ours = two_chats(servers["raw"], mode, f"Be {mode}")
    stock = two_chats(servers["stock"], mode, f"Be {mode}")
    assert all(map(same_answer, ours, stock))
    for our_answer, stock_answer in zip(ours, stock, strict=True):
        assert our_answer.cached_tokens >= stock_answer.cached_tokens


@pytest.mark.parametrize("mode", MODES)
def test_a_warm_text_answers_as_a_cold_one(servers: dict[str, Client], mode: str) -> None:
    """Text completions, of which each continues or leaves the one before it."""
    whole = prompt(mode, 400)
    for text in (whole[:150], whole[:300], whole, whole[:200], whole[:250] + "!" * 50, whole):
        warm = servers["raw"].text(text, **MODES[mode])
        assert same_answer(warm, servers["none"].text(text, **MODES[mode]))
        assert warm.cached_tokens == warm.longest_hit


def test_batched_and_sequential_requests_share_one_store(servers: dict[str, Client]) -> None:
    """What one of them stored is a hit for the other."""
    text = prompt("modes", 300)
    for place, mode in enumerate(("sequential", "batched", "sequential", "batched")):
        warm = servers["raw"].text(text, **MODES[mode])
        assert same_answer(warm, servers["none"].text(text, **MODES[mode]))
        assert warm.cached_tokens == (299 if place else warm.longest_hit)
