"""The budget holds on every path, and what is given up is what was used least recently.

The model takes 2,048 bytes a token in full precision, so that 1 MiB has room for two prompts of
about 200 tokens and their answers, and not for three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from mlx_lm_kvcache_plugin.events import Error, Evict, Hit, Miss
from mlx_lm_kvcache_plugin.store.budget import GIB
from tests.integration.clients import MODES
from tests.integration.local_server import LocalServer
from tests.models import prompt

MIB = 1 << 20
TOKEN_BYTES = 2048
LIMITS = {
    "--cache-memory-mb": (("--cache-memory-mb", "1"), MIB),
    "--prompt-cache-bytes": (("--kv-cache-codec", "raw", "--prompt-cache-bytes", "1048576"), MIB),
    "the smaller of both": (("--cache-memory-mb", "64", "--prompt-cache-bytes", "900000"), 900000),
}


def ask(server: LocalServer, names: Sequence[str], mode: str, tokens: int = 200) -> list[int]:
    """Send one prompt for each name; the cached tokens of each."""
    answers = [server.text(prompt(name, tokens), **MODES[mode]) for name in names]
    server.settle()
    return [answer.cached_tokens or 0 for answer in answers]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", LIMITS)
def test_the_limit_holds_after_every_insert(model: Path, limit: str, mode: str) -> None:
    """Five distinct prompts, room for two, nothing ever joins a batch.

    What stock counts as being decoded is within the limit of `--prompt-cache-bytes` too.
    """
    arguments, limit_bytes = LIMITS[limit]
    with LocalServer("--model", str(model), *arguments) as server:
        assert ask(server, "abcde", mode) == [0] * 5
        held = [insertion.held_bytes for insertion in server.watch.insertions]
        assert len(held) >= 5 and 0 < max(held) <= limit_bytes
        assert server.prompt_cache.nbytes == held[-1] > limit_bytes // 3
        if "--prompt-cache-bytes" in arguments:
            for insertion in server.watch.insertions:
                assert insertion.held_bytes + insertion.active_bytes <= limit_bytes
        assert ask(server, "e", mode) == [199]


def test_prompt_cache_bytes_holds_when_requests_join(model: Path) -> None:
    """With a batch that grows while others join it."""
    limit_bytes = 3_000_000
    arguments = ("--kv-cache-codec", "raw", "--prompt-cache-bytes", str(limit_bytes))
    with LocalServer("--model", str(model), *arguments) as server:
        for names in ("abc", "dea", "bfg"):
            with server.held():
                asked = [server.start(prompt(name, 200), max_tokens=60) for name in names]
                server.wait_until(lambda: server.generator.requests.qsize() == 3)
            assert [len(future.result().text) for future in asked] == [60] * 3
            server.settle()
        for insertion in server.watch.insertions:
            assert insertion.held_bytes + insertion.active_bytes <= limit_bytes


@pytest.mark.parametrize("mode", MODES)
def test_what_was_fetched_last_stays(model: Path, mode: str) -> None:
    """Room for two: insert A and B, fetch A, insert C; A stays and B goes."""
    with LocalServer("--model", str(model), "--cache-memory-mb", "1") as server:
        assert ask(server, "ABAC", mode) == [0, 0, 199, 0]
        assert [bytes(tokens[:1]) for tokens in server.sequences()] == [b"A", b"C"]
        assert ask(server, "A", mode) == [199]
        assert ask(server, "B", mode) == [0]


@pytest.mark.parametrize("mode", MODES)
def test_a_tail_that_gives_way_makes_room_before_others_do(model: Path, mode: str) -> None:
    """Room for two of 220 tokens: a batch stores each prompt first, and then what grew out of it.

    The shorter tail that the longer one replaces is of no use to anyone; A's is.
    """
    with LocalServer("--model", str(model), "--cache-memory-mb", "1") as server:
        assert ask(server, "ABA", mode, tokens=220) == [0, 0, 219]


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_larger_than_the_budget_keeps_its_leading_blocks(model: Path, mode: str) -> None:
    """Two small prompts, then one twice the budget: its first blocks displace the older of both.

    The events agree with what is held, and later requests hit.
    """
    with LocalServer("--model", str(model), "--cache-memory-mb", "1") as server:
        assert ask(server, "ab", mode, tokens=100) == [0, 0]
        assert ask(server, "Z", mode, tokens=1000) == [0]
        assert sorted(len(tokens) for tokens in server.sequences()) == [108, 3 * 128]
        assert ask(server, "Z", mode, tokens=1000) == [3 * 128]
        assert ask(server, "ab", mode, tokens=100) == [0, 0]
        assert ask(server, "ab", mode, tokens=100) == [99, 99]
        (last,) = ask(server, "Z", mode, tokens=1000)
        assert last in (128, 2 * 128)
        events = server.recorder.events
        hits, misses = events.of(Hit), events.of(Miss)
        assert (len(hits), len(misses)) == (4, 5)
        assert sum(event.hit_tokens for event in hits) == 3 * 128 + 99 + 99 + last
        assert sum(event.prompt_tokens for event in hits + misses) == 6 * 100 + 3 * 1000
        assert events.of(Evict) and not events.of(Error)
        assert server.cache.tree.used_bytes <= MIB
        assert server.is_alive()


def test_a_small_prompt_survives_where_a_larger_one_leaves_room(model: Path) -> None:
    """Only as much is given up as the new prompt needs."""
    with LocalServer("--model", str(model), "--cache-memory-mb", "1") as server:
        assert ask(server, "ab", "sequential", tokens=100) == [0, 0]
        assert ask(server, "c", "sequential", tokens=330) == [0]
        assert ask(server, "b", "sequential", tokens=100) == [99]
        assert ask(server, "a", "sequential", tokens=100) == [0]


@pytest.mark.parametrize("mode", MODES)
def test_a_short_prompt_is_charged_for_its_tokens(model: Path, mode: str) -> None:
    """Ten tokens, though upstream's buffer has 256 rows."""
    with LocalServer("--model", str(model), "--kv-cache-codec", "raw") as server:
        answer = server.text(prompt("", 9), max_tokens=1, **MODES[mode])
        assert len(server.sequences()[0]) in (9, 10) and len(answer.text) == 1
        assert 9 * TOKEN_BYTES < server.prompt_cache.nbytes < 11 * TOKEN_BYTES


