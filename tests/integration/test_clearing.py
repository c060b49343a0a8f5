"""`DELETE /v1/cache` on the real server: all is gone, at any moment, and no answer is the worse."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest
from mlx_lm.models.cache import KVCache

from tests import models
from tests.integration.clients import ANSWER_SECONDS, MODES, same_answer
from tests.integration.local_server import LocalServer, stopped
from tests.integration.test_restart import slow
from tests.models import prompt

RAW = ("--kv-cache-codec", "raw")
TEXT = prompt("A text to come back to", 300)
LARGE_BYTES = 200 << 20
HELD = ("used_bytes", "blocks", "tails", "checkpoints", "tokens", "sequences")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LocalServer]:
    with LocalServer("--model", str(model), *RAW) as server:
        yield server


def is_empty(told: dict[str, Any]) -> bool:
    """Whether the statistics tell of nothing in memory."""
    nothing = not any(told["memory"][key] for key in HELD)
    return nothing and told["models"] == [] and told["sequences"]["roots"] == []


def records(disk: Path) -> list[Path]:
    """All files of ours."""
    return [path for path in disk.rglob("*") if path.is_file() and path.name != "usage.lock"]


# What is gone


@pytest.mark.parametrize("mode", MODES)
def test_all_is_gone(server: LocalServer, mode: str) -> None:
    """What was held is what is freed; the next request computes all, and says why."""
    server.text(TEXT, **MODES[mode])
    server.text(TEXT[:200] + mode, **MODES[mode])
    server.settle()
    before = server.stats()
    told = server.delete().json
    assert told == {"freed_bytes": before["memory"]["used_bytes"], "deleted_files": 0}
    after = server.stats()
    assert is_empty(after)
    assert after["memory"]["limit_bytes"] == before["memory"]["limit_bytes"]
    assert after["hit_rate"]["start"] == before["hit_rate"]["start"]
    assert server.delete().json == {"freed_bytes": 0, "deleted_files": 0}
    assert server.text(TEXT, **MODES[mode]).cached_tokens == 0
    server.settle()
    (last, *_) = server.stats()["last_misses"]
    assert (last["reason"], last["token"]) == ("nothing stored", 0)  # nothing is kept of it
    assert server.text(TEXT, **MODES[mode]).cached_tokens == 299


def test_all_models_are_gone(model: Path, tmp_path: Path) -> None:
    """Not the loaded one alone; with windows and states too."""
    folders = [model, models.gemma(tmp_path / "gemma"), models.lfm(tmp_path / "lfm")]
    with LocalServer(*RAW) as server:
        for folder in folders:
            server.text(TEXT, model=str(folder))
        server.settle()
        told = server.stats()
        assert len(told["models"]) == 3 and told["memory"]["checkpoints"] > 0
        assert server.delete().json["freed_bytes"] == told["memory"]["used_bytes"]
        assert is_empty(server.stats())
        for folder in folders[::-1]:
            cached = [server.text(TEXT, model=str(folder)).cached_tokens for _ in range(2)]
            assert cached == [0, 299]


def test_the_disk_is_left(model: Path, tmp_path: Path) -> None:
    """With `?tier=memory`: the next request finds all of it there."""
    with LocalServer("--model", str(model), *RAW, "--kv-cache-dir", str(tmp_path)) as server:
        server.text(TEXT)
        server.settle()
        assert server.tier.flush()
        files = records(tmp_path)
        told = server.delete("/v1/cache?tier=memory").json
        assert told["freed_bytes"] > 0 and told["deleted_files"] == 0
        assert records(tmp_path) == files
        assert is_empty(server.stats()) and server.stats()["disk"]["used_bytes"] > 0
        assert server.explain({"prompt": TEXT}).json["on_disk_tokens"] == 299
        assert server.text(TEXT).cached_tokens == 299
        server.settle()
        assert server.stats()["disk"]["restored_tokens"] >= 299


def test_the_disk_is_cleared_too(model: Path, tmp_path: Path) -> None:
    """Also what other servers left there; what is not ours stays. Then it is written anew."""
    disk, stranger = tmp_path / "disk", tmp_path / "disk" / "notes.txt"
    arguments = ("--model", str(model), *RAW, "--kv-cache-dir", str(disk))
    with LocalServer(*arguments) as server:
        server.text(prompt("Of another server", 300))
        server.settle()
    stranger.write_text("not ours")
    with LocalServer(*arguments) as server:
        server.text(TEXT)
        server.settle()
        assert server.tier.flush()
        files = records(disk)
        told = server.delete().json
        assert told["deleted_files"] == len(files) - 1 > 6
        assert records(disk) == [stranger]
        assert server.tier.flush()
        assert server.stats()["disk"]["used_bytes"] < 100  # of the file that counts them
        for text in (TEXT, prompt("Of another server", 300)):
            assert server.explain({"prompt": text}).json["hit_tokens"] == 0
        assert server.text(TEXT).cached_tokens == 0
        server.settle()
        assert server.tier.flush()
        assert server.stats()["disk"]["used_bytes"] > 0
    with LocalServer(*arguments) as server:
        assert server.text(TEXT).cached_tokens == 299
        assert server.stats()["disk"]["errors"] == 0


@pytest.mark.parametrize("query", ["tier=disk", "tier=", "all=1", "tier=memory&tier=disk"])
def test_what_is_not_understood_clears_nothing(server: LocalServer, query: str) -> None:
    """Somebody meant something else than all."""
    server.text(TEXT)
    server.settle()
    before = server.stats()["memory"]
    assert server.delete(f"/v1/cache?{query}").status == 400
    assert server.stats()["memory"] == before


# When it is asked for


@pytest.mark.parametrize("mode", ["batched", slow("sequential")])
@pytest.mark.parametrize("after", [0, 5], ids=["in the prefill", "while decoding"])
def test_a_generation_goes_on(
    server: LocalServer, cold: LocalServer, mode: str, after: int
) -> None:
    """Though all that it began with is gone: its answer is right, and what it stores is whole."""
    longer = TEXT + prompt("and much more", 100)
    server.delete()
    server.text(TEXT, **MODES[mode])
    server.settle()
    language_model = type(server.generator.model_provider.model)
    with stopped(language_model, "__call__", after) as is_held:
        asked = server.start(longer, **MODES[mode])
        assert is_held.wait(ANSWER_SECONDS)
        assert server.delete().json["freed_bytes"] > 0
        assert is_empty(server.stats())
        assert not asked.done()
    answer = asked.result()
    assert answer.cached_tokens == 300
    assert same_answer(answer, cold.text(longer, **MODES[mode]))
    server.settle()
    assert server.text(longer, **MODES[mode]).cached_tokens == 399


def test_stored_rows_are_right_after_it(server: LocalServer, loaded: Any) -> None:
    """What is stored of a generation that was cleared in its middle is what the model computes."""
    language_model = type(server.generator.model_provider.model)
    server.text(TEXT)
    server.settle()
    with stopped(language_model, "__call__", 3) as is_held:
        asked = server.start(TEXT + "?", max_tokens=20)
        assert is_held.wait(ANSWER_SECONDS)
        server.delete()
    asked.result()
    server.check_rows(loaded)


@pytest.mark.parametrize("tiers", ["memory", slow("disk")])
def test_hammering(model: Path, cold: LocalServer, tmp_path: Path, tiers: str) -> None:
    """Several clear, look and explain while several ask: right answers, a sound tree, no error."""
    disk = ("--kv-cache-dir", str(tmp_path)) if tiers == "disk" else ()
    texts = [TEXT[: 60 * n] + prompt(str(n), 80) for n in range(1, 5)]
    expected = {text: cold.text(text) for text in texts}
    over = threading.Event()
    with LocalServer("--model", str(model), *RAW, *disk) as server:
        server.text(texts[0])  # before which there may be no model yet

        def hammer(path: str) -> set[int]:
            seen: set[int] = set()
            while not over.is_set():
                if path == "/v1/cache/explain":
                    seen.add(server.explain({"prompt": texts[0]}).status)
                else:
                    seen.add(server.request("GET" if "stats" in path else "DELETE", path).status)
            return seen

        paths = ("/v1/cache", "/v1/cache?tier=memory", "/v1/cache/stats", "/v1/cache/explain")
        hammering = [server._threads.submit(hammer, path) for path in paths]
        try:
            for turn in range(2):
                options = MODES["batched" if turn % 2 else "sequential"]
                asked = [(text, server.start(text, **options)) for text in texts]
                for text, each in asked:
                    assert same_answer(each.result(), expected[text])
        finally:
            over.set()
        assert [each.result() for each in hammering] == [{200}] * len(paths)
        server.settle()
        assert server.is_alive() and not server.recorder.errors
        server.cache.tree.check()
        server.delete()
        assert is_empty(server.stats())
        assert [server.text(TEXT).cached_tokens for _ in range(2)] == [0, 299]


# What it is for


def store(server: LocalServer, number: int, tokens: int) -> None:
    """Store a sequence of a model that has 131,072 bytes of rows a token."""
    caches = [KVCache() for _ in range(128)]
    for cache in caches:
        rows = mx.random.normal((1, 1, tokens, 128))
        cache.update_and_fetch(rows, rows)
    sequence = list(range(number * tokens, (number + 1) * tokens))
    server.prompt_cache.insert_cache(("large", None, None), sequence, caches)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, memory is accounted otherwise")
@pytest.mark.parametrize("codec", ["raw", "rotated"])
def test_resident_memory_falls(model: Path, codec: str) -> None:
    """By about what was held: the system has it back at once, not only the next insert."""
    process = psutil.Process()
    with LocalServer("--model", str(model), "--kv-cache-codec", codec) as server:
        sequences = 0
        while server.stats()["memory"]["used_bytes"] < LARGE_BYTES:
            store(server, sequences, tokens=256)
            sequences += 1
        mx.clear_cache()
        used_bytes, before = server.stats()["memory"]["used_bytes"], process.memory_info().rss
        assert server.delete().json["freed_bytes"] == used_bytes
        fallen = before - process.memory_info().rss
        assert fallen > 0.9 * used_bytes
