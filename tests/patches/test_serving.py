"""A running server, as far as it needs neither a model nor a port: what is done for which model."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_lm_kvcache_plugin.hookspecs import hookimpl
from mlx_lm_kvcache_plugin.options import MIB
from mlx_lm_kvcache_plugin.patches import serving as serving_module
from mlx_lm_kvcache_plugin.patches.arguments import StockDefault
from mlx_lm_kvcache_plugin.patches.bindings import bound
from mlx_lm_kvcache_plugin.patches.layer_kinds import BuiltInLayerKinds, TokenWise
from mlx_lm_kvcache_plugin.patches.prompt_cache import PrefixPromptCache
from mlx_lm_kvcache_plugin.patches.ranks import Ranks
from mlx_lm_kvcache_plugin.patches.server import REBOUND
from mlx_lm_kvcache_plugin.patches.serving import FURTHEST, NO_LIMIT, Serving
from mlx_lm_kvcache_plugin.plugins import plugins
from mlx_lm_kvcache_plugin.settings import Settings
from tests.patches import cache_objects as objects

MODEL = ("model", None, None)
RAW = Settings(codec="raw", memory_mb=64, memory_percent=None)

Maker = Callable[[], Any]

PLAIN: list[Maker] = [KVCache, KVCache]
WINDOWS: list[Maker] = [lambda: RotatingKVCache(objects.WINDOW), KVCache]
STATES: list[Maker] = [lambda: ArraysCache(1), KVCache]


@pytest.fixture(autouse=True)
def fresh_plugins() -> Iterator[None]:
    plugins.cache_clear()
    plugins().register(BuiltInLayerKinds(), BuiltInLayerKinds.NAME)
    yield
    plugins.cache_clear()


class Model:
    """Fills its caches with nothing but shapes."""

    def __init__(self, makers: list[Maker]) -> None:
        self.makers = makers

    def make_cache(self) -> list[Any]:
        return [make() for make in self.makers]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> None:
        for layer in cache:
            rows = mx.zeros((1, 2, tokens.shape[1], 64))
            if isinstance(layer, ArraysCache):
                layer[0] = rows
            else:
                layer.update_and_fetch(rows, rows)


class Provider:
    """Upstream's, as far as the patch knows it."""

    models: dict[str, list[Maker]] = {}

    def __init__(self) -> None:
        self.model_key: tuple[Any, ...] | None = None
        self.model: Any = None
        self.draft_model: Any = None

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> tuple[object, str]:
        key = (model_path, adapter_path, draft_model_path)
        if key != self.model_key:
            self.model = Model(self.models.get(model_path, PLAIN))
            self.model_key = key
        return self.model, "tokenizer"


class Responses:
    """Upstream's, which cuts a prompt into segments."""

    segments: tuple[Any, ...] = ()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> tuple[Any, ...]:
        return self.segments


class Batches:
    """Upstream's, which knows what it is decoding with."""

    prompt_cache_nbytes = 0


def stream_generate(**options: Any) -> Iterator[Any]:
    yield options


STOCK = {
    "ModelProvider": Provider,
    "ResponseGenerator": Responses,
    "BatchGenerator": Batches,
    "APIHandler": object,
    "stream_generate": stream_generate,
    "_run_http_server": lambda *arguments, handler_class: handler_class,
}


class Server:
    """A module of upstream's with our names in it, and what it would make of them."""

    def __init__(self, settings: Settings | None = RAW, prompt_cache_bytes: int | None = None):
        self.serving = Serving(settings, prompt_cache_bytes)
        self.names = bound(self.serving, STOCK)
        self.provider = self.names["ModelProvider"]()
        self.responses = self.names["ResponseGenerator"]()

    def start(self, *size: int) -> Any:
        """Make the prompt cache, which the caller has to hold."""
        return self.names["LRUPromptCache"](*size)

    def segments(self, lengths: list[int], labels: list[str], *others: Any) -> tuple[Any, ...]:
        """What becomes of a prompt that upstream cuts like this."""
        prompt = list(range(sum(lengths)))
        starts = [sum(lengths[:place]) for place in range(len(lengths))]
        pieces = [prompt[s : s + n] for s, n in zip(starts, lengths, strict=True)]
        self.responses.segments = (prompt, pieces, labels, *others)
        tokenized: tuple[Any, ...] = self.responses._tokenize(NO_THINKING, None, None)
        return tokenized


