"""The patch of `mlx_lm.server`: our flags, and our prompt cache once one of them is used."""

from __future__ import annotations

import argparse
import logging
import os
import weakref
from types import ModuleType
from typing import Any

import mlx.core as mx

from ..errors import KVCachePluginError
from ..plugins import plugins
from ..prefix_cache import PrefixCache
from ..settings import MIB, Settings
from ..store.budget import Budget
from . import shape
from .announcement import announcement
from .arguments import StockDefault, argparse_namespace
from .flags import BuiltInFlags
from .prompt_cache import PrefixPromptCache

logger = logging.getLogger("mlx_lm_kvcache_plugin")

COMMAND = "server"

REBOUND = ("LRUPromptCache", "ModelProvider", "BatchGenerator")
"""The names of upstream's module that get a class of ours while the plugin is on."""

PROMPT_CACHE_METHODS = {
    "__init__": ("max_size", "max_bytes"),
    "fetch_nearest_cache": ("model", "tokens"),
    "insert_cache": ("model", "tokens", "prompt_cache", "cache_type"),
    "trim_to": ("n_sequences", "n_bytes"),
    "stats_by_type": (),
}

PROMPT_CACHE_MEMBERS = {*PROMPT_CACHE_METHODS, "nbytes"}

NO_LIMIT = 1 << 63
"""Upstream's default of `LRUPromptCache(max_bytes=)`."""


def apply(module: ModuleType) -> None:
    """Give the server our flags, and our classes at once if the environment asks for them.

    Raises:
        PatchRefused: if the module does not have the shape that this was written for.
    """
    check_shape(module)
    plugins().register(BuiltInFlags(), BuiltInFlags.NAME)
    ServerPatch(module).apply()


def check_shape(module: ModuleType) -> None:
    """Compare what this patch relies on with what the module is."""
    shape.require_names(module, [*REBOUND, "ResponseGenerator", "argparse", "main", "run"])
    shape.require_parameters(module.LRUPromptCache, PROMPT_CACHE_METHODS)
    shape.require_members(module.ResponseGenerator, "prompt_cache", PROMPT_CACHE_MEMBERS)
    shape.require_parameters(
        module.ModelProvider, {"load": ("model_path", "adapter_path", "draft_model_path")}
    )
    shape.require_names(module.BatchGenerator, ["prompt_cache_nbytes"])
    shape.require_use(module.main, ["argparse", "ModelProvider"])
    shape.require_use(module.run, ["LRUPromptCache"])
    shape.require_use(module.ResponseGenerator._generate, ["BatchGenerator"])


class ServerPatch:
    """What ties the server's flags, its model and its prompt cache together.

    Args:
        module: upstream's, freshly executed.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._stock = {name: getattr(module, name) for name in REBOUND}
        self._prompt_cache_bytes: int | None = None
        self._cache: weakref.ref[PrefixCache] | None = None
        self._disabled = False
        self._generator: weakref.ref[Any] | None = None

    def apply(self) -> None:
        """Add the flags; switch on at once if a variable asks for it."""
        self._module.argparse = argparse_namespace(  # type: ignore[attr-defined]
            COMMAND,
            add=self._add_arguments,
            configure=self._configure,
            mark_defaults=frozenset({"prompt_cache_size"}),
        )
        if Settings.is_requested(os.environ):
            self._switch_on(None)

    def _add_arguments(self, group: Any) -> None:
        plugins().call("kvcache_add_arguments", group=group, command=COMMAND)
        plugins().require(BuiltInFlags.NAME)  # without them the group is taken back

    def _configure(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        plugins().call("kvcache_configure", args=args, command=COMMAND, parser=parser)
        try:
            plugins().require(BuiltInFlags.NAME)
        except KVCachePluginError as error:
            parser.error(str(error))  # never the stock cache for someone who asked for ours
        settings: Settings | None = getattr(args, "kv_cache_settings", None)
        self._prompt_cache_bytes = getattr(args, "prompt_cache_bytes", None)
        if settings is not None and settings.requested:
            self._switch_on(settings)
        else:
            self._switch_off()

    def _switch_on(self, settings: Settings | None) -> None:
        """Bind our classes; without settings, a cache reads the environment when it is made."""
        vars(self._module).update(
            LRUPromptCache=self._bind_prompt_cache(self._stock["LRUPromptCache"], settings),
            ModelProvider=self._bind_model_provider(self._stock["ModelProvider"]),
            BatchGenerator=self._bind_batch_generator(self._stock["BatchGenerator"]),
        )

    def _switch_off(self) -> None:
        vars(self._module).update(self._stock)

    def _bind_prompt_cache(self, stock: Any, settings: Settings | None) -> type:
        patch = self

        def chosen() -> Settings:
            return settings or Settings.resolve(None, os.environ)

        class LRUPromptCache(PrefixPromptCache):
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                if mx.distributed.init().size() > 1 and not chosen().disabled:
                    logger.warning("prefix cache: off, since it does not serve several ranks yet")
                    return stock(*args, **kwargs)
                return super().__new__(cls)

            def __init__(self, max_size: int = StockDefault(10), max_bytes: int = NO_LIMIT) -> None:
                super().__init__(patch._build_cache(chosen(), max_size, max_bytes))

        return LRUPromptCache

    def _build_cache(self, settings: Settings, max_size: int, max_bytes: int) -> PrefixCache | None:
        self._cache = None
        self._disabled = settings.disabled
        if settings.disabled:
            return None
        budget = Budget(
            limit_bytes=None if settings.memory_mb is None else settings.memory_mb * MIB,
            percent=settings.memory_percent,
            ceiling=lambda: min(max_bytes, self._unclaimed_bytes()),
            ceiling_origin="--prompt-cache-bytes, less what is being decoded with",
            relieve=mx.clear_cache,
        )
        cache = PrefixCache(
            settings,
            plugins().codecs(),
            budget,
            emit=_emit,
            max_sequences=None if isinstance(max_size, StockDefault) else max_size,
        )
        self._cache = weakref.ref(cache)
        return cache

    def _unclaimed_bytes(self) -> int:
        """What `--prompt-cache-bytes` leaves beside the caches that are being decoded with."""
        if self._prompt_cache_bytes is None:
            return NO_LIMIT
        generator = self._generator() if self._generator else None
        return self._prompt_cache_bytes - (generator.prompt_cache_nbytes if generator else 0)

    def _bind_model_provider(self, stock: Any) -> type:
        patch = self

        class ModelProvider(stock):  # type: ignore[misc]
            def load(self, *args: Any, **kwargs: Any) -> Any:
                before = self.model_key
                loaded = super().load(*args, **kwargs)
                if self.model_key != before:
                    patch._announce(self.model, getattr(self, "draft_model", None))
                return loaded

        return ModelProvider

    def _announce(self, model: Any, draft_model: Any | None) -> None:
        if self._disabled:
            logger.info("prefix cache: disabled, every request is prefilled from its first token")
            return
        cache = self._cache() if self._cache else None
        if cache is None:
            return
        try:
            logger.info(announcement(cache, model, draft_model))
        except Exception as error:
            logger.warning("prefix cache: nothing can be told about it yet: %r", error)

    def _bind_batch_generator(self, stock: Any) -> type:
        patch = self

        class BatchGenerator(stock):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                patch._generator = weakref.ref(self)

        return BatchGenerator


def _emit(event: Any) -> None:
    plugins().call("kvcache_event", event=event)
