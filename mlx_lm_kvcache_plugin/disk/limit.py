"""How much the folder may hold, and what gives way: the least recently used."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from .access import remove_folders, unlink
from .contents import Found, Role, all_files
from .counters import DiskCounters
from .ledger import LEDGER_BYTES, Ledger, owned
from .names import BLOCK

GIB = 1 << 30

STALE_SECONDS = 600.0
"""No write takes so long: what is temporary and older was left by a process that is no more."""

RESCAN_SECONDS = 600.0
"""The ledger is compared with the folder so often, since people delete and copy files too."""

KEPT_SHARE = 0.95
"""What eviction leaves of what is allowed: one look at all files then serves many writes."""

_FILES_AT_A_TIME = 256
"""Then other threads have their turn: a look at a hundred thousand files takes a second."""

T = TypeVar("T")


class DiskUsage(Protocol):
    """As of `shutil.disk_usage`: bytes."""

    @property
    def total(self) -> int: ...
    @property
    def free(self) -> int: ...


class Limit:
    """Holds all processes that share a folder to its limit; for one thread.

    Invariant: the ledger never says less than the files of ours have, and temporary files have
    their final size from the beginning.
    """

    def __init__(
        self,
        root: str,
        limit_bytes: int,
        counters: DiskCounters,
        disk_usage: Callable[[str], DiskUsage] = shutil.disk_usage,
    ) -> None:
        self._root = root
        self.limit_bytes = limit_bytes
        self._counters = counters
        self._disk_usage = disk_usage
        self._rescan_at = 0.0
        self.used_bytes = 0

    def allowed_bytes(self, used_bytes: int) -> int:
        """What the folder may hold now: within the limit, and leaving the disk its reserve."""
        disk = self._disk_usage(self._root)
        reserve_bytes = max(2 * GIB, disk.total // 20)
        return max(0, min(self.limit_bytes, used_bytes + disk.free - reserve_bytes))

    def enforce(self) -> None:
        """Look at all files, and evict what is more than allowed.

        Raises:
            OSError: the folder is gone, or cannot be changed.
        """
        with owned(self._root) as ledger:
            self._make_room(ledger, None, 0, ())

    def reserve(self, nbytes: int, keep: Collection[str], create: Callable[[], T]) -> T | None:
        """Make a file of a given size, if need be in the place of older ones.

        Args:
            keep: paths that may not give way.
            create: makes the file, at its full size.

        Returns:
            What `create` returned; None if there is no room.

        Raises:
            OSError: from `create`, or the folder is gone or cannot be changed.
        """
        with owned(self._root) as ledger:
            total = ledger.read() if time.monotonic() < self._rescan_at else None
            if not self._make_room(ledger, total, nbytes, keep):
                return None
            # First this: who is killed in between has counted too much, not too little.
            self._note(ledger, self.used_bytes + nbytes)
            return create()

    def place(self, temporary: str, path: str) -> None:
        """Give a finished file its name; locked, since who counts could miss a file that moves.

        Raises:
            OSError: it is gone, or the folder is.
        """
        with owned(self._root):
            os.rename(temporary, path)

    def remove(self, paths: Iterable[str]) -> None:
        """Delete files and take them off the ledger; what is not there is deleted already."""
        with owned(self._root) as ledger:
            total = ledger.read()
            for path in paths:
                try:
                    nbytes = os.lstat(path).st_size
                    os.unlink(path)
                except FileNotFoundError:
                    continue
                remove_folders(path, self._root)
                total = None if total is None else total - nbytes
            if total is not None:
                self._note(ledger, total)

    def _make_room(
        self, ledger: Ledger, total: int | None, nbytes: int, keep: Collection[str]
    ) -> bool:
        """Whether there is room, after eviction if need be.

        Args:
            total: what the ledger says; None to look at the files in any case.
        """
        if total is not None and total + nbytes <= self.allowed_bytes(total):
            self.used_bytes = total
            return True
        files = self._scan()
        total = LEDGER_BYTES + sum(file.nbytes for file in files)
        allowed = self.allowed_bytes(total)
        needed = nbytes if nbytes <= allowed else 0
        if total + needed > allowed:
            total = self._evict(files, total, int(allowed * KEPT_SHARE) - needed, keep)
        self._note(ledger, total)
        return total + nbytes <= allowed

    def _scan(self) -> list[Found]:
        """All files of ours, without the temporary ones that nobody writes any more."""
        self._rescan_at = time.monotonic() + RESCAN_SECONDS
        stale_ns = time.time_ns() - int(STALE_SECONDS * 1e9)
        files = []
        for number, file in enumerate(all_files(self._root)):
            if number % _FILES_AT_A_TIME == 0:
                time.sleep(0)
            is_stale = file.role is Role.TEMPORARY and file.mtime_ns < stale_ns
            if not (is_stale and unlink(file.path)):
                files.append(file)
        return files

    def _evict(self, files: Sequence[Found], total: int, target: int, keep: Collection[str]) -> int:
        """Delete what was not used for longest; returns what is left in bytes."""
        failure: OSError | None = None
        for file in eviction_order(files):
            if total <= target:
                return total
            if file.path in keep:
                continue
            try:
                os.unlink(file.path)
            except FileNotFoundError:
                pass
            except OSError as error:
                failure = error
                continue
            else:
                self._counters.evicted_files += 1
                self._counters.evicted_bytes += file.nbytes
                remove_folders(file.path, self._root)
            total -= file.nbytes
        if failure and total > target:
            raise failure
        return total

    def _note(self, ledger: Ledger, total: int) -> None:
        ledger.write(total)
        self.used_bytes = total


def eviction_order(files: Iterable[Found]) -> list[Found]:
    """What has to go first, first: broken files, then the least recently used.

    A record goes before the block that it hangs below, however their times came about, since it
    could not be found without it, and a checkpoint before its tail; and all go before the texts of
    their namespace. Temporary files are no candidates: somebody is writing them.
    """
    found = list(files)
    newest: dict[str, int] = {}
    for file in found:
        newest[file.namespace] = max(file.mtime_ns, newest.get(file.namespace, 0))

    def last_use(file: Found) -> tuple[int, bool]:
        is_text = file.role is Role.TEXT
        return (newest[file.namespace] if is_text else file.mtime_ns), is_text

    broken = [file for file in found if file.role is Role.QUARANTINED]
    used = [file for file in found if file.role in (Role.RECORD, Role.TEXT)]
    newest_first = _parents_first(sorted(used, key=last_use, reverse=True))
    return sorted(broken, key=last_use) + newest_first[::-1]


def _parents_first(files: Sequence[Found]) -> list[Found]:
    """The same files, each preceded by what it cannot be found or used without."""
    blocks = {
        (file.namespace, file.name.layout, file.name.own): file
        for file in files
        if file.name and file.name.kind == BLOCK
    }
    placed: set[str] = set()
    result: list[Found] = []
    for file in files:
        way: list[Found] = []
        above: Found | None = file
        while above and above.path not in placed:
            placed.add(above.path)
            way.append(above)
            above = _above(above, blocks)
        result += reversed(way)
    return result


def _above(file: Found, blocks: Mapping[tuple[str, bytes, bytes], Found]) -> Found | None:
    """A checkpoint stands at the end of its tail; all else, below a block."""
    if not file.name:
        return None
    keys = [file.name.parent] if file.name.kind == BLOCK else [file.name.own, file.name.parent]
    found = (blocks.get((file.namespace, file.name.layout, key)) for key in keys)
    return next(filter(None, found), None)
