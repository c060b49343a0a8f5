"""A prompt's array: what it holds, and that no token is turned into a number twice."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from mlx_lm_kvcache_plugin.stats.history import History
from mlx_lm_kvcache_plugin.store.prompt import Prompt
from tests.store.caches import MODEL, TINY, insert, make_cache

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


def test_a_request_takes_each_token_once() -> None:
    """For the lookup, for what the statistics ask about it, and for a layer with states too."""
    for shape in (TINY, {**TINY, "state_bytes": 300}):
        cache = make_cache(history=History(4))
        insert(cache, range(40), **shape)
        for following in ([], [1, 2, 3], [*range(100)]):
            watched = Watched([*range(40), 97, *following])
            prompt = Prompt(watched)
            cache.fetch(prompt, cache.match(MODEL, prompt), namespace=MODEL)
            assert 41 <= watched.taken <= len(watched)
