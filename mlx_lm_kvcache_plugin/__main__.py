"""The command `mlx_lm.kvcache`, also `python -m mlx_lm_kvcache_plugin`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__, doctor
from .disk import command as disk
from .evaluation import command as evaluate

COMMANDS = (doctor, disk, evaluate)
"""The modules of the sub-commands, each with `add_parser(subparsers)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="mlx_lm.kvcache", description="Look after the prefix cache of mlx-lm's commands."
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
