"""The worked timeline of docs/architecture.md: two chats sharing a system prompt, step by step."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_lm_kvcache_plugin.plugins import Plugins
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.store.blocks import Block
from mlx_lm_kvcache_plugin.store.budget import Budget
from tests.store.caches import fetched_from, row_layers
from tests.tensors import Rows

MODEL = ("model", None, None)

SYSTEM = range(0, 300)
CHAT_A = [*SYSTEM, *range(1000, 1100)]
CHAT_B = [*SYSTEM, *range(2000, 2120)]


def rows_of(tokens: list[int]) -> Rows:
    """One layer whose rows are a function of their tokens, so that sharing them is right."""
    values = mx.array(np.array(tokens, np.float32) / 1000)[None, :, None]
    return Rows(mx.broadcast_to(values, (2, len(tokens), 64)).astype(mx.float16))


def insert(cache: PrefixCache, tokens: list[int]) -> None:
    layers = row_layers([rows_of(tokens), rows_of(tokens)], len(tokens))
    cache.insert(MODEL, tokens, layers, "assistant")
    cache.tree.check()


def spans(cache: PrefixCache) -> list[tuple[int, int]]:
    """First and last position of every node, from the least to the most recently used."""
    return [(start_of(block), start_of(block) + block.tokens - 1) for block in cache.tree]


def start_of(block: Block) -> int:
    parent, start = block.parent, 0
    while parent is not None:
        start += parent.tokens
        parent = parent.parent
    return start


def test_two_chats_share_their_system_prompt_as_the_document_tells() -> None:
    """Blocks, tails, matches and the order of eviction are those of the table."""
    budget = Budget(limit_bytes=1 << 30)
    cache = PrefixCache(Settings.resolve({"kv_cache_bits": 4}), Plugins({}).codecs(), budget)

    assert fetched_from(cache, CHAT_A[:340], MODEL) is None
    insert(cache, CHAT_A[:300])
    assert spans(cache) == [(256, 299), (128, 255), (0, 127)]
    insert(cache, CHAT_A[:340])
    assert spans(cache) == [(256, 339), (128, 255), (0, 127)]
    insert(cache, CHAT_A)
    assert spans(cache) == [(384, 399), (256, 383), (128, 255), (0, 127)]

    fetched = fetched_from(cache, CHAT_B[:360], MODEL)
    assert fetched is not None and fetched.tokens == 300
    insert(cache, CHAT_B)
    assert spans(cache)[2:] == [(384, 419), (256, 383), (128, 255), (0, 127)]

    fetched = fetched_from(cache, [*CHAT_A, 5, 6, 7], MODEL)
    assert fetched is not None and fetched.tokens == 400
    chat_b = [(384, 419), (256, 383)]
    chat_a = [(384, 399), (256, 383)]
    assert spans(cache) == [*chat_b, *chat_a, (128, 255), (0, 127)]

    cache.trim_to(n_bytes=cache.tree.used_bytes - 1)
    assert spans(cache) == [chat_b[1], *chat_a, (128, 255), (0, 127)]
    cache.trim_to(n_bytes=cache.tree.used_bytes - 1)
    assert spans(cache) == [*chat_a, (128, 255), (0, 127)]
