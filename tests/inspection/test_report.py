"""All that is told of a server: the keys that are promised, as strict JSON, in every state.

What is said of the parts is proved where they are: in test_sequences.py, test_sizing.py and
tests/stats.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvcache_plugin import __version__
from mlx_lm_kvcache_plugin.disk.tier import DiskTier
from mlx_lm_kvcache_plugin.events import Error, Reason, SkipReason
from mlx_lm_kvcache_plugin.inspection.report import Models, report
from mlx_lm_kvcache_plugin.prefix_cache import BLOCK_TOKENS, PrefixCache
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.stats.history import History
from mlx_lm_kvcache_plugin.stats.statistics import Statistics
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget
from mlx_lm_kvcache_plugin.store.eviction import Cause
from tests.disk.records import Disk
from tests.store.caches import MIXED, MODEL, TINY, JsonLayers, Machine, insert, make_cache

Told = dict[str, Any]

SUMS = {"requests", "prompt_tokens", "hit_tokens"}

TALLY = {"used_bytes", "blocks", "tails", "checkpoints", "tokens"}

KEYS: dict[str, set[str]] = {
    "": {"version", "time", "uptime_seconds", "enabled", "shows_text", "settings", "memory"}
    | {"models", "hit_rate", "history", "misses", "last_misses", "inserts", "evictions", "timing"}
    | {"disk", "errors", "last_error", "sizing", "sequences"},
    "settings": {"codec", "key_bits", "value_bits", "group_size", "block_tokens"},
    "memory": {"limit_bytes", "origin", "is_short", "sequences"} | TALLY,
    "models[]": {"model", "is_loaded"} | TALLY,
    "hit_rate": {"1m", "5m", "15m", "start"},
    "hit_rate.5m": {"rate"} | SUMS,
    "history[]": {"age_seconds"} | SUMS,
    "misses": {reason.value for reason in Reason},
    "misses.diverged": {"requests", "misses", "tokens"},
    "last_misses[]": {"age_seconds", "prompt_tokens", "hit_tokens", "reason", "token", "cause"}
    | {"text"},
    "inserts": {"count", "new_tokens", "skipped"},
    "inserts.skipped": {reason.value for reason in SkipReason},
    "evictions": {cause.value for cause in Cause},
    "evictions.trim": {"blocks", "bytes"},
    "timing": {"decode", "encode", "restore"},
    "timing.decode": {"count", "seconds"},
    "disk": {"folder", "limit_bytes", "used_bytes", "restored_tokens", "files_written"}
    | {"bytes_written", "files_read", "bytes_read", "quarantined", "evicted_files"}
    | {"evicted_bytes", "skipped", "errors"},
    "sizing": {"limit_bytes", "hit_rate", "prompt_tokens", "scales", "text"},
    "sizing.scales[]": {"scale", "limit_bytes", "hit_rate"},
    "sequences": {"total", "shown", "roots"},
    "sequences.roots[]": {"model", "is_loaded", "nodes"},
    "sequences.roots[].nodes[]": {"id", "tokens", "end", "bytes", "age_seconds", "label", "kind"}
    | {"words", "children"},
}
"""What every place of the report has. A list's members are alike."""


def at(told: Any, place: str) -> list[Any]:
    """What is found at a place: nothing where a list is empty, or a value is null."""
    found = [told]
    for name in filter(None, place.split(".")):
        key, is_list = name.removesuffix("[]"), name.endswith("[]")
        found = [each[key] for each in found]
        if is_list:
            found = [member for each in found for member in each]
    return [each for each in found if each is not None]


class Server:
    """A prefix cache whose events are counted, and what is told of it.

    Attributes:
        cache: None if nothing is kept.
    """

    def __init__(self, disabled: bool = False, **options: Any) -> None:
        self.statistics = Statistics()
        self.settings = Settings(codec="raw", key_bits=None, value_bits=None)
        self.kept: PrefixCache | None = None
        if not disabled:
            options.setdefault("history", History(4))
            self.kept = make_cache(emit=self.statistics.record, **options)

    @property
    def cache(self) -> PrefixCache:
        assert self.kept is not None
        return self.kept

    def ask(self, tokens: Any, namespace: Hashable = MODEL) -> None:
        prefix = self.cache.match(namespace, tokens)
        self.cache.fetch(tokens, prefix, namespace=namespace)

    def told(self, shows_text: bool = True) -> Told:
        """The report: strict JSON, with the keys that are promised."""
        models = Models(
            name=lambda namespace: f"the {namespace}",
            is_loaded=lambda namespace: namespace == MODEL,
            words=lambda namespace, tokens: f"secret {tokens[0]}",
        )
        told = report(self.settings, self.kept, self.statistics, models, shows_text)
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        for place, keys in KEYS.items():
            assert all(set(each) == keys for each in at(told, place)), place
        return told


