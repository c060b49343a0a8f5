"""Measure one benchmark and print its figures beside their targets; a full run is saved."""

from __future__ import annotations

import argparse
import ast
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from demo.server import child_environment, find_openblas

from . import report

NAMES = (
    "store",
    "footprint",
    "hit_rate",
    "sizing",
    "server",
    "stats",
    "page",
    "soak",
    "fidelity",
    "chat",
    "restart",
    "block_size",
    "windows",
)
"""The modules that can be measured: each has `measure`, and perhaps `add_arguments` and `draw`."""

INSTALLS = {
    "vllm_mlx": "pip install --no-deps vllm-mlx==0.6.0",
    "matplotlib": "pip install matplotlib",
    "selenium": "pip install selenium",
}
"""What nothing but a benchmark needs, and how it is installed."""

REFUSED = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""What a wrong path comes to."""

RAW: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}


def docstring(name: str) -> str:
    """What a benchmark says of itself, first in one line, read without importing what it needs."""
    source = Path(__file__).with_name(f"{name}.py").read_text("utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def load(name: str) -> ModuleType:
    """The module of a benchmark."""
    return importlib.import_module(f"{__package__}.{name}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; only the benchmark that it names is imported."""
    texts = {name: docstring(name) for name in NAMES}
    firsts = (f"  {name:<12}{text.partition(chr(10))[0]}" for name, text in texts.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="\n".join((str(__doc__), "", *firsts)), **RAW
    )
    commands = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, text in texts.items():
        command = commands.add_parser(name, description=text, **RAW)
        command.add_argument("--quick", action="store_true", help="smaller inputs, nothing saved")
        command.add_argument("--redraw", action="store_true", help="draw the saved figures anew")
        if argv[:1] == [name] and "--redraw" not in argv:  # what was saved needs no inputs
            getattr(load(name), "add_arguments", lambda parser: None)(command)
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace) -> int:
    """Measure, print, and save a full run; 1 if a target was missed."""
    module = load(arguments.name)
    result = module.measure(arguments)
    report.print_table(result.rows)
    if not arguments.quick:
        report.save(arguments.name, result)
        if hasattr(module, "draw"):
            report.draw(arguments.name, module.draw)
    return 0 if all(row.met for row in result.rows) else 1


def redraw(name: str) -> int:
    """Draw what an earlier run has saved."""
    module = load(name)
    if not hasattr(module, "draw"):
        raise SystemExit(f"benchmarks: {name} has no figure")
    report.draw(name, module.draw)
    return 0


def main(argv: Sequence[str]) -> int:
    """Do what the command line says; what it got wrong is told in one line."""
    try:
        arguments = parse(argv)
        return redraw(arguments.name) if arguments.redraw else measure(arguments)
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in INSTALLS:
            raise
        raise SystemExit(f"benchmarks: {missing} is missing: {INSTALLS[missing]}") from None
    except REFUSED as error:
        raise SystemExit(f"benchmarks: {error}") from None


def start_anew() -> None:
    """With OpenBLAS where there is one, which is chosen when a process starts; and no settings."""
    library, preloaded = find_openblas(), os.environ.get("LD_PRELOAD", "")
    missing = library if library and Path(library).name not in preloaded else None
    environment = child_environment(os.environ, missing)
    if environment != os.environ:
        command = [sys.executable, "-m", str(__package__), *sys.argv[1:]]
        os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    start_anew()
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
