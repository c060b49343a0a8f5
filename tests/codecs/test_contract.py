"""The contract that every codec keeps; a new built-in codec is held to it without being named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin.codecs.base import Codec, CodecOptions, Parts
from mlx_lm_kvcache_plugin.codecs.registry import BUILT_IN
from mlx_lm_kvcache_plugin.options import KV_CACHE_BITS, KV_CACHE_GROUP_SIZES

DIMS = (0, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512, 576)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)

GROUPS_OF = {
    0: {},
    64: {32: 32, 64: 64, 128: 64},
    80: {},
    96: {32: 32, 64: 32, 128: 32},
    112: {},
    128: {32: 32, 64: 64, 128: 128},
    160: {32: 32, 64: 32, 128: 32},
    192: {32: 32, 64: 64, 128: 64},
    224: {32: 32, 64: 32, 128: 32},
    256: {32: 32, 64: 64, 128: 128},
    512: {32: 32, 64: 64, 128: 128},
    576: {32: 32, 64: 64, 128: 64},
}
"""By width: the group size asked for, and the one that is used; a width without any stays raw."""

HEADS, TOKENS, BLOCKS = 2, 6, 3
ROWS = TOKENS * BLOCKS


@dataclass(frozen=True)
class Variant:
    name: str
    bits: int
    group_size: int

    def make(self) -> Codec:
        return BUILT_IN[self.name](CodecOptions(self.bits, self.group_size))

    def __str__(self) -> str:
        return f"{self.name}-{self.bits}-g{self.group_size}"


def variants() -> Iterator[Variant]:
    for name in BUILT_IN:
        for bits in KV_CACHE_BITS:
            for group_size in KV_CACHE_GROUP_SIZES:
                yield Variant(name, bits, group_size)


VARIANTS = list(variants())

COMBINATIONS = [
    pytest.param(variant, dim, id=f"{variant}-dim{dim}")
    for variant in VARIANTS
    for dim in DIMS
    if variant.make().group_size_for(dim) is not None
]
"""Every codec with every width that it takes."""

every_combination = pytest.mark.parametrize(("variant", "dim"), COMBINATIONS)


def rows_like_keys(dim: int, dtype: mx.Dtype = mx.float32, blocks: int = BLOCKS) -> mx.array:
    """[blocks, heads, tokens, dim]: noise about a mean that differs from channel to channel."""
    random = np.random.default_rng(dim)
    means = random.normal(scale=3, size=(HEADS, 1, dim))
    noise = random.normal(size=(blocks, HEADS, TOKENS, dim))
    return mx.array((means + noise).astype(np.float32)).astype(dtype)


def one_after_the_other(x: mx.array) -> mx.array:
    """[blocks, heads, tokens, dim] as [heads, blocks * tokens, dim]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3])


def encode(codec: Codec, x: mx.array, first: bool = False) -> list[Parts]:
    """The parts of each block, as the packer keeps them."""
    blocks = list(zip(*(np.array(part) for part in codec.encode(x, first=first)), strict=True))
    for parts in blocks:
        for part in parts:
            part.flags.writeable = False
    return blocks


def encode_sequence(codec: Codec, x: mx.array) -> list[Parts]:
    """The parts of blocks that begin a sequence."""
    return encode(codec, x[:1], first=True) + encode(codec, x[1:])


