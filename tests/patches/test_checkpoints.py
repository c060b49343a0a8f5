"""Where a prompt gets its checkpoints: cut into segments for a batch, watched where it is alone."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvcache_plugin.patches.checkpoints import (
    THINKING_TAIL,
    PrefillWatch,
    is_users_turn,
    label_before_last,
    split,
    start_of_thinking,
)
from mlx_lm_kvcache_plugin.store.thinning import GENERATED, PROMPT, USER

WHOLE = ["assistant"]
"""The kind of a prompt that upstream leaves whole."""

NO_THINKING = -1


def segments_of(*lengths: int) -> list[list[int]]:
    """A prompt of the tokens 0, 1, 2, ... in segments of these lengths."""
    ends = [0, *accumulate(lengths)]
    return [list(range(start, stop)) for start, stop in pairwise(ends)]


def cuts(
    lengths: list[int], labels: list[str], every: int = 0, thinking: int = NO_THINKING
) -> list[tuple[int, str]]:
    """Where each segment ends, and its kind."""
    pieces, kinds = split(segments_of(*lengths), labels, every, thinking)
    assert [token for piece in pieces for token in piece] == list(range(sum(lengths)))
    return list(zip(accumulate(map(len, pieces)), kinds, strict=True))


# Cutting segments


@pytest.mark.parametrize(
    ("lengths", "labels"),
    [
        ([40, 60], ["system", "user"]),
        ([40, 60, 7], ["system", "user", "assistant"]),
        ([60], ["user"]),
        ([60, 7], ["user", "assistant"]),
    ],
)
def test_the_ends_that_upstream_sets_stay(lengths: list[int], labels: list[str]) -> None:
    """With their kinds: a chat that ends with a user's message is cut where its turns are."""
    ends = list(zip(accumulate(lengths), labels, strict=True))
    assert cuts(lengths, labels) == ends
    assert cuts(lengths, labels, thinking=5) == ends
    assert set(ends) <= set(cuts(lengths, labels, every=16))


@pytest.mark.parametrize(
    ("length", "every", "expected"),
    [
        (100, 0, []),
        (100, 100, []),
        (100, 200, []),
        (100, 64, [64]),
        (128, 64, [64]),
        (129, 64, [64]),
        (200, 50, [50, 100, 150]),
        (3, 1, [1]),
        (1, 1, []),
    ],
)
def test_a_long_way_is_cut_at_multiples_inside(
    length: int, every: int, expected: list[int]
) -> None:
    """Never at the end nor before the last token, where upstream stores the prompt anyway."""
    wanted = [*((position, "prompt") for position in expected), (length, "prompt")]
    assert cuts([length], WHOLE, every) == wanted


def test_multiples_are_those_of_the_prompt_and_not_of_a_segment() -> None:
    """So that two prompts that begin alike set the same checkpoints, however long their turns are.

    A multiple at which a segment ends is that segment's end.
    """
    assert cuts([40, 90], ["system", "user"], every=64) == [
        (40, "system"),
        (64, "prompt"),
        (128, "prompt"),
        (130, "user"),
    ]
    assert cuts([64, 66], ["system", "user"], every=64) == [
        (64, "system"),
        (128, "prompt"),
        (130, "user"),
    ]


@pytest.mark.parametrize("every", [0, 64])
def test_a_prompt_that_is_left_whole_is_a_prompt(every: int) -> None:
    """A text completion, or a chat that ends with a tool's answer: nothing of it was generated.

    Where a template opens the thinking, the next turn will leave it there.
    """
    assert cuts([60], WHOLE, every) == [(60, "prompt")]
    assert cuts([60], WHOLE, every, thinking=57) == [(57, "prompt"), (60, "assistant")]


@pytest.mark.parametrize("thinking", [-1, 0, 60, 61])
def test_thinking_that_is_none_cuts_nothing(thinking: int) -> None:
    """Neither at the very start nor at the end, where there would be nothing beside it."""
    assert cuts([60], WHOLE, thinking=thinking) == [(60, "prompt")]


