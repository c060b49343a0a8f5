"""Why no more of a prompt was a hit: every reason arises where it should, and nowhere else.

A block has four tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_lm_kvcache_plugin import recording
from mlx_lm_kvcache_plugin.events import Error, Event, Hit, Insert, Miss, Reason, Stop
from mlx_lm_kvcache_plugin.inspection.explanation import explain
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.stats.history import History
from mlx_lm_kvcache_plugin.store.budget import GIB
from mlx_lm_kvcache_plugin.store.eviction import Cause
from mlx_lm_kvcache_plugin.store.thinning import SYSTEM, USER
from tests.store.caches import MODEL, STATES, TINY, WINDOWS, Machine, insert, make_cache

NEW = 97
"""A token that is in no sequence."""

IMAGE = -(2**60)


class Asked:
    """A prefix cache that tells why each prompt was no more of a hit."""

    def __init__(self, **options: Any) -> None:
        self.events: list[Event] = []
        options.setdefault("history", History(4))
        self.cache: PrefixCache = make_cache(emit=self.events.append, **options)

    def store(self, *sequences: Sequence[int], label: str = USER, **shape: Any) -> Asked:
        for sequence in sequences:
            insert(self.cache, sequence, label=label, **{**TINY, **shape})
        return self

    def ask(self, tokens: Sequence[int], namespace: Hashable = MODEL) -> tuple[int, Stop | None]:
        """How many tokens are a hit, and why no more."""
        self.events.clear()
        prefix = self.cache.match(namespace, tokens)
        explained = explain(self.cache, namespace, tokens)
        self.cache.fetch(tokens, prefix, namespace=namespace)
        (told,) = [event for event in self.events if isinstance(event, Hit | Miss)]
        hit_tokens = told.hit_tokens if isinstance(told, Hit) else 0
        assert (explained.hit_tokens, explained.stop) == (hit_tokens, told.stop)
        return hit_tokens, told.stop


# Nothing stored


def test_nothing_is_stored_at_all() -> None:
    """From the first token on."""
    assert Asked().ask(range(9)) == (0, Stop(Reason.NOTHING_STORED, 0))


@pytest.mark.parametrize("length", range(1, 14))
def test_what_is_stored_ends_there(length: int) -> None:
    """At the end of a block or of a tail; what follows is new."""
    asked = Asked().store(range(length))
    assert asked.ask([*range(length), NEW, NEW]) == (length, Stop(Reason.NOTHING_STORED, length))


@pytest.mark.parametrize("length", range(1, 14))
def test_a_whole_hit_stops_nowhere(length: int) -> None:
    """The last token has to be computed, whether or not it is stored."""
    asked = Asked().store(range(length))
    assert asked.ask([*range(length), NEW]) == (length, None)
    if length > 1:
        assert asked.ask(range(length)) == (length - 1, None)


@pytest.mark.parametrize("tokens", [[], [5]])
def test_a_prompt_has_one_token_more_than_can_be_a_hit(tokens: list[int]) -> None:
    """Whatever is stored."""
    for asked in (Asked(), Asked().store(range(9), [5, 6, 7])):
        assert asked.ask(tokens) == (0, Stop(Reason.BELOW_ONE_TOKEN, 0))


# Diverged


@pytest.mark.parametrize("place", range(13))
def test_what_is_stored_goes_on_with_other_tokens(place: int) -> None:
    """From the first token on, at the border of a block, or inside of one."""
    asked = Asked().store(range(14))
    assert asked.ask([*range(place), NEW, NEW]) == (place, Stop(Reason.DIVERGED, place))


def test_a_prompt_of_two_tokens_diverges_at_its_first() -> None:
    """The shortest that can."""
    assert Asked().store(range(14)).ask([NEW, NEW]) == (0, Stop(Reason.DIVERGED, 0))


def test_a_tail_goes_on_as_a_block_does() -> None:
    """A prompt leaves the longest of several sequences."""
    asked = Asked().store([*range(4), 5, 6], [*range(4), 7, 8, 9])
    assert asked.ask([*range(4), 7, 8, NEW, NEW]) == (6, Stop(Reason.DIVERGED, 6))
    assert asked.ask([*range(4), NEW, NEW]) == (4, Stop(Reason.DIVERGED, 4))


# Other models


def test_something_is_stored_of_another_model_alone() -> None:
    """That one would have to compute it anew."""
    asked = Asked().store(range(9))
    assert asked.ask(range(9), "other") == (0, Stop(Reason.OTHER_MODEL, 0))
    insert(asked.cache, [50, 51], "other", **TINY)
    assert asked.ask(range(9), "other") == (0, Stop(Reason.DIVERGED, 0))


def test_another_model_is_no_reason_where_its_own_was_given_up() -> None:
    """Of this very prompt; for another one nothing is known but that."""
    asked = Asked().store(range(9))
    asked.cache.trim_to(n_bytes=0)
    insert(asked.cache, range(9), "other", **TINY)
    assert asked.ask(range(9)) == (0, Stop(Reason.EVICTED, 0, "trim"))
    assert asked.ask([NEW] * 9) == (0, Stop(Reason.OTHER_MODEL, 0))


# Evicted


def evict(asked: Asked, cause: Cause) -> None:
    """Have everything of the model given up."""
    cache = asked.cache
    match cause:
        case Cause.MEMORY:
            cache.budget._fixed_bytes = cache.budget._limit_bytes = 0
            cache.keep_within_budget()
            cache.budget._fixed_bytes = cache.budget._limit_bytes = GIB
        case Cause.COUNT:
            cache.max_sequences = 1
            insert(cache, [3, 3, 3], "other", **TINY)
            cache.max_sequences = None
        case Cause.PRESSURE:
            probe = cache.budget._probe
            cache.budget._probe = Machine(available_bytes=0).probe
            cache.keep_within_budget()
            cache.budget._probe = probe
            cache.keep_within_budget()
        case Cause.TRIM:
            cache.trim_to(n_sequences=0)
        case Cause.REPLACED:
            insert(cache, [3, 3, 3], **{**TINY, "layers": 2})


@pytest.mark.parametrize("length", [2, 4, 6, 14])
@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.CLEARED])
def test_what_was_given_up_is_told_with_its_cause(cause: Cause, length: int) -> None:
    """Sequences that are shorter than a block too; until they are stored again."""
    asked = Asked().store(range(length))
    evict(asked, cause)
    assert asked.ask([*range(length), NEW]) == (0, Stop(Reason.EVICTED, 0, cause.value))
    shape = {"layers": 2} if cause is Cause.REPLACED else {}
    asked.store(range(length), **shape)
    assert asked.ask([*range(length), NEW, NEW]) == (length, Stop(Reason.NOTHING_STORED, length))
    assert asked.ask([NEW] * 20) == (0, Stop(Reason.DIVERGED, 0))


@pytest.mark.parametrize("rest", [1, 3, 4, 5, 9])
def test_the_rest_of_what_is_stored_was_given_up(rest: int) -> None:
    """It is told from where on; whoever goes on with other tokens lost nothing."""
    asked = Asked().store(range(8 + rest))
    prefix = asked.cache.match(MODEL, range(9))
    assert prefix is not None
    while asked.cache.tree.tokens > 8:
        asked.cache.trim_to(n_bytes=asked.cache.tree.used_bytes - 1)
    assert asked.ask([*range(8 + rest), NEW]) == (8, Stop(Reason.EVICTED, 8, "trim"))
    assert asked.ask([*range(8), NEW, NEW]) == (8, Stop(Reason.NOTHING_STORED, 8))


def test_what_was_given_up_beside_what_is_stored() -> None:
    """In the middle of a block that others go on with."""
    asked = Asked().store([1, 2, 3, 4], [1, 2, 5, 6])
    asked.ask([1, 2, 5, 6, NEW])
    asked.cache.trim_to(n_sequences=1)
    assert asked.ask([1, 2, 3, 4, NEW, NEW]) == (2, Stop(Reason.EVICTED, 2, "trim"))
    assert asked.ask([1, 2, 3, NEW, NEW]) == (2, Stop(Reason.EVICTED, 2, "trim"))


def test_a_few_tokens_are_no_loss() -> None:
    """All prompts of a template begin alike: it is not for these that a new one is computed."""
    asked = Asked().store([1, 2, 3, 4, 5, 6])
    asked.cache.trim_to(n_bytes=0)
    assert asked.ask([1, 2, *[NEW] * 8]) == (0, Stop(Reason.NOTHING_STORED))
    assert asked.ask([1, 2, NEW, NEW]) == (0, Stop(Reason.EVICTED, 0, "trim"))
    assert asked.ask([1, 2, 3, 4, *[NEW] * 30]) == (0, Stop(Reason.EVICTED, 0, "trim"))


def test_what_was_cleared_was_never_stored() -> None:
    """Nothing is remembered of what somebody wanted gone, nor of what was evicted before."""
    asked = Asked().store([1, 2, 3, 4, 5])
    asked.cache.trim_to(n_bytes=0)
    asked.store([1, 2, 6, 7, 8])
    asked.cache.clear()
    for prompt in ([1, 2, 3, 4, NEW], [1, 2, 6, 7, NEW]):
        assert asked.ask(prompt) == (0, Stop(Reason.NOTHING_STORED))


def test_a_tail_that_a_longer_one_holds_is_not_gone() -> None:
    """It was given up, and is stored again as a part of something else."""
    asked = Asked().store([1, 2, 3, 4, 5, 6])
    asked.cache.trim_to(n_sequences=0)
    asked.store([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert asked.ask([1, 2, 3, 4, 5, 6, NEW, NEW]) == (6, Stop(Reason.DIVERGED, 6))
    asked.cache.trim_to(n_sequences=0)
    assert asked.ask([1, 2, 3, 4, 5, 6, NEW, NEW]) == (0, Stop(Reason.EVICTED, 0, "trim"))


def test_what_a_hit_uses_is_not_gone() -> None:
    """As much of a path as is used is known to be there."""
    asked = Asked().store(range(12))
    asked.cache.trim_to(n_bytes=0)
    asked.store(range(8))
    assert asked.ask(range(13)) == (8, Stop(Reason.EVICTED, 8, "trim"))
    assert asked.ask([*range(8), NEW, NEW]) == (8, Stop(Reason.NOTHING_STORED, 8))


@pytest.mark.parametrize("behind", [7, 8, 9, 14])
@pytest.mark.parametrize("shape", [STATES, WINDOWS], ids=["states", "windows"])
def test_a_checkpoint_was_given_up(shape: dict[str, Any], behind: int) -> None:
    """With all that led to it alone."""
    asked = Asked().store(range(behind), **shape)
    asked.cache.trim_to(n_sequences=0)
    assert asked.ask([*range(behind), NEW]) == (0, Stop(Reason.EVICTED, 0, "trim"))
    asked.store(range(behind), **shape)
    assert asked.ask([*range(behind), NEW, NEW]) == (behind, Stop(Reason.NOTHING_STORED, behind))


def test_a_checkpoint_was_given_up_and_a_shorter_sequence_was_not() -> None:
    """A short prompt of a model with windows is rows, and lies elsewhere than what goes on."""
    asked = Asked().store(range(14), **WINDOWS)
    asked.cache.trim_to(n_sequences=0)
    asked.store(range(5), **WINDOWS)
    assert asked.ask(range(15)) == (5, Stop(Reason.EVICTED, 5, "trim"))
    assert asked.ask([*range(5), NEW, NEW]) == (5, Stop(Reason.NOTHING_STORED, 5))
    asked.store(range(14), **WINDOWS)
    assert asked.ask([*range(5), NEW, NEW]) == (5, Stop(Reason.DIVERGED, 5))


def test_rows_of_no_use_were_given_up() -> None:
    """No checkpoint among them was on the way, so that none of them would have been a hit."""
    asked = Asked().store(range(8), label=SYSTEM, **STATES)
    asked.store(range(40), **STATES)
    prompt = [*range(28), *[NEW] * 20]
    assert asked.ask(prompt) == (8, Stop(Reason.NOT_RESTORABLE, 28))
    asked.ask([*range(8), NEW])  # which is used last
    asked.cache.trim_to(n_sequences=1)
    assert asked.ask(prompt) == (8, Stop(Reason.NOTHING_STORED, 8))
    assert asked.ask([*range(40), NEW]) == (8, Stop(Reason.EVICTED, 8, "trim"))


def test_rows_were_given_up_and_a_checkpoint_was_not() -> None:
    """They are in common with what is left, but only from them could it go on there."""
    asked = Asked().store(range(5), **WINDOWS).store(range(14), **WINDOWS)
    assert asked.ask([*range(5), NEW, NEW, NEW]) == (5, Stop(Reason.DIVERGED, 5))
    asked.store(range(14), **WINDOWS)
    asked.cache.trim_to(n_sequences=1)
    stop = Stop(Reason.NOT_RESTORABLE, 5, "trim")
    assert asked.ask([*range(5), NEW, NEW, NEW]) == (0, stop)


def test_the_cause_is_that_of_the_longest_loss() -> None:
    """What else was given up would have been less of a hit."""
    asked = Asked().store(range(4), **WINDOWS)
    asked.cache.trim_to(n_sequences=0)
    asked.store(range(12), label=SYSTEM, **WINDOWS)
    evict(asked, Cause.COUNT)
    assert asked.ask([*range(12), NEW, NEW]) == (0, Stop(Reason.EVICTED, 0, "count"))
    assert asked.ask([*range(4), NEW, NEW]) == (0, Stop(Reason.EVICTED, 0, "trim"))


def test_a_checkpoint_at_the_very_end_is_of_no_use() -> None:
    """The last token has to be computed, so that one would not have been a hit."""
    asked = Asked().store(range(6), label=SYSTEM, **STATES).store(range(14), **STATES)
    asked.cache.trim_to(n_sequences=1)
    assert asked.ask(range(6)) == (0, Stop(Reason.NOT_RESTORABLE, 6))
    assert asked.ask(range(7)) == (0, Stop(Reason.NOT_RESTORABLE, 7, "trim"))


def test_without_a_history_nobody_knows_what_was_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is stored now is all that is known; and that is told to the log at most, as it costs."""
    asked = Asked(history=None).store(range(14))
    asked.cache.trim_to(n_bytes=0)

    def told() -> Stop | None:
        asked.events.clear()
        prompt = range(15)
        asked.cache.fetch(prompt, asked.cache.match(MODEL, prompt), namespace=MODEL)
        (miss,) = [event for event in asked.events if isinstance(event, Miss)]
        return miss.stop

    caplog.set_level(logging.INFO, "mlx_lm_kvcache_plugin")
    assert told() is None
    caplog.set_level(logging.DEBUG, "mlx_lm_kvcache_plugin")
    assert told() == Stop(Reason.NOTHING_STORED, 0)
    asked.store(range(18), **STATES)
    assert told() == Stop(Reason.NOT_RESTORABLE, 15)


