"""Clearing a folder from inside of a server: whatever is queued, whoever wrote it."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from mlx_lm_kvcache_plugin.disk.clearing import Cleared
from mlx_lm_kvcache_plugin.disk.tier import Home, Offer
from tests.disk.records import (
    HOME,
    LAYOUT,
    make_record,
    names_of,
    offers_of,
    open_tier,
    path_of,
    put,
    stored,
    used,
)

OTHER = Home(b"other weights", {"model": "another one"})


def test_all_of_ours_goes(tmp_path: Path) -> None:
    """Records, texts and broken files, of all models; what is not ours stays."""
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    with open_tier(tmp_path) as tier:
        put(tier, "abcd")
        put(tier, "abc!", home=OTHER)
        path_of(tmp_path, names_of("ab")[0]).write_bytes(b"broken")
        assert tier.read(HOME, names_of("ab")[0]) is None
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        nbytes = sum(path.stat().st_size for path in files)
        cleared = tier.clear()
        assert tier.flush(60)
        ledger = 21
        assert cleared == Cleared(len(files) - 2, nbytes - ledger - foreign.stat().st_size)
        assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["notes.txt"]
        assert stored(tier, "abcd") == "...." and tier.layouts(HOME) == {}


def test_an_empty_folder(tmp_path: Path) -> None:
    """Nothing goes, and nothing fails."""
    with open_tier(tmp_path) as tier:
        assert tier.clear() == tier.clear() == Cleared(0, 0)
        assert tier.flush(60) and tier.counters.errors == 0


def test_what_is_written_afterwards_is_there_and_counted(tmp_path: Path) -> None:
    """As in a new folder: with its texts, and within the limit."""
    with open_tier(tmp_path) as tier:
        put(tier, "abcd", 5000)
        tier.clear()
        assert tier.flush(60)
        assert tier.used_bytes == used(tmp_path)
        put(tier, "abxy")
        assert (stored(tier, "abxy"), stored(tier, "abcd")) == ("abxy", "ab..")
        assert list(tier.layouts(HOME).values()) == [LAYOUT]
        assert tier.used_bytes == used(tmp_path)
        assert (tier.counters.errors, tier.counters.skipped) == (0, 0)


def test_what_is_queued_goes_too(tmp_path: Path) -> None:
    """It is written first, so that it does not come back afterwards."""
    release, begun = threading.Event(), threading.Event()
    with open_tier(tmp_path) as tier:
        tier.offer(
            HOME,
            LAYOUT,
            [
                Offer(
                    names_of("ab")[0], lambda: begun.set() or release.wait(60) and make_record("ab")
                )
            ],
        )
        for letters in ("cdef", "gh"):
            tier.offer(HOME, LAYOUT, offers_of(letters))
        tier.forget(HOME, names_of("gh"))
        assert begun.wait(60)
        cleared: list[Cleared] = []
        clearer = threading.Thread(target=lambda: cleared.append(tier.clear()))
        clearer.start()
        assert not cleared
        release.set()
        clearer.join()
        assert tier.flush(60)
        assert tier.counters.files_written == 4
        assert [each.files for each in cleared] == [3 + 2]
        assert [stored(tier, letters) for letters in ("ab", "cdef", "gh")] == ["..", "....", ".."]


def test_what_others_wrote_goes_too(tmp_path: Path) -> None:
    """Under them: they go on, and write anew what they offer again."""
    with open_tier(tmp_path) as other, open_tier(tmp_path) as tier:
        put(other, "abcd")
        put(tier, "xy")
        assert tier.clear().files == 3 + 2
        assert stored(other, "abcdxy") == "......"
        put(other, "abcd")
        assert stored(tier, "abcd") == "abcd"
        assert other.counters.errors == tier.counters.errors == 0
        assert other.used_bytes == used(tmp_path)


def test_what_was_remembered_is_forgotten(tmp_path: Path) -> None:
    """Tokens of files are looked up once; these are gone."""
    with open_tier(tmp_path) as tier:
        put(tier, "ab")
        (name,) = names_of("ab")
        assert tier.tokens_of(HOME, name) is not None
        tier.clear()
        assert tier.tokens_of(HOME, name) is None


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """Somebody deleted it: there is nothing left to clear; nor is it made anew."""
    with open_tier(tmp_path / "cache") as tier:
        put(tier, "ab")
        shutil.rmtree(tmp_path / "cache")
        assert tier.clear() == Cleared(0, 0)
        assert tier.flush(60)
        assert not (tmp_path / "cache").exists()


def test_a_tier_that_pauses_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full refuses to write, and is the more reason to clear it."""
    caplog.set_level(logging.CRITICAL)
    with open_tier(tmp_path) as tier:
        put(tier, "ab")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: os.close(-1))
            put(tier, "cd")
        assert not tier.accepts
        assert tier.clear().files == 3
        assert stored(tier, "abcd") == "...."


def test_what_cannot_be_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To whoever asked; it is still there, and the next time it goes."""

    def refuse(path: str) -> None:
        raise PermissionError(13, "no", path)

    with open_tier(tmp_path) as tier:
        put(tier, "ab")
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refuse)
            with pytest.raises(PermissionError):
                tier.clear()
        assert stored(tier, "ab") == "ab"
        assert tier.clear().files == 3


def test_a_file_that_goes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else deleted it first: that is what was wanted."""
    real = os.unlink

    def too_late(path: str) -> None:
        real(path)
        if path.endswith(".safetensors"):
            real(path)

    with open_tier(tmp_path) as tier:
        put(tier, "abcd")
        monkeypatch.setattr(os, "unlink", too_late)
        tier.clear()
        assert tier.flush(60)
        assert (stored(tier, "abcd"), tier.counters.errors) == ("....", 0)
