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

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from .access import make_folder, unlink
from .contents import QUARANTINE, entries_of, files_in, status_of
from .names import Name
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

    def children(self, home: Home, parent: bytes) -> list[Name]:
        """The names below a parent, the newest first."""
        prefix = f"{parent.hex()}-"
        found: list[tuple[int, Name]] = []
        for entry in entries_of(os.path.join(self.namespace(home), f"{parent[0]:02x}")):
            name = Name.parse(entry.name) if entry.name.startswith(prefix) else None
            status = status_of(entry) if name else None
            if name and status:
                found.append((status.st_mtime_ns, name))
        return [name for _, name in sorted(found, key=lambda pair: pair[0], reverse=True)]

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
