"""The limit of a folder: held at every moment, by giving up what was not used for longest."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from mlx_lm_kvcache_plugin.disk.contents import Role, all_files
from mlx_lm_kvcache_plugin.disk.ledger import LEDGER, LEDGER_BYTES, locked
from mlx_lm_kvcache_plugin.disk.limit import GIB, KEPT_SHARE, STALE_SECONDS
from mlx_lm_kvcache_plugin.disk.tier import DiskTier, Home
from tests.disk.records import (
    HOME,
    MIB,
    Disk,
    age,
    names_of,
    open_tier,
    path_of,
    put,
    stored,
    temporaries,
    used,
)

KIB = 1 << 10
OTHER = Home(b"another fingerprint", {"model": "another", "codec": "raw"})


def ledger_of(folder: Path) -> int:
    with locked(str(folder)) as ledger:
        total = ledger.read()
    assert total is not None
    return total


@pytest.mark.parametrize("seed", range(3))
def test_the_limit_holds_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Over namespaces, quarantine and temporary files: looked at after every change."""
    generator = random.Random(seed)
    limit = 64 * KIB
    highest = 0

    def watched(real):
        def call(*arguments, **more):
            nonlocal highest
            result = real(*arguments, **more)
            highest = max(highest, used(tmp_path))
            return result

        return call

    for function in ("ftruncate", "write", "rename", "unlink"):
        monkeypatch.setattr(os, function, watched(getattr(os, function)))
    with open_tier(tmp_path, limit) as tier:
        for _ in range(60):
            letters = "".join(generator.choices("abc", k=generator.randint(1, 8)))
            home = generator.choice([HOME, OTHER])
            put(tier, letters + generator.choice(["", "!"]), generator.randint(1, 12 * KIB), home)
            if generator.random() < 0.2:
                name = generator.choice(names_of(letters, home))
                if tier.has(home, name):
                    path_of(tmp_path, name, home).write_bytes(b"broken")
                    assert tier.read(home, name) is None
            assert ledger_of(tmp_path) >= used(tmp_path)
        assert tier.counters.errors == 0
        assert tier.counters.evicted_files > 10
        assert tier.counters.quarantined > 0
    assert limit / 2 < highest <= limit


def test_a_limit_that_was_lowered_holds_from_the_start(tmp_path: Path) -> None:
    """Down to it, oldest first, without an offer and without reading a record."""
    with open_tier(tmp_path) as tier:
        for number, letters in enumerate(["ab", "cd", "ef", "gh"]):
            put(tier, letters, 20 * KIB)
            age(tmp_path, names_of(letters), 1000 - 100 * number)
    with open_tier(tmp_path, 50 * KIB) as tier:
        left = [letters for letters in ("ab", "cd", "ef", "gh") if "." not in stored(tier, letters)]
        assert left == ["ef", "gh"]
        assert (tier.counters.evicted_files, tier.counters.files_read) == (2, 0)
        assert tier.used_bytes == ledger_of(tmp_path) == used(tmp_path) <= 50 * KIB


def test_a_file_that_is_larger_than_the_limit_is_skipped(tmp_path: Path) -> None:
    """Nothing gives way to it."""
    with open_tier(tmp_path, 64 * KIB) as tier:
        put(tier, "ab", 20 * KIB)
        put(tier, "cd", 70 * KIB)
        assert (stored(tier, "ab"), stored(tier, "cd")) == ("ab", "..")
        assert (tier.counters.skipped, tier.counters.evicted_files) == (1, 0)