def same_bits(one: mx.array, other: mx.array) -> bool:
    """Whether shapes, dtypes and every bit agree, those of a NaN too."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)))


def agree(one: mx.array, other: mx.array) -> bool:
    """Whether two ways of decoding gave the same.

    Bit for bit, but for the last bits of widths that are multiples of 20 and 28: a product of
    matrices undoes their rotation, and on some devices it sums in an order that hangs on the rows.
    """
    if one.shape[-1] % 5 and one.shape[-1] % 7:
        return same_bits(one, other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    rounding = 2**-7 if one.dtype == mx.bfloat16 else 2**-18
    return bool(mx.allclose(one, other, rtol=rounding, atol=rounding))


def relative_error(decoded: mx.array, wanted: mx.array) -> float:
    """Root of the mean square error, over that of what was wanted."""
    wanted = wanted.astype(mx.float32)
    difference = decoded.astype(mx.float32) - wanted
    return math.sqrt(float(mx.mean(difference**2)) / float(mx.mean(wanted**2)))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_group_sizes(variant: Variant) -> None:
    """The largest one up to the asked that divides the width, else none; raw needs none."""
    codec = variant.make()
    for dim, groups in GROUPS_OF.items():
        wanted = 0 if variant.name == "raw" else groups.get(variant.group_size)
        assert codec.group_size_for(dim) == wanted, dim


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_codec_is_found_under_its_own_name(name: str) -> None:
    """The name in the registry is the one that the codec says it has."""
    codec = BUILT_IN[name](CodecOptions(4, 64))
    assert isinstance(codec, Codec)
    assert codec.name == name


@every_combination
def test_shape_and_dtype_come_back(variant: Variant, dim: int) -> None:
    """Whatever the dtype, what is decoded looks like what was encoded, and nearly is it."""
    codec = variant.make()
    for dtype in DTYPES:
        x = rows_like_keys(dim, dtype)
        decoded = codec.decode(encode_sequence(codec, x), ROWS, dtype)
        assert decoded.shape == (HEADS, ROWS, dim)
        assert decoded.dtype == dtype
        if dim:
            assert relative_error(decoded, one_after_the_other(x)) < 0.5


@every_combination
def test_a_cut_is_the_beginning_of_the_whole(variant: Variant, dim: int) -> None:
    """Decoding any number of rows gives the first rows of the whole."""
    codec = variant.make()
    blocks = encode_sequence(codec, rows_like_keys(dim, mx.bfloat16))
    whole = codec.decode(blocks, ROWS, mx.bfloat16)
    for rows in range(1, ROWS + 1):
        needed = blocks[: -(-rows // TOKENS)]
        assert agree(codec.decode(needed, rows, mx.bfloat16), whole[:, :rows]), rows


@every_combination
def test_many_blocks_decode_as_one_by_one(variant: Variant, dim: int) -> None:
    """A run of blocks, one that begins a sequence among them, is the blocks side by side."""
    codec = variant.make()
    blocks = encode_sequence(codec, rows_like_keys(dim))
    alone = [codec.decode([parts], TOKENS, mx.float32) for parts in blocks]
    assert agree(codec.decode(blocks, ROWS, mx.float32), mx.concatenate(alone, axis=1))
    later = codec.decode(blocks[1:], ROWS - TOKENS, mx.float32)
    assert agree(later, mx.concatenate(alone[1:], axis=1))


@every_combination
def test_blocks_encode_as_one_by_one(variant: Variant, dim: int) -> None:
    """A block's bytes hang on that block alone: neither on those beside it nor on the call."""
    codec = variant.make()
    x = rows_like_keys(dim, mx.float16)
    together = encode(codec, x)
    for block, parts in enumerate(together):
        (alone,) = encode(codec, x[block : block + 1])
        assert [part.tobytes() for part in parts] == [part.tobytes() for part in alone]


@every_combination
def test_parts_are_finite_host_arrays(variant: Variant, dim: int) -> None:
    """Finite rows have finite parts, in dtypes that numpy knows, with an axis of blocks."""
    codec = variant.make()
    for dtype in DTYPES:
        for part in codec.encode(rows_like_keys(dim, dtype), first=False):
            assert part.shape[0] == BLOCKS
            host = np.array(part)
            assert host.dtype.kind in "fiu"
            assert np.isfinite(host).all()


@every_combination
def test_attention_sinks_spoil_no_other_row(variant: Variant, dim: int) -> None:
    """However far out of line a sequence's first four tokens are, the rest comes back the same."""
    codec = variant.make()
    x = rows_like_keys(dim, blocks=2)
    loud = mx.concatenate([x[:1, :, :4] * 300, x[:1, :, 4:]], axis=2)
    quiet = codec.decode(encode(codec, x[:1], True) + encode(codec, x[1:]), 12, mx.float32)
    decoded = codec.decode(encode(codec, loud, True) + encode(codec, x[1:]), 12, mx.float32)
    assert same_bits(decoded[:, 4:], quiet[:, 4:])
    if dim:
        assert relative_error(decoded[:, :4], loud[0, :, :4]) < 0.5


@every_combination
def test_a_first_block_may_be_short(variant: Variant, dim: int) -> None:
    """A first block of no more than the sinks, or of one token besides, is a block too."""
    codec = variant.make()
    for tokens in (1, 3, 4, 5):
        x = rows_like_keys(dim, mx.float16)[:1, :, :tokens]
        decoded = codec.decode(encode(codec, x, True), tokens, mx.float16)
        assert decoded.shape == (HEADS, tokens, dim)
        if dim:
            assert relative_error(decoded, x[0]) < 0.5


@every_combination
def test_a_codec_keeps_nothing_between_calls(variant: Variant, dim: int) -> None:
    """Another object of the same options, which never encoded anything, decodes the same."""
    codec = variant.make()
    blocks = encode_sequence(codec, rows_like_keys(dim))
    decoded = codec.decode(blocks, ROWS, mx.float32)
    assert same_bits(variant.make().decode(blocks, ROWS, mx.float32), decoded)


