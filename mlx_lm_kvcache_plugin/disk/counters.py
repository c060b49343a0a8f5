"""What the disk tier has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DiskCounters:
    """Sums since the start, of this process.

    Attributes:
        files_written, bytes_written: records.
        files_read, bytes_read: records that were sound.
        quarantined: broken files that were set aside.
        evicted_files, evicted_bytes: what gave way to the limit or to the reserve of free disk.
        skipped: paths that found the queue full or the writer pausing, and records without room.
        errors: what failed otherwise.
    """

    files_written: int = 0
    bytes_written: int = 0
    files_read: int = 0
    bytes_read: int = 0
    quarantined: int = 0
    evicted_files: int = 0
    evicted_bytes: int = 0
    skipped: int = 0
    errors: int = 0
