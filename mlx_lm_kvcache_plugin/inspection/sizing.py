"""What a larger or smaller budget would have hit, in words too."""

from __future__ import annotations

from typing import Any

from ..stats.history import SCALES, Predicted

TOLD_SCALE = 2.0
"""The scale that the sentence is about."""

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def sizing(predicted: Predicted, limit_bytes: int) -> dict[str, Any]:
    """Hit rates so far, of this budget and of others, as JSON holds them."""
    prompt_tokens = predicted.prompt_tokens
    rates = {
        scale: hit_tokens / prompt_tokens if prompt_tokens else None
        for scale, hit_tokens in ((1.0, predicted.hit_tokens), *predicted.at.items())
    }
    return {
        "limit_bytes": limit_bytes,
        "hit_rate": rates[1.0],
        "prompt_tokens": prompt_tokens,
        "scales": [
            {
                "scale": scale,
                "limit_bytes": int(scale * limit_bytes),
                "hit_rate": rates.get(scale),
            }
            for scale in SCALES
        ],
        "text": _sentence(rates.get(TOLD_SCALE), rates[1.0], limit_bytes),
    }


def _sentence(other: float | None, own: float | None, limit_bytes: int) -> str | None:
    if other is None or own is None:
        return None
    sizes = f"with {size(TOLD_SCALE * limit_bytes)} instead of {size(limit_bytes)}"
    if f"{other:.0%}" == f"{own:.0%}":
        return f"{sizes}, no more than {own:.0%}"
    return f"{sizes}, {other:.0%} instead of {own:.0%}"


def size(n_bytes: float) -> str:
    """A size in words: "4 GiB"."""
    unit, name = next((unit for unit in _UNITS if n_bytes >= unit[0]), _UNITS[-1])
    count = n_bytes / unit
    return f"{count:.3g} {name}" if count < 999.5 else f"{count:.0f} {name}"