NO_THINKING = SimpleNamespace(has_thinking=False)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three that can be loaded by their names."""
    known = {"plain": PLAIN, "windows": WINDOWS, "states": STATES}
    monkeypatch.setattr(Provider, "models", known)


# The prompt cache


def test_what_is_bound_are_all_names_and_no_others() -> None:
    """Those that the patch takes over."""
    assert set(Server().names) == set(REBOUND)


def test_the_server_runs_with_our_request_handler() -> None:
    """Upstream's own is the default of its functions, which no rebinding reaches."""
    names = Server().names
    assert names["_run_http_server"]("host", 8080, None) is names["APIHandler"]
    assert names["_run_http_server"]("host", 8080, None, handler_class=int) is int


def test_a_typed_size_counts_and_a_default_does_not() -> None:
    """Stock's default of 10 means ten copies of everything, which is not what is kept here."""
    server = Server()
    for size, expected in (((), None), ((StockDefault(10),), None), ((10,), 10)):
        assert server.start(*size).cache.max_sequences == expected


def test_settings_may_wait_for_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that parses no arguments has variables, read when its cache is made."""
    server = Server(None)
    monkeypatch.setenv("MLX_LM_CACHE_MEMORY_MB", "3")
    assert server.start().cache.settings.memory_mb == 3
    monkeypatch.setenv("MLX_LM_DISABLE_PREFIX_CACHE", "1")
    assert server.start().cache is None


@pytest.mark.parametrize(
    ("settings", "size", "prompt_cache_bytes", "active", "expected"),
    [
        (RAW, (10,), None, 0, 64 * MIB),
        (RAW, (10, 1000), None, 0, 1000),
        (RAW, (10,), 70_000, 0, 70_000),
        (RAW, (10,), 70_000, 30_000, 40_000),
        (RAW, (10, 1000), 70_000, 30_000, 1000),
        (RAW, (10,), 70_000, 90_000, 0),
    ],
)
def test_the_smallest_limit_holds(
    settings: Settings,
    size: tuple[int, ...],
    prompt_cache_bytes: int | None,
    active: int,
    expected: int,
) -> None:
    """Ours, upstream's, and what `--prompt-cache-bytes` leaves beside what is being decoded."""
    server = Server(settings, prompt_cache_bytes)
    face = server.start(*size)
    generator = server.names["BatchGenerator"]()
    generator.prompt_cache_nbytes = active
    face.cache.keep_within_budget()
    assert face.cache.tree.limit_bytes == expected
    del generator
    gc.collect()
    face.cache.keep_within_budget()
    unclaimed = NO_LIMIT if prompt_cache_bytes is None else prompt_cache_bytes
    assert face.cache.tree.limit_bytes == min(64 * MIB, unclaimed, *size[1:])


