"""What the length of a block costs and brings: docs/decisions/0001-block-size.md rests on this.

    python -m benchmarks.bench_block_size

At 4 bits: bits an element, the error on real text, what eight chats share, and speed.
"""

from __future__ import annotations

import sys

from mlx_lm_kvcache_plugin.patches.layer_kinds import PlainTensor

from .report import median_seconds, save
from .samples import TOPICS, ModelShape, read, topic_ids
from .stores import MODEL, held_by_chats, make_store, relative_error, sequence, sixteen_bit

SHAPE = ModelShape(layers=8, heads=4, head_dim=64)
SIZES = (64, 128, 256)
TOKENS = 4096


def measure(block_tokens: int, real: list[PlainTensor]) -> dict[str, float]:
    """One line of the table."""
    store, cache = make_store(block_tokens, kv_cache_bits=4)
    caches, ids = SHAPE.prompt_cache(TOKENS), sequence(TOKENS)
    insert_seconds = median_seconds(1, store.insert_cache, MODEL, ids, caches)
    fetch_seconds = median_seconds(5, store.fetch_nearest_cache, MODEL, [*ids, 1])
    one, all_ = held_by_chats(make_store(block_tokens, kv_cache_bits=4)[0], SHAPE)
    keys, values = (relative_error(cache, real[side::2], 1024) for side in (0, 1))
    return {
        "block": block_tokens,
        "bits/element": store.nbytes * 16 / (TOKENS * SHAPE.token_bytes),
        "error K": keys,
        "error V": values,
        "8 chats/1": all_ / one,
        "insert s": insert_seconds,
        "fetch s": fetch_seconds,
    }


def main() -> int:
    """Measure, print and save."""
    real = sixteen_bit(read(topic_ids(TOPICS[0], 1024)), 1024)
    rows = [measure(block_tokens, real) for block_tokens in SIZES]
    print("  ".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:12.4g}" for value in row.values()))
    save("bench_block_size", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
