"""Writing when the disk refuses: no partial file, one warning, and service again later."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open

from mlx_lm_kvcache_plugin.disk.files import Record
from mlx_lm_kvcache_plugin.disk.tier import DiskTier, Offer
from tests.disk.records import (
    HOME,
    LAYOUT,
    Disk,
    make_record,
    names_of,
    offers_of,
    open_tier,
    put,
    stored,
    temporaries,
)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.safetensors") if "quarantine" not in path.parts]


@contextmanager
def refusing(
    patch: pytest.MonkeyPatch, call: tuple[object, str], number: int, after: int = 0
) -> Iterator[list[int]]:
    """Let a system call fail from its n-th time on; yields how often it was tried."""
    module, function = call
    real: Callable[..., object] = getattr(module, function)
    tries = [0]

    def refuse(*arguments: object, **more: object) -> object:
        tries[0] += 1
        if tries[0] <= after:
            return real(*arguments, **more)
        raise OSError(number, os.strerror(number))

    with patch.context() as context:
        context.setattr(module, function, refuse)
        yield tries


STEPS = {
    "the lock": (os, "open"),
    "locking": (fcntl, "flock"),
    "the ledger": (os, "pwrite"),
    "making a folder": (os, "mkdir"),
    "its size": (os, "ftruncate"),
    "its content": (os, "write"),
    "waiting for the disk": (os, "fsync"),
    "its place": (os, "rename"),
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_write_that_fails_at_any_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: tuple[object, str],
    number: int,
    after: int,
) -> None:
    """Nothing half-written stays or is read; one line tells; later all is written."""
    with open_tier(tmp_path, pause_seconds=0) as tier:
        with refusing(monkeypatch, step, number, after) as tries:
            for _ in range(3):
                put(tier, "abcdef!")
            assert tries[0] > after
        assert temporaries(tmp_path) == []
        for path in files(tmp_path):
            with safe_open(path, "np") as file:
                assert file.keys()
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert os.strerror(number) in caplog.text
        assert tier.counters.errors >= 2
        assert put(tier, "abcdef!")
        assert stored(tier, "abcdef!") == "abcdef"
        assert all(tier.read(HOME, name) for name in names_of("abcdef!"))
        assert tier.counters.quarantined == 0


def test_while_it_pauses_nothing_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offer returns at once and is counted; what is on disk is still read."""
    with open_tier(tmp_path, pause_seconds=60) as tier:
        put(tier, "ab")
        with refusing(monkeypatch, (os, "fsync"), errno.ENOSPC):
            assert tier.accepts and put(tier, "cdef")
        assert not tier.accepts and not put(tier, "ghij")
        assert (tier.counters.skipped, tier.counters.errors) == (1, 1)
        assert tier.read(HOME, names_of("ab")[0])


def test_one_warning_for_each_kind_of_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often: a full disk, then a read-only one, then a full one again."""
    with open_tier(tmp_path, pause_seconds=0) as tier:
        for number in (errno.ENOSPC, errno.ENOSPC, errno.EROFS, errno.ENOSPC, errno.EROFS):
            with refusing(monkeypatch, (os, "write"), number):
                put(tier, "ab")
        assert len(caplog.records) == 2
        assert tier.counters.errors == 5


@pytest.mark.parametrize("when", ["before the path", "within the path"])
def test_a_folder_that_is_deleted_is_not_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """It goes quiet; once the user has made the folder again it goes on."""
    folder = tmp_path / "cache"
    with open_tier(folder, pause_seconds=0) as tier:
        put(tier, "ab")
        offers = offers_of("cdef")
        if when == "before the path":
            shutil.rmtree(folder)
        else:

            def pull_away() -> Record:
                shutil.rmtree(folder)
                return make_record("ef")

            offers[1] = Offer(offers[1].name, pull_away)
        tier.offer(HOME, LAYOUT, offers)
        put(tier, "cdef")
        assert not folder.exists()
        assert len(caplog.records) == 1
        assert tier.read(HOME, names_of("ab")[0]) is None
        folder.mkdir()
        put(tier, "ab")
        assert stored(tier, "ab") == "ab"
        assert tier.layouts(HOME)


def test_what_others_delete_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All that is in the folder, just before a file is put in its place."""
    real = os.rename

    def clear_first(*arguments: str) -> None:
        for path in tmp_path.iterdir():
            path.unlink() if path.is_file() else shutil.rmtree(path)
        real(*arguments)

    with open_tier(tmp_path) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", clear_first)
            put(tier, "abcd")
        assert (tier.counters.errors, caplog.records, files(tmp_path)) == (0, [], [])
        put(tier, "abcd")
        assert stored(tier, "abcd") == "abcd"
        assert tier.layouts(HOME)


@pytest.mark.parametrize("kind", ["a file in its place", "a file on the way", "a loop of links"])
def test_a_folder_that_cannot_be_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Nothing is raised: one line, nothing is written, everything is a miss."""
    place = tmp_path / "cache"
    if kind == "a loop of links":
        place.symlink_to(place)
    else:
        place.write_text("a file")
    folder = place / "below" if kind == "a file on the way" else place
    with open_tier(folder, pause_seconds=0) as tier:
        for _ in range(2):
            put(tier, "ab")
        (name,) = names_of("ab")
        assert tier.read(HOME, name) is None
        assert tier.tokens_of(HOME, name) is None
        assert tier.children(HOME, name.parent) == []
        assert tier.layouts(HOME) == {}
        assert not tier.has(HOME, name)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert len(caplog.records) <= 2


def test_a_disk_that_tells_nothing(tmp_path: Path) -> None:
    """A failing question for free room pauses the writer like any other refusal."""
    answers: list[Disk | OSError] = [Disk(), OSError(errno.EIO, "no answer")]

    def usage(_: str) -> Disk:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    tier: DiskTier
    with open_tier(tmp_path, disk_usage=usage, pause_seconds=0) as tier:
        put(tier, "ab")
        assert (stored(tier, "ab"), tier.counters.errors) == ("..", 1)
        answers[:] = [Disk()]
        put(tier, "ab")
        assert stored(tier, "ab") == "ab"
