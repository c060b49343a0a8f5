"""Hit rates of other budgets, as figures and in a sentence."""

from __future__ import annotations

import json

import pytest

from mlx_lm_kvcache_plugin.inspection.sizing import size, sizing
from mlx_lm_kvcache_plugin.stats.history import Predicted

GIB = 1 << 30


def test_before_any_request_nothing_is_said() -> None:
    """There is no rate of nothing, though the budgets are known."""
    assert sizing(Predicted(), 4 * GIB) == {
        "limit_bytes": 4 * GIB,
        "hit_rate": None,
        "prompt_tokens": 0,
        "scales": [
            {"scale": 0.5, "limit_bytes": 2 * GIB, "hit_rate": None},
            {"scale": 2.0, "limit_bytes": 8 * GIB, "hit_rate": None},
            {"scale": 4.0, "limit_bytes": 16 * GIB, "hit_rate": None},
        ],
        "text": None,
    }


def test_rates_and_a_sentence() -> None:
    """It is about twice the budget."""
    told = sizing(Predicted(1000, 830, {0.5: 710, 2.0: 914, 4.0: 920}), 4 * GIB)
    assert (told["hit_rate"], told["prompt_tokens"]) == (0.83, 1000)
    assert [each["hit_rate"] for each in told["scales"]] == [0.71, 0.914, 0.92]
    assert told["text"] == "with 8 GiB instead of 4 GiB, 91% instead of 83%"


@pytest.mark.parametrize("other", [830, 826, 834])
def test_a_larger_budget_that_is_of_no_use(other: int) -> None:
    """To the percent that is told."""
    told = sizing(Predicted(1000, 830, {2.0: other}), 4 * GIB)
    assert told["text"] == "with 8 GiB instead of 4 GiB, no more than 83%"


@pytest.mark.parametrize("known", [{}, {0.5: 1}, {0.5: 1, 4.0: 3}])
def test_what_is_not_known_is_not_told(known: dict[float, int]) -> None:
    """Of those scales, and no sentence without the one that it is about."""
    told = sizing(Predicted(10, 2, known), GIB)
    rates = {each["scale"]: each["hit_rate"] for each in told["scales"]}
    assert rates == {scale: known[scale] / 10 if scale in known else None for scale in rates}
    assert list(rates) == [0.5, 2.0, 4.0]
    assert (told["hit_rate"], told["text"]) == (0.2, None)


@pytest.mark.parametrize("limit_bytes", [0, 1, 3, GIB, 1 << 60])
def test_it_is_plain(limit_bytes: int) -> None:
    """Strict JSON, with whole numbers of bytes, of any budget."""
    told = sizing(Predicted(7, 3), limit_bytes)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert all(isinstance(each["limit_bytes"], int) for each in told["scales"])
    assert told["text"] is not None


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (999 << 20, "999 MiB"),
        (int(999.4 * (1 << 20)), "999 MiB"),
        (int(999.7 * (1 << 20)), "1000 MiB"),
        (1000 << 20, "1000 MiB"),
        (1023 << 20, "1023 MiB"),
        (4 * GIB, "4 GiB"),
        (int(12.345 * GIB), "12.3 GiB"),
        (2 << 40, "2 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes_in_words(n_bytes: float, text: str) -> None:
    """Three digits where there is a choice, and never an exponent."""
    assert size(n_bytes) == text
