"""The prefix cache against a naive list of what was stored, under anything that may happen.

Whoever reads it while it changes does so whenever its lock is about to be free.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.events import Error, Evict, Hit, Insert, Miss
from mlx_lm_kvcache_plugin.inspection.explanation import explain
from mlx_lm_kvcache_plugin.inspection.sequences import list_sequences
from mlx_lm_kvcache_plugin.layers import Fetched, Layers
from mlx_lm_kvcache_plugin.stats.history import History
from mlx_lm_kvcache_plugin.store.blocks import Block
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget, logger
from mlx_lm_kvcache_plugin.store.thinning import GENERATED, PROMPT, SYSTEM, USER
from tests.events import Events
from tests.store.caches import (
    Crash,
    Machine,
    fail_on_call,
    fetched_from,
    insert,
    is_what_was_computed,
    layers_for,
    make_cache,
    state_of,
)
from tests.store.reading import WatchedLock, assert_whole

Sequence = tuple[int, ...]

ROWS, OTHER_ROWS = "rows", "other rows"
WINDOWS, STATES, CHATS = "windows", "states", "chats"

MODELS: dict[str, dict[str, Any]] = {
    ROWS: {},
    OTHER_ROWS: {},
    WINDOWS: {"windows": (2, 6)},  # rows alone until the first of them is full
    STATES: {"windows": (3,), "state_bytes": 200},
    CHATS: {"windows": (3,), "state_bytes": 200},
}
"""By namespace, what its model has beside layers whose tokens are independent rows."""

THINNED = {CHATS}
"""Where checkpoints get any label, so that some of them are given up for others."""

LABELS = (SYSTEM, USER, PROMPT, GENERATED)

LIMIT_BYTES = 1 << 20

SHAPE: dict[str, Any] = {"heads": 1, "dim": 16}
"""Wide enough that a tail takes much less than a block."""

BETWEEN_LOOKS = 31
"""How often the lock is taken before somebody looks again: a prime, so that it is at any step."""

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


namespaces = st.sampled_from(list(MODELS))
labels = st.sampled_from(LABELS)


def root_of(block: Block) -> Any:
    """The space that a block is in."""
    while block.parent is not None:
        block = block.parent
    return block.namespace  # type: ignore[attr-defined]


def crash() -> None:
    raise Crash


def crashing(name: str, on_call: int) -> AbstractContextManager[object]:
    """Make the codec's method fail when it is called for the n-th time."""
    return patch.object(RawCodec, name, fail_on_call(on_call, getattr(RawCodec, name)))


