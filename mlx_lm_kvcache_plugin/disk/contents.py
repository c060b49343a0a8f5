"""What lies in a folder, and what of it is ours; the rest is left alone."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .names import Name
from .texts import ABOUT, is_layout_filename, read_about

QUARANTINE = "quarantine"

_NAMESPACE = re.compile("(?:[0-9a-f]{2})+")
_SUBFOLDER = re.compile("[0-9a-f]{2}")
_TEMPORARY = re.compile(r"\.[0-9]+-[0-9]+\.tmp")
_QUARANTINED = re.compile(r"[0-9a-f]{16}-(.*)")


class Role(enum.Enum):
    """What a file of ours is for."""

    RECORD = enum.auto()
    TEXT = enum.auto()
    TEMPORARY = enum.auto()
    QUARANTINED = enum.auto()


@dataclass(frozen=True, slots=True)
class Found:
    """A file of ours, or a link or a pipe that has its name.

    Attributes:
        namespace: the name of the namespace's folder, "" outside any.
        name: of a record.
    """

    path: str
    role: Role
    nbytes: int
    mtime_ns: int
    namespace: str = ""
    name: Name | None = None


def all_files(root: str) -> Iterator[Found]:
    """All that is ours, temporary and broken files too; but not the lock.

    Raises:
        OSError: the folder is gone or unreadable.
    """
    with os.scandir(root) as entries:
        folders = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    for folder in folders:
        if folder.name == QUARANTINE:
            yield from files_in(folder.path)
        elif _NAMESPACE.fullmatch(folder.name):
            yield from files_in(folder.path, folder.name)
            for path in subfolders_of(folder.path):
                yield from files_in(path, folder.name)


def subfolders_of(namespace: str) -> list[str]:
    """The folders of a namespace's folder in which records lie."""
    return [
        entry.path
        for entry in entries_of(namespace)
        if _SUBFOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]


def files_in(folder: str, namespace: str = "") -> Iterator[Found]:
    """The files of ours in one folder; without a namespace it is the quarantine."""
    for entry in entries_of(folder):
        role, name = _role(entry, namespace)
        if role is None or entry.is_dir(follow_symlinks=False):
            continue
        if status := status_of(entry):
            size, mtime_ns = status.st_size, status.st_mtime_ns
            yield Found(entry.path, role, size, mtime_ns, namespace, name)


def _role(entry: os.DirEntry[str], namespace: str) -> tuple[Role | None, Name | None]:
    if not namespace:
        found = _QUARANTINED.fullmatch(entry.name)
        is_ours = found and (is_layout_filename(found[1]) or Name.parse(found[1]))
        return (Role.QUARANTINED if is_ours else None), None
    if name := Name.parse(entry.name):
        return Role.RECORD, name
    if _TEMPORARY.fullmatch(entry.name):
        return Role.TEMPORARY, None
    # Anybody may have an about.json: only one that says so is ours.
    is_about = entry.name == ABOUT and read_about(entry.path) is not None
    return (Role.TEXT if is_about or is_layout_filename(entry.name) else None), None


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """What lies in a folder; nothing if it is gone, or closed to us."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def names_in(folder: str) -> list[str]:
    """The names of what lies in a folder; nothing if it is gone, or closed to us."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def status_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    """An entry's size and times; None if it is gone by now."""
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None
