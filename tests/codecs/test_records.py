"""Payloads as plain data and named arrays: what comes back is the payload, and weighs the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings

from mlx_lm_kvcache_plugin.codecs.affine import AffineCodec
from mlx_lm_kvcache_plugin.codecs.base import Array, Codec, CodecOptions
from mlx_lm_kvcache_plugin.codecs.packing import Packer, Payload
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.codecs.records import payload_from, payload_to, windows_from, windows_to
from mlx_lm_kvcache_plugin.codecs.rotated import RotatedCodec
from mlx_lm_kvcache_plugin.codecs.tensors import TensorSpec
from mlx_lm_kvcache_plugin.codecs.windows import WindowPacker, WindowPayload
from mlx_lm_kvcache_plugin.disk import files
from mlx_lm_kvcache_plugin.disk.names import BLOCK, Name, child_key
from mlx_lm_kvcache_plugin.options import KV_CACHE_BITS
from tests.tensors import Window

CODECS: dict[str, Codec] = {
    "raw": RawCodec(),
    **{f"affine {bits}": AffineCodec(CodecOptions(bits, 32)) for bits in KV_CACHE_BITS},
    **{f"rotated {bits}": RotatedCodec(CodecOptions(bits, 64)) for bits in KV_CACHE_BITS},
}

TOKENS = 8

SPECS = (
    TensorSpec(2, 192, mx.bfloat16),
    TensorSpec(2, 128, mx.bfloat16),
    TensorSpec(1, 64, mx.float16),
    TensorSpec(2, 80, mx.float32),  # no group size divides it
    TensorSpec(2, 0, mx.float32),  # no values at all
    TensorSpec(3, 7, mx.bfloat16),
    TensorSpec(4, 128, mx.int32),  # no floating numbers
    TensorSpec(4, 64, mx.float32),
    TensorSpec(2, 192, mx.bfloat16),  # stacked with the first one
)

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def make_tensors(specs: Sequence[TensorSpec], tokens: int, bad: Sequence[int] = ()) -> list[Window]:
    """Random ones; those of the numbers in `bad` have something that cannot be quantized."""
    random = np.random.default_rng(len(specs) + tokens)
    made = []
    for index, spec in enumerate(specs):
        values = random.normal(scale=50, size=(spec.heads, tokens, spec.dim)).astype(np.float32)
        if index in bad and values.size:
            values[0, tokens // 2, 0] = np.nan
        made.append(Window(mx.array(values).astype(spec.dtype)))
    return made


def through_a_file(
    plain: dict[str, Any], arrays: dict[str, Array]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """What a file of the disk tier makes of it."""
    tokens = np.arange(3, dtype="<i8").tobytes()
    parent = b"p" * 16
    name = Name(parent, child_key(parent, tokens), 3, BLOCK, b"l" * 8)
    record = files.decode(name, files.encode(name, files.Record(tokens, plain, arrays)))
    return record.meta, record.arrays


def assert_same(one: Payload, other: Payload) -> None:
    """Equal in all that a payload has, and in its bytes to the bit."""
    assert (one.tokens, one.is_near_exact, one.encodings, one.nbytes) == (
        *(other.tokens, other.is_near_exact, other.encodings, other.nbytes),
    )
    assert list(map(len, one.groups)) == list(map(len, other.groups))
    assert one.exceptions.keys() == other.exceptions.keys()
    pairs = [
        pair
        for parts in zip(one.groups, other.groups, strict=True)
        for pair in zip(*parts, strict=True)
    ] + [(array, other.exceptions[index]) for index, array in one.exceptions.items()]
    for mine, its in pairs:
        assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
        assert mine.tobytes() == its.tobytes()
        assert its.flags.owndata and its.base is None


def same_bits(one: mx.array, other: mx.array) -> bool:
    return one.dtype == other.dtype and np.array_equal(
        np.array(one.view(mx.uint8)), np.array(other.view(mx.uint8))
    )


def decoded(packer: Packer, payload: Payload) -> list[mx.array]:
    return [packer.decode(batch, [payload], 5) for batch in packer.batches(5)]


@every_codec
@pytest.mark.parametrize("bad", [(), (0, 3, 7)], ids=["sound", "with NaN"])
@pytest.mark.parametrize("start", [0, TOKENS], ids=["first", "later"])
def test_a_payload_comes_back(codec: Codec, start: int, bad: tuple[int, ...]) -> None:
    """Of any codec and any bits, with what was kept raw for once, and it decodes to the same."""
    packer = Packer(SPECS, codec, codec)
    payloads = packer.encode(make_tensors(SPECS, 3 * TOKENS, bad), start, TOKENS, 2, 1)
    has_exceptions = any(payload.exceptions for payload in payloads)
    assert has_exceptions == (bool(bad) and not isinstance(codec, RawCodec))
    for payload in payloads:
        plain, arrays = payload_to(payload)
        assert_same(payload, payload_from(plain, arrays))
        back = payload_from(*through_a_file(plain, arrays))
        assert_same(payload, back)
        pairs = zip(decoded(packer, payload), decoded(packer, back), strict=True)
        assert all(same_bits(one, other) for one, other in pairs)


specs = st.lists(
    st.builds(
        TensorSpec,
        st.integers(1, 3),
        st.sampled_from([0, 1, 7, 32, 64, 80, 128]),
        st.sampled_from([mx.float16, mx.bfloat16, mx.float32, mx.int32]),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    specs=specs,
    name=st.sampled_from(["raw", "affine 4", "rotated 8"]),
    bad=st.sets(st.integers(0, 13)),
    near_exact=st.booleans(),
    encodings=st.integers(0, 2),
)
def test_any_payload_comes_back(
    specs: list[TensorSpec], name: str, bad: set[int], near_exact: bool, encodings: int
) -> None:
    """Of any number of tensors, more than ten groups too, whatever they look like."""
    codec = CODECS[name]
    packer = Packer(specs, codec, codec, near_exact)
    (payload,) = packer.encode(make_tensors(specs, 4, sorted(bad)), 0, 4, encodings=encodings)
    assert_same(payload, payload_from(*through_a_file(*payload_to(payload))))


def test_many_payloads_in_one_file() -> None:
    """Their arrays do not mix, though some names begin like others."""
    packer = Packer(SPECS, CODECS["rotated 4"], CODECS["affine 2"])
    payloads = packer.encode(make_tensors(SPECS, 12 * TOKENS, (0, 7)), 0, TOKENS, 12)
    plains, arrays = [], {"state.0": np.zeros(3), "raw.0": np.zeros(2)}
    for number, payload in enumerate(payloads):
        plain, its = payload_to(payload, f"rows.{number}.")
        assert not arrays.keys() & its.keys()
        plains.append(plain)
        arrays |= its
    for number, payload in enumerate(payloads):
        assert_same(payload, payload_from(plains[number], arrays, f"rows.{number}."))


@pytest.mark.parametrize("codec", ["raw", "affine 8"])
@pytest.mark.parametrize(
    "lengths",
    [(), (5,), (5, 3, 5, 3), (1, 9, 9, 2), tuple(range(1, 13)), (4,) * 12],
    ids=str,
)
def test_windows_come_back(codec: str, lengths: tuple[int, ...]) -> None:
    """Of any lengths, more than ten too: each length is a payload, and they decode to the same."""
    specs = [SPECS[index % len(SPECS)] for index in range(len(lengths))]
    packer = WindowPacker(specs, CODECS[codec])
    windows = [
        make_tensors([spec], length, (0,) if length == 3 else ())[0]
        for spec, length in zip(specs, lengths, strict=True)
    ]
    packed = packer.encode(windows)
    plain, arrays = windows_to(packed)
    for back in (windows_from(plain, arrays), windows_from(*through_a_file(plain, arrays))):
        assert isinstance(back, WindowPayload)
        assert (back.lengths, back.nbytes) == (packed.lengths, packed.nbytes)
        for one, other in zip(packed.payloads, back.payloads, strict=True):
            assert_same(one, other)
        pairs = zip(packer.decode(packed), packer.decode(back), strict=True)
        assert all(same_bits(one, other) for one, other in pairs)


def test_windows_beside_other_arrays() -> None:
    """A checkpoint's file holds states too, and a prompt's file rows: none is taken for another."""
    packer = WindowPacker(SPECS, CODECS["affine 8"])
    packed = packer.encode([make_tensors([spec], 5)[0] for spec in SPECS])
    plain, arrays = windows_to(packed)
    others = {"state.0": np.zeros(3), "rows.0.0.0": np.zeros(2), "rows.0.raw.1": np.zeros(2)}
    assert_same(packed.payloads[0], windows_from(plain, {**others, **arrays}).payloads[0])


def test_plain_data_is_what_json_holds() -> None:
    """A file's head is text."""
    packer = Packer(SPECS, CODECS["rotated 4"], CODECS["raw"])
    (payload,) = packer.encode(make_tensors(SPECS, TOKENS, (0,)), 0, TOKENS)
    windows = WindowPacker(SPECS, CODECS["raw"]).encode(make_tensors(SPECS, 5))
    for plain in (payload_to(payload)[0], windows_to(windows)[0]):
        assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize("missing", ["0.0", "1.0"])
def test_an_array_that_is_missing_is_an_error(missing: str) -> None:
    """And not another payload."""
    packer = Packer(SPECS, CODECS["rotated 4"], CODECS["rotated 4"])
    (payload,) = packer.encode(make_tensors(SPECS, TOKENS), 0, TOKENS)
    plain, arrays = payload_to(payload)
    del arrays[missing]
    with pytest.raises(KeyError):
        payload_from(plain, arrays)
