"""The plugin's own flags, and what a command of upstream has to do with them.

The flags are registered through the hooks that any other plugin would use.
"""

from __future__ import annotations

import argparse
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any, ClassVar

from ..errors import CodecError, KVCachePluginError, SettingsError
from ..hookspecs import hookimpl
from ..options import OPTIONS, has_variables, options_of
from ..plugins import plugins
from ..settings import Settings
from .arguments import add_options, argparse_namespace

(CODEC,) = (option for option in OPTIONS if option.name == "kv_cache_codec")


class BuiltInFlags:
    """Adds the flags of `options.OPTIONS` and turns their values into `args.kv_cache_settings`."""

    NAME = "built-in flags"

    @staticmethod
    @hookimpl(tryfirst=True)
    def kvcache_add_arguments(group: Any, command: str) -> None:
        add_options(group, options_of(command), has_variables(command))

    @staticmethod
    @hookimpl(tryfirst=True)
    def kvcache_configure(
        args: argparse.Namespace, command: str, parser: argparse.ArgumentParser
    ) -> None:
        try:
            settings = Settings.resolve(vars(args), os.environ if has_variables(command) else {})
            plugins().codecs().create_pair(settings)
        except SettingsError as error:
            parser.error(str(error))
        except CodecError as error:
            source = CODEC.flag if args.kv_cache_codec else f"environment variable {CODEC.variable}"
            parser.error(f"{source}: {error}")
        args.kv_cache_settings = settings


class CommandPatch(ABC):
    """The flags of an upstream command, and what switches its module over to ours.

    Args:
        module: upstream's, freshly executed.
        rebound: the names in it that are bound to ours while the plugin is on.

    Attributes:
        command: what follows "mlx_lm." in the command's name.
        mark_defaults: see `arguments.Extension`.
        module: as it was given.
        stock: what the names are bound to otherwise.
    """

    command: ClassVar[str]
    mark_defaults: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, module: ModuleType, rebound: Collection[str]) -> None:
        self.module = module
        self.stock = {name: getattr(module, name) for name in rebound}

    def apply(self) -> None:
        """Add the flags; switch on at once if a variable asks for it."""
        self.module.argparse = argparse_namespace(  # type: ignore[attr-defined]
            self.command, self.add_arguments, self.configure, self.mark_defaults
        )
        if has_variables(self.command) and Settings.is_requested(os.environ):
            vars(self.module).update(self.bindings(None, None))

    @abstractmethod
    def bindings(
        self, settings: Settings | None, args: argparse.Namespace | None
    ) -> Mapping[str, Any]:
        """What the names are bound to while the plugin is on.

        Args:
            settings: what was asked for; None to read the environment when it is needed.
            args: of the command; None if it has not parsed any.
        """

    def is_wanted(self, settings: Settings) -> bool:
        """Whether these settings ask for ours."""
        return settings.requested

    def add_arguments(self, group: Any) -> None:
        """Add all plugins' options to our group."""
        plugins().call("kvcache_add_arguments", group=group, command=self.command)
        plugins().require(BuiltInFlags.NAME)  # without them the group is taken back

    def configure(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Switch on or off, as the parsed arguments and the variables say."""
        plugins().call("kvcache_configure", args=args, command=self.command, parser=parser)
        try:
            plugins().require(BuiltInFlags.NAME)
        except KVCachePluginError as error:
            parser.error(str(error))  # never the stock cache for someone who asked for ours
        settings: Settings | None = getattr(args, "kv_cache_settings", None)
        is_on = settings is not None and self.is_wanted(settings)
        vars(self.module).update(self.bindings(settings, args) if is_on else self.stock)
