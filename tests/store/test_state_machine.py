"""The prefix cache against a naive list of what was stored, under anything that may happen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.events import Event, Evict, Hit, Insert, Miss
from mlx_lm_kvcache_plugin.fetched import Fetched
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget, logger
from tests.store.caches import (
    Crash,
    Machine,
    Point,
    fail_on_call,
    insert,
    is_what_was_computed,
    make_cache,
    tensors_for,
)

Sequence = tuple[int, ...]

ROWS = ("rows", "other rows")
"""Namespaces of models whose tokens are independent rows."""

CUTTABLE, RIGID = "states that can be cut", "states that cannot"

LIMIT_BYTES = 1 << 20

SHAPE: dict[str, Any] = {"heads": 1, "dim": 16}
"""Wide enough that a tail takes much less than a block."""

NEVER = 99
"""A token that is in no sequence."""

RUNS = ((0,), (1,), (0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 0), (-(2**60), 0))

sequences = st.lists(st.sampled_from(RUNS), max_size=7).map(lambda runs: tuple(chain(*runs)))
"""Of so few runs that any two of them are likely to begin alike."""


def common(one: Sequence, other: Sequence) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def crashing(name: str, on_call: int) -> AbstractContextManager[object]:
    """Make the codec's method fail when it is called for the n-th time."""
    return patch.object(RawCodec, name, fail_on_call(on_call, getattr(RawCodec, name)))


