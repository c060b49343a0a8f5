"""`mlx_lm.kvcache disk`: what a folder of the disk tier holds, and clearing or checking it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from ..tables import aligned
from .access import BrokenFile, is_broken, open_file
from .clearing import clear, is_empty
from .contents import Found, Role, all_files
from .folder import Folder
from .names import BLOCK, CHECKPOINT
from .texts import ABOUT, read_about, read_layout

MIB = 1 << 20

UNUSABLE = 2
"""The exit status for a folder that is none; 1 says that a file was broken."""

_LONGEST_WORDS = 60
"""Characters of a text that anybody may have written into a shared folder."""

_HEADINGS = ("model", "codec", "blocks", "tokens", "checkpoints", "MB", "oldest use", "last use")
_FIGURES = range(2, 6)
"""The columns of numbers."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to a parser."""
    parser = subparsers.add_parser(
        "disk",
        help="show, check or clear a folder that --kv-cache-dir names",
        description="Show what a folder that --kv-cache-dir names holds, one line for each model "
        "and codec. MB have 2^20 bytes.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--clear", action="store_true", help="delete all that was stored")
    what.add_argument(
        "--verify",
        action="store_true",
        help="read every file and set broken ones aside; exit 1 if there was any",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do it; 0 if all is well, 1 for broken files, 2 if the folder is of no use."""
    root = os.path.abspath(args.folder)
    if not os.path.isdir(root):
        problem = "is no folder" if os.path.lexists(root) else "does not exist"
        print(f"{args.folder} {problem}", file=sys.stderr)
        return UNUSABLE
    try:
        if is_empty(root):
            print(f"nothing stored in {args.folder}")
            return 0
        if args.clear:
            cleared = clear(root)
            print(f"cleared {args.folder}: {cleared.files} files, {_mb(cleared.nbytes)} MB")
            return 0
        return _verify(root) if args.verify else _show(root)
    except OSError as error:
        print(error, file=sys.stderr)
        return UNUSABLE


def _show(root: str) -> int:
    namespaces: dict[str, list[Found]] = {}
    broken: list[Found] = []
    for file in all_files(root):
        if file.role is Role.QUARANTINED:
            broken.append(file)
        else:
            namespaces.setdefault(file.namespace, []).append(file)
    rows = [_row(root, namespace, files) for namespace, files in sorted(namespaces.items())]
    everything = [file for files in namespaces.values() for file in files]
    rows.append(("total", "", *_figures(everything)))
    for line in aligned([_HEADINGS, *sorted(rows[:-1]), rows[-1]], _FIGURES):
        print(line)
    if broken:
        nbytes = sum(file.nbytes for file in broken)
        print(f"quarantine: {len(broken)} broken files, {_mb(nbytes)} MB")
    return 0


def _row(root: str, namespace: str, files: Iterable[Found]) -> tuple[str, ...]:
    about = read_about(os.path.join(root, namespace, ABOUT)) or {}
    return (_words(about.get("model")), _words(about.get("codec")), *_figures(files))


def _words(text: object) -> str:
    """A short text without what would give a terminal orders."""
    if not isinstance(text, str):
        return "unknown"
    words = "".join(letter if letter.isprintable() else "?" for letter in text[:_LONGEST_WORDS])
    return words if len(text) <= _LONGEST_WORDS else words[:-3] + "..."


def _figures(files: Iterable[Found]) -> tuple[str, ...]:
    files = list(files)
    records = [(file, file.name) for file in files if file.name]
    blocks = [name.tokens for _, name in records if name.kind == BLOCK]
    checkpoints = sum(name.kind == CHECKPOINT for _, name in records)
    uses = [file.mtime_ns for file, _ in records]
    return (
        f"{len(blocks):,}",
        f"{sum(blocks):,}",
        f"{checkpoints:,}",
        _mb(sum(file.nbytes for file in files)),
        _when(min(uses)) if uses else "-",
        _when(max(uses)) if uses else "-",
    )


def _mb(nbytes: int) -> str:
    return f"{nbytes / MIB:,.1f}"


def _when(time_ns: int) -> str:
    try:
        return f"{datetime.fromtimestamp(time_ns // 10**9):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):  # no time that a calendar has
        return "?"


def _verify(root: str) -> int:
    from tqdm import tqdm

    folder = Folder(Path(root))
    files = [file for file in all_files(root) if file.role in (Role.RECORD, Role.TEXT)]
    broken = 0
    for file in tqdm(files, unit="file"):
        if fault := _fault(file):
            broken += 1
            is_moved = is_broken(fault) and folder.quarantine(file.path)
            moved = "set aside" if is_moved else "left where it is"
            tqdm.write(f"{file.path}: {fault}; {moved}", file=sys.stderr)
    print(f"{len(files):,} files read, {broken:,} broken")
    return 1 if broken else 0


def _fault(file: Found) -> Exception | None:
    """What is wrong with a file; None if it is sound, or gone meanwhile."""
    from .files import read_record

    try:
        with open_file(file.path) as opened:
            if file.name:
                read_record(file.name, opened, os.fstat(opened.fileno()).st_size)
            elif os.path.basename(file.path) != ABOUT:
                read_layout(os.path.basename(file.path), opened)
    except FileNotFoundError:
        return None
    except (OSError, BrokenFile) as error:
        return error
    except MemoryError:
        return MemoryError("it does not fit into memory")
    return None
