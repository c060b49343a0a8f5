"""What is told of an evaluation: a table and advice for people, JSON for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from .. import __version__
from ..tables import aligned
from .documents import Document
from .engine import Evaluation
from .recommendation import Recommendation, recommend
from .scoring import GREEDY_TOKENS
from .summary import Loss, Room, Summary, bits_text

GIB = 1 << 30
BUDGETS_GB = (1, 8, 20)
"""Sizes of a store for which it is told how many tokens fit, in GB of 2^30 bytes."""

HEADINGS = (
    *("bits", "codec", "KL", "top-1", "perplexity", f"{GREEDY_TOKENS} greedy"),
    *("bits/element", "bytes/token"),
    *(f"in {budget} GB" for budget in BUDGETS_GB),
)

ROUNDING = "rounding"
"""The line that tells what the model's own rounding does."""

LEGEND = "rounding: the last bit of each cached number turned over; in N GB (2^30 bytes): tokens"


def plain(model: str, documents: Sequence[Document], evaluation: Evaluation) -> dict[str, Any]:
    """All that was found out, as JSON holds it."""
    rounding, summaries = Loss.of(evaluation.rounding), evaluation.summaries()
    return {
        "model": model,
        "versions": {
            "mlx_lm_kvcache_plugin": __version__,
            **{package: version(package) for package in ("mlx", "mlx-lm")},
        },
        "documents": [
            {
                "name": document.name,
                "prefix_tokens": len(document.prefix),
                "scored_tokens": len(document.rest) - 1,
            }
            for document in documents
        ],
        "greedy_tokens": GREEDY_TOKENS,
        "rounding": asdict(rounding),
        "settings": [summary.plain() for summary in summaries],
        "recommendations": [asdict(each) for each in recommend(summaries, rounding)],
    }


def lines(evaluation: Evaluation) -> Iterator[str]:
    """The table, and what to use."""
    rounding, summaries = Loss.of(evaluation.rounding), evaluation.summaries()
    rows = [HEADINGS, *map(_row, summaries), _rounding_row(rounding)]
    yield from aligned(rows, range(2, len(HEADINGS)))
    yield LEGEND
    for recommendation in recommend(summaries, rounding):
        yield from ("", _advice(recommendation))


def _advice(recommendation: Recommendation) -> str:
    given = recommendation.flags or "no quantization"
    why = textwrap.fill(recommendation.why, 100, initial_indent="  ", subsequent_indent="  ")
    return f"For {recommendation.purpose}: {given}\n{why}"


def _row(summary: Summary) -> tuple[str, ...]:
    settings = summary.settings
    return (bits_text(settings), settings.codec, *_losses(summary.loss), *_rooms(summary.room))


def _rounding_row(rounding: Loss) -> tuple[str, ...]:
    return ("-", ROUNDING, *_losses(rounding), *[""] * (2 + len(BUDGETS_GB)))


def _losses(loss: Loss) -> tuple[str, ...]:
    same = f"{loss.same_greedy} of {loss.documents}"
    change = round(loss.perplexity_ratio - 1, 4) + 0.0  # never -0.0
    return f"{loss.kl:.6f}", f"{loss.top1:.1%}", f"{change:+.2%}", same


def _rooms(room: Room) -> tuple[str, ...]:
    bits = "-" if room.bits_per_element is None else f"{room.bits_per_element:.2f}"
    fit = [f"{int(budget * GIB / room.bytes_per_token):,}" for budget in BUDGETS_GB]
    return bits, f"{room.bytes_per_token:,.0f}", *fit