def test_several_ranks_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ours, which agrees with the other ranks before each hit."""
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    monkeypatch.setattr(mx.distributed, "init", lambda: group)
    face = Server().start()
    assert isinstance(face, PrefixPromptCache) and face.ranks.size == 2


# The model


def test_each_loaded_model_is_announced_once(
    models: None, caplog: pytest.LogCaptureFixture
) -> None:
    """At level INFO; a model that is there already is not."""
    caplog.set_level(logging.INFO, "mlx_lm_kvcache_plugin")
    server = Server()
    face = server.start()
    for path in ("plain", "plain", "windows", "plain"):
        model, tokenizer = server.provider.load(path)
        assert model is server.provider.model and tokenizer == "tokenizer"
    lines = [record.getMessage() for record in caplog.records]
    assert ["1 window" in line for line in lines] == [False, True, False]
    assert all(record.levelno == logging.INFO for record in caplog.records)
    del face


def test_a_model_without_a_prompt_cache_is_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    """It is loaded by someone who has none, or after it is gone."""
    caplog.set_level(logging.INFO, "mlx_lm_kvcache_plugin")
    server = Server()
    server.provider.load("plain")
    face = server.start()
    del face
    gc.collect()
    server.provider.load("other")
    assert not caplog.records


def test_a_cache_that_keeps_nothing_is_announced_too(caplog: pytest.LogCaptureFixture) -> None:
    """So that no one wonders."""
    caplog.set_level(logging.INFO, "mlx_lm_kvcache_plugin")
    server = Server(Settings(disabled=True))
    face = server.start()
    server.provider.load("plain")
    assert face.cache is None
    (record,) = caplog.records
    assert "disabled" in record.getMessage()


def test_an_announcement_that_fails_is_no_failure_of_the_load(
    models: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told as a warning, and the model serves, with its checkpoints."""

    def fail(*models: object) -> str:
        raise RuntimeError("no idea")

    monkeypatch.setattr(serving_module, "announcement", fail)
    server = Server()
    face = server.start()
    server.provider.load("windows")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "no idea" in record.getMessage()
    assert server.segments([3000], ["assistant"])[2] == ["prompt"] * 2
    del face


def test_a_model_whose_layers_cannot_be_told_serves_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without checkpoints on the way: they are known with its first request."""
    server = Server()
    face = server.start()

    class Broken(Model):
        def make_cache(self) -> list[Any]:
            raise RuntimeError("no idea")

    server.provider.model, server.provider.model_key = Broken([]), MODEL
    server.serving.model_loaded(server.provider)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"prefix cache: the model{what} cannot be told: RuntimeError('no idea')"
        for what in (" itself", "'s layers")
    ]
    assert server.segments([3000], ["assistant"])[2] == ["assistant"]
    del face


def test_what_is_stored_of_another_model_goes_first(models: None) -> None:
    """Of those that are not loaded, though it was used last; a model's own order stays."""
    server = Server(Settings(codec="raw", memory_mb=1, memory_percent=None))
    face = server.start()
    server.provider.load("plain")
    one, other = ("plain", None, None), ("windows", None, None)

    def put(key: Any, start: int) -> None:
        tokens = list(range(start, start + 200))
        face.insert_cache(key, tokens, [objects.plain(200)])

    def hits(key: Any) -> list[bool]:
        return [face.cache.match(key, list(range(n, n + 150))) is not None for n in (0, 1000, 2000)]

    entry_bytes = 200 * 2 * 2 * 64 * 4
    assert 4 * entry_bytes < MIB < 6 * entry_bytes
    put(one, 0), put(one, 1000)
    server.provider.load("windows")
    put(other, 0), put(other, 1000)
    server.provider.load("plain")
    assert (hits(one), hits(other)) == ([True, True, False], [True, True, False])
    put(one, 2000)
    put(one, 3000)
    assert hits(one) == [True, True, True] and hits(other) == [False, True, False]
    put(one, 4000)
    assert hits(other) == [False] * 3 and hits(one) == [True] * 3


def test_a_model_that_comes_back_finds_what_it_left(models: None) -> None:
    """And never what another one stored, or the same one with an adapter or a draft."""
    server = Server()
    face = server.start()
    keys = [("plain", None, None), ("plain", "adapter", None), ("plain", None, "draft")]
    tokens = list(range(50))
    for key in keys:
        server.provider.load(*key)
        assert face.fetch_nearest_cache(key, [*tokens, 1])[0] is None
        face.insert_cache(key, tokens, [objects.plain(50)])
    for key in reversed(keys):
        server.provider.load(*key)
        assert face.fetch_nearest_cache(key, [*tokens, 1])[1] == [1]


# Checkpoints


@pytest.mark.parametrize("others", [("normal",), ("normal", None)], ids=["0.31", "0.32"])
def test_a_model_that_can_be_cut_anywhere_keeps_its_segments(
    models: None, others: tuple[Any, ...]
) -> None:
    """The very same objects: nothing of this runs."""
    server = Server()
    face = server.start()
    server.provider.load("plain")
    found = server.segments([40, 5000, 7], ["system", "user", "assistant"], *others)
    assert found is server.responses.segments
    options = {"prompt_progress_callback": print, "prompt_cache": []}
    assert server.serving.watched(options) is options
    del face


