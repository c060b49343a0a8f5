"""Sequences of blocks and tails: each part decoded by what encoded it, and errors kept small."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin.codecs.base import Parts
from mlx_lm_kvcache_plugin.codecs.packing import Packer
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.codecs.registry import BUILT_IN, CodecRegistry
from mlx_lm_kvcache_plugin.codecs.sequence import MOST_ENCODINGS, SequencePacker, SequencePackers
from mlx_lm_kvcache_plugin.codecs.tensors import TensorSpec
from mlx_lm_kvcache_plugin.errors import CodecError
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.store.budget import Budget
from tests.store.caches import fetched_from, row_layers
from tests.tensors import Rows

TOKENS = 8
"""Tokens of a block."""

SPECS = [TensorSpec(2, 64, mx.float32)] * 2


def registry() -> CodecRegistry:
    codecs = CodecRegistry()
    for name, factory in BUILT_IN.items():
        codecs.register(name, factory)
    return codecs


def packers(**options: object) -> SequencePacker:
    return SequencePackers(Settings.resolve(options), registry()).for_specs(SPECS)


def make_tensors(tokens: int = 3 * TOKENS) -> list[Rows]:
    random = np.random.default_rng(7)
    return [Rows(mx.array(random.normal(size=(2, tokens, 64)).astype(np.float32))) for _ in SPECS]


def error(found: mx.array, wanted: mx.array) -> float:
    return (mx.linalg.norm(found - wanted) / mx.linalg.norm(wanted)).item()


def test_tails_are_near_exact_whatever_blocks_are() -> None:
    """8 bits, or raw where blocks are; keys and values may have different bits in blocks only."""
    mixed = packers(kv_cache_bits=4, kv_cache_value_bits=3)
    assert [codec.name for codec in mixed.blocks.codecs] == ["rotated", "rotated"]
    assert [codec.name for codec in mixed.tails.codecs] == ["affine", "affine"]
    assert [codec.name for codec in packers(cache_memory_mb=1).tails.codecs] == ["raw", "raw"]
    tensors = make_tensors()
    (tail,) = mixed.tails.encode(tensors, 0, 5)
    for decoded, tensor in zip(mixed.decode([tail], 5), tensors, strict=True):
        assert error(decoded, tensor.rows(0, 5)) < 0.008


def test_a_sequence_is_decoded_by_what_encoded_each_part() -> None:
    """Blocks, a block that was encoded as tails are, and a tail, up to any row."""
    made, tensors = packers(kv_cache_bits=4), make_tensors(4 * TOKENS)
    (first,) = made.blocks.encode(tensors, 0, TOKENS)
    (second,) = made.tails.encode(tensors, TOKENS, TOKENS)
    (third,) = made.blocks.encode(tensors, 2 * TOKENS, TOKENS)
    (tail,) = made.tails.encode(tensors, 3 * TOKENS, 5)
    for count in range(1, 3 * TOKENS + 6):
        payloads = [first, second, third, tail][: -(-count // TOKENS)]
        for decoded, tensor in zip(made.decode(payloads, count), tensors, strict=True):
            assert decoded.shape == (2, count, 64)
            for start, most in ((0, 0.2), (TOKENS, 0.008), (2 * TOKENS, 0.2), (3 * TOKENS, 0.008)):
                if start < count:
                    stop = min(count, start + TOKENS)
                    assert error(decoded[:, start:stop], tensor.rows(start, stop)) < most


@pytest.mark.parametrize("fault", ["rows", "dtype", "heads", "dim"])
def test_a_codec_that_decodes_something_else_is_found_out(fault: str) -> None:
    """Whatever a stranger's codec gives back, the model is never handed another shape."""

    class Wrong(RawCodec):
        def decode(self, blocks: Sequence[Parts], rows: int, dtype: mx.Dtype) -> mx.array:
            x = super().decode(blocks, rows, dtype)
            if fault == "dtype":
                return x.astype(mx.float16)
            return {"rows": x[:, 1:], "heads": x[:1], "dim": x[:, :, 1:]}[fault]

    wrong, tensors = Packer(SPECS, Wrong(), Wrong()), make_tensors()
    payloads = wrong.encode(tensors, 0, TOKENS)
    with pytest.raises(CodecError, match="decoded"):
        list(SequencePacker(wrong, wrong).decode(payloads, TOKENS))


def test_encodings_are_counted_where_they_leave_a_trace() -> None:
    """By the codec for blocks; a tail only passes on what its rows went through before."""
    made, tensors = packers(kv_cache_bits=4), make_tensors()
    for before in range(4):
        (block,) = made.blocks.encode(tensors, 0, TOKENS, 1, before)
        (tail,) = made.tails.encode(tensors, 0, 5, 1, before)
        assert (block.encodings, block.is_near_exact) == (before + 1, False)
        assert (tail.encodings, tail.is_near_exact) == (before, True)
        assert made.for_block(before) is (made.tails if before >= MOST_ENCODINGS else made.blocks)


@pytest.mark.parametrize("with_tails", [False, True])
@pytest.mark.parametrize(("bits", "most"), [(4, 2.2), (8, 3.0)])
def test_parting_again_and_again_inside_a_block_adds_no_more_errors(
    bits: int, most: float, with_tails: bool
) -> None:
    """A dozen conversations, each leaving the one before it a little later in the same block: what
    the last one gets is hardly worse than what the second one got, and no worse than two encodings.
    """
    block = 128
    budget = Budget(limit_bytes=1 << 30)
    cache = PrefixCache(
        Settings.resolve({"kv_cache_bits": bits}), registry(), budget, block_tokens=block
    )
    random = np.random.default_rng(1)
    exact = mx.array(random.normal(size=(2, 3 * block, 64)).astype(np.float32))
    ids = list(range(3 * block))
    cache.insert("model", ids[: 2 * block], row_layers([Rows(exact)] * 2, 2 * block), "assistant")
    errors = []
    for turn in range(12):
        shared = block + 40 + 5 * turn
        new = [1000 * (turn + 1) + i for i in range(block)]
        fetched = fetched_from(cache, [*ids[:shared], *new], "model")
        assert fetched is not None and fetched.tokens == shared
        rows = fetched.rows[0]
        errors.append(error(rows[:, block : block + 40], exact[:, block : block + 40]))
        ids = [*ids[:shared], *new]
        tensors = [Rows(mx.concatenate([rows, exact[:, :block]], axis=1))] * 2
        if with_tails:
            cache.insert("model", ids[: shared + 3], row_layers(tensors, shared + 3), "user")
        layers = row_layers(tensors, 2 * block + 9)
        cache.insert("model", ids[: layers.tokens], layers, "assistant")
        cache.tree.check()
    assert max(errors) < most * errors[0]
