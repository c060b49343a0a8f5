"""The advice, as a function of the figures alone."""

from __future__ import annotations

import pytest

from mlx_lm_kvcache_plugin.evaluation.choices import make_settings
from mlx_lm_kvcache_plugin.evaluation.recommendation import (
    CLOSE,
    CLOSE_KL,
    EXACT,
    SAME,
    SMALL,
    SMALL_KL,
    recommend,
)
from mlx_lm_kvcache_plugin.evaluation.summary import Loss, Room, Summary, flags
from mlx_lm_kvcache_plugin.settings import Settings


def loss(kl: float, same_greedy: int = 3) -> Loss:
    return Loss(documents=4, kl=kl, top1=1.0, perplexity_ratio=1.0, same_greedy=same_greedy)


def summary(
    kl: float, bits: int | None = 8, codec: str = "rotated", same_greedy: int = 3
) -> Summary:
    taken = 16.0 if bits is None else bits + 0.5
    room = Room(16.0, taken, taken, 100 * taken)
    return Summary(make_settings(codec, bits), loss(kl, same_greedy), room)


EXACT_ONE = summary(0.0, None, "raw")
QUIET = loss(0.0)


def advice(*summaries: Summary, rounding: Loss = QUIET) -> dict[str, str]:
    return {each.purpose: each.flags for each in recommend(summaries, rounding)}


def test_the_least_room_within_each_limit() -> None:
    measured = [summary(1e-5, 8), summary(CLOSE_KL, 6), summary(0.004, 4), summary(0.02, 3)]
    assert advice(EXACT_ONE, *measured) == {
        SAME: "--kv-cache-bits 6",
        CLOSE: "--kv-cache-bits 6",
        SMALL: "--kv-cache-bits 4",
    }


def test_the_same_answers_are_those_that_rounding_leaves() -> None:
    """However small the divergence is."""
    measured = [summary(1e-5, 8, same_greedy=4), summary(1e-4, 6, same_greedy=3)]
    wanted = {CLOSE: "--kv-cache-bits 6", SMALL: "--kv-cache-bits 6"}
    exact, less, none = loss(0.0, 4), loss(0.0, 3), loss(0.0, 5)
    assert advice(*measured, rounding=exact) == {SAME: "--kv-cache-bits 8", **wanted}
    assert advice(*measured, rounding=less) == {SAME: "--kv-cache-bits 6", **wanted}
    assert advice(*measured, rounding=none) == {SAME: "", **wanted}


def test_a_limit_is_met_at_its_value_and_not_above() -> None:
    bits = {8: 0.0, 6: CLOSE_KL * 1.01, 4: SMALL_KL, 3: SMALL_KL * 1.01}
    measured = [summary(kl, each) for each, kl in bits.items()]
    assert advice(*measured)[CLOSE] == "--kv-cache-bits 8"
    assert advice(*measured)[SMALL] == "--kv-cache-bits 4"


def test_what_rounding_does_is_granted_on_top_and_once_more() -> None:
    """A model in bfloat16 is no more exact than that."""
    measured = [summary(0.0022, 8), summary(0.0031, 5), summary(0.0033, 4), summary(0.0115, 3)]
    found = advice(*measured, rounding=loss(0.0016))
    assert (found[CLOSE], found[SMALL]) == ("--kv-cache-bits 5", "--kv-cache-bits 3")
    assert advice(summary(0.03), rounding=loss(0.02))[SMALL] == "--kv-cache-bits 8"


def test_of_equal_room_the_closer_one() -> None:
    measured = [summary(2e-4, 8, "affine"), summary(1e-4, 8)]
    assert advice(*measured)[CLOSE] == "--kv-cache-bits 8"


def test_nothing_is_recommended_that_will_not_do() -> None:
    same, close, small = recommend([summary(0.3, 4), summary(0.5, 3)], QUIET)
    assert same.flags == close.flags == small.flags == ""
    assert close.why == "nothing measured has a KL within the limit 0.0002, rounding alone 0"
    assert same.why.endswith(", and 64 likeliest tokens the same in 3 of 4 documents")


def test_a_model_that_no_codec_touches_needs_none() -> None:
    """Nothing but states; or tensors that stay raw whatever the bits."""
    settings = make_settings("rotated", 8)
    states = Summary(settings, loss(0), Room(None, None, None, 64.0))
    narrow = Summary(settings, loss(0), Room(32.0, 33.0, 32.0, 64.0))
    for each in (states, narrow):
        (only,) = recommend([each], QUIET)
        assert (only.flags, only.why) == ("", EXACT)


def test_full_precision_alone_needs_no_advice() -> None:
    assert recommend([EXACT_ONE], QUIET) == []


def test_the_figures_stand_in_the_reason() -> None:
    (_, close, _) = recommend([summary(5e-5)], loss(1e-6))
    assert close.why == (
        "KL 5e-05 (limit 0.0002, rounding alone 1e-06), so at most 0.5% of drawn tokens differ; "
        "64 likeliest tokens the same in 3 of 4 documents; 850 bytes per token, the least of what "
        "will do"
    )


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        (make_settings("rotated", 8), "--kv-cache-bits 8"),
        (make_settings("rotated", 5, 4), "--kv-cache-bits 5 --kv-cache-value-bits 4"),
        (make_settings("affine", 4), "--kv-cache-bits 4 --kv-cache-codec affine"),
        (make_settings("rotated", 4, 4, 32), "--kv-cache-bits 4 --kv-cache-group-size 32"),
        (make_settings("raw"), "--kv-cache-codec raw"),
    ],
)
def test_the_flags_are_those_of_the_settings(settings: Settings, given: str) -> None:
    """Given back to the plugin they mean the same."""
    assert flags(settings) == given
    words = given.split()
    values = {
        flag.removeprefix("--").replace("-", "_"): int(value) if value.isdigit() else value
        for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    assert Settings.resolve(values) == settings
