"""A quantized, shared and bounded prefix cache for the stock commands of mlx-lm.

Every start of Python in an environment that has the plugin imports this file and calls `install()`.
So it imports nothing but `os` and `sys`, which are loaded by then, and not even `__future__`; all
else waits until mlx-lm is imported.
"""

import os
import sys

TYPE_CHECKING = False  # as typing has it, without the import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from .codecs.base import Codec
    from .errors import KVCachePluginError
    from .hookspecs import hookimpl
    from .prefix_cache import PrefixCache
    from .settings import Settings

__version__ = "0.1.0"

__all__ = [
    "Codec",
    "KVCachePluginError",
    "PrefixCache",
    "Settings",
    "__version__",
    "hookimpl",
    "install",
]

_PUBLIC = {
    "Codec": "codecs.base",
    "KVCachePluginError": "errors",
    "PrefixCache": "prefix_cache",
    "Settings": "settings",
    "hookimpl": "hookspecs",
}
"""Public names and the modules that they are taken from when first used."""

PATCHED_MODULES = ("mlx_lm.generate", "mlx_lm.cache_prompt", "mlx_lm.server")

DISABLE_VARIABLE = "MLX_LM_KVCACHE_PLUGIN_DISABLE"


class PatchFinder:
    """Finds the patched modules as the finders after it do, and wraps their loader.

    It stays in `sys.meta_path` for the life of the process; any thread may import.
    """

    def __init__(self) -> None:
        self._asking: set[tuple[str, int]] = set()

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        if fullname not in PATCHED_MODULES or is_disabled():
            return None
        from _thread import get_ident  # built in; `threading` would have to be loaded

        asking = (fullname, get_ident())
        if asking in self._asking:
            return None  # a finder that we ask looks up the plain spec: it is to get that one
        self._asking.add(asking)
        try:
            spec = self._ask_later_finders(fullname, path, target)
        finally:
            self._asking.discard(asking)
        return _with_patching_loader(spec)

    def _ask_later_finders(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        # The import system has asked those before us already; they had nothing to say.
        finders = list(sys.meta_path)
        start = finders.index(self) + 1 if self in finders else 0
        for finder in finders[start:]:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec and find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


def _with_patching_loader(spec: "ModuleSpec | None") -> "ModuleSpec | None":
    if spec is None or not hasattr(spec.loader, "exec_module"):
        return spec
    if getattr(spec.loader, "is_patching", False):
        return spec  # a finder that we asked took it from the module, which is being reloaded
    try:
        from .patches.loader import PatchingLoader
    except Exception as error:  # a broken installation of ours must not break mlx-lm
        print(f"mlx_lm_kvcache_plugin: not active: {error!r}", file=sys.stderr)
        return spec
    assert spec.loader is not None
    spec.loader = PatchingLoader(spec.loader)
    return spec


def is_disabled() -> bool:
    """Whether MLX_LM_KVCACHE_PLUGIN_DISABLE turns the whole plugin off."""
    return os.environ.get(DISABLE_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


def is_installed() -> bool:
    """Whether the import hook is armed."""
    # By name, so that a reload of this module does not arm a second one.
    name = PatchFinder.__qualname__
    return any(
        type(finder).__module__ == __name__ and type(finder).__qualname__ == name
        for finder in sys.meta_path
    )


def install() -> None:
    """Arm the import hook that patches mlx-lm; a second call changes nothing.

    The start-up files call this, in a virtual environment even twice (cpython issue 75723).
    """
    if not is_disabled() and not is_installed():
        sys.meta_path.insert(0, PatchFinder())


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
