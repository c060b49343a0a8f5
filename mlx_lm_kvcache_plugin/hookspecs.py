"""The hooks that the plugin calls, for itself and for others. docs/hooks.md shows them at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import argparse

    from .codecs.registry import CodecFactory
    from .events import Event
    from .layers import LayerKind

PROJECT = "mlx_lm_kvcache_plugin"
"""The name of the project, of the hook markers, and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kvcache_add_arguments(group: Any, command: str) -> None:
    """Add options to the plugin's argument group of an mlx-lm command ("server", ...)."""


@hookspec
def kvcache_configure(
    args: argparse.Namespace, command: str, parser: argparse.ArgumentParser
) -> None:
    """Read the parsed arguments before the command runs; `parser.error()` refuses them."""


@hookspec
def kvcache_register_codecs(register: Callable[[str, CodecFactory], None]) -> None:
    """Call `register(name, factory)` for each codec that `--kv-cache-codec` may name."""


@hookspec
def kvcache_register_layer_kinds(register: Callable[[type, LayerKind], None]) -> None:
    """Call `register(cache_class, kind)` for each class of cache objects that you know."""


@hookspec
def kvcache_event(event: Event) -> None:
    """Take note of a hit, a miss, an insert, an eviction or an error: once per request each."""
