"""`mlx_lm.kvcache doctor`: whether the flags would work here, and if not, why."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import PATCHED_MODULES, __version__, is_disabled, is_installed
from .errors import CodecError, SettingsError
from .options import OPTIONS
from .settings import Settings

START_UP_FILES = ("mlx_lm_kvcache_plugin.pth", "mlx_lm_kvcache_plugin.start")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; a finding that is not fine makes the flags fail."""

    subject: str
    text: str
    fine: bool = True


def add_parser(subparsers: Any) -> None:
    """Add the sub-command to a parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="check that the flags of the plugin work here",
        description="Check that the plugin is started, hooked and patched in; exit 1 if not.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 if the flags would not work, else 0."""
    all_fine = True
    for section in (_versions, _start_up, _patches, _plugins, _settings):
        for finding in _findings(section):
            print(f"{'ok ' if finding.fine else 'BAD'}  {finding.subject}: {finding.text}")
            all_fine &= finding.fine
    return 0 if all_fine else 1


def _findings(section: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a section finds; that it cannot go on is a finding too."""
    try:
        yield from section()
    except Exception as error:  # a package that cannot be imported, most likely
        yield Finding(section.__name__.strip("_"), repr(error), fine=False)


def _versions() -> Iterator[Finding]:
    yield Finding("Python", f"{sys.version.split()[0]} at {sys.prefix}")
    yield Finding("mlx_lm_kvcache_plugin", __version__)
    for package in ("mlx-lm", "mlx", "pluggy", "psutil", "numpy", "prometheus-client"):
        try:
            yield Finding(package, version(package))
        except PackageNotFoundError:
            yield Finding(package, "not installed in this environment", fine=False)


def _start_up() -> Iterator[Finding]:
    if is_disabled():
        yield Finding("start-up", "MLX_LM_KVCACHE_PLUGIN_DISABLE switches the plugin off", False)
        return
    found = [str(path) for path in _start_up_files()]
    yield Finding("start-up files", ", ".join(found) or "none on sys.path", bool(found))
    armed = is_installed()
    yield Finding("import hook", "armed" if armed else "not armed at start-up", armed)


def _start_up_files() -> Iterator[Path]:
    for folder in dict.fromkeys(sys.path):
        for name in START_UP_FILES:
            path = Path(folder, name)
            if path.is_file():
                yield path


def _patches() -> Iterator[Finding]:
    from .patches import outcomes

    for name in PATCHED_MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            yield Finding(name, f"cannot be imported: {error!r}", fine=False)
        else:
            outcome = outcomes.get(name, "not patched: it was imported without the hook")
            yield Finding(name, outcome, outcome == "patched")


def _plugins() -> Iterator[Finding]:
    from .plugins import plugins

    yield Finding("plugins", ", ".join(plugins().names()))
    for name, reason in plugins().set_aside.items():
        yield Finding(f"plugin {name}", f"set aside, it takes no part: {reason}")


def _settings() -> Iterator[Finding]:
    from .plugins import plugins

    variables = {o.variable: os.environ[o.variable] for o in OPTIONS if os.environ.get(o.variable)}
    try:
        plugins().codecs().create_pair(Settings.resolve(None, os.environ))
    except (SettingsError, CodecError) as error:
        yield Finding("environment", str(error), fine=False)
    else:
        text = ", ".join(f"{name}={value}" for name, value in variables.items())
        yield Finding("environment", text or "none of our variables is set")
