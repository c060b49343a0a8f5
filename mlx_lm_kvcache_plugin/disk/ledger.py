"""The ledger: how many bytes a folder holds, agreed upon by all processes that write into it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LEDGER = "usage.lock"
LEDGER_BYTES = 21
"""Twenty digits and a newline, so that it counts itself right."""


class Ledger:
    """A number in a locked file.

    Only in a `locked` block of its owner, one thread at a time, may it be read and written.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> int | None:
        """The bytes in use; None if there is no such number."""
        text = os.pread(self._descriptor, LEDGER_BYTES + 1, 0)
        is_number = len(text) == LEDGER_BYTES and text[:-1].isdigit() and text[-1:] == b"\n"
        return int(text) if is_number else None

    def is_ours(self) -> bool:
        """Whether the file holds nothing but what a ledger would.

        Nothing at all: somebody was killed between making it and writing. Zeros: the power failed.
        """
        content = os.pread(self._descriptor, LEDGER_BYTES + 1, 0)
        return self.read() is not None or content in (b"", bytes(LEDGER_BYTES))

    def write(self, nbytes: int) -> None:
        os.pwrite(self._descriptor, f"{max(0, nbytes):020d}\n".encode(), 0)
        os.ftruncate(self._descriptor, LEDGER_BYTES)


@contextmanager
def locked(root: str) -> Iterator[Ledger]:
    """Keep all others from changing what is in a folder; short moments only.

    Raises:
        OSError: the folder is gone, closed to us, or on a disk that knows no locks.
    """
    descriptor = _lock(os.path.join(root, LEDGER))
    try:
        yield Ledger(descriptor)
    finally:
        # Explicitly: a child that was forked meanwhile has the descriptor too.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextmanager
def owned(root: str) -> Iterator[Ledger]:
    """The same, but only with a ledger of ours: nobody else's file is written to.

    Raises:
        OSError: as for `locked`, or the file is somebody else's.
    """
    with locked(root) as ledger:
        if not ledger.is_ours():
            path = os.path.join(root, LEDGER)
            raise FileExistsError(errno.EEXIST, "this file is not the disk tier's", path)
        yield ledger


def _lock(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(path: str, descriptor: int) -> bool:
    """Whether the file was not deleted while we waited for it."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