def busy(**options: Any) -> Server:
    """Two models, one of them with checkpoints; hits, misses, evictions and an error."""
    server = Server(**options)
    for length in (5, 9, 14):
        insert(server.cache, range(length), label="user", **TINY)
        insert(server.cache, range(length), "other", label="system", **MIXED)
        server.ask([*range(length), 97, 98])
    server.ask([50, 51], "third")
    server.ask([97] * 5, "other")
    insert(server.cache, range(60, 70), label="assistant", **TINY)
    server.cache.trim_to(n_sequences=4)
    server.ask([*range(14), 97, 98])
    server.cache.record(Error("fetch", "OSError: /home/somebody/secret"))
    return server


def test_a_server_that_was_just_started() -> None:
    """Nothing is held, asked for or missed, and every key is there."""
    told = Server().told()
    assert (told["version"], told["enabled"], told["shows_text"]) == (__version__, True, True)
    assert told["memory"] == {
        "limit_bytes": GIB,
        "origin": "a fixed limit",
        "is_short": False,
        "sequences": 0,
        **dict.fromkeys(TALLY, 0),
    }
    assert told["models"] == told["last_misses"] == []
    assert told["disk"] is told["last_error"] is told["sizing"]["text"] is None
    assert told["errors"] == {}
    assert told["sequences"] == {"total": 0, "shown": 0, "roots": []}
    assert told["settings"]["block_tokens"] == 4
    assert told["settings"]["key_bits"] is told["settings"]["value_bits"] is None


def test_where_nothing_is_kept() -> None:
    """The same keys, and zeros."""
    told = Server(disabled=True).told()
    assert told["enabled"] is False
    assert {told["memory"][key] for key in TALLY | {"limit_bytes", "sequences"}} == {0}
    assert told["settings"]["block_tokens"] == BLOCK_TOKENS
    assert told["disk"] is told["sizing"]["text"] is None
    assert told["sizing"]["limit_bytes"] == 0


def test_a_share_that_is_not_settled_yet() -> None:
    """It is a number all the same; and the right one once it was asked for."""
    server = Server(budget=Budget(percent=0.5, probe=Machine().probe))
    assert server.told()["memory"]["limit_bytes"] == 0
    server.cache.keep_within_budget()
    memory = server.told()["memory"]
    assert memory["limit_bytes"] == 5 * GIB
    assert memory["origin"].startswith("50% of the ")


def test_what_is_held() -> None:
    """By model and in all; with checkpoints, of layouts that differ with the length."""
    server = busy()
    told, tree = server.told(), server.cache.tree
    memory = told["memory"]
    assert memory["used_bytes"] == tree.used_bytes and memory["tokens"] == tree.tokens
    assert memory["blocks"] + memory["tails"] + memory["checkpoints"] == len(tree)
    assert memory["checkpoints"] > 0 and memory["sequences"] == tree.sequences.total() == 4
    for key in TALLY:
        assert sum(each[key] for each in told["models"]) == memory[key]
    names = {each["model"]: each["is_loaded"] for each in told["models"]}
    assert names == {f"the {MODEL}": True, "the other": False}
    assert len(told["sequences"]["roots"]) == len(tree.roots())
    assert told["sequences"]["total"] == told["sequences"]["shown"] == 4


def test_what_was_asked_for() -> None:
    """As it was counted."""
    told = busy().told()
    assert told["hit_rate"]["start"]["requests"] == 6
    missed = {name: each["requests"] for name, each in told["misses"].items() if each["requests"]}
    assert missed.keys() >= {"nothing stored", "other model", "diverged"}
    assert sum(missed.values()) == 6
    assert told["evictions"]["trim"]["blocks"] > 0
    assert told["sizing"]["prompt_tokens"] == told["hit_rate"]["start"]["prompt_tokens"]
    assert told["sizing"]["hit_rate"] == told["hit_rate"]["start"]["rate"]
    assert told["sizing"]["text"]
    assert told["errors"] == {"fetch": 1}