class PrefixCacheMachine(RuleBasedStateMachine):
    """The list knows all that was ever stored, so it bounds every hit.

    Until something is evicted it equals every hit; and what is fetched is always what a model
    computes for the tokens of the hit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.ceiling: int | None = None
        self.events: list[Event] = []
        budget = Budget(
            limit_bytes=LIMIT_BYTES, ceiling=lambda: self.ceiling, probe=self.machine.probe
        )
        self.cache = make_cache(budget=budget, emit=self.events.append)
        self.layers = dict.fromkeys(ROWS, 2)
        self.stored: list[tuple[str, Sequence]] = []
        self.is_complete = True

    # What is stored

    @rule(tokens=sequences, namespace=st.sampled_from(ROWS))
    def insert(self, tokens: Sequence, namespace: str) -> None:
        shape = {"layers": self.layers[namespace], **SHAPE}
        self.expect_insert(
            namespace, tokens, lambda: insert(self.cache, tokens, namespace, **shape)
        )

    @rule(tokens=sequences, namespace=st.sampled_from(ROWS))
    def insert_of_another_shape(self, tokens: Sequence, namespace: str) -> None:
        """The model behind a namespace looks different now: what is stored of it is no use."""
        self.layers[namespace] = 3 - self.layers[namespace]
        self.stored = [item for item in self.stored if item[0] != namespace]
        self.insert(tokens, namespace)

    @rule(
        tokens=sequences,
        last=st.sampled_from([0, 1]),
        namespace=st.sampled_from([CUTTABLE, RIGID]),
    )
    def insert_checkpoint(self, tokens: Sequence, last: int, namespace: str) -> None:
        tokens = (*tokens, last)  # there is no state of no tokens
        point = Point(tokens, can_be_cut=namespace == CUTTABLE, nbytes=100 * len(tokens))
        self.expect_insert(
            namespace,
            tokens,
            lambda: self.cache.insert_checkpoint(namespace, tokens, point, "system"),
        )

    def expect_insert(self, namespace: str, tokens: Sequence, store: Callable[[], None]) -> None:
        self.events.clear()
        store()
        self.stored.append((namespace, tokens))
        (said,) = [event for event in self.events if isinstance(event, Insert)]
        self.notice_evictions()
        self.is_complete &= said.stored_tokens == len(tokens)
        assert 0 <= said.new_tokens <= said.stored_tokens <= len(tokens) == said.tokens
        if self.cache.max_sequences is not None:
            assert self.cache.tree.sequences.total() <= self.cache.max_sequences
        elif said.stored_tokens:
            assert self.expect_fetch((*tokens, NEVER), namespace) >= said.stored_tokens

    @rule(tokens=sequences, namespace=st.sampled_from(ROWS), on_call=st.integers(1, 12))
    def insert_with_a_crash_in_the_codec(
        self, tokens: Sequence, namespace: str, on_call: int
    ) -> None:
        with crashing("encode", on_call):
            self.expect_insert_or_nothing(tokens, namespace)

    @rule(tokens=sequences, namespace=st.sampled_from(ROWS), on_call=st.integers(1, 3))
    def insert_with_a_crash_in_the_probe(
        self, tokens: Sequence, namespace: str, on_call: int
    ) -> None:
        left = on_call

        def fail() -> None:
            nonlocal left
            left -= 1
            if not left:
                raise Crash

        self.machine.before_probing = fail
        try:
            self.expect_insert_or_nothing(tokens, namespace)
        finally:
            self.machine.before_probing = lambda: None

    def expect_insert_or_nothing(self, tokens: Sequence, namespace: str) -> None:
        """A crash skips the insert whole: nothing is half stored, whatever had to go first."""
        before = set(self.cache.tree)
        tensors = tensors_for(tokens, namespace, layers=self.layers[namespace], **SHAPE)
        self.events.clear()
        try:
            self.cache.insert(namespace, tokens, tensors, "assistant")
        except Crash:
            self.notice_evictions()
            assert set(self.cache.tree) <= before
            assert set(self.cache.tree) == before or not self.is_complete
            assert not any(isinstance(event, Insert) for event in self.events)
        else:
            self.stored.append((namespace, tokens))
            self.notice_evictions()
            self.is_complete &= all(
                event.stored_tokens == len(tokens)
                for event in self.events
                if isinstance(event, Insert)
            )

    # What is fetched

    @rule(tokens=sequences, namespace=st.sampled_from([*ROWS, CUTTABLE, RIGID]))
    def fetch(self, tokens: Sequence, namespace: str) -> None:
        self.expect_fetch(tokens, namespace)

    def expect_fetch(self, tokens: Sequence, namespace: str) -> int:
        self.events.clear()
        fetched: Fetched | None = self.cache.fetch(namespace, tokens)
        self.notice_evictions()
        told = [event for event in self.events if isinstance(event, Hit | Miss)]
        assert [getattr(event, "hit_tokens", 0) for event in told] == [
            fetched.tokens if fetched else 0
        ]
        best = self.longest(namespace, tokens[:-1])
        if fetched is None:
            assert best == 0 or not self.is_complete
            return 0
        assert 0 < fetched.tokens <= best
        assert fetched.tokens == best or not self.is_complete
        self.expect_content(fetched, tokens, namespace)
        return fetched.tokens

    def expect_content(self, fetched: Fetched, tokens: Sequence, namespace: str) -> None:
        if namespace in ROWS:
            shape = {"layers": self.layers[namespace], **SHAPE}
            assert is_what_was_computed(fetched, tokens, namespace, **shape)
            return
        assert isinstance(fetched.checkpoint, Point)
        state = fetched.checkpoint.tokens
        assert state[: fetched.tokens] == tokens[: fetched.tokens]
        assert len(state) == fetched.tokens + fetched.surplus_tokens
        assert namespace == CUTTABLE or not fetched.surplus_tokens

    def longest(self, namespace: str, wanted: Sequence) -> int:
        """The best hit that anything ever stored could give."""
        runs = [
            (common(tokens, wanted), len(tokens))
            for name, tokens in self.stored
            if name == namespace
        ]
        if namespace == RIGID:
            return max((run for run, length in runs if run == length), default=0)
        return max((run for run, _ in runs), default=0)

    @rule(tokens=sequences, namespace=st.sampled_from(ROWS), on_call=st.integers(1, 4))
    def fetch_with_a_crash_in_the_codec(
        self, tokens: Sequence, namespace: str, on_call: int
    ) -> None:
        """A hit that cannot be decoded is told as an error, and is there the next time."""
        before = set(self.cache.tree)
        self.events.clear()
        try:
            with crashing("decode", on_call):
                self.cache.fetch(namespace, tokens)
        except Crash:
            assert not any(isinstance(event, Hit | Miss) for event in self.events)
        self.notice_evictions()
        assert set(self.cache.tree) == before or not self.is_complete

    # What may be held

    @rule(ceiling=st.one_of(st.none(), st.integers(0, 20_000)))
    def move_the_ceiling(self, ceiling: int | None) -> None:
        self.ceiling = ceiling
        self.cache.keep_within_budget()
        self.notice_evictions()
        assert ceiling is None or self.cache.tree.used_bytes <= ceiling

    @rule(
        tokens=sequences,
        namespace=st.sampled_from([*ROWS, CUTTABLE, RIGID]),
        spare_bytes=st.integers(-500, 1500),
    )
    def insert_into_little_room(self, tokens: Sequence, namespace: str, spare_bytes: int) -> None:
        """So little that it fits in only if others go, or not even then."""
        ceiling = self.ceiling
        self.move_the_ceiling(max(0, self.cache.tree.used_bytes + spare_bytes))
        if namespace in ROWS:
            self.insert(tokens, namespace)
        else:
            self.insert_checkpoint(tokens, 1, namespace)
        self.ceiling = ceiling

    @rule()
    def run_short_of_memory_for_a_moment(self) -> None:
        self.machine.available_bytes = 0
        with patch.object(logger, "warning"):  # a reader of a failure has enough to read
            self.cache.keep_within_budget()
        self.machine.available_bytes = 10 * GIB
        self.is_complete &= not self.stored
        assert self.cache.tree.used_bytes == 0

    @rule(n_sequences=st.integers(0, 5))
    def trim_sequences(self, n_sequences: int) -> None:
        self.cache.trim_to(n_sequences=n_sequences)
        self.notice_evictions()
        assert self.cache.tree.sequences.total() <= n_sequences

    @rule(n_bytes=st.integers(0, 20_000))
    def trim_bytes(self, n_bytes: int) -> None:
        self.cache.trim_to(n_bytes=n_bytes)
        self.notice_evictions()
        assert self.cache.tree.used_bytes <= n_bytes

    @rule(max_sequences=st.one_of(st.none(), st.integers(1, 5)))
    def limit_sequences(self, max_sequences: int | None) -> None:
        self.cache.max_sequences = max_sequences

    @rule()
    def begin_anew(self) -> None:
        """Forget everything, so that what follows is held against a complete list again."""
        self.cache.trim_to(n_bytes=0)
        assert len(self.cache.tree) == self.cache.tree.used_bytes == 0
        self.ceiling = self.cache.max_sequences = None
        self.stored.clear()
        self.is_complete = True

    def notice_evictions(self) -> None:
        evicted = {event.cause for event in self.events if isinstance(event, Evict)}
        evicted |= {cause.value for cause in self.cache.tree.evicted_blocks}
        if evicted - {"replaced"}:
            self.is_complete = False

    @invariant()
    def everything_adds_up(self) -> None:
        self.cache.tree.check()
        assert self.cache.tree.used_bytes <= LIMIT_BYTES


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,  # a failure is a change's doing, and not the day's
)
