"""What all benchmarks share: timing, a table that says what was met, and what is saved."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import psutil
from tqdm import tqdm

Thing = TypeVar("Thing")

RESULTS = Path(__file__).parent / "results"

PACKAGES = ("mlx", "mlx-lm", "numpy", "mlx-lm-kvcache-plugin", "vllm-mlx")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its target.

    Attributes:
        what: what was measured, and against what.
        value: the median, in the unit of `limit`.
        limit: the most that meets the target; None for a figure that has none.
        note: the parts that the figure was made of.
        at_least: whether `limit` is the least that meets the target instead.
        low, high: least and most of the runs whose median `value` is.
    """

    what: str
    value: float
    limit: float | None = None
    note: str = ""
    at_least: bool = False
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(
        cls,
        what: str,
        values: Sequence[float],
        limit: float | None = None,
        note: str = "",
        at_least: bool = False,
    ) -> Row:
        """The median of several runs, with the least and the most of them."""
        median = statistics.median(values)
        return cls(what, median, limit, note, at_least, min(values), max(values))

    @property
    def met(self) -> bool:
        """Whether the target is met; without one, always."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Report:
    """What a benchmark found.

    Attributes:
        rows: the figures, in the order of the table.
        data: plain JSON data that its figure is drawn from.
    """

    rows: Sequence[Row]
    data: Mapping[str, Any] = field(default_factory=dict)


def report_of(measures: Sequence[Callable[[bool], Iterable[Row]]], quick: bool) -> Report:
    """The rows of several measures, one after the other."""
    return Report([row for part in tqdm(measures, unit="measure") for row in part(quick)])


def in_turn(number: int, things: Sequence[Thing]) -> Sequence[Thing]:
    """All of them, each time another one first."""
    first = number % len(things)
    return [*things[first:], *things[:first]]


def median_seconds(times: int, run: Callable[..., object], *args: Any) -> float:
    """The median time of a call."""
    return statistics.median(seconds(run, *args) for _ in range(times))


def seconds(run: Callable[..., object], *args: Any) -> float:
    """The time of one call."""
    begun = time.perf_counter()
    run(*args)
    return time.perf_counter() - begun


def print_table(rows: Sequence[Row]) -> None:
    """Print the figures beside their targets."""
    width = max((len(row.what) for row in rows), default=0)
    for row in rows:
        print(f"{_verdict(row)} {row.what:<{width}} {_figure(row)} {row.note}".rstrip())


def _verdict(row: Row) -> str:
    if row.limit is None:
        return " " * 6
    return "met   " if row.met else "MISSED"


def _figure(row: Row) -> str:
    """The value, its target, and between what the runs lay."""
    sign = ">=" if row.at_least else "<="
    target = "" if row.limit is None else f"{sign} {row.limit:.4g}"
    spread = f"[{row.low:.4g} to {row.high:.4g}]" if row.low is not None else ""
    return f"{row.value:>10.4g} {target:<11} {spread}".rstrip()


def save(name: str, report: Report) -> None:
    """Write the figures to results/NAME.json, with the machine's facts, and say so."""
    rows = [asdict(row) | {"met": row.met} for row in report.rows]
    content = {"machine": machine(), "rows": rows, "data": report.data}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(f"saved to {path}")


def draw(name: str, drawing: Callable[[Mapping[str, Any]], Any]) -> None:
    """Draw what results/NAME.json holds into results/NAME.svg and NAME.png, and say so."""
    from . import figures

    saved = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    for path in figures.save(RESULTS / name, drawing, saved["data"]):
        print(f"saved to {path}")


def machine() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    return {
        "date": date.today().isoformat(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "device": str(mx.default_device()),
        "openblas": "openblas" in os.environ.get("LD_PRELOAD", ""),
        "python": platform.python_version(),
        **dict(_versions()),
    }


def processor() -> str:
    """The processor's name, as the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    return platform.processor()


def _versions() -> Iterator[tuple[str, str]]:
    """Of all packages that are installed."""
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            yield package, version(package)
