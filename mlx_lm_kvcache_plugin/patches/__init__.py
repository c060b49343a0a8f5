"""Patches of mlx-lm, one small file for each upstream module. Only this folder imports mlx_lm.

`apply` runs right after a patched module was executed, see loader.py. A file here is named after
the last part of the upstream module's name and offers `apply(module)`, which checks the module's
shape first and raises `PatchRefused` when it is not the one that it was written for.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from ..errors import PatchRefused
from ..options import OPTIONS
from ..settings import Settings

outcomes: dict[str, str] = {}
"""What became of each patched module: "patched", or "refused: " and why. `doctor` shows it."""


def apply(module: ModuleType) -> None:
    """Patch an upstream module that has just been executed; leave it as it is if that fails."""
    name = module.__name__
    before = dict(vars(module))
    try:
        patch = importlib.import_module(f"{__name__}.{name.rpartition('.')[2]}")
        patch.apply(module)
    except Exception as error:  # whatever it is, the stock module must go on working
        _restore(module, before)
        reason = str(error) if isinstance(error, PatchRefused) else repr(error)
        outcomes[name] = f"refused: {reason}"
        complain(f"{name} was not patched: {reason}")
    else:
        outcomes[name] = "patched"


def _restore(module: ModuleType, before: dict[str, object]) -> None:
    names = vars(module)
    for name in names.keys() - before.keys():
        del names[name]
    names.update(before)


def complain(message: str) -> None:
    """Say on stderr, in one line, what will not work; but only to who asked for the plugin."""
    if was_asked_for():
        print(f"mlx_lm_kvcache_plugin: {' '.join(message.split())}", file=sys.stderr)


def was_asked_for() -> bool:
    """Whether one of our flags is on the command line or one of our variables is set."""
    typed = {argument.partition("=")[0] for argument in getattr(sys, "argv", [])[1:]}
    return any(option.flag in typed for option in OPTIONS) or Settings.is_requested(os.environ)
