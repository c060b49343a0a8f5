"""One style for all figures: legible on GitHub's light and dark pages, the same file each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, GRID = "#24292f", "#d0d7de"

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which stay apart for colour-blind eyes."""

STYLE: Any = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.transparent": False,
    "savefig.dpi": 150,
    "svg.hashsalt": "mlx_lm_kvcache_plugin",  # names inside the file are random without one
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
}


def new(
    columns: int = 1, rows: int = 1, *, width: float = 8, height: float = 3.6, **subplots: Any
) -> Figure:
    """A figure with its axes, in inches; `subplots` goes to `Figure.subplots`."""
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE | {"axes.prop_cycle": cycler(color=COLOURS)}):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.subplots(rows, columns, **subplots)
    return figure


def save(
    stem: Path, draw: Callable[[Mapping[str, Any]], Figure], data: Mapping[str, Any]
) -> tuple[Path, ...]:
    """Draw and write `stem`.svg and `stem`.png; returns both paths."""
    from matplotlib import rc_context

    paths = tuple(stem.with_suffix(suffix) for suffix in (".svg", ".png"))
    undated = ({"Date": None, "Creator": None}, {"Software": None})
    with rc_context(STYLE):
        figure = draw(data)
        for path, metadata in zip(paths, undated, strict=True):
            figure.savefig(path, metadata=metadata)
    return paths
