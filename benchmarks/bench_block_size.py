"""What the length of a block costs and brings: docs/decisions/0001-block-size.md rests on this.

    python -m benchmarks.bench_block_size

At 4 bits: bits an element, the error on real text, what eight chats share, and speed.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx

from mlx_lm_kvcache_plugin.patches.models_cache import PlainTensor, tensors_of

from .report import machine, median_seconds
from .samples import TOPICS, ModelShape, read, topic_ids
from .stores import MODEL, held_by_chats, make_store, relative_error, sequence

SHAPE = ModelShape(layers=8, heads=4, head_dim=64)
SIZES = (64, 128, 256)
TOKENS = 4096


def measure(block_tokens: int, real: list[PlainTensor]) -> tuple[float, ...]:
    """One line of the table."""
    store, cache = make_store(block_tokens, kv_cache_bits=4)
    caches, ids = SHAPE.prompt_cache(TOKENS), sequence(TOKENS)
    insert_seconds = median_seconds(1, store.insert_cache, MODEL, ids, caches)
    fetch_seconds = median_seconds(5, store.fetch_nearest_cache, MODEL, [*ids, 1])
    one, all_ = held_by_chats(make_store(block_tokens, kv_cache_bits=4)[0], SHAPE)
    keys, values = (relative_error(cache, real[side::2], 1024) for side in (0, 1))
    bits = store.nbytes * 16 / (TOKENS * SHAPE.token_bytes)
    return bits, keys, values, all_ / one, insert_seconds, fetch_seconds


def main() -> int:
    """Measure and print."""
    tensors: Any = tensors_of(read(topic_ids(TOPICS[0], 1024)))
    real = [PlainTensor(tensor.array.astype(mx.float16)) for tensor in tensors]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print("block  bits/element  error K  error V  8 chats/1  insert s  fetch s")
    for block_tokens in SIZES:
        bits, keys, values, shared, insert, fetch = measure(block_tokens, real)
        print(
            f"{block_tokens:5}  {bits:12.3f}  {keys:7.4f}  {values:7.4f}  {shared:9.2f}"
            f"  {insert:8.3f}  {fetch:7.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
