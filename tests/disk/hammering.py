"""A process that works on a folder until it has done enough, or is ended; see test_processes.py.

    python hammering.py FOLDER LIMIT_BYTES SECONDS SEED

It prints a line when it has begun, and at last what went wrong, as JSON.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from pathlib import Path

from mlx_lm_kvcache_plugin.disk.exit import flush_at_exit
from mlx_lm_kvcache_plugin.disk.ledger import locked
from mlx_lm_kvcache_plugin.disk.tier import DiskTier
from tests.disk.records import (
    HOME,
    LAYOUT,
    Disk,
    make_record,
    names_of,
    offers_of,
    parts_of,
    same,
    used,
)


def main(folder: Path, limit_bytes: int, seconds: float, seed: int) -> None:
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mlx_lm_kvcache_plugin").addHandler(handler)
    tier = DiskTier(folder, limit_bytes, disk_usage=lambda _: Disk())
    flush_at_exit(tier)
    generator = random.Random(seed)
    wrong = highest = 0
    print("begun", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        letters = "".join(generator.choices("abcd", k=generator.randint(1, 12)))
        tier.offer(HOME, LAYOUT, offers_of(letters, 4000))
        for name, part in zip(names_of(letters), parts_of(letters), strict=True):
            record = tier.read(HOME, name)
            wrong += record is not None and not same(record, make_record(part, 4000))
        with locked(str(folder)):  # so that nothing appears here after it vanished there
            highest = max(highest, used(folder))
        tier.flush(60)
    tier.close()
    counters = tier.counters
    print(
        json.dumps(
            {
                "wrong": wrong,
                "highest": highest,
                "words": words,
                "errors": counters.errors,
                "quarantined": counters.quarantined,
                "written": counters.files_written,
                "evicted": counters.evicted_files,
                "read": counters.files_read,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