@pytest.mark.parametrize("others", [("normal",), ("normal", None)], ids=["0.31", "0.32"])
@pytest.mark.parametrize("path", ["windows", "states"])
def test_a_model_that_cannot_gets_checkpoints_on_the_way(
    models: None, path: str, others: tuple[Any, ...]
) -> None:
    """As many tokens apart as was asked for; what else upstream returns is handed on."""
    server = Server(Settings(checkpoint_tokens=64))
    face = server.start()
    server.provider.load(path)
    prompt, pieces, labels, *rest = server.segments([40, 100], ["system", "user"], *others)
    assert prompt is server.responses.segments[0] and rest == list(others)
    assert [len(piece) for piece in pieces] == [40, 24, 64, 12]
    assert labels == ["system", "prompt", "prompt", "user"]
    assert sum(pieces, []) == prompt
    del face


@pytest.mark.parametrize(("every", "expected"), [(0, [9000]), (2048, [2048] * 4 + [808])])
def test_how_far_checkpoints_are_apart(models: None, every: int, expected: list[int]) -> None:
    """2,048 tokens unless it is said; 0 sets them where turns end, and nowhere else."""
    server = Server(Settings(checkpoint_tokens=every))
    face = server.start()
    server.provider.load("windows")
    assert [len(piece) for piece in server.segments([9000], ["assistant"])[1]] == expected
    assert Settings().checkpoint_tokens == 2048
    del face


def test_checkpoints_come_and_go_with_the_model(models: None) -> None:
    """One server, three models, one after the other, and the distance stays."""
    server = Server(Settings(checkpoint_tokens=64))
    face = server.start()
    for path, pieces in (("plain", 1), ("windows", 3), ("plain", 1), ("states", 3)):
        server.provider.load(path)
        assert len(server.segments([150], ["assistant"])[1]) == pieces
    del face


def test_the_opening_of_the_thinking_is_a_checkpoint(models: None) -> None:
    """Where upstream leaves a prompt whole, the next turn will leave it there."""
    server = Server()
    face = server.start()
    server.provider.load("states")
    tokenizer = SimpleNamespace(
        has_thinking=True, rfind_think_start=lambda tokens, start: start + 4
    )
    server.responses.segments = (list(range(60)), [list(range(60))], ["assistant"], "reasoning")
    _, pieces, labels, _ = server.responses._tokenize(tokenizer, None, None)
    assert [len(piece) for piece in pieces] == [53, 7] and labels == ["prompt", "assistant"]
    del face


def test_a_prefill_that_is_watched_stores_on_its_way(models: None) -> None:
    """Behind the hit that it began with, under the model's key, and upstream is told as ever."""
    server = Server(Settings(codec="raw", checkpoint_tokens=16))
    face = server.start()
    server.provider.load("windows")
    key, tokens = server.provider.model_key, list(range(100))

    def caches(end: int) -> list[Any]:
        return [objects.rotating(end), objects.plain(end)]

    face.insert_cache(key, tokens[:20], caches(20), cache_type="system")
    caches_of_request, rest = face.fetch_nearest_cache(key, tokens)
    assert len(rest) == 80
    inserted: list[tuple[list[int], str]] = []
    insert = face.insert_cache

    def watched_insert(model: Any, tokens: list[int], caches: Any, *, cache_type: str) -> None:
        assert model == key and caches is caches_of_request
        inserted.append((tokens, cache_type))
        insert(model, tokens, caches, cache_type=cache_type)

    face.insert_cache = watched_insert
    reported: list[tuple[int, int]] = []
    options = {
        "prompt": rest,
        "prompt_cache": caches_of_request,
        "prompt_progress_callback": lambda *progress: reported.append(progress),
    }
    (given,) = server.names["stream_generate"](**options)
    assert {name: given[name] for name in ("prompt", "prompt_cache")} == {
        name: options[name] for name in ("prompt", "prompt_cache")
    }
    for computed in (0, 30, 60, 79, 80):
        caches_of_request[:] = caches(20 + computed)
        given["prompt_progress_callback"](computed, 80)
    assert reported == [(0, 80), (30, 80), (60, 80), (79, 80), (80, 80)]
    assert [(len(stored), label) for stored, label in inserted] == [
        (50, "prompt"),
        (80, "prompt"),
        (99, "user"),
    ]
    assert all(stored == tokens[: len(stored)] for stored, _ in inserted)
    assert face.fetch_nearest_cache(key, [*tokens, 7])[1] == [99, 7]


