"""What the ghost lists tell of other budgets, beside real runs with those budgets.

    python -m benchmarks sizing TRACE [--quick]

TRACE is a file in the Mooncake format, as for `hit_rate`. It is replayed through our store at 4
bits with a budget, while the history that the server keeps predicts the hit rate at half, twice and
four times as much; and then through a store with each of these budgets.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from mlx_lm_kvcache_plugin.prefix_cache import BLOCK_TOKENS
from mlx_lm_kvcache_plugin.stats.history import SCALES, History

from . import hit_rate as rates
from .replay.ours import Ours
from .replay.trace import Request
from .report import Report, Row

TOLD_SCALE, MOST_OFF = 2.0, 0.02
"""How far a prediction may be from the real hit rate, at the scale that has a target."""

BUDGETS = (300_000, 1_000_000, rates.TOLD)
"""In tokens of 16 bits."""

QUICK_REQUESTS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Args: parser: of this benchmark."""
    rates.add_arguments(parser)


def measure(arguments: argparse.Namespace) -> Report:
    """Replay the trace with each budget, predicting, and with each that was predicted for."""
    requests = rates.requests_of(arguments.trace, QUICK_REQUESTS if arguments.quick else None)
    rows = [row for budget in BUDGETS for row in rows_of(requests, budget)]
    return Report(rows, {"requests": len(requests), "budget_tokens": BUDGETS})


def rows_of(requests: Sequence[Request], budget_tokens: int) -> Iterator[Row]:
    """How far off the predictions from one budget are."""
    history = History(BLOCK_TOKENS)
    own = replay(requests, budget_tokens, history)
    predicted = history.predicted
    for scale in SCALES:
        real = replay(requests, int(scale * budget_tokens), None)
        told = predicted.at[scale] / predicted.prompt_tokens
        yield Row(
            f"hit rate at {scale:g}x the bytes of {budget_tokens:,} 16-bit tokens, told to real",
            abs(told - real),
            MOST_OFF if scale == TOLD_SCALE else None,
            f"told {told:.4f}, real {real:.4f}, at 1x {own:.4f}",
        )


def replay(requests: Sequence[Request], budget_tokens: int, history: History | None) -> float:
    """The hit rate with a budget."""
    limit_bytes = budget_tokens * rates.SHAPE.token_bytes
    store = Ours(rates.SHAPE, rates.FOUR_BITS, limit_bytes, history)
    return rates.hit_rate(store, tqdm(requests, desc=f"{budget_tokens:,} tokens", leave=False))
