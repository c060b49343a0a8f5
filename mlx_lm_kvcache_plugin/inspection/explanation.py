"""Tells what a prompt would hit, and where it leaves what is stored; changes nothing."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ..diagnosis import diagnose
from ..events import Reason, Stop
from ..matching import find_longest, ways_on
from ..prefix_cache import PrefixCache
from ..store.blocks import TOKEN_BYTES, Block, Match, Root

AROUND_TOKENS = 32
"""How many tokens are told on either side of the place where a prompt leaves what is stored."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """The stored sequence that has the most in common with a prompt.

    Attributes:
        common_tokens: how many of their first tokens are the same.
        used_at: when it was last used, in seconds of `time.monotonic`.
        before: the last ones of those.
        prompt, stored: how either goes on.
    """

    common_tokens: int
    used_at: float
    before: list[int]
    prompt: list[int]
    stored: list[int]

    @property
    def age_seconds(self) -> float:
        return max(0.0, time.monotonic() - self.used_at)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would become of a prompt.

    Attributes:
        hit_tokens: how many of its tokens would be a hit.
        on_disk_tokens: those of them that would have to be read from disk first.
        stop: why they are no more.
        nearest: None where nothing is stored of its model.
    """

    prompt_tokens: int
    hit_tokens: int
    on_disk_tokens: int
    stop: Stop | None
    nearest: Nearest | None


def explain(cache: PrefixCache, namespace: Hashable, tokens: Sequence[int]) -> Explanation:
    """What a prompt would hit now. Any thread may ask."""
    tree, ids = cache.tree, np.array(tokens, np.int64)
    on_disk, goes_on = cache.reach_on_disk(namespace, ids)
    with tree.lock:
        spaces = cache.spaces.of(namespace)
        found = find_longest(tree, spaces, ids, max(0, len(ids) - 1))
        in_memory = found.tokens if found is not None else 0
        hit_tokens = max(in_memory, on_disk)
        stop = diagnose(tree, cache.spaces, cache.history, namespace, ids, hit_tokens)
        if stop is not None and hit_tokens > stop.token:  # which is all that memory knows of it
            stop = Stop(Reason.DIVERGED if goes_on else Reason.NOTHING_STORED, hit_tokens)
        commons = [(space, tree.match(space, ids)) for space in spaces if tree.has(space)]
        nearest = None
        if commons:
            space, common = max(commons, key=lambda pair: pair[1].tokens)
            nearest = _nearest(tree.root(space), common, tokens)
    return Explanation(len(tokens), hit_tokens, hit_tokens - in_memory, stop, nearest)


def _nearest(root: Root, common: Match, tokens: Sequence[int]) -> Nearest:
    end = common.tokens
    stored, used_at = _after(common.blocks[-1] if common.blocks else root, common.rows)
    return Nearest(
        end,
        used_at,
        list(tokens[max(0, end - AROUND_TOKENS) : end]),
        list(tokens[end : end + AROUND_TOKENS]),
        stored,
    )


def _after(node: Block, rows: int) -> tuple[list[int], float]:
    """The tokens that are stored behind the first rows of a node, and when they were last used.

    Where there are several ways on, that which was used last.
    """
    data, used_at = b"", node.used_at
    while len(data) < AROUND_TOKENS * TOKEN_BYTES and (ways := list(ways_on(node, rows))):
        node, start = max(ways, key=lambda way: way[0].used_at)
        data += node.key[start * TOKEN_BYTES :]
        used_at = used_at or node.used_at  # a root has no time of its own
        rows = node.tokens
    return np.frombuffer(data, np.int64)[:AROUND_TOKENS].tolist(), used_at
