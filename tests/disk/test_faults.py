"""Reading whatever lies in a file's place: a miss and one count, never an error."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_lm_kvcache_plugin.disk.folder import QUARANTINED_FILES
from mlx_lm_kvcache_plugin.disk.names import Name, layout_digest
from mlx_lm_kvcache_plugin.disk.tier import DiskTier
from tests.disk.records import (
    HOME,
    LAYOUT,
    letters_of,
    make_record,
    names_of,
    open_tier,
    path_of,
    put,
    same,
    stored,
)

Fault = Callable[[Path], None]


def replaced(make: Fault) -> Fault:
    def fault(path: Path) -> None:
        path.unlink()
        make(path)

    return fault


def flipped(place: float) -> Fault:
    def fault(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(place * (len(data) - 1))] ^= 4
        path.write_bytes(data)

    return fault


def cut(share: float) -> Fault:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def linked_elsewhere(path: Path) -> None:
    """A link to the very file that belongs there."""
    away = path.parents[3] / "away"
    path.rename(away)
    path.symlink_to(away)


def taken_by_another(path: Path) -> None:
    """A whole record under the name of another."""
    for other in path.parents[1].rglob("*.safetensors"):
        if other != path:
            path.write_bytes(other.read_bytes())
            return


FAULTS: dict[str, Fault] = {
    "empty": cut(0),
    "cut in the head": cut(0.1),
    "cut in half": cut(0.5),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more") and None,
    "a bit of the length": flipped(0),
    "a bit of the head": flipped(0.3),
    "a bit of the numbers": flipped(1),
    "foreign": lambda path: path.write_text("#!/bin/sh\nexit 1\n") and None,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "taken by another": taken_by_another,
    "a folder": replaced(Path.mkdir),
    "a full folder": replaced(lambda path: path.joinpath("a", "b").mkdir(parents=True)),
    "a link to nothing": replaced(lambda path: path.symlink_to("nothing")),
    "a link to itself": replaced(lambda path: path.symlink_to(path.name)),
    "a link to the file": linked_elsewhere,
    "a link to a folder": replaced(lambda path: path.symlink_to("/")),
    "a pipe": replaced(os.mkfifo),
}
every_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)

RECORDS = {"a first block": ("ab", 0), "a later block": ("abcd", 1), "a tail": ("abc", 1)}
RECORDS |= {"a checkpoint": ("ab!", 1), "a checkpoint behind a tail": ("abc!", 2)}
every_record = pytest.mark.parametrize(("letters", "place"), RECORDS.values(), ids=RECORDS)


def quarantined(folder: Path) -> list[Path]:
    return list(folder.joinpath("quarantine").iterdir())


@every_record
@every_fault
def test_a_fault_is_a_miss_and_one_count(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    letters: str,
    place: int,
) -> None:
    """It is set aside, so it is met once; and the next offer puts it right."""
    folder = tmp_path / "cache"
    with open_tier(folder) as tier:
        put(tier, "xy")
        put(tier, letters)
        name = names_of(letters)[place]
        fault(path_of(folder, name))
        assert tier.read(HOME, name) is None
        assert tier.counters.quarantined == 1
        assert len(quarantined(folder)) == 1
        assert tier.read(HOME, name) is None
        assert name not in tier.children(HOME, name.parent)
        assert (tier.counters.quarantined, tier.counters.errors) == (1, 0)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]

        put(tier, letters)
        assert "." not in stored(tier, letters)
        assert tier.read(HOME, name) is not None


@every_fault
def test_a_fault_does_not_hinder_another_start(tmp_path: Path, fault: Fault) -> None:
    """Whatever lies there when a process begins, it comes up without a word and can write."""
    with open_tier(tmp_path) as tier:
        put(tier, "xy")
        put(tier, "abcd")
    for letters in ("ab", "abcd"):
        fault(path_of(tmp_path, names_of(letters)[-1]))
    with open_tier(tmp_path) as tier:
        put(tier, "abcdef")
        assert tier.read(HOME, names_of("abcdef")[2])
        assert tier.counters.errors == 0


BAD_HEADS = ("empty", "cut in the head", "foreign", "zeros", "taken by another", "a pipe")


@pytest.mark.parametrize("fault", [FAULTS[key] for key in BAD_HEADS], ids=BAD_HEADS)
def test_tokens_are_not_read_from_a_broken_head(tmp_path: Path, fault: Fault) -> None:
    """None, and set aside like anything else that is broken."""
    with open_tier(tmp_path) as tier:
        put(tier, "xy")
        put(tier, "abcd")
        name = names_of("abcd")[1]
        fault(path_of(tmp_path, name))
        assert tier.tokens_of(HOME, name) is None
        assert tier.tokens_of(HOME, name) is None
        assert tier.counters.quarantined == 1


@pytest.mark.parametrize("fault", [FAULTS[key] for key in BAD_HEADS], ids=BAD_HEADS)
def test_a_look_leaves_a_broken_head_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    """It says nothing and counts nothing; whoever comes next is not told by it what to find."""
    with open_tier(tmp_path) as tier:
        put(tier, "xy")
        put(tier, "abcd")
        name = names_of("abcd")[1]
        path = path_of(tmp_path, name)
        whole = path.read_bytes()
        fault(path)
        assert tier.untouched().tokens_of(HOME, name) is None
        assert os.path.lexists(path) and not tmp_path.joinpath("quarantine").exists()
        assert (tier.counters.quarantined, tier.counters.errors) == (0, 0)
        assert not caplog.records
        assert tier.tokens_of(HOME, name) is None
        assert tier.counters.quarantined == 1
        path.write_bytes(whole)
        assert tier.untouched().tokens_of(HOME, name) == make_record("cd").tokens


def test_a_look_and_a_lookup_remember_the_same(tmp_path: Path) -> None:
    """Whichever of them read the tokens."""
    with open_tier(tmp_path) as tier:
        put(tier, "abcd")
        first, second = names_of("abcd")
        assert tier.untouched().tokens_of(HOME, first)
        assert tier.tokens_of(HOME, second)
        for name in (first, second):
            path_of(tmp_path, name).unlink()
        assert tier.tokens_of(HOME, first) == make_record("ab").tokens
        assert tier.untouched().tokens_of(HOME, second) == make_record("cd").tokens


def test_what_is_not_there_is_a_plain_miss(tmp_path: Path) -> None:
    """No count, no word: the file, its subfolder or its namespace may be missing."""
    with open_tier(tmp_path) as tier:
        (name,) = names_of("ab")
        for _ in ("no namespace", "no subfolder", "no file"):
            assert tier.read(HOME, name) is None
            assert tier.tokens_of(HOME, name) is None
            assert tier.children(HOME, name.parent) == []
            assert not tier.has(HOME, name)
            path = path_of(tmp_path, name)
            (path.parent if path.parent.parent.exists() else path.parent.parent).mkdir(
                exist_ok=True
            )
        assert (tier.counters.quarantined, tier.counters.errors) == (0, 0)


@every_record
def test_an_unreadable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letters: str, place: int
) -> None:
    """Root may read everything, so the refusal is simulated."""
    with open_tier(tmp_path) as tier:
        put(tier, letters)
        name = names_of(letters)[place]
        refuse(monkeypatch, tier, errno.EACCES, path_of(tmp_path, name))
        assert tier.read(HOME, name) is None
        assert (tier.counters.quarantined, tier.counters.errors) == (1, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permissions(tmp_path: Path) -> None:
    """The same without simulation."""
    with open_tier(tmp_path) as tier:
        put(tier, "ab")
        path_of(tmp_path, names_of("ab")[0]).chmod(0)
        assert tier.read(HOME, names_of("ab")[0]) is None
        assert tier.counters.quarantined == 1


NOT_THE_FILE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@pytest.mark.parametrize("number", NOT_THE_FILE, ids=errno.errorcode.get)
def test_what_is_not_the_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Out of descriptors, or a network disk is away: a miss, but the file stays."""
    with open_tier(tmp_path) as tier:
        put(tier, "ab")
        (name,) = names_of("ab")
        with monkeypatch.context() as patch:
            refuse(patch, tier, number, path_of(tmp_path, name))
            assert tier.untouched().tokens_of(HOME, name) is None
            assert (tier.counters.quarantined, tier.counters.errors) == (0, 0)
            assert tier.read(HOME, name) is None
            assert tier.tokens_of(HOME, name) is None
        assert (tier.counters.quarantined, tier.counters.errors) == (0, 2)
        assert tier.read(HOME, name)


