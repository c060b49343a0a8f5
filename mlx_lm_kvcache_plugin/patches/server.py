"""The patch of `mlx_lm.server`: our flags, and our prompt cache once one of them is used."""

from __future__ import annotations

import argparse
import os
from types import ModuleType
from typing import Any

from ..errors import KVCachePluginError
from ..plugins import plugins
from ..settings import Settings
from . import shape
from .arguments import argparse_namespace
from .flags import BuiltInFlags
from .layer_kinds import BuiltInLayerKinds
from .serving import Serving, bound

COMMAND = "server"

REBOUND = (
    "LRUPromptCache",
    "ModelProvider",
    "ResponseGenerator",
    "BatchGenerator",
    "stream_generate",
)
"""The names of upstream's module that are bound to ours while the plugin is on."""

PROMPT_CACHE_METHODS = {
    "__init__": ("max_size", "max_bytes"),
    "fetch_nearest_cache": ("model", "tokens"),
    "insert_cache": ("model", "tokens", "prompt_cache", "cache_type"),
    "trim_to": ("n_sequences", "n_bytes"),
    "stats_by_type": (),
}

PROMPT_CACHE_MEMBERS = {*PROMPT_CACHE_METHODS, "nbytes"}


def apply(module: ModuleType) -> None:
    """Give the server our flags, and our classes at once if the environment asks for them.

    Raises:
        PatchRefused: if the module does not have the shape that this was written for.
    """
    check_shape(module)
    plugins().register(BuiltInFlags(), BuiltInFlags.NAME)
    plugins().register(BuiltInLayerKinds(), BuiltInLayerKinds.NAME)
    ServerPatch(module).apply()


def check_shape(module: ModuleType) -> None:
    """Compare what this patch relies on with what the module is."""
    shape.require_names(module, [*REBOUND, "argparse", "main", "run"])
    shape.require_parameters(module.LRUPromptCache, PROMPT_CACHE_METHODS)
    shape.require_members(module.ResponseGenerator, "prompt_cache", PROMPT_CACHE_MEMBERS)
    shape.require_parameters(
        module.ModelProvider, {"load": ("model_path", "adapter_path", "draft_model_path")}
    )
    shape.require_names(module.BatchGenerator, ["prompt_cache_nbytes"])
    shape.require_use(module.main, ["argparse", "ModelProvider"])
    shape.require_parameters(
        module.ResponseGenerator, {"_tokenize": ("tokenizer", "request", "args")}
    )
    shape.require_use(module.run, ["LRUPromptCache", "ResponseGenerator"])
    shape.require_use(module.ResponseGenerator._serve_single, ["stream_generate"])
    shape.require_use(module.ResponseGenerator._generate, ["BatchGenerator"])


class ServerPatch:
    """The flags of the server, and what switches it over to our classes.

    Args:
        module: upstream's, freshly executed.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._stock = {name: getattr(module, name) for name in REBOUND}

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
        if settings is not None and settings.requested:
            self._switch_on(settings, getattr(args, "prompt_cache_bytes", None))
        else:
            self._switch_off()

    def _switch_on(self, settings: Settings | None, prompt_cache_bytes: int | None = None) -> None:
        """Bind our classes; without settings, a cache reads the environment when it is made."""
        vars(self._module).update(bound(Serving(settings, prompt_cache_bytes), self._stock))

    def _switch_off(self) -> None:
        vars(self._module).update(self._stock)
