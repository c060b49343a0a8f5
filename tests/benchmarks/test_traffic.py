"""Agents that ask the same each time, and what is told of the memory of a server that they ask."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks import traffic
from benchmarks.soak import PARTS, Soak, after_warm_up, growths, line_through
from benchmarks.traffic import MOST_MESSAGES, OPEN_CHATS, Agents, resident_memory
from benchmarks.watched import used_bytes


def requests(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    agents = Agents(seed)
    return [agents.request() for _ in range(count)]


@pytest.fixture
def server() -> Iterator[Any]:
    """A child that stands for the server's process."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        yield SimpleNamespace(pid=child.pid)
        child.kill()


def test_a_seed_settles_all_that_agents_ask() -> None:
    assert requests(50) == requests(50)
    assert requests(50) != requests(50, seed=1)


def test_a_request_begins_a_chat_or_goes_on_with_one() -> None:
    asked = requests(300)
    for place, messages in enumerate(asked):
        assert [message["role"] for message in messages[:2]] == ["system", "user"]
        assert len(messages) == 2 or messages[:-2] in asked[:place]
        assert len(messages) <= MOST_MESSAGES
    assert {message["role"] for message in asked[-1]} <= {"system", "user", "assistant", "tool"}


def test_chats_come_back_after_a_long_time_and_share_system_prompts() -> None:
    asked = requests(600)
    firsts = [messages[0]["content"] for messages in asked if len(messages) == 2]
    assert len(set(firsts)) < len(firsts) / 2
    pauses = [
        place - asked.index(messages[:-2])
        for place, messages in enumerate(asked)
        if len(messages) > 2
    ]
    assert max(pauses) > 10 * OPEN_CHATS


def test_traffic_stays_the_same_all_the_time() -> None:
    lengths = [sum(len(each["content"]) for each in messages) for messages in requests(2000)]
    early, late = np.mean(lengths[200:1100]), np.mean(lengths[1100:])
    assert early == pytest.approx(late, rel=0.1)


def test_a_servers_memory_is_that_of_its_process(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "SAMPLE_S", 0.01)
    with resident_memory({"ours": server}) as samples:
        time.sleep(0.2)
    seconds, sizes = zip(*samples["ours"], strict=True)
    assert len(sizes) > 2 and sorted(seconds) == list(seconds)
    assert 1 << 20 < sizes[-1] < 100 << 20  # a Python that has imported nothing


def test_a_line_tells_growth_over_a_thousand_requests() -> None:
    line = line_through([100 + 3 * place for place in range(50)], between=10)
    assert line.growth == pytest.approx(300)
    assert line.error == pytest.approx(0, abs=1e-6)
    assert line.mean == pytest.approx(100 + 3 * 24.5)


@pytest.mark.parametrize("leak", [0, 40])
def test_the_error_of_a_line_covers_its_noise(leak: float) -> None:
    noise = np.random.default_rng(0).normal(0, 20, 150)
    line = line_through(noise + leak * np.arange(150) / 100, between=10)
    assert abs(line.growth - leak) < 3 * line.error < 30


def test_what_a_warm_up_takes_is_no_growth() -> None:
    assert line_through(after_warm_up([*range(25), *[30] * 75])).growth == pytest.approx(
        0, abs=1e-9
    )


def test_a_leak_misses_its_target_and_few_readings_have_none() -> None:
    readings = [
        {"resident": 10_000_000, "used": 1_000_000 + 2_000 * place, "python_blocks": 500}
        for place in range(100)
    ]
    leak, objects, resident = growths("ours", Soak(readings=readings), target=0.01)
    assert leak.value == pytest.approx(0.02) and not leak.met
    assert objects.value == pytest.approx(0, abs=1e-9) and objects.met
    assert resident.limit is None
    assert not list(growths("ours", Soak(readings=readings[: 2 * PARTS]), target=0.01))


def test_what_malloc_cannot_tell_is_left_out() -> None:
    readings: list[Any] = [{"resident": 1, "used": None, "python_blocks": 1}] * 100
    assert len(list(growths("ours", Soak(readings=readings), target=0.01))) == 2


def test_memory_in_use_is_what_is_held_and_not_what_mlx_keeps_for_later() -> None:
    before = used_bytes()
    if before is None:
        pytest.skip("this C library does not tell")
    array = mx.zeros((10 << 20,), mx.uint8)
    mx.eval(array)
    held = used_bytes()
    assert held is not None and held - before == pytest.approx(10 << 20, rel=0.05)
    del array
    assert used_bytes() == pytest.approx(before, abs=1 << 20)


def test_the_longest_chats_are_as_long_as_any_gets() -> None:
    def length(messages: list[dict[str, str]]) -> int:
        return sum(len(message["content"]) for message in messages)

    longest = Agents(longest=True)
    most = max(length(longest.request()) for _ in range(100))
    assert most >= max(map(length, requests(2000)))