class PrefixCacheMachine(RuleBasedStateMachine):
    """The list knows all that was ever stored, so it bounds every hit.

    Until something is evicted it equals every hit, but where checkpoints are given up for others;
    and what is fetched is always what a model computes for the tokens of the hit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.ceiling: int | None = None
        self.events = Events()
        budget = Budget(
            limit_bytes=LIMIT_BYTES, ceiling=lambda: self.ceiling, probe=self.machine.probe
        )
        self.cache = make_cache(budget=budget, emit=self.events.append, history=History(4))
        self.cache.tree.lock = self.lock = WatchedLock(self.look)  # type: ignore[assignment]
        self.layers = dict.fromkeys(MODELS, 1)
        self.stored: list[tuple[str, Sequence]] = []
        self.is_complete = True

    def shape(self, namespace: str) -> dict[str, Any]:
        return {"layers": self.layers[namespace], **MODELS[namespace], **SHAPE}

    def layers_of(self, tokens: Sequence, namespace: str) -> Layers:
        return layers_for(tokens, namespace, **self.shape(namespace))

    # What is stored

    @rule(tokens=sequences, namespace=namespaces, label=labels)
    def insert(self, tokens: Sequence, namespace: str, label: str) -> None:
        self.events.forget()
        label = label if namespace in THINNED else SYSTEM
        insert(self.cache, tokens, namespace, label, **self.shape(namespace))
        self.expect_stored(tokens, namespace)

    @rule(tokens=sequences, namespace=namespaces)
    def insert_of_another_shape(self, tokens: Sequence, namespace: str) -> None:
        """The model behind a namespace looks different now: what is stored of it is no use."""
        self.layers[namespace] = 3 - self.layers[namespace]
        self.stored = [item for item in self.stored if item[0] != namespace]
        self.insert(tokens, namespace, USER)

    def expect_stored(self, tokens: Sequence, namespace: str) -> None:
        """What was told of an insert is so."""
        told = [event for event in self.events if isinstance(event, Insert)]
        self.notice_evictions()
        if not told:
            # It was there already, or is larger by itself than what may be held.
            assert self.needs_checkpoint(tokens, namespace)
            self.is_complete &= (namespace, tokens) in self.stored or not tokens
            return
        (said,) = told
        self.stored.append((namespace, tokens))
        self.is_complete &= said.stored_tokens == len(tokens)
        assert 0 <= said.new_tokens <= said.stored_tokens <= len(tokens) == said.tokens
        if self.needs_checkpoint(tokens, namespace):
            assert said.stored_tokens in (0, len(tokens))
        if self.cache.max_sequences is not None:
            assert self.cache.tree.sequences.total() <= self.cache.max_sequences
        elif said.stored_tokens:
            assert self.expect_fetch((*tokens, NEVER), namespace) >= said.stored_tokens

    def needs_checkpoint(self, tokens: Sequence, namespace: str) -> bool:
        windows = MODELS[namespace].get("windows", ())
        return "state_bytes" in MODELS[namespace] or any(len(tokens) > size for size in windows)

    @rule(tokens=sequences, namespace=namespaces, on_call=st.integers(1, 14))
    def insert_with_a_crash_in_the_codec(
        self, tokens: Sequence, namespace: str, on_call: int
    ) -> None:
        with crashing("encode", on_call):
            self.expect_insert_or_nothing(tokens, namespace)

    @rule(tokens=sequences, namespace=namespaces)
    def insert_with_a_crash_in_the_states(self, tokens: Sequence, namespace: str) -> None:
        self.expect_insert_or_nothing(tokens, namespace, freeze=crash)

    @rule(tokens=sequences, namespace=namespaces, on_call=st.integers(1, 3))
    def insert_with_a_crash_in_the_probe(
        self, tokens: Sequence, namespace: str, on_call: int
    ) -> None:
        self.machine.before_probing = fail_on_call(on_call, lambda: None)
        self.expect_insert_or_nothing(tokens, namespace)

    def expect_insert_or_nothing(self, tokens: Sequence, namespace: str, **changes: Any) -> None:
        """A crash skips the insert whole: nothing is half stored, whatever had to go first."""
        before = set(self.cache.tree)
        layers = replace(self.layers_of(tokens, namespace), **changes)
        self.events.forget()
        try:
            self.cache.insert(namespace, tokens, layers, SYSTEM)
            has_crashed = False
        except Crash:
            has_crashed = True
        self.machine.before_probing = lambda: None
        if not has_crashed:
            self.expect_stored(tokens, namespace)
            return
        self.notice_evictions()
        assert set(self.cache.tree) <= before
        assert set(self.cache.tree) == before or not self.is_complete
        assert not any(isinstance(event, Insert) for event in self.events)

    # What is fetched

    @rule(tokens=sequences, namespace=namespaces)
    def fetch(self, tokens: Sequence, namespace: str) -> None:
        self.expect_fetch(tokens, namespace)

    def expect_fetch(self, tokens: Sequence, namespace: str) -> int:
        self.events.forget()
        fetched = fetched_from(self.cache, tokens, namespace)
        self.notice_evictions()
        hit = fetched.tokens if fetched is not None else 0
        told = [event for event in self.events if isinstance(event, Hit | Miss)]
        assert [getattr(event, "hit_tokens", 0) for event in told] == [hit]
        self.expect_content(fetched, hit, tokens[:-1], namespace)
        return hit

    @rule(tokens=sequences, namespace=namespaces, most=st.integers(0, 12))
    def fetch_within_a_bound(self, tokens: Sequence, namespace: str, most: int) -> None:
        """As ranks do that have to agree on what all of them can restore."""
        self.events.forget()
        prefix = self.cache.match(namespace, tokens, most)
        fetched = self.cache.fetch(tokens, prefix)
        self.notice_evictions()
        hit = fetched.tokens if fetched is not None else 0
        self.expect_content(fetched, hit, tokens[:-1][:most], namespace)

    def expect_content(
        self, fetched: Fetched | None, hit: int, wanted: Sequence, namespace: str
    ) -> None:
        best = self.longest(namespace, wanted)
        assert hit <= best
        assert hit == best or not self.is_complete or namespace in THINNED
        if fetched is not None:
            assert hit > 0
            assert is_what_was_computed(fetched, wanted, namespace, **self.shape(namespace))

    def longest(self, namespace: str, wanted: Sequence) -> int:
        """The best hit that anything ever stored could give."""
        runs = [
            (common(tokens, wanted), tokens) for name, tokens in self.stored if name == namespace
        ]
        return max(
            (
                run
                for run, tokens in runs
                if run == len(tokens) or not self.needs_checkpoint(tokens, namespace)
            ),
            default=0,
        )

    @rule(tokens=sequences, namespace=namespaces, on_call=st.integers(1, 6))
    def fetch_with_a_crash_in_the_codec(
        self, tokens: Sequence, namespace: str, on_call: int
    ) -> None:
        """A hit that cannot be decoded is told as an error, and is there the next time."""
        before = set(self.cache.tree)
        self.events.forget()
        try:
            with crashing("decode", on_call):
                fetched_from(self.cache, tokens, namespace)
        except Crash:
            assert not any(isinstance(event, Hit | Miss) for event in self.events)
        self.notice_evictions()
        assert set(self.cache.tree) == before or not self.is_complete

    # What is read

    def look(self) -> None:
        """As another thread may, whatever the owner is about: nothing is halfway."""
        if self.lock.taken % BETWEEN_LOOKS:
            return
        tree = self.cache.tree
        assert_whole(tree)
        listing = list_sequences(tree)
        assert listing.total == listing.shown == sum(not node.children for node in tree)
        for namespace in MODELS:
            explained = explain(self.cache, namespace, (0, 0, 0, 0, 1, NEVER))
            assert explained.hit_tokens <= 5

    @rule(tokens=sequences, namespace=namespaces)
    def explain_and_fetch(self, tokens: Sequence, namespace: str) -> None:
        """It changes nothing, and what it says is what happens."""
        before = self.everything()
        explained = explain(self.cache, namespace, tokens)
        list_sequences(self.cache.tree)
        assert self.everything() == before
        self.events.forget()
        prefix = self.cache.match(namespace, tokens)
        fetched = self.cache.fetch(tokens, prefix, namespace=namespace)
        (told,) = [event for event in self.events if isinstance(event, Hit | Miss)]
        hit = fetched.tokens if fetched is not None else 0
        assert (explained.hit_tokens, explained.on_disk_tokens) == (hit, 0)
        assert explained.stop == told.stop
        self.notice_evictions()
        self.expect_content(fetched, hit, tokens[:-1], namespace)

    def everything(self) -> Any:
        """All that only the owner may change."""
        nodes = [(node, node.used_at, node.nbytes, list(node.children)) for node in self.cache.tree]
        history = self.cache.history
        predicted = history.predicted if history is not None else None
        return nodes, state_of(self.cache), list(self.events), predicted

    # What may be held

    @rule(ceiling=st.one_of(st.none(), st.integers(0, 20_000)))
    def move_the_ceiling(self, ceiling: int | None) -> None:
        self.ceiling = ceiling
        self.cache.keep_within_budget()
        self.notice_evictions()
        assert ceiling is None or self.cache.tree.used_bytes <= ceiling

    @rule(
        tokens=sequences,
        namespace=namespaces,
        label=labels,
        spare_bytes=st.integers(-500, 3000),
    )
    def insert_into_little_room(
        self, tokens: Sequence, namespace: str, label: str, spare_bytes: int
    ) -> None:
        """So little that it fits in only if others go, or not even then."""
        ceiling = self.ceiling
        self.move_the_ceiling(max(0, self.cache.tree.used_bytes + spare_bytes))
        self.insert(tokens, namespace, label)
        self.ceiling = ceiling

    @rule()
    def run_short_of_memory_for_a_moment(self) -> None:
        self.machine.available_bytes = 0
        with patch.object(logger, "warning"):  # a reader of a failure has enough to read
            self.cache.keep_within_budget()
        self.machine.available_bytes = 10 * GIB
        self.is_complete &= not self.stored
        assert self.cache.tree.used_bytes == 0

    @rule(
        tokens=sequences,
        namespace=namespaces,
        on_call=st.integers(1, 6),
        available_bytes=st.integers(-3000, 0),
    )
    def insert_while_memory_runs_short(
        self, tokens: Sequence, namespace: str, on_call: int, available_bytes: int
    ) -> None:
        """For a moment: twice, since it is asked again after others have given back."""
        calls = 0

        def run_short() -> None:
            nonlocal calls
            calls += 1
            is_short = calls in (on_call, on_call + 1)
            self.machine.available_bytes = GIB + available_bytes if is_short else 10 * GIB

        self.machine.before_probing = run_short
        with patch.object(logger, "warning"):
            self.events.forget()
            insert(self.cache, tokens, namespace, SYSTEM, **self.shape(namespace))
        self.machine.before_probing = lambda: None
        self.machine.available_bytes = 10 * GIB
        self.expect_stored(tokens, namespace)

    @rule(namespace=namespaces)
    def prefer(self, namespace: str) -> None:
        """Nothing comes or goes, and the order changes between one model and the others alone."""
        before = list(self.cache.tree)
        self.cache.prefer(namespace)
        spaces = self.cache.spaces.of(namespace)
        preferred = [block for block in before if root_of(block) in spaces]
        others = [block for block in before if root_of(block) not in spaces]
        assert list(self.cache.tree) == others + preferred

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
        assert self.cache.history is not None and not self.events.of(Error)
        predicted = self.cache.history.predicted
        told = {**predicted.at, 1.0: predicted.hit_tokens}  # larger ones, if nothing was too large
        hits = [told[scale] for scale in sorted(told)]
        assert hits == sorted(hits) and hits[-1] <= predicted.prompt_tokens


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,  # a failure is a change's doing, and not the day's
)