@pytest.mark.parametrize("total", [4 * GIB, 400 * GIB], ids=["2 GiB", "a twentieth"])
def test_the_disk_keeps_its_reserve(tmp_path: Path, total: int) -> None:
    """Free room short of the reserve: older files give way, and nothing more is written."""
    reserve = max(2 * GIB, total // 20)
    free = reserve + 30 * KIB
    begin = 0

    def usage(_: str) -> Disk:
        return Disk(total, free - (used(tmp_path) - begin))

    with open_tier(tmp_path, disk_usage=usage) as tier:
        for letters in ("ab", "cd", "ef"):
            put(tier, letters, 12 * KIB)
            age(tmp_path, names_of("ab") if letters == "ab" else [], 100)
            assert usage("").free >= reserve
        assert [stored(tier, each) for each in ("ab", "cd", "ef")] == ["..", "cd", "ef"]
        free -= 15 * KIB  # somebody else writes
        put(tier, "gh", 1 * KIB)
        assert usage("").free >= reserve
        assert stored(tier, "gh") == "gh"
        free -= 100 * KIB
        put(tier, "ij", 1 * KIB)
        assert stored(tier, "ij") == ".."
        assert not any(file.role is Role.RECORD for file in all_files(str(tmp_path)))


@pytest.mark.parametrize("text", ["", "\0" * LEDGER_BYTES])
def test_a_ledger_that_was_torn_is_made_anew(tmp_path: Path, text: str) -> None:
    """By a kill or a power cut: from what is there.

    Likewise one that is missing, and one that says too little at a start.
    """
    with open_tier(tmp_path) as tier:
        put(tier, "ab", 20 * KIB)
        tmp_path.joinpath(LEDGER).write_text(text)
        put(tier, "cd", 20 * KIB)
        assert ledger_of(tmp_path) == used(tmp_path)
        tmp_path.joinpath(LEDGER).unlink()
        put(tier, "ef", 20 * KIB)
        assert ledger_of(tmp_path) == used(tmp_path)
    tmp_path.joinpath(LEDGER).write_text(f"{5:020d}\n")
    with open_tier(tmp_path):
        assert ledger_of(tmp_path) == used(tmp_path)
    assert tmp_path.joinpath(LEDGER).stat().st_size == LEDGER_BYTES


def test_a_ledger_that_says_too_much_evicts_nothing(tmp_path: Path) -> None:
    """Before anything gives way the files are counted."""
    with open_tier(tmp_path, 64 * KIB) as tier:
        put(tier, "ab", 20 * KIB)
        tmp_path.joinpath(LEDGER).write_text(f"{MIB:020d}\n")
        put(tier, "cd", 20 * KIB)
        assert (stored(tier, "ab"), stored(tier, "cd")) == ("ab", "cd")
        assert ledger_of(tmp_path) == used(tmp_path)


def test_stale_temporary_files_go(tmp_path: Path) -> None:
    """A killed process left them; a young one may be somebody's, and counts."""
    with open_tier(tmp_path) as tier:
        put(tier, "ab")
    place = path_of(tmp_path, names_of("ab")[0]).parent
    stale, young = place / ".123-4.tmp", place / ".123-5.tmp"
    for path in (stale, young, place.parent / ".123-6.tmp"):
        path.write_bytes(bytes(5000))
        os.utime(path, (time.time() - STALE_SECONDS - 5,) * 2)
    os.utime(young)
    with open_tier(tmp_path) as tier:
        assert temporaries(tmp_path) == [young]
        assert tier.used_bytes == used(tmp_path)


def test_what_is_foreign_is_left_alone(tmp_path: Path) -> None:
    """Neither counted nor evicted, whatever the limit."""
    with open_tier(tmp_path) as tier:
        put(tier, "abcd!", 10 * KIB)
    place = path_of(tmp_path, names_of("ab")[0]).parent
    foreign = [
        tmp_path / "notes.txt",
        tmp_path / "cafe" / "about.json",
        place / ".hidden.tmp",
        place / "model.safetensors",
        place.parent / "layout-1.json",
        tmp_path / "photos" / place.name / names_of("ab")[0].filename,
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(MIB))
    with open_tier(tmp_path, 1) as tier:
        assert tier.counters.evicted_files == 5
        assert tier.used_bytes == LEDGER_BYTES
    assert all(path.stat().st_size == MIB for path in foreign)


def test_evicting_all_of_a_namespace_leaves_nothing_of_it(tmp_path: Path) -> None:
    """The texts go behind the last record, and empty folders with them."""
    with open_tier(tmp_path) as tier:
        put(tier, "abcd!", 10 * KIB, OTHER)
        age(tmp_path, names_of("abcd!", OTHER), 1000, OTHER)
        put(tier, "ab", 10 * KIB)
    left = used(tmp_path / HOME.namespace.hex()) + LEDGER_BYTES
    with open_tier(tmp_path, int(left / KEPT_SHARE) + 2):
        assert {path.name for path in tmp_path.iterdir()} == {HOME.namespace.hex(), LEDGER}


def test_forgotten_records_are_deleted(tmp_path: Path) -> None:
    """And taken off the ledger; what was not there is no error."""
    with open_tier(tmp_path) as tier:
        put(tier, "abcd!", 10 * KIB)
        tier.forget(HOME, [*names_of("abcd!")[1:], *names_of("xy")])
        assert tier.flush(60)
        assert stored(tier, "abcd") == "ab.."
        assert tier.used_bytes == ledger_of(tmp_path) == used(tmp_path)
        assert tier.counters.errors == 0


def test_a_folder_is_looked_at_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What people copied into it counts from then on."""
    with open_tier(tmp_path, 64 * KIB) as tier:
        put(tier, "ab", 20 * KIB)
        copy = path_of(tmp_path, names_of("cd")[0])
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(bytes(30 * KIB))
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 700)
        put(tier, "ef", KIB)
        assert tier.used_bytes == ledger_of(tmp_path) == used(tmp_path)


def test_limits_of_several_tiers(tmp_path: Path) -> None:
    """Each holds the folder to its own, whoever wrote what is there."""
    with open_tier(tmp_path, 100 * KIB) as large, open_tier(tmp_path, 50 * KIB) as small:
        tiers: list[DiskTier] = [large, large, small]
        for tier, letters in zip(tiers, ("ab", "cd", "ef"), strict=True):
            put(tier, letters, 30 * KIB)
        assert used(tmp_path) <= 50 * KIB
        assert stored(small, "ef") == "ef"


FOREIGN = ["0\n", "nonsense", "12345\n", "-0000000000000000005\n", "9" * 20, "9" * 5000, "\0"]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_file_of_others_that_has_the_name_of_the_ledger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """It is not written to: one warning, and nothing is written until it is gone."""
    tmp_path.joinpath(LEDGER).write_text(text)
    with open_tier(tmp_path, pause_seconds=0) as tier:
        for _ in range(2):
            put(tier, "ab")
        tier.forget(HOME, names_of("ab"))
        assert tier.flush(60)
        assert [path.name for path in tmp_path.iterdir()] == [LEDGER]
        assert tmp_path.joinpath(LEDGER).read_text() == text
        assert [str(tmp_path / LEDGER) in record.getMessage() for record in caplog.records] == [
            True
        ]
        tmp_path.joinpath(LEDGER).unlink()
        put(tier, "ab")
        assert stored(tier, "ab") == "ab"