# Not restorable


@pytest.mark.parametrize("place", [1, 4, 6, 8, 13])
@pytest.mark.parametrize("shape", [STATES, WINDOWS], ids=["states", "windows"])
def test_more_is_in_common_than_can_be_resumed(shape: dict[str, Any], place: int) -> None:
    """Whether the prompt leaves what is stored, or is a part of it."""
    asked = Asked().store(range(14), **shape)
    assert asked.ask([*range(place), NEW, NEW]) == (0, Stop(Reason.NOT_RESTORABLE, place))
    if place > 1:
        assert asked.ask(range(place)) == (0, Stop(Reason.NOT_RESTORABLE, place))


def test_a_checkpoint_nearer_than_the_end() -> None:
    """It is a hit, and the rest of what is in common is not."""
    asked = Asked().store(range(6), label=SYSTEM, **STATES).store(range(14), **STATES)
    assert asked.ask([*range(10), NEW, NEW]) == (6, Stop(Reason.NOT_RESTORABLE, 10))
    assert asked.ask([*range(6), NEW, NEW]) == (6, Stop(Reason.DIVERGED, 6))
    assert asked.ask([*range(14), NEW, NEW]) == (14, Stop(Reason.NOTHING_STORED, 14))
    assert asked.ask([*range(14), NEW]) == (14, None)


