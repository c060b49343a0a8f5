"""The plugin's own flags, registered through the hooks that any other plugin would use."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..errors import CodecError, SettingsError
from ..hookspecs import hookimpl
from ..plugins import plugins
from ..settings import OPTIONS, Settings
from .arguments import add_options

(CODEC,) = (option for option in OPTIONS if option.name == "kv_cache_codec")


class BuiltInFlags:
    """Adds the flags of `settings.OPTIONS` and turns their values into `args.kv_cache_settings`."""

    NAME = "built-in flags"

    @staticmethod
    @hookimpl(tryfirst=True)
    def kvcache_add_arguments(group: Any) -> None:
        add_options(group)

    @staticmethod
    @hookimpl(tryfirst=True)
    def kvcache_configure(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        try:
            settings = Settings.resolve(vars(args), os.environ)
            plugins().codecs().create_pair(settings)
        except SettingsError as error:
            parser.error(str(error))
        except CodecError as error:
            source = CODEC.flag if args.kv_cache_codec else f"environment variable {CODEC.variable}"
            parser.error(f"{source}: {error}")
        args.kv_cache_settings = settings
