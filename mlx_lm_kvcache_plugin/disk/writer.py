"""Writing: a path's records beside each other, whole or not at all."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from .access import note_use, unlink, write_whole
from .counters import DiskCounters
from .files import TOKEN_BYTES, Record, encode
from .folder import Folder, Home
from .limit import Limit
from .names import BLOCK, CHECKPOINT, Name, child_key, layout_digest
from .texts import about_text

logger = logging.getLogger("mlx_lm_kvcache_plugin")


@dataclass(frozen=True, slots=True)
class Offer:
    """A record that may be written.

    Attributes:
        make: called on the writer's thread; None if what it stood for is gone by then.
    """

    name: Name
    make: Callable[[], Record | None]


class Writer:
    """Does what was queued; owned by the writer's thread, except for `is_quiet`."""

    def __init__(
        self, folder: Folder, limit: Limit, counters: DiskCounters, pause_seconds: float
    ) -> None:
        self._folder = folder
        self._limit = limit
        self._counters = counters
        self._pause_seconds = pause_seconds
        self._quiet_until = 0.0
        self._told: set[object] = set()

    @property
    def is_quiet(self) -> bool:
        """Whether it pauses, after a failure that the next write would meet too."""
        return time.monotonic() < self._quiet_until

    def attempt(self, job: Callable[[], object]) -> None:
        """Do something and survive it; what the disk refuses is tried again after a pause."""
        if self.is_quiet:
            self._counters.skipped += 1
            return
        try:
            job()
        except FileNotFoundError as error:
            # With the folder still there somebody cleared it under us, which is nobody's fault.
            if not self._folder.exists():
                self.pause(error)
        except OSError as error:
            self.pause(error)
        except Exception as error:
            self._counters.errors += 1
            self._tell(type(error), "a record could not be written to the disk tier: %r", error)

    def pause(self, error: OSError) -> None:
        """Leave the disk alone for a while."""
        self._counters.errors += 1
        self._quiet_until = time.monotonic() + self._pause_seconds
        self._tell(
            error.errno,
            "the disk tier of the prefix cache pauses for %.0f s: %s",
            self._pause_seconds,
            error,
        )

    def _tell(self, cause: object, message: str, *arguments: object) -> None:
        """Log once for each kind of cause."""
        if cause not in self._told:
            self._told.add(cause)
            logger.warning(message, *arguments)

    def store(self, home: Home, layout_text: str, offers: list[Offer]) -> None:
        """Write what is missing of a path, parents first, and note that the rest was used.

        Args:
            offers: emptied on the way, so that nothing is held longer than needed.

        Raises:
            OSError: the disk refuses.
        """
        texts = {
            self._folder.about(home): about_text(home.about),
            self._folder.layout(home, layout_digest(layout_text)): layout_text,
        }
        keep = {*texts, *(self._folder.record(home, offer.name) for offer in offers)}
        for path, text in texts.items():
            if not self._is_there(path) and not self._write(path, text.encode(), keep):
                return
        lost: set[bytes] = set()
        new: set[bytes] = set()
        offers.reverse()
        while offers:
            offer = offers.pop()
            # What hangs below a block that is not there could not be found; a checkpoint, which
            # has the key of its tail, could not be used without it.
            is_lost = offer.name.parent in lost or offer.name.own in lost
            if is_lost or not self._store_one(home, offer, keep, new):
                lost.add(offer.name.own)

    def forget(self, home: Home, names: Sequence[Name]) -> None:
        """Delete records.

        Raises:
            OSError: the disk refuses.
        """
        self._limit.remove(self._folder.record(home, name) for name in names)

    def _store_one(self, home: Home, offer: Offer, keep: Collection[str], new: set[bytes]) -> bool:
        """Whether the record is there now.

        Args:
            new: the keys of what this job has written: below that nothing is older.
        """
        name = offer.name
        path = self._folder.record(home, name)
        if self._is_there(path):
            return True
        record = offer.make()
        if record is None:
            return False
        data, tokens = encode(name, record), record.tokens
        del record
        if not self._write(path, data, keep):
            return False
        self._counters.files_written += 1
        self._counters.bytes_written += len(data)
        if name.kind == BLOCK and name.parent not in new:
            self._supersede(home, name, tokens)
        new.add(name.own)
        return True

    def _is_there(self, path: str) -> bool:
        """Whether a file is there, which counts as a use of it; anything else gives way."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(status.st_mode):
            self._counters.quarantined += self._folder.quarantine(path)
            return False
        note_use(path, status.st_mtime)
        return True

    def _write(self, path: str, data: bytes, keep: Collection[str]) -> bool:
        """Write a file beside its place and put it there; False without room for it."""
        made = self._limit.reserve(len(data), keep, lambda: self._folder.create(path, len(data)))
        if made is None:
            self._counters.skipped += 1
            return False
        descriptor, temporary = made
        try:
            try:
                write_whole(descriptor, data)
            finally:
                os.close(descriptor)
            self._limit.place(temporary, path)
        except BaseException:
            unlink(temporary)
            raise
        return True

    def _supersede(self, home: Home, name: Name, tokens: bytes) -> None:
        """Delete the shorter runs below the same block that a new one continues."""
        others = set(self._folder.filenames(home, name.parent, layout=name.layout))
        if others <= {name.filename}:
            return
        # A few hundred names that they would have, and not thousands that are there.
        runs = (
            replace(name, own=child_key(name.parent, tokens[: TOKEN_BYTES * length]), tokens=length)
            for length in range(1, name.tokens)
        )
        shorter = [
            self._folder.record(home, run)
            for run in runs
            if run.filename in others
            # A checkpoint stands at the end of its rows.
            and replace(run, kind=CHECKPOINT).filename not in others
        ]
        if shorter:
            self._limit.remove(shorter)