@pytest.mark.parametrize("place", [3, 4, 6, 8, 11])
def test_a_checkpoint_was_given_up_and_what_led_to_it_was_not(place: int) -> None:
    """Others need that: it is still in common."""
    asked = Asked().store(range(place), label=SYSTEM, **STATES).store(range(14), **STATES)
    assert asked.ask([*range(place), NEW, NEW])[0] == place
    asked.store(range(14), **STATES)
    asked.cache.trim_to(n_sequences=1)
    for end in (place, place + 1, place + 2):
        stop = Stop(Reason.NOT_RESTORABLE, end, "trim")
        assert asked.ask([*range(end), NEW, NEW]) == (0, stop)
    stop = Stop(Reason.NOT_RESTORABLE, place - 1)  # it leaves the way before the checkpoint
    assert asked.ask([*range(place - 1), NEW, NEW]) == (0, stop)
    asked.store(range(place), label=SYSTEM, **STATES)
    assert asked.ask([*range(12), NEW, NEW]) == (place, Stop(Reason.NOT_RESTORABLE, 12))


@pytest.mark.parametrize(("gone", "held", "cause"), [(4, 8, ""), (8, 4, "trim"), (5, 6, "")])
def test_only_a_checkpoint_beyond_the_hit_matters(gone: int, held: int, cause: str) -> None:
    """One before it would not have been used."""
    asked = Asked().store(range(gone), label=SYSTEM, **STATES).store(range(14), **STATES)
    asked.cache.trim_to(n_sequences=1)
    asked.store(range(held), label=SYSTEM, **STATES)
    assert asked.ask([*range(12), NEW]) == (held, Stop(Reason.NOT_RESTORABLE, 12, cause))


