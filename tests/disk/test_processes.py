"""Processes: several that share a folder, and one that is ended in the middle of a write."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.disk.clearing import clear
from tests.disk.records import (
    HOME,
    names_of,
    open_tier,
    path_of,
    put,
    stored,
    used,
)

ROOT = Path(__file__).parents[2]
KIB = 1 << 10


def start(*arguments: str) -> subprocess.Popen[str]:
    """A Python that finds the tests' own modules."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def hammer(folder: Path, limit: int, seconds: float, seed: int) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("hammering.py"))
    return start(script, str(folder), str(limit), str(seconds), str(seed))


def has_begun(process: subprocess.Popen[str]) -> bool:
    assert process.stdout
    return process.stdout.readline() == "begun\n"


def report_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def test_two_write_and_one_clears(tmp_path: Path) -> None:
    """No error, no wrong record, and the limit is held at every look."""
    limit = 150 * KIB
    writers = [hammer(tmp_path, limit, 2, seed) for seed in (1, 2)]
    assert all(has_begun(writer) for writer in writers)
    cleared = 0
    while any(writer.poll() is None for writer in writers):
        time.sleep(0.2)
        cleared += clear(str(tmp_path)).files
    for report in map(report_of, writers):
        assert (report["wrong"], report["errors"], report["quarantined"]) == (0, 0, 0)
        assert report["words"] == []
        assert report["highest"] <= limit
        assert report["written"] > 0
        assert report["read"] > 0
    assert cleared > 0
    clear(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_two_write_more_than_there_is_room_for(tmp_path: Path) -> None:
    """Each evicts what the other wrote, and none of them exceeds what both were told."""
    limit = 100 * KIB
    writers = [hammer(tmp_path, limit, 1, seed) for seed in (3, 4)]
    for writer in writers:
        assert has_begun(writer)
    for report in map(report_of, writers):
        assert (report["wrong"], report["errors"], report["words"]) == (0, 0, [])
        assert report["highest"] <= limit
        assert report["evicted"] > 0
    assert used(tmp_path) <= limit


def test_a_process_killed_at_any_moment(tmp_path: Path) -> None:
    """The next one starts without a word, reads whole records only and keeps the limit."""
    limit = 150 * KIB
    generator = random.Random(5)
    writer = hammer(tmp_path, limit, 60, 0)
    assert has_begun(writer)
    for seed in range(1, 10):
        time.sleep(generator.uniform(0, 0.15))
        writer.kill()
        writer.communicate()
        assert used(tmp_path) <= limit
        writer = hammer(tmp_path, limit, 60 if seed < 9 else 0.3, seed)
        assert has_begun(writer)
    report = report_of(writer)
    assert (report["wrong"], report["errors"], report["quarantined"]) == (0, 0, 0)
    assert (report["words"], report["written"] > 0) == ([], True)
    with open_tier(tmp_path, limit) as tier:
        put(tier, "zzzz", 4000)
        assert all(tier.read(HOME, name) for name in names_of("zzzz"))
        assert tier.counters.errors == 0


ENDING = """
import gc, os, signal, sys, threading, time
from pathlib import Path
from mlx_lm_kvcache_plugin.disk.exit import flush_at_exit
import mlx_lm_kvcache_plugin.disk.exit as exit_module
from mlx_lm_kvcache_plugin.disk.tier import DiskTier, Offer
from tests.disk.records import *

how = sys.argv[2]
if how == "stuck":
    exit_module.CLOSING_SECONDS = 0.5
if how == "handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
tier = DiskTier(Path(sys.argv[1]), 10 * MIB, disk_usage=lambda _: Disk())
flush_at_exit(tier)
flush_at_exit(tier)
def slowly(make):
    return lambda: time.sleep(0.2) or make()

tier.offer(HOME, LAYOUT, [Offer(each.name, slowly(each.make)) for each in offers_of("abcd")])
if how == "stuck":
    tier.offer(HOME, LAYOUT, [Offer(names_of("xy")[0], lambda: time.sleep(60))])
if how.startswith("dropped"):
    del tier
    gc.collect()
if how not in ("end", "raise", "dropped"):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
if how == "raise":
    raise SystemExit(4)
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("end", 0),
        ("raise", 4),
        ("term", -signal.SIGTERM),
        ("handled", 3),
        ("dropped", 0),
        ("dropped, then term", -signal.SIGTERM),
    ],
)
def test_what_is_queued_is_written_before_the_end(tmp_path: Path, how: str, status: int) -> None:
    """Also by SIGTERM, whose exit status stays; a handler of somebody else's is left alone.

    Nobody need hold the tier any more.
    """
    process = start("-c", ENDING, str(tmp_path), how)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (status, "")
    with open_tier(tmp_path) as tier:
        assert stored(tier, "abcd") == "abcd"


def test_the_end_does_not_wait_for_ever(tmp_path: Path) -> None:
    """Five seconds at most, here half a second; what is not written by then is not."""
    begun = time.monotonic()
    process = start("-c", ENDING, str(tmp_path), "stuck")
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - begun < 5
    with open_tier(tmp_path) as tier:
        assert stored(tier, "xy") == ".."


FORKING = """
import os, sys, threading, time, warnings
from pathlib import Path
from mlx_lm_kvcache_plugin.disk.exit import flush_at_exit
from mlx_lm_kvcache_plugin.disk.tier import DiskTier, Offer
from tests.disk.records import *

warnings.simplefilter("ignore")  # that forking with threads is dangerous is the point
tier = DiskTier(Path(sys.argv[1]), 10 * MIB, disk_usage=lambda _: Disk())
flush_at_exit(tier)
put(tier, "ab")
begun = threading.Event()
tier.offer(HOME, LAYOUT, [Offer(names_of("cd")[0], lambda: begun.set() or time.sleep(0.3))])
begun.wait()
child = os.fork()
if not child:
    assert not tier.offer(HOME, LAYOUT, offers_of("ef"))
    assert tier.flush(0) and tier.read(HOME, names_of("ab")[0])
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
put(tier, "gh")
assert stored(tier, "efgh"[:2]) == ".." and stored(tier, "gh") == "gh"
"""


def test_a_forked_child_reads_and_does_not_write(tmp_path: Path) -> None:
    """It has no thread that could; it neither hangs nor disturbs its parent."""
    process = start("-c", FORKING, str(tmp_path))
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert path_of(tmp_path, names_of("gh")[0]).exists()