def test_without_a_history() -> None:
    """Other budgets are not told about, and all else is."""
    told = busy(history=None).told()
    assert told["sizing"]["prompt_tokens"] == 0 and told["sizing"]["text"] is None
    assert told["hit_rate"]["start"]["requests"] == 6


@pytest.mark.parametrize("shows_text", [True, False])
def test_the_disk(tmp_path: Path, shows_text: bool) -> None:
    """What is there, and what this process did; its folder for those alone who see text."""
    tier = DiskTier(tmp_path, GIB, disk_usage=lambda _: Disk())
    server = Server(tier=tier)
    server.settings = Settings(codec="raw", disk_folder=tmp_path)
    server.cache.attach(MODEL, b"weights", {"model": "of a test"}, JsonLayers())
    insert(server.cache, range(9), **TINY)
    assert tier.flush()
    server.cache.trim_to(n_bytes=0)
    server.ask(range(10))
    disk = server.told(shows_text)["disk"]
    assert disk["folder"] == (str(tmp_path) if shows_text else None)
    assert (disk["limit_bytes"], disk["used_bytes"]) == (GIB, tier.used_bytes)
    assert (disk["files_written"], disk["files_read"], disk["restored_tokens"]) == (3, 3, 9)
    assert disk["bytes_written"] == disk["bytes_read"] > 0
    tier.close()


def test_who_sees_no_text_is_told_no_words() -> None:
    """Nor anything that may name a file."""
    server = busy()
    server.settings = Settings(codec="raw", disk_folder=Path("/home/somebody/secret"))
    text = json.dumps(server.told(shows_text=True))
    assert "secret 0" in text and "/home/somebody/secret" in text
    told = server.told(shows_text=False)
    assert told["shows_text"] is False
    assert "secret" not in json.dumps(told) and "home" not in json.dumps(told)
    assert told["memory"] == server.told()["memory"]


def test_words_that_nobody_can_tell() -> None:
    """Of a model that is not loaded."""
    server = busy()
    models = Models(str, lambda namespace: False, lambda namespace, tokens: None)
    told = report(server.settings, server.cache, server.statistics, models, True)
    nodes = at(told, "sequences.roots[].nodes[]")
    assert nodes and not any(node["words"] for node in nodes)


def test_words_are_made_while_the_tree_may_change() -> None:
    """A tokenizer takes its time: nobody waits for it."""
    server = busy()
    tree = server.cache.tree
    is_free: list[bool] = []

    def take() -> None:
        if tree.lock.acquire(blocking=False):
            tree.lock.release()
            is_free.append(True)

    def look(namespace: Hashable, tokens: list[int]) -> str:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return ""

    models = Models(str, lambda namespace: False, look)
    told = report(server.settings, server.cache, server.statistics, models, True)
    assert is_free and told["memory"]["used_bytes"] == tree.used_bytes


def test_others_ask_while_it_is_stored_and_evicted() -> None:
    """Whoever asks sees a tree that is whole: what it holds is what its models hold."""
    server = Server(limit_bytes=20_000)
    is_over = threading.Event()
    reports: list[Told] = []
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            while not is_over.is_set():
                reports.append(server.told())
        except BaseException as error:
            failures.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    number = 0
    while len(reports) < 15 and not failures:
        number += 1
        insert(server.cache, [*range(4), number, *range(9)], f"model {number % 3}", **TINY)
        server.ask([*range(4), number, 97], f"model {number % 3}")
        if number % 50 == 0:
            server.cache.clear()
    is_over.set()
    asker.join()
    assert not failures
    for told in reports:
        memory, models = told["memory"], told["models"]
        assert memory["used_bytes"] <= 20_000
        for key in TALLY:
            assert sum(model[key] for model in models) == memory[key]
        assert told["sequences"]["total"] == told["sequences"]["shown"]
        nodes = at(told, "sequences.roots[].nodes[]")
        assert sum(map(tokens_of, nodes)) == memory["tokens"]


def tokens_of(node: Told) -> int:
    """A run's, and those of all below it."""
    total: int = node["tokens"] + sum(map(tokens_of, node["children"]))
    return total
