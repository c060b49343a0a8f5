"""The figure of an evaluation: divergence over the room that it is paid with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from .recommendation import limits_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = "pip install 'mlx-lm-kvcache-plugin[plot]'"


def check(path: Path) -> None:
    """Say before anything is measured whether a figure can be drawn into a file of this name.

    Raises:
        SettingsError: if matplotlib is missing, or does not know the file's extension.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SettingsError(f"--plot needs matplotlib: {INSTALL}") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise SettingsError(f"--plot {path}: no such format; there are {', '.join(sorted(known))}")


def draw(found: Mapping[str, Any]) -> Figure:
    """KL over bits per element, a line for each codec.

    Args:
        found: an evaluation, as JSON holds it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for codec in dict.fromkeys(each["codec"] for each in found["settings"]):
        _draw_codec(axes, codec, found)
    words = ("as good as without a cache", "a small loss")
    for limit, word in zip(limits_beside(found["rounding"]["kl"]), words, strict=True):
        axes.axhline(limit, color="0.7", linewidth=0.8, zorder=0)
        axes.text(1, limit, word, transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    axes.set_yscale("log")
    axes.set_xlabel("bits per element, everything counted")
    axes.set_ylabel("KL divergence of the next token (nats)")
    axes.set_title(f"{Path(found['model']).name}: what a stored prefix costs", fontsize="medium")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    return figure


def _draw_codec(axes: Axes, codec: str, found: Mapping[str, Any]) -> None:
    """Leaves out what is exact, or has no elements: there is no place for it."""
    points = sorted(
        (each["bits_per_element"], each["kl"])
        for each in found["settings"]
        if each["codec"] == codec and each["kl"] > 0 and each["bits_per_element"]
    )
    if points:
        axes.plot(*zip(*points, strict=True), marker="o", label=codec)
