"""Many requests of all kinds at once, over a store too small for them, on a machine short of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from mlx_lm_kvcache_plugin.events import Evict, Hit
from mlx_lm_kvcache_plugin.store.budget import GIB
from tests.integration.clients import same_answer
from tests.integration.local_server import LocalServer
from tests.models import prompt

LIMITS = {
    "one MiB": ("--cache-memory-mb", "1"),
    "--prompt-cache-bytes": ("--kv-cache-codec", "raw", "--prompt-cache-bytes", "2000000"),
    "three sequences": ("--kv-cache-codec", "raw", "--prompt-cache-size", "3"),
}


def requests(chance: random.Random, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Texts that continue, leave or repeat others, batched and not, streams and not."""
    texts = [prompt(name, 260) for name in "abc"]
    for number in range(count):
        text = chance.choice(texts)
        text = text[: chance.choice([len(text), chance.randint(1, len(text)), 128])]
        if chance.random() < 0.6:
            text += prompt(f"{number}!", chance.randint(5, 150))
        texts.append(text)
        options: dict[str, Any] = {"max_tokens": chance.choice([1, 2, 9, 30])}
        if chance.random() < 0.3:
            options["seed"] = 1
        if chance.random() < 0.4:
            options["stream"] = True
        yield text, options


@pytest.mark.parametrize("limit", LIMITS)
def test_every_answer_is_right(model: Path, cold: LocalServer, limit: str) -> None:
    """The store is sound after each call, within its limit, and the tokens are the cold ones."""
    chance = random.Random(limit)
    script = list(requests(chance, 30))
    expected = [cold.text(text, **{**options, "seed": 1}) for text, options in script]
    available = [8 * GIB]

    def probe() -> SimpleNamespace:
        return SimpleNamespace(total=16 * GIB, available=available[0])

    with (
        mock.patch.object(psutil, "virtual_memory", probe),
        LocalServer("--model", str(model), *LIMITS[limit]) as server,
        ThreadPoolExecutor(4) as clients,
    ):

        def ask(request: tuple[str, dict[str, Any]]) -> Any:
            text, options = request
            available[0] = chance.choice([GIB // 2, GIB + 500_000, 8 * GIB, 8 * GIB])
            if chance.random() < 0.15:
                body = {"prompt": text, **options, "max_tokens": 100}
                server.disconnect("/v1/completions", body, after=chance.randint(0, 3))
                return None
            return server.text(text, **options)

        answers = list(clients.map(ask, script))
        for answer, right in zip(answers, expected, strict=True):
            assert answer is None or same_answer(answer, right)
        server.settle()
        assert server.is_alive() and not server.recorder.errors
        events, insertions = server.recorder.events, server.watch.insertions
        assert events.of(Hit) and events.of(Evict) and len(insertions) > 20
        if limit == "one MiB":
            assert max(insertion.held_bytes for insertion in insertions) <= 1 << 20
        if limit == "three sequences":
            assert max(insertion.sequences for insertion in insertions) <= 3
        if limit == "--prompt-cache-bytes":
            assert all(
                i.held_bytes + i.active_bytes <= 2_000_000 for i in insertions if i.held_bytes
            )
