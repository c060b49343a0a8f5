"""A prompt's array: what it holds, and that no token is turned into a number twice."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mlx_lm_kvcache_plugin.matching import LOOKED_AT_FIRST
from mlx_lm_kvcache_plugin.stats.history import LOOKED_AT_ONCE, History
from mlx_lm_kvcache_plugin.store.prompt import Prompt
from tests.store.caches import MODEL, STATES, TINY, insert, make_cache

bounds = st.none() | st.integers(-12, 12)
tokens = st.lists(st.integers(-(2**60), 2**31), max_size=10)


class Watched(list[int]):
    """Tokens that count how many of them were taken."""

    taken = 0

    def __getitem__(self, part: Any) -> Any:
        found = super().__getitem__(part)
        self.taken += len(found) if isinstance(found, list) else 1
        return found


@given(tokens, st.lists(st.tuples(bounds, bounds), max_size=5))
def test_a_slice_is_the_array_of_those_tokens(
    ids: list[int], slices: list[tuple[int | None, int | None]]
) -> None:
    """In whatever order somebody looks, and each token is taken once."""
    watched = Watched(ids)
    prompt = Prompt(watched)
    assert len(prompt) == len(ids)
    for start, end in slices:
        found = prompt[start:end]
        assert found.dtype == np.int64 and found.tolist() == ids[start:end]
    assert watched.taken <= len(ids)


@pytest.mark.parametrize("history", [None, History(4)], ids=["alone", "with statistics"])
def test_what_is_not_stored_is_hardly_looked_at(history: History | None) -> None:
    """However long a prompt is, also once something was given up."""
    cache = make_cache(history=history)
    insert(cache, range(40), **TINY)
    insert(cache, range(100, 120), **TINY)
    for evicts in (False, True):
        if evicts:
            cache.trim_to(n_sequences=1)
        for start in (0, 100, 500):
            watched = Watched(range(start, 50_000))
            prompt = Prompt(watched)
            cache.fetch(prompt, cache.match(MODEL, prompt), namespace=MODEL)
            assert watched.taken <= 2 * (LOOKED_AT_FIRST + LOOKED_AT_ONCE)


def test_a_request_takes_each_token_once() -> None:
    """For the lookup, for what the statistics ask about it, and for a layer with states too."""
    for shape in (TINY, STATES):
        cache = make_cache(history=History(4))
        insert(cache, range(40), **shape)
        for following in ([], [1, 2, 3], [*range(100)]):
            watched = Watched([*range(40), 97, *following])
            prompt = Prompt(watched)
            cache.fetch(prompt, cache.match(MODEL, prompt), namespace=MODEL)
            assert 41 <= watched.taken <= len(watched)
