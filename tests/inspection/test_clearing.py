"""Dropping what is stored: what is freed, what is left, and who may wait for whom."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.disk import tier
from mlx_lm_kvcache_plugin.disk.tier import DiskTier
from mlx_lm_kvcache_plugin.events import Event, Evict
from mlx_lm_kvcache_plugin.inspection import clearing
from mlx_lm_kvcache_plugin.inspection.clearing import clear, give_back_memory
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.store.budget import GIB
from tests.disk.records import Disk
from tests.store.caches import MODEL, STATES, TINY, JsonLayers, fetch, insert, make_cache

PROMPT = range(9)


def cache_on_disk(folder: Path, **shape: Any) -> PrefixCache:
    """A cache with a sequence, which is on disk too."""
    cache = make_cache(tier=DiskTier(folder, GIB, disk_usage=lambda _: Disk()))
    cache.attach(MODEL, b"weights", {"model": "of a test"}, JsonLayers())
    store(cache, **shape)
    return cache


def store(cache: PrefixCache, **shape: Any) -> None:
    insert(cache, PROMPT, **{**TINY, **shape})
    assert cache.tier is None or cache.tier.flush()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_memory_is_dropped_whole() -> None:
    """Of all models; what was held is told to the byte, and the events say who did it."""
    events: list[Event] = []
    cache = make_cache(emit=events.append)
    store(cache)
    insert(cache, PROMPT, "other", **TINY)
    held, nodes = cache.tree.used_bytes, len(cache.tree)
    assert clear(cache, nullcontext(), False) == {"freed_bytes": held, "deleted_files": 0}
    cache.tree.check()
    assert (len(cache.tree), cache.tree.used_bytes) == (0, 0)
    assert [event for event in events if isinstance(event, Evict)] == [
        Evict(nodes, held, "cleared")
    ]


def test_what_is_stored_afterwards_is_there() -> None:
    """And a second time there is nothing to drop."""
    cache = make_cache()
    store(cache)
    clear(cache, nullcontext(), False)
    assert fetch(cache, PROMPT) == 0
    assert clear(cache, nullcontext(), False) == {"freed_bytes": 0, "deleted_files": 0}
    store(cache)
    assert fetch(cache, PROMPT) == 8


def test_the_disk_is_cleared_too(tmp_path: Path) -> None:
    """As many files as there were; what is stored afterwards is written again."""
    cache = cache_on_disk(tmp_path)
    count = len(files(tmp_path))
    assert count > 3
    told = clear(cache, nullcontext(), memory_alone=False)
    assert told["freed_bytes"] > 0 and told["deleted_files"] == count
    assert not files(tmp_path) and fetch(cache, PROMPT) == 0
    store(cache)
    assert len(files(tmp_path)) == count
    assert cache.tier is not None
    cache.tier.close()


@pytest.mark.parametrize("shape", [TINY, STATES], ids=["rows", "states"])
@pytest.mark.parametrize("uses", ["before", "after", "both"])
def test_what_is_restored_meanwhile_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], uses: str
) -> None:
    """A request may read it before the files are gone, and have them written anew thereafter."""
    cache = cache_on_disk(tmp_path, **shape)
    held, delete = cache.tree.used_bytes, tier.clear
    hits: list[int] = []

    def delete_late(root: str) -> object:
        prompt = [*PROMPT, 97]
        prefix = cache.match(MODEL, prompt)
        hits.append(prefix.tokens if prefix else 0)
        if uses != "after":
            cache.fetch(prompt, prefix)
        told = delete(root)
        if uses != "before":
            cache.fetch(prompt, prefix)
        return told

    monkeypatch.setattr(tier, "clear", delete_late)
    assert clear(cache, nullcontext(), memory_alone=False)["freed_bytes"] == 2 * held
    assert hits == [len(PROMPT)]
    assert cache.tier is not None and cache.tier.flush()
    assert not list(tmp_path.rglob("*.safetensors"))
    assert (len(cache.tree), fetch(cache, PROMPT)) == (0, 0)
    cache.tier.close()


def test_memory_alone(tmp_path: Path) -> None:
    """What is on disk stays, and comes back."""
    cache = cache_on_disk(tmp_path)
    before = files(tmp_path)
    assert clear(cache, nullcontext(), memory_alone=True)["deleted_files"] == 0
    assert files(tmp_path) == before and len(cache.tree) == 0
    assert fetch(cache, PROMPT) == 8
    assert cache.tier is not None
    cache.tier.close()


def test_a_folder_that_is_gone_is_as_good_as_cleared(tmp_path: Path) -> None:
    """Nothing is deleted in it, and nobody is told of a failure."""
    cache = cache_on_disk(tmp_path / "cache")
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    told = clear(cache, nullcontext(), memory_alone=False)
    assert told["freed_bytes"] > 0 and told["deleted_files"] == 0
    assert cache.tier is not None
    cache.tier.close()


def test_it_waits_for_whoever_changes_the_cache() -> None:
    """A request that is being served goes on first."""
    cache, lock = make_cache(), threading.RLock()
    store(cache)
    told: list[dict[str, int]] = []
    with lock:
        thread = threading.Thread(target=lambda: told.append(clear(cache, lock, False)))
        thread.start()
        store(cache)
        assert fetch(cache, PROMPT) == 8
        held = cache.tree.used_bytes
        assert not told
    thread.join()
    assert told == [{"freed_bytes": held, "deleted_files": 0}]


def test_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all is dropped; where the system cannot, nothing fails."""
    cache = make_cache()
    store(cache)
    held: list[int] = []
    monkeypatch.setattr(clearing, "give_back_memory", lambda: held.append(len(cache.tree)))
    clear(cache, nullcontext(), False)
    assert held == [0]
    give_back_memory()
    monkeypatch.setattr(clearing.ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(clearing.sys, "platform", "linux")
    give_back_memory()
