"""The disk tier: what the prefix cache calls; nothing here raises because of a disk."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from .access import BrokenFile, is_broken, note_use, open_file
from .clearing import Cleared, clear
from .counters import DiskCounters
from .exit import CLOSING_SECONDS, flush_at_exit
from .files import Record, read_record, read_tokens
from .folder import Folder, Home
from .limit import DiskUsage, Limit
from .names import Name
from .texts import read_layout
from .worker import Worker
from .writer import Offer, Writer

__all__ = ["DiskCounters", "DiskTier", "Home", "Offer", "flush_at_exit"]

logger = logging.getLogger("mlx_lm_kvcache_plugin")

QUEUED_PATHS = 256
QUEUED_OFFERS = 16_384
"""No further path is taken then: long ones have hundreds of offers, of some 400 bytes each."""

REMEMBERED_TOKENS = 4096
"""Records whose tokens are remembered, a kilobyte each: files never change."""

PAUSE_SECONDS = 60.0

UNREADABLE = (OSError, MemoryError, BrokenFile)
"""What comes of reading a file, whether or not it is the file's fault."""

T = TypeVar("T")


class DiskTier:
    """Records on disk: read by any thread, written by one thread of its own.

    Args:
        folder: made if it is not there; several processes may share it.
        limit_bytes: of all files in it, whoever wrote them.
        disk_usage: asks for the disk's size and free room.
        pause_seconds: how long nothing is written after the disk has refused.
        queued_paths, queued_offers: how many may wait to be written; the last path that is taken
            may have more.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        *,
        disk_usage: Callable[[str], DiskUsage] = shutil.disk_usage,
        pause_seconds: float = PAUSE_SECONDS,
        queued_paths: int = QUEUED_PATHS,
        queued_offers: int = QUEUED_OFFERS,
    ) -> None:
        self.counters = DiskCounters()
        self._folder = Folder(folder)
        self._limit = Limit(self._folder.root, limit_bytes, self.counters, disk_usage)
        self._writer = Writer(self._folder, self._limit, self.counters, pause_seconds)
        self._is_view = False
        self._tokens = lru_cache(REMEMBERED_TOKENS)(self._read_tokens)
        try:
            os.makedirs(self._folder.root, 0o700, exist_ok=True)
        except OSError as error:
            self._writer.pause(error)
        self._worker = Worker("kvcache-disk", queued_paths, queued_offers)
        weakref.finalize(self, self._worker.retire).atexit = False
        self._queue(self._limit.enforce)

    @property
    def worker(self) -> Worker:
        """Holds what is queued, and nothing of the tier; it ends when the tier is gone."""
        return self._worker

    @property
    def accepts(self) -> bool:
        """Whether an offer would be queued: if not, none need be made."""
        return not self._writer.is_quiet and self._worker.has_room

    @property
    def limit_bytes(self) -> int:
        """What all files of ours may have."""
        return self._limit.limit_bytes

    @property
    def used_bytes(self) -> int:
        """What all files of ours have, as far as this process knows."""
        return self._limit.used_bytes

    def untouched(self) -> DiskTier:
        """The same to look at, by all but `read`: what is broken stays where it is, and nothing is
        counted."""
        view = copy.copy(self)
        view._is_view = True
        return view

    def layouts(self, home: Home) -> dict[bytes, str]:
        """The texts of the layouts that a namespace's records have, by their digests."""
        found: dict[bytes, str] = {}
        for path in self._folder.layouts(home):
            layout = self._examine(path, partial(read_layout, os.path.basename(path)))
            if layout:
                found[layout[0]] = layout[1]
        return found

    def children(
        self,
        home: Home,
        parent: bytes,
        kind: str | None = None,
        layout: bytes | None = None,
        most: int | None = None,
    ) -> list[Name]:
        """What lies below a block, or at the beginning, in no order.

        Args:
            kind, layout: only what has these; None for any.
            most: if there are more, so many of those that were used last; None for all.
        """
        return self._folder.children(home, parent, kind, layout, most)

    def has(self, home: Home, name: Name) -> bool:
        """Whether a file of that name is there; what is in it shows when it is read."""
        try:
            status = os.lstat(self._folder.record(home, name))
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode)

    def tokens_of(self, home: Home, name: Name) -> bytes | None:
        """A record's tokens, from the head of its file; they have the key of its name.

        They are remembered, so the file may be gone by now.
        """
        try:
            return self._tokens(home.namespace, name)
        except UNREADABLE as error:
            self._failed(self._folder.record(home, name), error)
            return None

    def read(self, home: Home, name: Name) -> Record | None:
        """A record that is whole and what its name says, or None; notes that it was used."""

        def look(file: BufferedReader) -> tuple[Record, int]:
            status = os.fstat(file.fileno())
            nbytes = status.st_size
            if nbytes > self._limit.limit_bytes:
                raise BrokenFile(f"it alone has more than the limit: {nbytes:,} bytes")
            record = read_record(name, file, nbytes)
            with suppress(OSError):  # on a read-only disk nothing is evicted either
                note_use(file.fileno(), status.st_mtime)
            return record, nbytes

        found = self._examine(self._folder.record(home, name), look)
        if found is None:
            return None
        self.counters.files_read += 1
        self.counters.bytes_read += found[1]
        return found[0]

    def offer(self, home: Home, layout_text: str, offers: Sequence[Offer]) -> bool:
        """Have a path written, as far as it is not there; never waits.

        Args:
            layout_text: the layout of all its records.
            offers: of one path, parents first.

        Returns:
            Whether it was queued: not if the queue is full or the writer pauses.
        """
        job = partial(self._writer.store, home, layout_text, list(offers))
        return self._queue(job, len(offers))

    def forget(self, home: Home, names: Sequence[Name]) -> None:
        """Have records deleted; never waits."""
        self._queue(partial(self._writer.forget, home, list(names)))

    def clear(self, then: Callable[[], object] = lambda: None) -> Cleared:
        """Delete everything of ours in the folder, whoever wrote it, once what is queued is done.

        Args:
            then: called when it is gone, before anything more is written.

        Raises:
            OSError: something cannot be deleted.
        """
        self.flush()
        with self._worker.held(CLOSING_SECONDS):
            cleared = clear(self._folder.root) if self._folder.exists() else Cleared()
            self._tokens.cache_clear()
            then()
        self._queue(self._limit.enforce)  # which counts anew
        return cleared

    def flush(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until all that was queued is written; False if the time was too short."""
        return self._worker.flush(seconds)

    def close(self) -> None:
        """Flush, but not for ever, and take nothing more to write; reading still works."""
        self._worker.close(CLOSING_SECONDS)

    def _queue(self, job: Callable[[], None], offers: int = 0) -> bool:
        job = partial(self._writer.attempt, job)
        if not self._writer.is_quiet and self._worker.put(job, offers):
            return True
        self.counters.skipped += 1
        return False

    def _read_tokens(self, namespace: bytes, name: Name) -> bytes:
        """What raises is not remembered."""
        with open_file(self._folder.record(Home(namespace, {}), name)) as file:
            return read_tokens(name, file)

    def _examine(self, path: str, look: Callable[[BufferedReader], T]) -> T | None:
        """What `look` makes of a file; None if it is not there, or cannot be read."""
        try:
            with open_file(path) as file:
                return look(file)
        except UNREADABLE as error:
            self._failed(path, error)
            return None

    def _failed(self, path: str, cause: Exception) -> None:
        """Set a broken file aside, or count what is not its fault; what is not there is neither."""
        if self._is_view or isinstance(cause, FileNotFoundError | NotADirectoryError):
            return
        if not is_broken(cause) or not self._folder.quarantine(path):
            self.counters.errors += 1
            return
        level = logging.DEBUG if self.counters.quarantined else logging.WARNING
        self.counters.quarantined += 1
        logger.log(level, "%s went into quarantine, and is a miss: %s", path, cause)
