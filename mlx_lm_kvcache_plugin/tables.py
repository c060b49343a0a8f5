"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], figures: Collection[int]) -> Iterator[str]:
    """Columns as wide as needed: words to the left, figures to the right.

    Args:
        figures: the numbers of the columns that have them.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if place in figures else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