@pytest.mark.parametrize("missing", ["prompt_progress_callback", "prompt_cache"])
def test_a_prefill_that_says_nothing_is_not_watched(models: None, missing: str) -> None:
    """As any other caller of upstream's function: its options are passed on."""
    server = Server()
    face = server.start()
    server.provider.load("windows")
    options = {"prompt_progress_callback": print, "prompt_cache": [], "prompt": [1]}
    del options[missing]
    assert server.serving.watched(options) is options
    del face
    gc.collect()
    whole = {"prompt_progress_callback": print, "prompt_cache": []}
    assert server.serving.watched(whole) is whole


# Several ranks


def ranks_that_say(*says: int) -> tuple[Ranks, list[int]]:
    """Ours, beside another one that says these numbers in turn; and what is left of them."""
    left = list(says)

    def all_min(numbers: list[int]) -> list[int]:
        mine, _ = numbers
        other = left.pop(0)
        return [min(mine, other), min(-mine, -other)]

    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    return Ranks(group, all_min), left


@pytest.mark.parametrize(
    ("path", "every", "says", "expected"),
    [
        ("plain", 64, (0, 64), [150]),
        ("plain", 64, (1, 64), [64, 64, 22]),
        ("windows", 64, (0, 64), [64, 64, 22]),
        ("windows", 64, (1, 32, 32), [32] * 4 + [22]),
        ("windows", 64, (1, 100, 64), [64, 64, 22]),
        ("windows", 0, (1, 100, 100), [100, 50]),
        ("windows", 0, (1, FURTHEST), [150]),
        ("windows", 64, (1, FURTHEST, 64), [64, 64, 22]),
    ],
)
def test_ranks_cut_a_prompt_alike(
    models: None, path: str, every: int, says: tuple[int, ...], expected: list[int]
) -> None:
    """Or a batch would be computed in other steps on each: if one needs checkpoints, all set them.

    As far apart as the one wants that wants them closest.
    """
    server = Server(Settings(checkpoint_tokens=every))
    face = server.start()
    face.ranks, left = ranks_that_say(*says)
    server.provider.load(path)
    assert not left
    assert [len(piece) for piece in server.segments([150], ["assistant"])[1]] == expected


def test_a_rank_that_keeps_nothing_cuts_alike(models: None) -> None:
    """`--disable-prefix-cache` on one of them: it needs none, and sets them for the others."""
    server = Server(Settings(disabled=True))
    face = server.start()
    face.ranks, left = ranks_that_say(1, 64, 64)
    server.provider.load("windows")
    assert not left
    assert len(server.segments([150], ["assistant"])[1]) == 3


# Plugins


def test_a_plugin_can_teach_a_layer_kind(models: None) -> None:
    """A class that can be cut anywhere then needs no checkpoints."""

    class Own(KVCache):  # type: ignore[misc]
        pass

    class Teacher:
        @hookimpl
        def kvcache_register_layer_kinds(self, register: Any) -> None:
            register(Own, TokenWise(Own))

    for teaches, pieces in ((False, 3), (True, 1)):
        if teaches:
            plugins().register(Teacher(), "teacher")
        server = Server(Settings(checkpoint_tokens=64))
        face = server.start()
        server.provider.model, server.provider.model_key = Model([Own, KVCache]), MODEL
        server.serving.model_loaded(server.provider)
        assert len(server.segments([150], ["assistant"])[1]) == pieces
        del face
