"""What stores of other sizes would have hit, against prefix caches that do have these sizes.

A block has four tokens and is much larger than what the index takes for it, so that a budget in
blocks is one in bytes. Every request is looked up, and stored with an answer afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_lm_kvcache_plugin.events import Hit, Reason
from mlx_lm_kvcache_plugin.inspection.sizing import sizing
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.stats import ghosts, history
from mlx_lm_kvcache_plugin.stats.history import SCALES, History
from mlx_lm_kvcache_plugin.store.eviction import Cause
from mlx_lm_kvcache_plugin.store.thinning import GENERATED, SYSTEM, USER
from tests.store.caches import MODEL, TINY, fetch, insert, layers_for, make_cache

STEP = 4

ROWS: dict[str, Any] = {"layers": 1, "heads": 1, "dim": 2048}

CHECKPOINTS: dict[str, Any] = {**TINY, "state_bytes": 30_000}


def size_of_a_block() -> float:
    """With its share of all else."""
    cache = make_cache()
    insert(cache, range(6 * STEP), **ROWS)
    return cache.tree.used_bytes / 6


BLOCK_BYTES = size_of_a_block()

LIMIT_BYTES = int(6.65 * BLOCK_BYTES)
"""No scale of it is near a whole number of blocks: 3.3, 13.3, 26.6."""


class Request(NamedTuple):
    """Tokens that are asked for, and how many more are generated."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Turn(NamedTuple):
    """What a request goes on from: a part of an earlier one, from the last one on; and with what.

    Attributes:
        kept: how much of it, in sixths.
    """

    back: int
    kept: int
    new: int
    generated: int


turns = st.builds(Turn, st.integers(1, 9), st.integers(0, 6), st.integers(1, 8), st.integers(1, 8))