def test_what_is_rows_alone_is_restorable_everywhere() -> None:
    """A part of an image is in common, and no layer is the reason why that is of no use."""
    asked = Asked().store([1, 2, IMAGE, IMAGE])
    hit_tokens, stop = asked.ask([1, 2, IMAGE, IMAGE, IMAGE, 3, 4])
    assert (hit_tokens, stop) == (2, Stop(Reason.NOTHING_STORED, 4))


# Who is told


def test_a_fetch_without_a_namespace_tells_none() -> None:
    """Nobody asks."""
    asked = Asked().store(range(9))
    for prompt in ([*range(5), NEW, NEW], [NEW, NEW], [5]):
        asked.events.clear()
        asked.cache.fetch(prompt, asked.cache.match(MODEL, prompt))
        (told,) = [event for event in asked.events if isinstance(event, Hit | Miss)]
        assert told.stop is None


def test_a_diagnosis_that_fails_spoils_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error that is told, of a request that is as good as before."""

    def fail(*arguments: object) -> Stop | None:
        raise RuntimeError("no idea")

    asked = Asked().store(range(9))
    monkeypatch.setattr(recording, "diagnose", fail)
    prompt = [*range(6), NEW, NEW]
    fetched = asked.cache.fetch(prompt, asked.cache.match(MODEL, prompt), namespace=MODEL)
    assert fetched is not None and fetched.tokens == 6
    insert, error, hit = asked.events
    assert isinstance(insert, Insert)
    assert error == Error("diagnosis", "RuntimeError: no idea")
    assert isinstance(hit, Hit) and (hit.hit_tokens, hit.stop) == (6, None)


def test_one_line_of_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """For each request."""
    caplog.set_level(logging.DEBUG, "mlx_lm_kvcache_plugin")
    asked = Asked().store(range(9))
    caplog.clear()
    asked.ask([*range(6), NEW, NEW])
    asked.ask([*range(9), NEW])
    asked.ask([NEW] * 1200, "other")
    lines = [line for line in caplog.messages if line.startswith("match")]
    assert [line.partition(", decoded")[0] for line in lines[:2]] == [
        "match 6 of 8 tokens (blocks 1, tail 2)",
        "match 9 of 10 tokens (blocks 2, tail 1)",
    ]
    assert lines[0].endswith("ms; diverged at token 6")
    assert lines[1].endswith("ms")
    assert lines[2] == "match 0 of 1,200 tokens; other model"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (Stop(Reason.NOTHING_STORED), "nothing stored"),
        (Stop(Reason.NOTHING_STORED, 1234), "nothing stored beyond token 1,234"),
        (Stop(Reason.OTHER_MODEL), "other model"),
        (Stop(Reason.DIVERGED), "diverged at token 0"),
        (Stop(Reason.EVICTED, 0, "memory"), "evicted from token 0 on (memory)"),
        (Stop(Reason.BELOW_ONE_TOKEN), "below one token"),
        (Stop(Reason.NOT_RESTORABLE, 50), "a layer is not restorable before token 50"),
        (
            Stop(Reason.NOT_RESTORABLE, 50, "memory"),
            "a layer is not restorable before token 50: evicted (memory)",
        ),
        (Stop(Reason.DISABLED), "disabled"),
        (Stop(Reason.ERROR), "error"),
    ],
)
def test_reasons_in_words(stop: Stop, text: str) -> None:
    """With the token and the cause where there are any."""
    assert str(stop) == text


# Under anything that may happen

RUNS = st.sampled_from([(0,), (1,), (0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 0)])

sequences = st.lists(RUNS, min_size=1, max_size=5).map(lambda runs: tuple(sum(runs, ())))

SHAPES = {"rows": TINY, "states": STATES, "windows": WINDOWS}


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


trims = st.sampled_from([None, None, 0, 1, 2])


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(sequences, trims), max_size=8), sequences, st.sampled_from([*SHAPES]))
def test_what_is_told_is_so(
    stored: list[tuple[tuple[int, ...], int | None]], prompt: tuple[int, ...], kind: str
) -> None:
    """Against a cache that gave nothing up, and a list of all that was stored.

    Args:
        stored: each with how many sequences are left then; None for all.
    """
    asked, twin = Asked(), Asked()
    held: list[tuple[int, ...]] | None = []  # as long as that is known
    for sequence, left in stored:
        for each in (asked, twin):
            each.store(sequence, label=SYSTEM, **SHAPES[kind])
        if left is not None:
            asked.cache.trim_to(n_sequences=left)
        held = [] if left == 0 else None if left or held is None else [*held, sequence]
    hit_tokens, stop = asked.ask(prompt)
    would_hit, _ = twin.ask(prompt)
    if stop is None:
        assert hit_tokens == len(prompt) - 1
    elif stop.reason is Reason.BELOW_ONE_TOKEN:
        assert len(prompt) == 1
    else:
        # A block more than was a hit, or half of the rest.
        least = hit_tokens + max(1, min(4, (len(prompt) - hit_tokens) // 2))
        assert (stop.cause == "trim") == (would_hit >= least)
        assert (stop.reason is Reason.EVICTED) == (would_hit >= least and would_hit > stop.token)
        if held is not None:
            check_place(stop, hit_tokens, prompt, held)


def check_place(
    stop: Stop, hit_tokens: int, prompt: tuple[int, ...], held: Sequence[tuple[int, ...]]
) -> None:
    """How far a prompt and what is held go together, and what either does there."""
    longest = max((common(each, prompt) for each in held), default=0)
    goes_on = any(common(each, prompt) == longest < len(each) for each in held)
    assert stop.token == longest >= hit_tokens
    match stop.reason:
        case Reason.NOT_RESTORABLE:
            assert longest > hit_tokens
        case Reason.DIVERGED:
            assert goes_on and hit_tokens == longest
        case Reason.NOTHING_STORED:
            assert not goes_on and hit_tokens == longest
        case reason:
            assert reason is Reason.EVICTED
