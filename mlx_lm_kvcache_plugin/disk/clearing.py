"""Deleting all that is ours in a folder, while others may be writing."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from .access import remove_folders
from .contents import all_files, subfolders_of
from .ledger import LEDGER, locked


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was deleted."""

    files: int = 0
    nbytes: int = 0


def is_empty(root: str) -> bool:
    """Whether nothing of ours is in a folder.

    Raises:
        OSError: the folder cannot be read.
    """
    return not os.path.lexists(os.path.join(root, LEDGER)) and not any(all_files(root))


def clear(root: str) -> Cleared:
    """Delete everything of ours, but not the folder itself.

    Raises:
        OSError: something cannot be deleted.
    """
    with locked(root) as ledger:
        files = list(all_files(root))
        for file in files:
            with suppress(FileNotFoundError):  # set aside by a reader meanwhile
                os.unlink(file.path)
            remove_folders(file.path, root)
        for folder in {os.path.join(root, file.namespace) for file in files if file.namespace}:
            for path in subfolders_of(folder):
                remove_folders(os.path.join(path, ""), root)
        if ledger.is_ours():
            # Who waits for the lock sees that its file is gone, and makes a new one.
            os.unlink(os.path.join(root, LEDGER))
    return Cleared(len(files), sum(file.nbytes for file in files))