def requests_of(turns: Sequence[Turn], multiple: int) -> list[Request]:
    """The requests of some conversations, at most ten blocks long.

    Args:
        multiple: of which all lengths are.
    """
    stored: list[tuple[int, ...]] = [(1,) * STEP]
    made = []
    for number, turn in enumerate(turns, 2):
        earlier = stored[-min(turn.back, len(stored))]
        kept = len(earlier) * turn.kept // 6 // multiple * multiple
        new = turn.new if multiple == 1 else -(-turn.new // multiple) * multiple
        prompt = (earlier[:kept] + (number,) * new)[: 10 * STEP - multiple]
        generated = turn.generated if multiple == 1 else multiple
        made.append(Request(prompt, (1000 + number,) * generated))
        stored.append(prompt + made[-1].answer)
    return made


class Servers:
    """One prefix cache that keeps a history, and one of each of the sizes that it tells about."""

    def __init__(self, limit_bytes: int, shape: dict[str, Any]) -> None:
        self.history = History(STEP)
        self.shape = shape
        self.hits: list[dict[float, int]] = []
        self.predicted: list[dict[float, int]] = []
        self.caches = {
            scale: make_cache(limit_bytes=int(scale * limit_bytes)) for scale in (0.5, 2.0, 4.0)
        }
        self.caches[1.0] = make_cache(limit_bytes=limit_bytes, history=self.history)

    def serve(self, request: Request) -> None:
        """Look a prompt up everywhere, and store it with its answer."""
        before = self.history.predicted
        self.hits.append({})
        for scale, cache in self.caches.items():
            prefix = cache.match(MODEL, request.prompt)
            cache.fetch(request.prompt, prefix, namespace=MODEL)
            self.hits[-1][scale] = prefix.tokens if prefix else 0
        after = self.history.predicted
        self.predicted.append({scale: after.at[scale] - before.at[scale] for scale in SCALES})
        assert after.prompt_tokens - before.prompt_tokens == len(request.prompt)
        assert after.hit_tokens - before.hit_tokens == self.hits[-1][1.0]
        self.store(request.prompt, USER)
        self.store(request.prompt + request.answer, GENERATED)

    def store(self, tokens: tuple[int, ...], label: str) -> None:
        layers = layers_for(tokens, MODEL, **self.shape)
        for cache in self.caches.values():
            cache.insert(MODEL, tokens, layers, label)
            cache.tree.check()

    @property
    def real(self) -> list[dict[float, int]]:
        """What was a hit, of the scales that are told about."""
        return [{scale: hits[scale] for scale in SCALES} for hits in self.hits]


def check_bounds(servers: Servers, requests: Sequence[Request]) -> None:
    """More memory never hits less, and nobody hits a prompt's last token."""
    for request, hits, predicted in zip(requests, servers.hits, servers.predicted, strict=True):
        told = [predicted[0.5], hits[1.0], predicted[2.0], predicted[4.0], len(request.prompt) - 1]
        assert told == sorted(told)
        assert told[0] >= 0


# Token by token


def check_whole_blocks(turns: Sequence[Turn]) -> None:
    requests = requests_of(turns, STEP)
    servers = Servers(LIMIT_BYTES, ROWS)
    for request in requests:
        servers.serve(request)
    assert servers.predicted == servers.real
    check_bounds(servers, requests)


many_turns = st.lists(turns, min_size=5, max_size=16)

examples = settings(max_examples=8, deadline=None, database=None, derandomize=True)
many_examples = settings(max_examples=300, deadline=None, database=None, derandomize=True)


@examples
@given(many_turns)
def test_whole_blocks_are_told_exactly(turns: list[Turn]) -> None:
    """Request by request, of conversations that are larger than a whole store too."""
    check_whole_blocks(turns)


@pytest.mark.slow
@many_examples
@given(st.lists(turns, min_size=5, max_size=40))
def test_whole_blocks_are_told_exactly_at_length(turns: list[Turn]) -> None:
    """The same for many more of them."""
    check_whole_blocks(turns)


def check_any_length(turns: Sequence[Turn], shape: dict[str, Any], limit_bytes: int) -> None:
    requests = requests_of(turns, 1)
    servers = Servers(limit_bytes, shape)
    for request in requests:
        servers.serve(request)
    check_bounds(servers, requests)


@examples
@given(many_turns)
def test_tails_keep_within_bounds(turns: list[Turn]) -> None:
    """They are no chains of their own: only that more is no less can be told of each request."""
    check_any_length(turns, ROWS, LIMIT_BYTES)


@pytest.mark.slow
@many_examples
@given(st.lists(turns, min_size=5, max_size=40), st.sampled_from([ROWS, CHECKPOINTS]))
def test_bounds_at_length(turns: list[Turn], shape: dict[str, Any]) -> None:
    """The same for many more of them, and for what is resumed at checkpoints."""
    check_any_length(turns, shape, 130_000)


@examples
@given(many_turns)
def test_tails_of_a_store_with_room_are_told_exactly(turns: list[Turn]) -> None:
    """What was a hit is known to the token, so that more memory seems of no use where it is not."""
    servers = Servers(200 * int(BLOCK_BYTES), ROWS)
    for request in requests_of(turns, 1):
        servers.serve(request)
    assert servers.predicted == servers.real


# From checkpoints


@examples
@given(many_turns)
def test_checkpoints_keep_within_bounds(turns: list[Turn]) -> None:
    """What they weigh is an average, so that no more can be told of each request."""
    check_any_length(turns, CHECKPOINTS, 130_000)


@examples
@given(many_turns)
def test_checkpoints_of_a_store_with_room_are_told_exactly(turns: list[Turn]) -> None:
    """A checkpoint that later ones have made needless is gone, however large a store is."""
    servers = Servers(1 << 30, CHECKPOINTS)
    for request in requests_of(turns, 1):
        servers.serve(request)
    assert servers.predicted == servers.real


@pytest.mark.parametrize("behind", range(1, 10))
def test_a_checkpoint_that_was_given_up_is_held_by_a_larger_store(behind: int) -> None:
    """Behind whole blocks and behind a tail."""
    servers = Servers(100_000, CHECKPOINTS)
    wanted = Request((*range(behind), 97), (98,))
    servers.store(tuple(range(behind)), SYSTEM)
    for number in range(4):
        servers.store((200 + number,) * 5, SYSTEM)
    servers.serve(wanted)
    assert servers.hits[0] == {0.5: 0, 1.0: 0, 2.0: behind, 4.0: behind}
    assert servers.predicted == [{0.5: 0, 2.0: behind, 4.0: behind}]


# What is told


def test_nothing_is_told_of_what_nobody_asked() -> None:
    """Nor is anything a hit before anything was stored."""
    kept = History(STEP)
    assert (kept.predicted.prompt_tokens, kept.predicted.hit_tokens) == (0, 0)
    assert kept.predicted.at == dict.fromkeys(SCALES, 0)
    kept.asked(MODEL, [1, 2, 3], 0)
    assert (kept.predicted.prompt_tokens, kept.predicted.hit_tokens) == (3, 0)
    assert kept.predicted.at == dict.fromkeys(SCALES, 0)


def ask(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = MODEL) -> int:
    """Fetch as a server does; how many tokens are a hit."""
    prefix = cache.match(namespace, tokens)
    cache.fetch(tokens, prefix, namespace=namespace)
    return prefix.tokens if prefix else 0


def cache_with_history(**options: Any) -> tuple[PrefixCache, History]:
    kept = History(STEP)
    return make_cache(history=kept, **options), kept


def test_a_fetch_without_a_namespace_is_not_counted() -> None:
    """Nobody says whose prompt it is."""
    cache, kept = cache_with_history()
    insert(cache, range(8), **TINY)
    assert fetch(cache, range(9)) == 8
    assert kept.predicted.prompt_tokens == 0


def test_the_prompts_of_other_models_are_not_held() -> None:
    """Sequences of different namespaces never meet, in no store of any size."""
    cache, kept = cache_with_history()
    insert(cache, range(8), "one", **TINY)
    assert ask(cache, range(9), "other") == 0
    assert kept.predicted.at == dict.fromkeys(SCALES, 0)


def test_a_list_that_was_cut_is_told_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on it would hold less than the store that it stands for."""
    monkeypatch.setattr(ghosts, "LEAST_KEYS", 8)
    monkeypatch.setattr(ghosts, "BYTES_A_KEY", 1 << 30)
    cache, kept = cache_with_history(limit_bytes=int(6.65 * BLOCK_BYTES))
    for number in range(8):
        insert(cache, [number] * STEP, **ROWS)
        ask(cache, [number] * STEP)
    assert set(kept.predicted.at) == set(SCALES)
    insert(cache, [8] * STEP, **ROWS)
    ask(cache, [8] * STEP)
    assert set(kept.predicted.at) == {0.5}
    cache.clear()
    ask(cache, [8] * STEP)
    assert set(kept.predicted.at) == {0.5}
    told = sizing(kept.predicted, 4 << 30)
    assert [each["hit_rate"] is None for each in told["scales"]] == [False, True, True]
    assert told["text"] is None


def test_what_is_stored_again_was_not_given_up() -> None:
    """Nor what is used again: it is forgotten why, since it may go without being given up."""
    cache, kept = cache_with_history()
    insert(cache, range(8), **TINY)
    (root,) = kept.roots(MODEL)
    assert kept.lost_rows(root, 0, range(9), 0) is None
    cache.trim_to(n_bytes=0)
    assert kept.lost_rows(root, 0, range(9), 0) == (8, Cause.TRIM)
    insert(cache, range(8), **TINY)
    assert kept.lost_rows(root, 0, range(9), 0) is None


def test_what_was_cleared_would_be_gone_from_every_store() -> None:
    """Or computed with other weights: no budget would have kept it."""
    for cause in (Cause.CLEARED, Cause.REPLACED):
        cache, kept = cache_with_history()
        insert(cache, range(8), **TINY)
        if cause is Cause.CLEARED:
            cache.clear()
        else:
            cache.spaces.identify(MODEL, b"one")
            cache.spaces.identify(MODEL, b"other")
            cache.keep_within_budget()
        assert len(cache.tree) == ask(cache, range(9)) == 0
        assert kept.predicted.at == dict.fromkeys(SCALES, 0)
        insert(cache, range(8), **TINY)
        assert ask(cache, range(9)) == 8
        assert kept.predicted.at == dict.fromkeys(SCALES, 8)


def test_what_was_trimmed_would_be_held_by_a_larger_store() -> None:
    """As what memory had no room for; but no smaller store hits more than this one did."""
    cache, kept = cache_with_history()
    insert(cache, range(8), **TINY)
    cache.trim_to(n_bytes=0)
    assert ask(cache, range(9)) == 0
    assert kept.predicted.at == {0.5: 0, 2.0: 8, 4.0: 8}


def test_namespaces_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used longest ago, once there are too many."""
    monkeypatch.setattr(history, "MOST_NAMESPACES", 2)
    cache, kept = cache_with_history()
    for namespace in ("one", "two", "one", "three"):
        insert(cache, range(8), namespace, **TINY)
    assert [len(kept.roots(name)) for name in ("one", "two", "three")] == [1, 0, 1]
    insert(cache, range(4), "two", **TINY)  # which forgets "one", and comes back with what is used
    ask(cache, range(9), "two")
    assert kept.predicted.hit_tokens == 8
    assert kept.predicted.at == {0.5: 4, 2.0: 8, 4.0: 8}


def test_nothing_is_kept_of_models_that_came_and_went() -> None:
    """A list is as long as what it holds."""
    kept = ghosts.Ghosts(SCALES, STEP)
    for number in range(1000):
        kept.use(number, [number], 1.0, limit_bytes=2)
    assert len(kept._weights) == 8
    assert [len(each.roots) for each in kept.lists.values()] == [1, 4, 8]


def test_a_history_that_fails_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time it is told anything that is counted, and the cache goes on as it would have."""

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("lost")

    for method in ("asked", "used", "evicted", "thinned", "lost_rows", "roots"):
        events: list[Any] = []
        cache, _ = cache_with_history(emit=events.append)
        with monkeypatch.context() as patch:
            patch.setattr(History, method, fail)
            insert(cache, range(8), **TINY)
            assert ask(cache, [*range(8), 97, 98]) == 8
            cache.trim_to(n_bytes=0)
        assert len(cache.tree) == 0
        (hit,) = [event for event in events if isinstance(event, Hit)]
        assert hit.hit_tokens == 8
        operations = {event.operation for event in events if hasattr(event, "operation")}
        is_asked = method in ("lost_rows", "roots")
        assert operations == {"diagnosis" if is_asked else "history"}
        assert (hit.stop is None) == is_asked
        assert hit.stop is None or hit.stop.reason is Reason.NOTHING_STORED


def test_nothing_is_told_of_larger_budgets_once_something_was_too_large() -> None:
    """What a larger one would have held is not known: better nothing than "no more than 0%"."""
    cache = make_cache(limit_bytes=60_000, history=History(STEP))

    def told_after(tokens: Sequence[int], state_bytes: int) -> set[float]:
        insert(cache, tokens, label=USER, **{**TINY, "state_bytes": state_bytes})
        cache.fetch([*tokens, 7], cache.match(MODEL, [*tokens, 7]), namespace=MODEL)
        assert cache.history is not None
        return set(cache.history.predicted.at)

    assert told_after(range(8), 30_000) == set(SCALES)
    assert told_after(range(12), 100_000) == {0.5}
