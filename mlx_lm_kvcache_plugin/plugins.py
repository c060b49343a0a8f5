"""The plugins: loading them, calling them one by one, and setting aside those that fail."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from . import hookspecs
from .errors import KVCachePluginError
from .hookspecs import PROJECT, hookimpl

if TYPE_CHECKING:
    from .codecs.registry import CodecRegistry
    from .layers import LayerKinds

PLUGINS_VARIABLE = "MLX_LM_KVCACHE_PLUGINS"
"""A comma-separated list of the entry points to load; not set, all of them."""

logger = logging.getLogger(PROJECT)


class BuiltInCodecs:
    """The codecs that come with the package."""

    @staticmethod
    @hookimpl(tryfirst=True)  # whoever wants one of their names is the one to be refused
    def kvcache_register_codecs(register: Any) -> None:
        from .codecs.registry import BUILT_IN

        for name, factory in BUILT_IN.items():
            register(name, factory)


class Plugins:
    """The registered plugins. A plugin that raises is named in the log and takes no further part.

    Args:
        environ: where to look for `MLX_LM_KVCACHE_PLUGINS`.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.set_aside: dict[str, str] = {}
        self.register(BuiltInCodecs(), "built-in codecs")
        wanted = environ.get(PLUGINS_VARIABLE)
        names = None if wanted is None else {name.strip() for name in wanted.split(",")}
        for entry_point in entry_points(group=PROJECT):
            if names is None or entry_point.name in names:
                self._load(entry_point)

    def names(self) -> list[str]:
        """The plugins that take part, in the order of registration."""
        return [name for name, _ in self._manager.list_name_plugin()]

    def register(self, plugin: object, name: str) -> None:
        """Add a plugin; one with an unknown or ill-formed hook is set aside."""
        if name in self.names():
            return
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            self._set_aside(name, "registering", error)

    def call(self, hook: str, **arguments: Any) -> None:
        """Call a hook on one plugin after the other, so that one that fails harms no other."""
        everyone = self._manager.get_plugins()
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            others = [other for other in everyone if other is not implementation.plugin]
            try:
                self._manager.subset_hook_caller(hook, others)(**arguments)
            except SystemExit as error:
                if hook == "kvcache_configure":  # `parser.error`
                    raise
                self._set_aside(implementation.plugin_name, hook, error)
            except Exception as error:
                self._set_aside(implementation.plugin_name, hook, error)

    def require(self, name: str) -> None:
        """Raise a KVCachePluginError if a plugin was set aside."""
        if name in self.set_aside:
            raise KVCachePluginError(f"{name}: {self.set_aside[name]}")

    def codecs(self) -> CodecRegistry:
        """All codecs that the plugins register."""
        from .codecs.registry import CodecRegistry

        registry = CodecRegistry()
        self.call("kvcache_register_codecs", register=registry.register)
        return registry

    def layer_kinds(self) -> LayerKinds:
        """All kinds of layers that the plugins register."""
        from .layers import LayerKinds

        kinds = LayerKinds()
        self.call("kvcache_register_layer_kinds", register=kinds.register)
        return kinds

    def _load(self, entry_point: EntryPoint) -> None:
        try:
            plugin = entry_point.load()
        except (Exception, SystemExit) as error:
            self._set_aside(entry_point.name, "loading", error)
        else:
            self.register(plugin, entry_point.name)

    def _set_aside(self, name: str, doing: str, error: BaseException) -> None:
        logger.warning("plugin %r is set aside: %s failed: %r", name, doing, error)
        self.set_aside[name] = f"{doing} failed: {error!r}"
        if self._manager.has_plugin(name):
            self._manager.unregister(name=name)


@functools.cache
def plugins() -> Plugins:
    """The process's plugins, loaded when first asked for."""
    return Plugins()
