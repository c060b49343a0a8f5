"""Which of the measured settings to use: a rule, so that the same figures give the same advice.

KL bounds how often an answer that is drawn from what the model expects takes another turn: at most
sqrt(KL / 2) of all draws differ (Pinsker), and that holds for means too. The model's own rounding
is granted on top: nothing can come closer than that. Answers are called the same if, beside that,
no document goes on otherwise than rounding lets it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .scoring import GREEDY_TOKENS
from .summary import Loss, Summary, flags

CLOSE_KL = 0.0002
"""Nats: at most one drawn token in 100 differs. Or as much again as the model's own rounding."""

SMALL_KL = 0.01
"""Nats: at most one drawn token in 14 differs."""

SAME, CLOSE, SMALL = (
    "the same answers as without a cache",
    "answers as good as without a cache",
    "the most room at a small loss",
)

EXACT = (
    "whatever the bits, the caches of this model are kept exactly: it has nothing but states, or "
    "tensors of a width or dtype that no codec takes"
)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to use for one purpose.

    Attributes:
        purpose: what it is for.
        flags: for `mlx_lm.server`; none if nothing that was measured will do.
        why: the figures that it rests on.
    """

    purpose: str
    flags: str
    why: str


def recommend(summaries: Sequence[Summary], rounding: Loss) -> list[Recommendation]:
    """For each purpose the setting that takes the least room of those that are good enough.

    Args:
        summaries: of all settings; those in full precision are exact, and no choice.
        rounding: what the model's own rounding does.
    """
    quantized = [each for each in summaries if each.settings.key_bits is not None]
    smaller = [each for each in quantized if each.room.is_smaller]
    if not smaller:
        return [Recommendation(SAME, "", EXACT)] if quantized else []
    close, small = limits_beside(rounding.kl)
    same = [each for each in smaller if each.loss.same_greedy >= rounding.same_greedy]
    return [
        _recommendation(SAME, same, rounding, close),
        _recommendation(CLOSE, smaller, rounding, close),
        _recommendation(SMALL, smaller, rounding, small),
    ]


def limits_beside(rounding_kl: float) -> tuple[float, float]:
    """The KL of answers that are as good, and that of a small loss, beside the model's rounding."""
    close = rounding_kl + max(CLOSE_KL, rounding_kl)
    return close, max(close, rounding_kl + SMALL_KL)


def _recommendation(
    purpose: str, summaries: Sequence[Summary], rounding: Loss, limit: float
) -> Recommendation:
    """Of settings that will do but for their KL."""
    limits = f"limit {limit:.2g}, rounding alone {rounding.kl:.2g}"
    fine = [each for each in summaries if each.loss.kl <= limit]
    if not fine:
        likely = f", and {_same(rounding)}" if purpose == SAME else ""
        return Recommendation(purpose, "", f"nothing measured has a KL within the {limits}{likely}")
    best = min(fine, key=lambda each: (each.room.bytes_per_token, each.loss.kl))
    why = (
        f"KL {best.loss.kl:.2g} ({limits}), so at most {math.sqrt(best.loss.kl / 2):.1%} of drawn "
        f"tokens differ; {_same(best.loss)}; {best.room.bytes_per_token:,.0f} bytes per token, the "
        "least of what will do"
    )
    return Recommendation(purpose, flags(best.settings), why)


def _same(loss: Loss) -> str:
    return (
        f"{GREEDY_TOKENS} likeliest tokens the same in {loss.same_greedy} of {loss.documents} "
        "documents"
    )