def test_a_prompt_may_be_short_or_nothing() -> None:
    """Whatever upstream makes of it."""
    assert split([[7]], WHOLE, 64, NO_THINKING) == ([[7]], ["prompt"])
    assert split([[]], WHOLE, 64, NO_THINKING) == ([[]], ["prompt"])
    assert split([], [], 64, NO_THINKING) == ([], [])


LABELS = st.sampled_from(["system", "user", "assistant"])
SEGMENTS = st.lists(st.tuples(st.integers(1, 40), LABELS), min_size=1, max_size=5)


@given(SEGMENTS, st.integers(0, 50), st.integers(-1, 210))
def test_whatever_the_segments_are(parts: list[tuple[int, str]], every: int, thinking: int) -> None:
    """The same tokens in the same order, a label for each piece, no piece longer than wanted.

    All ends of upstream's own stay, those of a user's turn and a system prompt with their kinds.
    """
    lengths, labels = [length for length, _ in parts], [label for _, label in parts]
    segments = segments_of(*lengths)
    pieces, kinds = split(segments, labels, every, thinking)
    assert sum(pieces, []) == sum(segments, [])
    assert len(pieces) == len(kinds) and all(pieces)
    # Upstream cuts the last token off by itself.
    assert not every or max(map(len, [*pieces[:-1], pieces[-1][:-1]])) <= every
    ends = dict(zip(accumulate(map(len, pieces)), kinds, strict=True))
    for end, label in zip(accumulate(lengths), labels, strict=True):
        assert ends.pop(end) == label or labels == WHOLE
    added = [position for position in ends if every == 0 or position % every]
    assert added in ([], [thinking]) and set(ends.values()) <= {"prompt"}


@given(SEGMENTS, st.integers(1, 50))
def test_what_was_cut_is_cut_no_further(parts: list[tuple[int, str]], every: int) -> None:
    """The same rule over again finds all of its cuts."""
    lengths, labels = [length for length, _ in parts], [label for _, label in parts]
    once = split(segments_of(*lengths), labels, every, NO_THINKING)
    assert split(*once, every, NO_THINKING) == once


# Thinking


class Tokenizer:
    """As upstream's wrapper finds where the thinking begins."""

    def __init__(self, opening: list[int] | None) -> None:
        self.opening = opening
        self.has_thinking = opening is not None

    def rfind_think_start(self, tokens: list[int], start: int = 0) -> int:
        assert self.opening is not None
        width = len(self.opening)
        places = range(max(start, 0), len(tokens) - width + 1)
        return max((n for n in places if tokens[n : n + width] == self.opening), default=-1)


@pytest.mark.parametrize("behind", range(THINKING_TAIL + 3))
def test_where_the_thinking_begins(behind: int) -> None:
    """As far before the end as upstream looks for it, and not where it was in an earlier turn."""
    prompt = [5] * 40 + [1, 2] + [5] * behind
    found = start_of_thinking(Tokenizer([1, 2]), prompt)
    assert found == (40 if behind + 2 <= THINKING_TAIL else -1)


def test_a_model_that_does_not_think() -> None:
    """It is not asked where."""
    assert start_of_thinking(Tokenizer(None), [1, 2]) == -1


@pytest.mark.parametrize("prompt", [[], [1], [1, 2], [2, 1, 2]])
def test_a_prompt_shorter_than_the_tail(prompt: list[int]) -> None:
    """Nothing is found, or what is there."""
    assert start_of_thinking(Tokenizer([1, 2]), prompt) == (len(prompt) - 2 if prompt[1:] else -1)


# Watching


def watched(
    total: int, step: int, *, reused: int = 0, every: int = 0
) -> tuple[list[tuple[int, int]], list[tuple[int, str]]]:
    """What is reported and what is stored as upstream prefills `total` tokens that were no hit."""
    reported: list[tuple[int, int]] = []
    stored: list[tuple[int, str]] = []

    def store(position: int, label: str) -> None:
        assert reported[-1][0] + reused == position  # what was computed is reported first
        stored.append((position, label))

    watch = PrefillWatch(lambda *progress: reported.append(progress), store, reused, every)
    computed = 0
    watch(0, total)
    while total - computed > 1:
        computed += min(step, total - 1 - computed)
        watch(computed, total)
    watch(total, total)
    return reported, stored


