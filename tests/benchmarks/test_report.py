"""The frame of the benchmarks: what a table says, what is saved, what a command line may say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import report
from benchmarks.__main__ import INSTALLS, NAMES, docstring, load, main
from benchmarks.report import Report, Row

ONE_ROW = Report([Row.of("time, to the other's", [3, 1, 2], limit=2)], data={"tokens": [1, 2]})


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where figures are saved in this test."""
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def in_place_of_store(monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    """What `python -m benchmarks store` imports."""
    monkeypatch.setattr(command, "load", lambda name: SimpleNamespace(**members))


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (Row("at the limit", 2, limit=2), True),
        (Row("above it", 2.1, limit=2), False),
        (Row("at the least", 2, limit=2, at_least=True), True),
        (Row("below it", 1.9, limit=2, at_least=True), False),
        (Row("without a target", 1e9), True),
        (Row("nothing is allowed", 1, limit=0), False),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_a_target_is_met_at_its_limit_and_on_its_side(
    row: Row, met: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert row.met == met
    report.print_table([row])
    line = capsys.readouterr().out
    assert ("MISSED" in line) == (not met)
    assert line.startswith("met") == (met and row.limit is not None)
    assert (">=" in line) == row.at_least


def test_a_row_of_several_runs_is_their_median() -> None:
    row = Row.of("what", [5, 1, 2, 9], 4, "note", at_least=True)
    assert row == Row("what", 3.5, 4, "note", True, low=1, high=9)


def test_what_is_saved_reads_back(results: Path) -> None:
    report.save("store", ONE_ROW)
    saved = json.loads((results / "store.json").read_text("utf-8"))
    (row,) = saved["rows"]
    assert row.pop("met") is True
    assert [Row(**row)] == ONE_ROW.rows
    assert saved["data"] == ONE_ROW.data
    facts = saved["machine"]
    assert facts["processor"] and facts["memory_gb"] > 0
    assert {"mlx", "mlx-lm", "numpy"} <= facts.keys()


@pytest.mark.parametrize("name", NAMES)
def test_each_benchmark_says_what_it_measures_and_can_be_imported_alone(name: str) -> None:
    assert docstring(name).partition("\n")[0].endswith(".")
    assert callable(load(name).measure)


def test_help_lists_all_and_imports_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load", lambda name: pytest.fail(f"imported {name}"))
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for name in NAMES:
        first = docstring(name).partition("\n")[0]
        assert re.search(f"^ *{name} +{re.escape(first)}$", printed, re.MULTILINE)


@pytest.mark.parametrize("argv", [[], ["nothing"], ["store", "--unknown"]], ids=" ".join)
def test_wrong_arguments_are_told_in_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Below argparse's line of usage."""
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("python -m benchmarks: error: ")


@pytest.mark.parametrize("package", INSTALLS)
def test_a_package_that_is_missing_is_named_with_its_command(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(arguments: object) -> Report:
        raise ModuleNotFoundError(name=f"{package}.part")

    in_place_of_store(monkeypatch, measure=measure)
    with pytest.raises(SystemExit, match=INSTALLS[package]):
        main(["store"])


def test_a_file_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_place_of_store(monkeypatch, measure=lambda arguments: (tmp_path / "trace").read_text())
    with pytest.raises(SystemExit, match="No such file.*trace"):
        main(["store"])


def test_a_quick_run_saves_nothing_and_a_missed_target_is_the_exit_status(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place_of_store(monkeypatch, measure=lambda arguments: ONE_ROW)
    assert main(["store", "--quick"]) == 0
    assert not results.exists()
    missed = Report([Row("what", 2, limit=1)])
    in_place_of_store(monkeypatch, measure=lambda arguments: missed)
    assert main(["store"]) == 1
    assert (results / "store.json").exists()


def test_a_figure_is_drawn_from_what_was_saved_and_always_the_same(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import figures

    def draw(data: Mapping[str, Any]) -> Any:
        figure = figures.new(2)
        figure.axes[0].plot(data["tokens"])
        return figure

    in_place_of_store(monkeypatch, measure=lambda arguments: ONE_ROW, draw=draw)
    assert main(["store"]) == 0
    drawn = {path.name: path.read_bytes() for path in results.glob("store.[sp]*")}
    assert set(drawn) == {"store.svg", "store.png"}
    assert main(["store", "--redraw"]) == 0
    assert drawn == {path.name: path.read_bytes() for path in results.glob("store.[sp]*")}


def test_what_was_never_measured_cannot_be_redrawn(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place_of_store(monkeypatch, draw=lambda data: None)
    with pytest.raises(SystemExit, match="store.json"):
        main(["store", "--redraw"])
    in_place_of_store(monkeypatch)
    with pytest.raises(SystemExit, match="no figure"):
        main(["store", "--redraw"])
