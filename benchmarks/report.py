"""What all benchmarks share: timing, and a table that says what was met."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure and the most that it may be.

    Attributes:
        what: what was measured, and against what.
        value: the median, in the unit of `limit`.
        limit: the largest value that meets the target.
        note: the parts that the figure was made of.
    """

    what: str
    value: float
    limit: float
    note: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def median_seconds(times: int, run: Callable[..., object], *args: Any) -> float:
    """The median time of a call."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        run(*args)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def machine() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    return {
        "date": date.today().isoformat(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "device": str(mx.default_device()),
        "python": platform.python_version(),
        **{package: version(package) for package in ("mlx", "mlx-lm", "numpy")},
    }


def print_table(rows: Sequence[Row]) -> None:
    """Print the figures beside their limits."""
    width = max(len(row.what) for row in rows)
    for row in rows:
        verdict = "met   " if row.met else "MISSED"
        value = f"{row.value:>10.4g} <= {row.limit:<8.4g}"
        print(f"{verdict} {row.what:<{width}} {value} {row.note}".rstrip())


def save(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the figures to results/NAME.json and say so."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"machine": machine(), "rows": list(rows)}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"saved to {path}")
