"""`mlx_lm.kvcache disk DIR`: what is there, whether it is sound, and getting rid of it."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_lm_kvcache_plugin.__main__ import main
from mlx_lm_kvcache_plugin.disk import command
from mlx_lm_kvcache_plugin.disk.contents import Found, all_files
from mlx_lm_kvcache_plugin.disk.ledger import LEDGER
from mlx_lm_kvcache_plugin.disk.tier import Home
from tests.disk.records import HOME, names_of, open_tier, path_of, put, stored, used

OTHER = Home(b"another fingerprint", {"model": "another model", "codec": "raw"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two namespaces, one with a checkpoint."""
    with open_tier(tmp_path / "cache") as tier:
        put(tier, "abcde!", 1 << 20)
        put(tier, "xy", 1 << 10, OTHER)
    for letters, home, when in (("abcde!", HOME, "2026-03-01 10:00"), ("xy", OTHER, "2026-04-02")):
        for day, name in enumerate(names_of(letters, home)):
            form = "%Y-%m-%d %H:%M" if ":" in when else "%Y-%m-%d"
            seconds = time.mktime(time.strptime(when, form)) + 86400 * day
            os.utime(path_of(tmp_path / "cache", name, home), (seconds, seconds))
    return tmp_path / "cache"


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """What was printed, cell by cell."""
    return [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each namespace, and one for all."""
    assert main(["disk", str(folder)]) == 0
    oldest, newest = "2026-03-01 10:00", "2026-03-04 10:00"
    only = "2026-04-02 00:00"
    assert lines(capsys) == [
        ["model", "codec", "blocks", "tokens", "checkpoints", "MB", "oldest use", "last use"],
        ["a model", "rotated, 8 bits", "3", "5", "1", "4.0", oldest, newest],
        ["another model", "raw", "1", "2", "0", "0.0", only, only],
        ["total", "4", "7", "1", "4.0", oldest, only],
    ]


def test_what_is_broken_or_not_described_is_shown_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quarantine has its own line; a namespace without its text is unknown."""
    folder.joinpath(OTHER.namespace.hex(), "about.json").unlink()
    path_of(folder, names_of("ab")[0]).write_bytes(b"broken")
    with open_tier(folder) as tier:
        tier.read(HOME, names_of("ab")[0])
    assert main(["disk", str(folder)]) == 0
    table = lines(capsys)
    assert table[2][:4] == ["unknown", "unknown", "1", "2"]
    assert table[4] == ["quarantine: 1 broken files, 0.0 MB"]


def test_verifying_a_sound_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file is read, none is changed, not even its time of use."""
    before = {path: path.stat().st_mtime for path in folder.rglob("*.safetensors")}
    assert main(["disk", str(folder), "--verify"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "9 files read, 0 broken\n"
    assert "9/9" in printed.err
    assert {path: path.stat().st_mtime for path in folder.rglob("*.safetensors")} == before


def test_verifying_finds_what_is_broken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named and set aside, and the exit status says so; the next time all is well."""
    paths = [path_of(folder, names_of("abcd")[1]), path_of(folder, names_of("xy", OTHER)[0], OTHER)]
    paths.append(next(folder.joinpath(HOME.namespace.hex()).glob("layout-*.json")))
    for path in paths:
        os.truncate(path, path.stat().st_size - 1)
    assert main(["disk", str(folder), "--verify"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "9 files read, 3 broken\n"
    assert all(str(path) in printed.err and not path.exists() for path in paths)
    assert len(list(folder.joinpath("quarantine").iterdir())) == 3
    assert main(["disk", str(folder), "--verify"]) == 0


def test_clearing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that is ours goes, broken and temporary files too; the folder stays, and what is not."""
    path_of(folder, names_of("ab")[0]).write_bytes(b"broken")
    with open_tier(folder) as tier:
        tier.read(HOME, names_of("ab")[0])
    place = path_of(folder, names_of("ab")[0]).parent
    place.joinpath(".1-2.tmp").write_bytes(b"left")
    foreign = [
        folder / "notes.txt",
        folder / "quarantine" / "mine",
        folder / "cafe" / "about.json",
        folder / "cafe" / "babe",
        place.parent / "00" / "mine.safetensors",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    nbytes = used(folder) - sum(path.stat().st_size for path in foreign) - 21
    assert main(["disk", str(folder), "--clear"]) == 0
    shown = f"cleared {folder}: 10 files, {nbytes / 2**20:.1f} MB\n"
    assert capsys.readouterr().out == shown
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == sorted(foreign)
    assert main(["disk", str(folder)]) == 0
    assert capsys.readouterr().out == f"nothing stored in {folder}\n"


def test_clearing_leaves_an_empty_folder(folder: Path) -> None:
    """Of our own folders none is left."""
    folder.joinpath(HOME.namespace.hex(), "00").mkdir(exist_ok=True)
    assert main(["disk", str(folder), "--clear"]) == 0
    assert list(folder.iterdir()) == []


def test_clearing_under_a_running_process(folder: Path) -> None:
    """It goes on: what it writes afterwards is there, and counted."""
    with open_tier(folder) as tier:
        put(tier, "ab")
        assert main(["disk", str(folder), "--clear"]) == 0
        assert stored(tier, "ab") == ".."
        put(tier, "cd")
        assert stored(tier, "cd") == "cd"
        assert tier.counters.errors == 0
        assert tier.used_bytes == used(folder)


@pytest.mark.parametrize("option", [[], ["--clear"], ["--verify"]])
def test_a_folder_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    """One line and a status of its own; a folder that holds nothing of ours is no fault."""
    missing, file, empty = tmp_path / "missing", tmp_path / "file", tmp_path / "empty"
    file.write_text("text")
    empty.mkdir()
    empty.joinpath("foreign").write_text("text")
    assert main(["disk", str(missing), *option]) == 2
    assert capsys.readouterr().err == f"{missing} does not exist\n"
    assert main(["disk", str(file), *option]) == 2
    assert capsys.readouterr().err == f"{file} is no folder\n"
    assert main(["disk", str(empty), *option]) == 0
    assert capsys.readouterr().out == f"nothing stored in {empty}\n"
    assert [path.name for path in empty.iterdir()] == ["foreign"]


@pytest.mark.parametrize("text", ["somebody else's lock", "12345\n", "9" * 21])
def test_a_foreign_file_that_has_the_name_of_the_lock(folder: Path, text: str) -> None:
    """Somebody else's: it stays, and all that is ours goes."""
    folder.joinpath(LEDGER).write_text(text)
    assert main(["disk", str(folder), "--clear"]) == 0
    assert [path.name for path in folder.iterdir()] == [LEDGER]
    assert folder.joinpath(LEDGER).read_text() == text


@pytest.mark.parametrize("seconds", [10**15, -(10**15), 10**12, -(10**12)])
def test_a_time_that_no_calendar_has(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """Anybody may set a file's time, and some disks keep whatever it is."""

    def found(root: str) -> Iterator[Found]:
        for file in all_files(root):
            yield replace(file, mtime_ns=seconds * 10**9)

    monkeypatch.setattr(command, "all_files", found)
    assert main(["disk", str(folder)]) == 0
    assert {tuple(row[-2:]) for row in lines(capsys)[1:]} == {("?", "?")}


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("\x1b]0;owned\x07\x1b[2J", "?]0;owned??[2J"),
        ("one\nanother\u202e\ud800", "one?another??"),
        ("m" * 10_000, "m" * 57 + "..."),
        (["no text"], "unknown"),
        ("modèle", "modèle"),
    ],
)
def test_what_others_wrote_gives_a_terminal_no_orders(
    folder: Path, capsys: pytest.CaptureFixture[str], model: object, shown: str
) -> None:
    """Whoever can write to the folder can write these texts."""
    path = folder / HOME.namespace.hex() / "about.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    assert main(["disk", str(folder)]) == 0
    assert shown in [row[0] for row in lines(capsys)]


def test_a_disk_that_cannot_be_read_breaks_no_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told and counted, but the file stays where it is."""
    path = path_of(folder, names_of("ab")[0])
    real = command.open_file

    def fail(name: str) -> object:
        if name == str(path):
            raise OSError(errno.EIO, "no answer", name)
        return real(name)

    monkeypatch.setattr(command, "open_file", fail)
    assert main(["disk", str(folder), "--verify"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "9 files read, 1 broken\n"
    assert "no answer" in printed.err and "left where it is" in printed.err
    assert path.exists()


def test_one_thing_at_a_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clearing what is to be checked makes no sense."""
    with pytest.raises(SystemExit, match="2"):
        main(["disk", str(folder), "--clear", "--verify"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_disk_that_fails(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, no traceback."""

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(os, "unlink", fail)
    assert main(["disk", str(folder), "--clear"]) == 2
    assert "Permission denied: 'somewhere'" in capsys.readouterr().err


def test_the_command_loads_little(folder: Path) -> None:
    """The table needs neither numpy nor safetensors, and MLX is never needed."""
    code = (
        "import sys; from mlx_lm_kvcache_plugin.__main__ import main; "
        f"main(['disk', {str(folder)!r}]); "
        "print(*{'mlx', 'mlx_lm', 'numpy', 'safetensors', 'tqdm'} & set(sys.modules), 'end')"
    )
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"],
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[-1] == "end"