def refuse(patch: pytest.MonkeyPatch, tier: DiskTier, number: int, path: Path) -> None:
    real = os.open

    def refusing(name: str, *arguments: int, **more: int) -> int:
        if name == str(path):
            raise OSError(number, os.strerror(number), name)
        return real(name, *arguments, **more)

    patch.setattr(os, "open", refusing)


def test_a_quarantine_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    """The file stays where it is; it is a miss each time."""
    with open_tier(tmp_path) as tier:
        put(tier, "ab")
        (name,) = names_of("ab")
        tmp_path.joinpath("quarantine").write_text("in the way")
        cut(0.5)(path_of(tmp_path, name))
        assert tier.read(HOME, name) is None
        assert tier.read(HOME, name) is None
        assert (tier.counters.quarantined, tier.counters.errors) == (0, 2)


def test_the_quarantine_has_a_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of many broken files the last ones are kept; one line tells of the first."""
    with open_tier(tmp_path) as tier:
        for number in range(QUARANTINED_FILES + 8):
            letters = chr(1000 + number) * 2
            put(tier, letters)
            cut(0.5)(path_of(tmp_path, names_of(letters)[0]))
            assert tier.read(HOME, names_of(letters)[0]) is None
        assert tier.counters.quarantined == QUARANTINED_FILES + 8
        assert len(quarantined(tmp_path)) == QUARANTINED_FILES
        assert len(caplog.records) == 1


LAYOUT_FAULTS = [key for key in FAULTS if key not in ("taken by another", "a link to nothing")]


@pytest.mark.parametrize("fault", [FAULTS[key] for key in LAYOUT_FAULTS], ids=LAYOUT_FAULTS)
def test_a_layout_that_does_not_have_its_digest(tmp_path: Path, fault: Fault) -> None:
    """It is set aside, and written anew with the next offer; a look leaves it alone."""
    folder = tmp_path / "cache"
    with open_tier(folder) as tier:
        put(tier, "ab")
        digest = layout_digest(LAYOUT)
        assert tier.layouts(HOME) == {digest: LAYOUT}
        path = folder / HOME.namespace.hex() / f"layout-{digest.hex()}.json"
        path.parent.joinpath("layout-foreign.json").write_text(LAYOUT)
        fault(path)
        assert tier.untouched().layouts(HOME) == {}
        assert (tier.counters.quarantined, tier.counters.errors) == (0, 0)
        assert os.path.lexists(path)
        assert tier.layouts(HOME) == {}
        assert tier.counters.quarantined == 1
        put(tier, "ab")
        assert tier.layouts(HOME) == {digest: LAYOUT}
        assert path.parent.joinpath("layout-foreign.json").exists()


def test_whole_records_come_back(tmp_path: Path) -> None:
    """To compare: without a fault all kinds of records are read, by another process too."""
    with open_tier(tmp_path) as tier:
        put(tier, "abcde!")
        everything = dict(zip(names_of("abcde!"), ["ab", "cd", "e", "e"], strict=True))
    with open_tier(tmp_path) as tier:
        for name, letters in everything.items():
            assert same(tier.read(HOME, name), make_record(letters))
            assert letters_of(tier.read(HOME, name)) == letters
            assert tier.tokens_of(HOME, name) == make_record(letters).tokens
        assert tier.counters.files_read == 8
        assert tier.layouts(HOME) == {layout_digest(LAYOUT): LAYOUT}
        below: list[Name] = tier.children(HOME, names_of("abcd")[1].own)
        assert set(below) == set(names_of("abcde!")[2:])