@pytest.mark.parametrize("total", [1, 2, 10, 100])
@pytest.mark.parametrize("step", [1, 7, 2048])
def test_upstreams_progress_is_reported_all_the_same(total: int, step: int) -> None:
    """Every call, with its own numbers: the client is told."""
    reported, _ = watched(total, step, reused=50, every=3)
    assert reported[0] == (0, total) and reported[-1] == (total, total)
    assert len(reported) == 2 + -(-(total - 1) // step)


@pytest.mark.parametrize("reused", [0, 50])
@pytest.mark.parametrize(
    ("total", "step", "every", "expected"),
    [
        (100, 2048, 0, [(99, "user")]),
        (100, 10, 0, [(99, "user")]),
        (100, 2048, 10, [(99, "user")]),
        (100, 10, 30, [(30, "prompt"), (60, "prompt"), (90, "prompt"), (99, "user")]),
        (100, 20, 30, [(40, "prompt"), (80, "prompt"), (99, "user")]),
        (100, 30, 64, [(90, "prompt"), (99, "user")]),
        (64, 32, 32, [(32, "prompt"), (63, "user")]),
        (2, 2048, 1, [(1, "user")]),
        (1, 2048, 1, []),
    ],
)
def test_where_a_prompt_that_is_alone_gets_checkpoints(
    total: int, step: int, every: int, expected: list[tuple[int, str]], reused: int
) -> None:
    """Between two steps, no closer than wanted; and before the last token, where an answer begins.

    Positions are the prompt's, whatever of it was a hit.
    """
    _, stored = watched(total, step, reused=reused, every=every)
    assert stored == [(reused + position, label) for position, label in expected]


@given(
    total=st.integers(1, 300),
    step=st.integers(1, 100),
    reused=st.integers(0, 300),
    every=st.integers(0, 100),
)
def test_checkpoints_keep_their_distance(**options: Any) -> None:
    """All but the last one; none behind what was computed, none twice."""
    _, stored = watched(**options)
    total, step, reused, every = (options[name] for name in ("total", "step", "reused", "every"))
    labels = [label for _, label in stored]
    assert labels == ["prompt"] * (len(labels) - 1) + ["user"] * (total > 1)
    positions = [reused, *(position for position, _ in stored[:-1])]
    assert all(one + every <= other < one + every + step for one, other in pairwise(positions))
    assert not every or total - 1 - (positions[-1] - reused) <= every + step
    if total > 1:
        assert stored[-1][0] == reused + total - 1


@pytest.mark.parametrize(
    ("thinking", "is_users", "label"),
    [
        (-1, True, USER),
        (-1, False, PROMPT),
        (99, True, USER),
        (99, False, PROMPT),
        (98, True, GENERATED),
        (90, False, GENERATED),
    ],
)
def test_what_ends_before_the_last_token(thinking: int, is_users: bool, label: str) -> None:
    """Behind an opened thinking no request leaves: it does not come back."""
    assert label_before_last(range(100), thinking, is_users) == label
    stored: list[tuple[int, str]] = []
    watch = PrefillWatch(lambda *_: None, lambda *it: stored.append(it), 0, 0, label)
    watch(99, 100)
    assert stored == [(99, label)]


@pytest.mark.parametrize("tokens", [1, 3, 5, 11, 12])
def test_a_short_prompt_is_looked_through_from_its_first_token(tokens: int) -> None:
    """Upstream's search begins where it is told to, and 0.31 takes that as it is."""

    def rfind_think_start(prompt: list[int], start: int) -> int:
        assert 0 <= start <= len(prompt)
        return -1

    tokenizer = SimpleNamespace(has_thinking=True, rfind_think_start=rfind_think_start)
    assert start_of_thinking(tokenizer, [7] * tokens) == -1


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (SimpleNamespace(messages=[{"role": "system"}, {"role": "user"}]), True),
        (SimpleNamespace(messages=[{"role": "user"}, {"role": "tool"}]), False),
        (SimpleNamespace(messages=[]), False),
        (SimpleNamespace(messages=None), False),
        (object(), False),
    ],
)
def test_whose_turn_it_is(request_: Any, expected: bool) -> None:
    """A text is nobody's."""
    assert is_users_turn(request_) == expected
