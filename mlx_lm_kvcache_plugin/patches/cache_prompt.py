"""The patch of `mlx_lm.cache_prompt`: the file that it writes can be quantized."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from ..codecs.raw import RawCodec
from ..errors import PromptFileError
from ..plugins import plugins
from ..settings import Settings
from . import shape
from .flags import BuiltInFlags, CommandPatch
from .layer_kinds import register_built_in
from .prompt_file import save

REBOUND = ("save_prompt_cache",)


def apply(module: ModuleType) -> None:
    """Give the command the flags that say how its file is encoded.

    Raises:
        PatchRefused: if the module does not have the shape that this was written for.
    """
    shape.require_names(module, [*REBOUND, "argparse", "main", "setup_arg_parser"])
    shape.require_use(module.main, [*REBOUND, "setup_arg_parser"])
    shape.require_use(module.setup_arg_parser, ["argparse"])
    plugins().register(BuiltInFlags(), BuiltInFlags.NAME)
    register_built_in()
    CachePromptPatch(module).apply()


class CachePromptPatch(CommandPatch):
    """The flags of `mlx_lm.cache_prompt`, and who writes its file."""

    command: ClassVar[str] = "cache_prompt"

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module, REBOUND)

    def is_wanted(self, settings: Settings) -> bool:
        return settings.codec != RawCodec.name

    def bindings(
        self, settings: Settings | None, args: argparse.Namespace | None
    ) -> dict[str, Callable[..., Any]]:
        """Ours, if a flag says how the file is to be encoded.

        No variable does: a script may read the file with upstream's own function.
        """
        if settings is None:
            return {}
        stock = self.stock["save_prompt_cache"]

        def save_prompt_cache(file_name: str, cache: list[Any], metadata: Any = None) -> None:
            try:
                print(f"Saved quantized: {save(file_name, cache, metadata or {}, settings)}")
            except PromptFileError as error:
                print(f"mlx_lm_kvcache_plugin: saved in full precision: {error}", file=sys.stderr)
                stock(file_name, cache, metadata)

        return {"save_prompt_cache": save_prompt_cache}
