"""Touching files with care: nothing is followed, waited for or shown to others."""

from __future__ import annotations

import errno
import os
import stat
import time
from io import BufferedReader
from typing import BinaryIO

from ..errors import KVCachePluginError

_LONGEST_TEXT = 1 << 20
"""Bytes; the layout of a model with a hundred layers has some ten thousand."""

_SAYS_THAT_IT_IS_BROKEN = {errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.EPERM}
"""A link, a folder, a socket, or closed to us. What else a disk says, such as EIO or ESTALE, may be
over in a moment, and then the file is as good as before."""

FRESH_SECONDS = 60.0
"""A use is not noted again within this time: order among chats needs no more."""


class BrokenFile(KVCachePluginError):
    """A file is not what its name says; the message says why."""


def is_broken(error: BaseException) -> bool:
    """Whether a failure to read is the fault of the file, and not of its disk or of ours."""
    if isinstance(error, OSError):
        return error.errno in _SAYS_THAT_IT_IS_BROKEN
    return isinstance(error, BrokenFile)


def open_file(path: str) -> BufferedReader:
    """Open a regular file for reading; never follows a link, never waits for a pipe.

    Raises:
        BrokenFile: it is something else.
        OSError: it is not there, or cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BrokenFile("it is no regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(file: BinaryIO) -> str:
    """What is left of a small text file.

    Raises:
        BrokenFile: it is none.
        OSError: it is not readable.
    """
    data = file.read(_LONGEST_TEXT + 1)
    if len(data) > _LONGEST_TEXT:
        raise BrokenFile("it is longer than any text of ours")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BrokenFile("it is no text") from None


def make_folder(path: str) -> None:
    """Make one folder that only its owner may enter, unless it is there.

    Raises:
        OSError: it cannot be made, or something else lies there.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise


def note_use(file: str | int, mtime: float) -> None:
    """Set the time of a file, or of an open one, unless it was set just now.

    Raises:
        OSError: it is gone, or the disk is read-only.
    """
    if mtime < time.time() - FRESH_SECONDS:
        os.utime(file)


def unlink(path: str) -> bool:
    """Delete a file; whether it was there and is gone."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def remove_folders(path: str, root: str) -> None:
    """Remove the folders that a deleted file leaves empty, but not the root."""
    folder = os.path.dirname(path)
    while folder != root:
        try:
            os.rmdir(folder)
        except OSError:  # not empty
            return
        folder = os.path.dirname(folder)


def write_whole(descriptor: int, data: bytes) -> None:
    """Write from the beginning of an open file, and wait until it is on the disk.

    Raises:
        OSError: there is no room, or the disk fails.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