QUANTIZED = [name for name in BUILT_IN if name != "raw"]


@pytest.mark.parametrize("name", QUANTIZED)
def test_only_the_rows_wanted_are_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are sliced off while they are still packed: a short hit in a long run costs little."""
    codec = BUILT_IN[name](CodecOptions(3, 64))  # by way of MLX's operations also on a CPU
    blocks = encode_sequence(codec, rows_like_keys(128))
    decoded_rows = []
    dequantize = mx.dequantize

    def spy(packed: mx.array, *args: Any, **options: Any) -> mx.array:
        decoded_rows.append(packed.shape[1])
        return dequantize(packed, *args, **options)

    monkeypatch.setattr(mx, "dequantize", spy)
    for rows in (1, TOKENS + 1):
        mx.eval(codec.decode(blocks[: -(-rows // TOKENS)], rows, mx.float16))
    assert decoded_rows == [1, TOKENS + 1]


def gaussian_error(name: str, bits: int, group_size: int = 64, dim: int = 128) -> float:
    x = mx.array(np.random.default_rng(0).normal(size=(2, 2, 64, dim)).astype(np.float32))
    codec = BUILT_IN[name](CodecOptions(bits, group_size))
    return relative_error(codec.decode(encode(codec, x), 128, mx.float32), one_after_the_other(x))


@pytest.mark.parametrize("group_size", KV_CACHE_GROUP_SIZES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_error_falls_with_the_bits(name: str, group_size: int) -> None:
    """A step is the span of a group over 2^bits - 1, and the error a step over sqrt(12).

    Six standard deviations span the largest group, so that sqrt(3) / (2^bits - 1) bounds it.
    """
    errors = {bits: gaussian_error(name, bits, group_size) for bits in KV_CACHE_BITS}
    for bits, error in errors.items():
        assert error < math.sqrt(3) / (2**bits - 1), bits
    for fewer, more in zip(KV_CACHE_BITS, KV_CACHE_BITS[1:], strict=False):
        assert errors[more] < errors[fewer] * 0.6 ** (more - fewer)


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_error_falls_with_the_group_size(name: str) -> None:
    """Fewer elements that share a scale span less."""
    small, middle, large = (gaussian_error(name, 4, size) for size in KV_CACHE_GROUP_SIZES)
    assert small < middle < large


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("bits", KV_CACHE_BITS)
def test_bits_are_what_is_paid_for(name: str, bits: int) -> None:
    """The packed words take exactly the asked bits, the statistics little besides."""
    tokens = 128
    x = mx.random.normal((1, HEADS, tokens, 128), key=mx.random.key(0))
    (parts,) = encode(BUILT_IN[name](CodecOptions(bits, 64)), x)
    per_element = [part.nbytes * 8 / x.size for part in parts]
    assert per_element[0] == bits
    assert sum(per_element) <= bits + 0.5 + 16 / tokens  # scale and bias, and a mean a channel


@pytest.mark.parametrize("name", QUANTIZED)
def test_bfloat16_costs_no_fidelity_at_8_bits(name: str) -> None:
    """Scales are float16 whatever the model's dtype: bfloat16 ones would double the error."""
    x = mx.random.normal((1, HEADS, 64, 128), key=mx.random.key(1)).astype(mx.bfloat16)
    codec = BUILT_IN[name](CodecOptions(8, 64))
    exact = codec.decode(encode(codec, x.astype(mx.float32)), 64, mx.float32)
    decoded = codec.decode(encode(codec, x), 64, mx.float32)
    assert same_bits(decoded, exact)
    assert relative_error(decoded, x[0]) < 0.0065


def error_of(codec: Codec, x: mx.array) -> float:
    decoded = codec.decode(encode(codec, x), x.shape[0] * x.shape[2], mx.float32)
    return relative_error(decoded, one_after_the_other(x))


@pytest.mark.parametrize("bits", KV_CACHE_BITS)
@pytest.mark.parametrize("dim", [64, 96, 128, 160, 192, 224, 256, 512, 576])
def test_rotated_beats_affine_on_what_keys_look_like(bits: int, dim: int) -> None:
    """Channels with means of their own, a few of them much larger: at most half the error."""
    random = np.random.default_rng(dim)
    scales = np.where(np.arange(dim) % 32 == 5, 8.0, 1.0)
    means = random.normal(scale=2, size=dim) * scales
    noise = random.normal(scale=0.3, size=(1, HEADS, 64, dim)) * scales
    x = mx.array((means + noise).astype(np.float32))
    affine, rotated = (BUILT_IN[name](CodecOptions(bits, 32)) for name in ("affine", "rotated"))
    assert error_of(rotated, x) < 0.5 * error_of(affine, x)
