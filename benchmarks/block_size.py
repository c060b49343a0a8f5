"""What the length of a block costs and brings: docs/decisions/0001-block-size.md rests on this.

At 4 bits: bits an element, the error on real text, what eight chats share, and speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from mlx_lm_kvcache_plugin.patches.layer_kinds import PlainTensor

from .peers import held_by_chats, ours
from .report import Report, Row, median_seconds
from .samples import SMALL, TOPICS, read_by_smollm2, topic_ids
from .stores import MODEL, make_store, relative_error, sequence, sixteen_bit

SIZES = (64, 128, 256)
TOKENS, REAL_TOKENS = 4096, 1024


def compare(block_tokens: int, tokens: int, real: list[PlainTensor]) -> Iterator[Row]:
    """The figures of one length."""
    store, cache = make_store(block_tokens, kv_cache_bits=4)
    caches, ids = SMALL.prompt_cache(tokens), sequence(tokens)
    insert_seconds = median_seconds(1, store.insert_cache, MODEL, ids, caches)
    fetch_seconds = median_seconds(5, store.fetch_nearest_cache, MODEL, [*ids, 1])
    one, all_ = held_by_chats(ours(4, block_tokens), SMALL)
    keys, values = (relative_error(cache, real[side::2], REAL_TOKENS) for side in (0, 1))
    figures = {
        "bits an element": store.nbytes * 16 / (tokens * SMALL.token_bytes),
        "error of keys": keys,
        "error of values": values,
        "eight chats to one": all_ / one,
        "insert, s": insert_seconds,
        "fetch, s": fetch_seconds,
    }
    for what, value in figures.items():
        yield Row(f"blocks of {block_tokens} tokens, {what}", value)


def measure(arguments: argparse.Namespace) -> Report:
    """All lengths."""
    real = sixteen_bit(read_by_smollm2(topic_ids(TOPICS[0], REAL_TOKENS)), REAL_TOKENS)
    tokens = TOKENS // 4 if arguments.quick else TOKENS
    return Report([row for length in SIZES for row in compare(length, tokens, real)])
