"""The folder: where what lies, making files in it, and setting broken ones aside.

```
DIR/usage.lock                       how many bytes are used, and the lock of all who write
DIR/quarantine/<random>-<name>       broken files
DIR/<namespace>/about.json           what the namespace stands for, for people
DIR/<namespace>/layout-<digest>.json the text of a layout
DIR/<namespace>/<xx>/<name>          the records, see names.py
```
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from .access import make_folder, unlink
from .contents import QUARANTINE, entries_of, files_in, names_in
from .names import Name, may_be_child
from .texts import ABOUT, is_layout_filename, layout_filename

QUARANTINED_FILES = 32
"""More are not kept: they are there to be looked at, and nobody looks at more."""

_temporaries = count()


@dataclass(frozen=True, slots=True)
class Home:
    """A namespace's place.

    Attributes:
        namespace: its fingerprint, one byte or more.
        about: what it stands for, for people: "model", "codec".
    """

    namespace: bytes
    about: Mapping[str, str]


class Folder:
    """Holds nothing but the path, so any thread may use it."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.abspath(root)

    def exists(self) -> bool:
        return os.path.isdir(self.root)

    def namespace(self, home: Home) -> str:
        return os.path.join(self.root, home.namespace.hex())

    def about(self, home: Home) -> str:
        return os.path.join(self.namespace(home), ABOUT)

    def layout(self, home: Home, digest: bytes) -> str:
        return os.path.join(self.namespace(home), layout_filename(digest))

    def record(self, home: Home, name: Name) -> str:
        return os.path.join(self.namespace(home), name.subfolder, name.filename)

    def layouts(self, home: Home) -> list[str]:
        """The paths of what has a layout's name."""
        entries = entries_of(self.namespace(home))
        return [entry.path for entry in entries if is_layout_filename(entry.name)]

    def children(
        self,
        home: Home,
        parent: bytes,
        kind: str | None = None,
        layout: bytes | None = None,
        most: int | None = None,
    ) -> list[Name]:
        """The names below a parent, in no order.

        Names are cheap, times are not: there may be thousands of files, and each is asked for its
        time only if there are more than wanted.

        Args:
            kind, layout: only such names; None for any.
            most: no more names than these; then they are those of the files that were used last.
        """
        filenames = self.filenames(home, parent, kind, layout)
        newest = _newest(self._subfolder(home, parent), filenames, most)
        return [name for name in map(Name.parse, newest) if name]

    def filenames(
        self, home: Home, parent: bytes, kind: str | None = None, layout: bytes | None = None
    ) -> list[str]:
        """The same names as they are on disk, unchecked, which takes a tenth of the time."""
        is_wanted = may_be_child(parent, kind, layout)
        return [name for name in names_in(self._subfolder(home, parent)) if is_wanted(name)]

    def _subfolder(self, home: Home, parent: bytes) -> str:
        return os.path.join(self.namespace(home), f"{parent[0]:02x}")

    def quarantine(self, path: str) -> bool:
        """Move what lies in a file's place out of the way; whether that could be done."""
        place = os.path.join(self.root, QUARANTINE)
        target = os.path.join(place, f"{os.urandom(8).hex()}-{os.path.basename(path)}")
        try:
            make_folder(place)
            os.rename(path, target)
        except OSError:
            return False
        kept = sorted(files_in(place), key=lambda file: file.mtime_ns)
        for file in kept[: max(0, len(kept) - QUARANTINED_FILES)]:
            unlink(file.path)
        return True

    def create(self, path: str, nbytes: int) -> tuple[int, str]:
        """Make a file beside a path, and the two folders down to it, but not the root.

        Returns:
            An open descriptor and the path of the new file, which has its final size already: so
            whoever counts counts it in full.

        Raises:
            OSError: nothing was made.
        """
        folder = os.path.dirname(path)
        if os.path.dirname(folder) != self.root:
            make_folder(os.path.dirname(folder))
        make_folder(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            temporary = os.path.join(folder, f".{os.getpid()}-{next(_temporaries)}.tmp")
            try:
                descriptor = os.open(temporary, flags, 0o600)
                break
            except FileExistsError:  # left by a killed process that had our number
                continue
        try:
            os.ftruncate(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            unlink(temporary)
            raise
        return descriptor, temporary


def _newest(folder: str, filenames: list[str], most: int | None) -> list[str]:
    """So many of the files, the last used; they are not asked if there are no more than that."""
    if most is None or len(filenames) <= most:
        return filenames
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # gone by now, or no descriptor is left
        return filenames[:most]

    def mtime_ns(filename: str) -> int:
        try:
            return os.stat(filename, dir_fd=descriptor, follow_symlinks=False).st_mtime_ns
        except OSError:
            return 0

    try:  # relative to the folder it takes two thirds of the time
        return heapq.nlargest(most, filenames, key=mtime_ns)
    finally:
        os.close(descriptor)
