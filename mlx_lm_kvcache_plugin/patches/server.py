"""The patch of `mlx_lm.server`: our flags, and our prompt cache once one of them is used."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any, ClassVar

from ..plugins import plugins
from ..settings import Settings
from . import shape
from .bindings import bound
from .flags import BuiltInFlags, CommandPatch
from .layer_kinds import register_built_in
from .serving import Serving

REBOUND = (
    "LRUPromptCache",
    "ModelProvider",
    "ResponseGenerator",
    "BatchGenerator",
    "APIHandler",
    "stream_generate",
    "_run_http_server",
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
    register_built_in()
    ServerPatch(module).apply()


def check_shape(module: ModuleType) -> None:
    """Compare what this patch relies on with what the module is."""
    shape.require_names(module, [*REBOUND, "argparse", "main", "run"])
    shape.require_parameters(module.LRUPromptCache, PROMPT_CACHE_METHODS)
    shape.require_members(module.ResponseGenerator, "prompt_cache", PROMPT_CACHE_MEMBERS)
    shape.require_parameters(
        module.ModelProvider, {"load": ("model_path", "adapter_path", "draft_model_path")}
    )
    shape.require_use(module.ModelProvider.load, ["_load"])
    shape.require_names(module.BatchGenerator, ["prompt_cache_nbytes"])
    shape.require_use(module.main, ["argparse", "ModelProvider"])
    shape.require_parameters(
        module.ResponseGenerator, {"_tokenize": ("tokenizer", "request", "args")}
    )
    shape.require_use(module.run, ["LRUPromptCache", "ResponseGenerator", "_run_http_server"])
    shape.require_parameter(module._run_http_server, "handler_class")
    shape.require_parameter(module.APIHandler.__init__, "response_generator")
    shape.require_parameters(module.APIHandler, {"do_GET": (), "do_POST": (), "do_OPTIONS": ()})
    shape.require_use(module.ResponseGenerator._serve_single, ["stream_generate"])
    shape.require_use(module.ResponseGenerator._generate, ["BatchGenerator"])


class ServerPatch(CommandPatch):
    """The flags of the server, and what switches it over to our classes."""

    command: ClassVar[str] = "server"
    mark_defaults: ClassVar[frozenset[str]] = frozenset({"prompt_cache_size"})

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module, REBOUND)

    def bindings(
        self, settings: Settings | None, args: argparse.Namespace | None
    ) -> dict[str, Any]:
        """Our classes; without settings, a cache reads the environment when it is made."""
        return bound(Serving(settings, getattr(args, "prompt_cache_bytes", None)), self.stock)