@pytest.mark.parametrize("mode", MODES)
def test_prompt_cache_size_bounds_the_sequences_if_typed(model: Path, mode: str) -> None:
    """Its default of 10 is upstream's and means nothing here; a typed 10 does."""
    names = "abcdefghijkl"
    arguments = ("--model", str(model), "--kv-cache-codec", "raw")
    for typed, expected in ((), 12), (("--prompt-cache-size", "10"), 10):
        with LocalServer(*arguments, *typed) as server:
            ask(server, names, mode, tokens=20)
            assert len(server.prompt_cache) == expected
    with LocalServer(*arguments, "--prompt-cache-size", "2") as server:
        ask(server, names, mode, tokens=20)
        assert max(insertion.sequences for insertion in server.watch.insertions) == 2
        assert ask(server, "lka", mode, tokens=20) == [19, 19, 0]


def test_a_count_of_sequences_spares_what_they_share(model: Path) -> None:
    """Chats that begin alike are sequences of their own, and their beginning outlives them."""
    arguments = ("--kv-cache-codec", "raw", "--prompt-cache-size", "2")
    with LocalServer("--model", str(model), *arguments) as server:
        for end in "abc":
            server.text(prompt("shared", 256) + prompt(end, 40), seed=1)
        assert len(server.sequences()) == 2
        answer = server.text(prompt("shared", 256) + prompt("a", 40), seed=1)
        assert answer.cached_tokens == 256


@contextmanager
def memory(available: list[int]) -> Iterator[None]:
    """Make the machine say that it has 32 GiB, and as much available as `available[0]`."""

    def probe() -> SimpleNamespace:
        return SimpleNamespace(total=32 * GIB, available=available[0])

    with mock.patch.object(psutil, "virtual_memory", probe):
        yield


def test_the_cache_gives_way_when_memory_is_short(model: Path) -> None:
    """Under the reserve of 5% all goes, logged once per episode; later it grows again."""
    available = [8 * GIB]
    with memory(available), LocalServer("--model", str(model), "--kv-cache-codec", "raw") as server:
        assert ask(server, "ab", "sequential") == [0, 0]
        assert server.cache.budget.limit_bytes == 8 * GIB // 5
        for _ in range(2):
            available[0] = GIB
            assert ask(server, "ab", "sequential")[1] == 0  # the first may yet serve, and goes
            assert server.prompt_cache.nbytes == 0
            available[0] = 8 * GIB
            assert ask(server, "abab", "sequential") == [0, 0, 199, 199]
        warnings = [message for message in server.messages() if "memory is short" in message]
        assert len(warnings) == 2
        assert server.is_alive()


def test_a_machine_short_from_the_start(model: Path) -> None:
    """Nothing is kept, and everything answered."""
    with memory([GIB // 2]), LocalServer("--model", str(model), "--kv-cache-bits", "8") as server:
        assert ask(server, "aabb", "batched") == [0] * 4
        assert server.prompt_cache.nbytes == 0
