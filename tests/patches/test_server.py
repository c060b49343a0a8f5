"""The patch of `mlx_lm.server`: refused where it does not fit, gone when it is switched off."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache
import mlx_lm.server
import pytest

import mlx_lm_kvcache_plugin as plugin
from mlx_lm_kvcache_plugin import patches
from mlx_lm_kvcache_plugin.errors import PatchRefused
from mlx_lm_kvcache_plugin.patches import server as patch
from mlx_lm_kvcache_plugin.patches.prompt_cache import PrefixPromptCache
from mlx_lm_kvcache_plugin.plugins import plugins
from tests.patches.refusals import check_refusal

MODEL = ("model", None, None)

Stock = mlx_lm.models.cache.LRUPromptCache


@pytest.fixture(autouse=True)
def fresh_plugins() -> Iterator[None]:
    plugins.cache_clear()
    yield
    plugins.cache_clear()


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line is pytest's; ours is empty."""
    monkeypatch.setattr(sys, "argv", ["mlx_lm.server"])


@pytest.fixture
def module() -> Any:
    """The server's module, freshly executed and not patched."""
    # This spec has the plain loader, whatever hooks are armed.
    spec = importlib.util.spec_from_file_location("mlx_lm.server", mlx_lm.server.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_caches(tokens: list[int]) -> list[Any]:
    """One layer that takes 512 bytes a token."""
    cache = mlx_lm.models.cache.KVCache()
    rows = mx.ones((1, 1, len(tokens), 64))
    cache.update_and_fetch(rows, rows)
    return [cache]


def parse(module: Any, *arguments: str) -> argparse.Namespace:
    """Run the module's `main()` with these arguments, up to where it would load a model."""
    parsed: list[argparse.Namespace] = []
    argv, run = sys.argv, module.run
    sys.argv = ["mlx_lm.server", *arguments]
    try:
        module.run = lambda host, port, model_provider: parsed.append(model_provider.cli_args)
        module.main()
    finally:
        sys.argv, module.run = argv, run
    return parsed[0]


# Shapes


class OtherCache(Stock):  # type: ignore[misc]
    """What upstream's class could become."""

    def fetch_nearest_cache(self, model: Any, tokens: Any, max_tokens: int = 0) -> Any:
        """With a parameter that we do not know."""


class NoTrim:
    def __init__(self, max_size: int = 10, max_bytes: int = 1) -> None: ...

    def fetch_nearest_cache(self, model: Any, tokens: Any) -> Any: ...

    def insert_cache(self, model: Any, tokens: Any, prompt_cache: Any, *, cache_type: Any) -> None:
        """All else is as it was."""

    def stats_by_type(self) -> None: ...


class CuriousGenerator:
    """Asks the prompt cache for what ours does not have."""

    prompt_cache: Any

    def _generate(self) -> None:
        self.prompt_cache.promote(BatchGenerator())  # type: ignore[name-defined]  # noqa: F821


class OtherBatches:
    """Makes its batches otherwise."""

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> None: ...

    def _serve_single(self, request: Any) -> None:
        stream_generate(request)  # type: ignore[name-defined]  # noqa: F821

    def _generate(self) -> None:
        """Nothing that looks up `BatchGenerator`."""


class OtherSingles(OtherBatches):
    """Generates by other means what is not batched."""

    def _serve_single(self, request: Any) -> None:
        """Nothing that looks up `stream_generate`."""


class OtherSegments:
    """Cuts its prompts otherwise."""

    def _tokenize(self, tokenizer: Any, request: Any) -> None:
        """Without the arguments."""


class OtherProvider:
    def load(self, model_path: str, adapter_path: str | None = None) -> None:
        """Without a draft."""


class LoadingProvider:
    def load(self, model_path: str, adapter_path: Any = None, draft_model_path: Any = None) -> None:
        """All by itself."""


class OtherHandler:
    """Has its routes elsewhere."""

    def __init__(self, response_generator: Any) -> None: ...

    def do_GET(self) -> None: ...

    def do_POST(self) -> None: ...


class HandlerOfNothing:
    """Does not say what it asks."""

    def __init__(self, *arguments: Any) -> None: ...


def run_otherwise(host: str, port: int, model_provider: Any) -> None:
    """With a server of its own."""
    ResponseGenerator(model_provider, LRUPromptCache())  # type: ignore[name-defined]  # noqa: F821


def serve_otherwise(host: str, port: int, response_generator: Any) -> None:
    """With a handler of its own."""


def idle() -> None:
    """Looks up nothing."""


WRONG_SHAPES: dict[str, tuple[str, Any, str]] = {
    "no cache": ("LRUPromptCache", None, "mlx_lm.server has no LRUPromptCache"),
    "no provider": ("ModelProvider", None, "mlx_lm.server has no ModelProvider"),
    "no batches": ("BatchGenerator", None, "mlx_lm.server has no BatchGenerator"),
    "no generator": ("ResponseGenerator", None, "mlx_lm.server has no ResponseGenerator"),
    "no argparse": ("argparse", None, "mlx_lm.server has no argparse"),
    "no main": ("main", None, "mlx_lm.server has no main"),
    "no run": ("run", None, "mlx_lm.server has no run"),
    "other parameters": (
        "LRUPromptCache",
        OtherCache,
        "OtherCache.fetch_nearest_cache does not take (model, tokens)",
    ),
    "no trim_to": (
        "LRUPromptCache",
        NoTrim,
        "NoTrim.trim_to does not take (n_sequences, n_bytes)",
    ),
    "more members": (
        "ResponseGenerator",
        CuriousGenerator,
        "CuriousGenerator uses prompt_cache.promote",
    ),
    "no stream": ("stream_generate", None, "mlx_lm.server has no stream_generate"),
    "other batches": (
        "ResponseGenerator",
        OtherBatches,
        "OtherBatches._generate does not use BatchGenerator",
    ),
    "other singles": (
        "ResponseGenerator",
        OtherSingles,
        "OtherSingles._serve_single does not use stream_generate",
    ),
    "other segments": (
        "ResponseGenerator",
        OtherSegments,
        "OtherSegments._tokenize does not take (tokenizer, request, args)",
    ),
    "other provider": (
        "ModelProvider",
        OtherProvider,
        "OtherProvider.load does not take (model_path, adapter_path, draft_model_path)",
    ),
    "provider that loads by itself": (
        "ModelProvider",
        LoadingProvider,
        "LoadingProvider.load does not use _load",
    ),
    "no request handler": ("APIHandler", None, "mlx_lm.server has no APIHandler"),
    "no HTTP server": ("_run_http_server", None, "mlx_lm.server has no _run_http_server"),
    "other HTTP server": (
        "_run_http_server",
        serve_otherwise,
        "serve_otherwise takes no handler_class",
    ),
    "run without the HTTP server": (
        "run",
        run_otherwise,
        "run_otherwise does not use _run_http_server",
    ),
    "other routes": ("APIHandler", OtherHandler, "OtherHandler.do_OPTIONS does not take ()"),
    "handler of nothing": (
        "APIHandler",
        HandlerOfNothing,
        "HandlerOfNothing.__init__ takes no response_generator",
    ),
    "main without argparse": ("main", idle, "idle does not use ModelProvider, argparse"),
    "run without our classes": (
        "run",
        idle,
        "idle does not use LRUPromptCache, ResponseGenerator",
    ),
}


@pytest.mark.parametrize("asked_for", [True, False])
@pytest.mark.parametrize("kind", WRONG_SHAPES)
def test_another_shape_is_refused(
    module: Any,
    kind: str,
    asked_for: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With its reason, the module untouched; on stderr only if a variable of ours is set."""
    check_refusal(module, WRONG_SHAPES[kind], asked_for, monkeypatch, capsys)


def test_a_flag_of_ours_on_the_command_line_asks_too(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the reason comes before argparse's own complaint."""
    monkeypatch.setattr(sys, "argv", ["mlx_lm.server", "--kv-cache-bits=4"])
    del module.BatchGenerator
    patches.apply(module)
    assert "mlx_lm.server has no BatchGenerator" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        module.main()
    assert "unrecognized arguments: --kv-cache-bits=4" in capsys.readouterr().err


def test_the_present_shape_is_known(module: Any) -> None:
    """That of the mlx-lm which is installed here."""
    patch.check_shape(module)


def test_a_patch_that_fails_halfway_leaves_the_module_as_it_was(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the error is."""

    def fail(module: Any) -> None:
        module.argparse = module.more = None
        del module.run
        raise LookupError("a bug\nof ours")

    monkeypatch.setenv("MLX_LM_KV_CACHE_BITS", "4")
    monkeypatch.setattr(patch, "apply", fail)
    before = dict(vars(module))
    patches.apply(module)
    assert vars(module) == before
    assert patches.outcomes["mlx_lm.server"].startswith("refused: LookupError(")
    assert capsys.readouterr().err.count("\n") == 1


# Switching on and off


def stock_names(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in patch.REBOUND}


def test_nothing_asked_for_changes_the_argument_parser_alone(module: Any) -> None:
    """The classes are stock's until a flag is used, and when none was."""
    before = dict(vars(module))
    patches.apply(module)
    changed = {name for name in before if before[name] is not vars(module)[name]}
    assert changed == {"argparse"} and vars(module).keys() == before.keys()
    parse(module)
    assert stock_names(module) == {name: before[name] for name in patch.REBOUND}
    assert sys.modules["argparse"] is argparse


def test_a_flag_binds_our_classes_and_its_absence_stocks(module: Any) -> None:
    """One process may parse many times: the last one counts."""
    stock = stock_names(module)
    patches.apply(module)
    for _ in range(2):
        parse(module, "--kv-cache-bits", "4")
        assert all(getattr(module, name) is not stock[name] for name in patch.REBOUND)
        assert issubclass(module.LRUPromptCache, PrefixPromptCache)
        assert issubclass(module.ModelProvider, stock["ModelProvider"])
        assert issubclass(module.ResponseGenerator, stock["ResponseGenerator"])
        assert issubclass(module.BatchGenerator, stock["BatchGenerator"])
        parse(module)
        assert stock_names(module) == stock


def test_a_variable_binds_our_classes_at_once(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For scripts that parse no arguments; it is read when a cache is made."""
    monkeypatch.setenv("MLX_LM_KV_CACHE_BITS", "4")
    patches.apply(module)
    cache = module.LRUPromptCache(10)
    assert isinstance(cache, PrefixPromptCache)
    assert (len(cache), cache.nbytes) == (0, 0)
    assert cache.cache.settings.key_bits == 4
    monkeypatch.setenv("MLX_LM_KV_CACHE_BITS", "8")
    assert module.LRUPromptCache(10).cache.settings.key_bits == 8
    assert mlx_lm.models.cache.LRUPromptCache is Stock


@pytest.mark.parametrize("value", ["0", "off", ""])
def test_a_switch_that_is_off_asks_for_nothing(
    module: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Neither when the module is imported nor when its arguments are parsed."""
    monkeypatch.setenv("MLX_LM_DISABLE_PREFIX_CACHE", value)
    patches.apply(module)
    assert module.LRUPromptCache is Stock
    parse(module)
    assert module.LRUPromptCache is Stock


def test_a_reload_patches_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, over what upstream defines anew; without our finder it is stock again."""
    plugin.install()
    module: Any = importlib.reload(mlx_lm.server)
    try:
        argparse_before = module.argparse
        parse(module, "--kv-cache-bits", "4")
        module = importlib.reload(module)
        assert module.LRUPromptCache is Stock
        assert module.argparse is not argparse_before and module.argparse is not argparse
        assert patches.outcomes["mlx_lm.server"] == "patched"
        parse(module, "--kv-cache-bits", "4")
        assert issubclass(module.LRUPromptCache, PrefixPromptCache)
        assert len([base for base in module.ModelProvider.__mro__ if base is not object]) == 2
        monkeypatch.setenv("MLX_LM_KVCACHE_PLUGIN_DISABLE", "1")
        module = importlib.reload(module)
        assert module.argparse is argparse and module.LRUPromptCache is Stock
    finally:
        importlib.reload(mlx_lm.server)


# What the parts do together


def test_a_typed_size_counts_and_the_default_does_not(module: Any) -> None:
    """Stock's default of 10 means ten copies of everything, which is not what is kept here."""
    patches.apply(module)
    for arguments, expected in (([], None), (["--prompt-cache-size", "10"], 10)):
        arguments_of_run = parse(module, "--kv-cache-bits", "4", *arguments)
        assert arguments_of_run.prompt_cache_size == 10
        cache = module.LRUPromptCache(arguments_of_run.prompt_cache_size)
        assert cache.cache.max_sequences == expected
    assert module.LRUPromptCache().cache.max_sequences is None
    assert module.LRUPromptCache(3).cache.max_sequences == 3
    assert module.LRUPromptCache(max_size=4).cache.max_sequences == 4


def test_max_bytes_is_a_limit(module: Any) -> None:
    """As in upstream's constructor, beside our own budget."""
    patches.apply(module)
    parse(module, "--kv-cache-codec", "raw")
    cache = module.LRUPromptCache(10, 20_000)
    for start in range(0, 500, 10):
        tokens = list(range(start, start + 10))
        cache.insert_cache(MODEL, tokens, plain_caches(tokens))
        assert 0 < cache.nbytes <= 20_000


def test_prompt_cache_bytes_leaves_room_for_what_is_decoded(module: Any) -> None:
    """What a batch holds is counted in, and given back with it."""
    patches.apply(module)
    parse(module, "--kv-cache-codec", "raw", "--prompt-cache-bytes", "60000")
    cache = module.LRUPromptCache(10)
    # Only what the patch adds is of interest: a generator that needs no model.
    generator = module.BatchGenerator.__new__(module.BatchGenerator)
    active = [0]
    module.BatchGenerator.prompt_cache_nbytes = property(lambda self: active[0])
    module.BatchGenerator.__del__ = lambda self: None
    stock_init = module.BatchGenerator.__mro__[1].__init__
    try:
        module.BatchGenerator.__mro__[1].__init__ = lambda self: None
        generator.__init__()
    finally:
        module.BatchGenerator.__mro__[1].__init__ = stock_init

    def held() -> int:
        for start in range(0, 300, 10):
            tokens = list(range(start, start + 10))
            cache.insert_cache(MODEL, tokens, plain_caches(tokens))
        return int(cache.nbytes)

    assert 50_000 < held() <= 60_000
    active[0] = 35_000
    assert 15_000 < held() <= 25_000
    active[0] = 70_000
    assert held() == 0
    del generator
    gc.collect()
    assert 50_000 < held() <= 60_000


def test_the_patch_keeps_no_cache_alive(module: Any) -> None:
    """Upstream deletes it on the thread that generates, where its arrays have to die."""
    patches.apply(module)
    parse(module, "--kv-cache-bits", "4")
    cache = module.LRUPromptCache(10)
    seen = weakref.ref(cache.cache)
    del cache
    gc.collect()
    assert seen() is None


def test_apply_says_why_it_refuses(module: Any) -> None:
    """To those who apply a patch by themselves."""
    del module.run
    with pytest.raises(PatchRefused, match="mlx_lm.server has no run"):
        patch.apply(module)


def test_other_names_of_the_environment_are_not_ours(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream has variables of its own that begin alike."""
    monkeypatch.setenv("MLX_LM_KV_BITS", "4")
    assert "MLX_LM_KV_BITS" in os.environ
    patches.apply(module)
    assert module.LRUPromptCache is Stock


def test_a_module_without_a_patch_is_left_alone() -> None:
    """Should a name get into the list of patched modules without a file for it."""
    module = ModuleType("mlx_lm.no_such_patch")
    module.value = 1  # type: ignore[attr-defined]
    patches.apply(module)
    assert module.value == 1
    assert patches.outcomes["mlx_lm.no_such_patch"].startswith("refused: ModuleNotFoundError")
