"""Packing one block of all layers: what is stacked, what stays raw, and what it all weighs."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin.codecs import tensors as sizes
from mlx_lm_kvcache_plugin.codecs.affine import AffineCodec
from mlx_lm_kvcache_plugin.codecs.base import Array, Codec, CodecOptions
from mlx_lm_kvcache_plugin.codecs.packing import Packer, Payload
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.codecs.rotated import RotatedCodec
from mlx_lm_kvcache_plugin.codecs.tensors import PIECE_ELEMENTS, TensorSpec
from tests.tensors import Rows

TOKENS = 8
"""Tokens of a block."""

MIXED = (
    TensorSpec(2, 192, mx.bfloat16),  # unequal keys and values, as MLA has them
    TensorSpec(2, 128, mx.bfloat16),
    TensorSpec(1, 512, mx.float16),
    TensorSpec(1, 64, mx.float16),
    TensorSpec(2, 80, mx.float32),  # no group size divides it
    TensorSpec(2, 0, mx.float32),  # no values at all
    TensorSpec(4, 128, mx.int32),  # no floating numbers
    TensorSpec(4, 64, mx.float32),
)

STAYS_RAW = (4, 5, 6)
"""Those of `MIXED` that no quantizing codec takes."""


def make_packer(
    specs: Sequence[TensorSpec] = MIXED, bits: int = 8, value_bits: int | None = None
) -> Packer:
    key_codec = RotatedCodec(CodecOptions(bits, 64))
    if value_bits is None:
        return Packer(specs, key_codec, key_codec)
    return Packer(specs, key_codec, RotatedCodec(CodecOptions(value_bits, 64)))


def make_tensors(specs: Sequence[TensorSpec] = MIXED, tokens: int = 3 * TOKENS) -> list[Rows]:
    random = np.random.default_rng(7)
    return [
        Rows(
            mx.array(random.normal(scale=50, size=(spec.heads, tokens, spec.dim))).astype(
                spec.dtype
            )
        )
        for spec in specs
    ]


def arrays_of(payload: Payload) -> Iterator[Array]:
    for parts in payload.groups:
        yield from parts
    yield from payload.exceptions.values()


def content(payload: Payload) -> list[bytes]:
    return [array.tobytes() for array in arrays_of(payload)]


def decode(packer: Packer, payloads: Sequence[Payload], rows: int = TOKENS) -> list[mx.array]:
    found = {
        index: tensor
        for batch in packer.batches(rows)
        for index, tensor in zip(batch, packer.decode(batch, payloads, rows), strict=True)
    }
    return [found[index] for index in range(len(packer.specs))]


def same_bits(one: mx.array, other: mx.array) -> bool:
    return bool(mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)))


def close(one: mx.array, other: mx.array) -> bool:
    """Whether 8 bits could have made one of the other: values here reach about 200."""
    return bool(mx.allclose(one.astype(mx.float32), other.astype(mx.float32), rtol=0.01, atol=2))


def test_each_tensor_has_the_codec_that_takes_it() -> None:
    """Per tensor: a width or dtype that the codec does not take is kept raw, others beside it."""
    packer = make_packer()
    names = [codec.name for codec in packer.codecs]
    assert [index for index, name in enumerate(names) if name == "raw"] == list(STAYS_RAW)
    assert set(names) == {"raw", "rotated"}


def test_mixed_tensors_come_back() -> None:
    """Every tensor in its own shape and dtype and nearly its own numbers; raw ones bit for bit."""
    packer, tensors = make_packer(), make_tensors()
    (payload,) = packer.encode(tensors, 0, TOKENS)
    assert not payload.exceptions
    for index, decoded in enumerate(decode(packer, [payload])):
        wanted = tensors[index].rows(0, TOKENS)
        assert (decoded.shape, decoded.dtype) == (wanted.shape, wanted.dtype)
        assert close(decoded, wanted)
        assert same_bits(decoded, wanted) == (index in STAYS_RAW)


def test_keys_and_values_have_their_own_codecs() -> None:
    """Tensors of even index are keys, those of odd index values."""
    specs = [TensorSpec(2, 64, mx.float32)] * 4
    packer, tensors = make_packer(specs, bits=8, value_bits=2), make_tensors(specs)
    (payload,) = packer.encode(tensors, TOKENS, TOKENS)
    decoded = decode(packer, [payload])
    good = [close(decoded[i], tensors[i].rows(TOKENS, 2 * TOKENS)) for i in range(4)]
    assert good == [True, False, True, False]


@pytest.mark.parametrize("start", [0, TOKENS])
def test_blocks_together_equal_blocks_alone(start: int) -> None:
    """Encoding a run of blocks gives the bytes that each block gives alone."""
    packer, tensors = make_packer(), make_tensors(tokens=4 * TOKENS)
    together = packer.encode(tensors, start, TOKENS, blocks=3)
    assert len(together) == 3
    for block, payload in enumerate(together):
        (alone,) = packer.encode(tensors, start + block * TOKENS, TOKENS)
        assert content(payload) == content(alone)
        assert payload.nbytes == alone.nbytes


def test_encoding_twice_gives_the_same_bytes() -> None:
    """Nothing random, nothing remembered: another packer of the same model agrees as well."""
    tensors = make_tensors()
    first, again = (make_packer().encode(tensors, 0, TOKENS, 2) for _ in range(2))
    assert list(map(content, first)) == list(map(content, again))


def test_only_a_first_block_has_sinks() -> None:
    """The start of the sequence decides, and not the order of the calls."""
    specs = [TensorSpec(2, 64, mx.float32)]
    packer, tensors = make_packer(specs), make_tensors(specs)
    later, first = (packer.encode(tensors, start, TOKENS)[0] for start in (TOKENS, 0))
    assert len(first.groups[0]) == len(later.groups[0]) + 1


@pytest.mark.parametrize("rows", [1, TOKENS, TOKENS + 1, 3 * TOKENS - 1, 3 * TOKENS])
def test_decoding_cuts_every_tensor(rows: int) -> None:
    """As many rows as asked of every tensor, the first ones."""
    packer, tensors = make_packer(), make_tensors()
    payloads = packer.encode(tensors, 0, TOKENS, 3)
    decoded = decode(packer, payloads[: -(-rows // TOKENS)], rows)
    for one, tensor in zip(decoded, tensors, strict=True):
        assert one.shape[1] == rows
        assert close(one, tensor.rows(0, rows))


BAD_NUMBERS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "too large for float16": 1e30}


@pytest.mark.parametrize("bad", BAD_NUMBERS.values(), ids=BAD_NUMBERS)
@pytest.mark.parametrize("codec", [RotatedCodec, AffineCodec])
def test_what_cannot_be_quantized_is_kept_raw_for_once(
    codec: type[RotatedCodec] | type[AffineCodec], bad: float
) -> None:
    """NaN, infinity or overflow: that tensor of that block is raw, and none beside it notices."""
    specs = [TensorSpec(2, 64, mx.bfloat16)] * 4
    made = codec(CodecOptions(8, 64))
    packer, tensors = Packer(specs, made, made), make_tensors(specs)
    clean = packer.encode(tensors, 0, TOKENS, 3)
    tensors[2].array[1, TOKENS + 3, 5] = bad
    payloads = packer.encode(tensors, 0, TOKENS, 3)
    assert [list(payload.exceptions) for payload in payloads] == [[], [2], []]
    assert content(payloads[0]) == content(clean[0])
    assert content(payloads[2]) == content(clean[2])
    for rows in (3 * TOKENS, TOKENS + 4, TOKENS):
        was = decode(packer, clean[: -(-rows // TOKENS)], rows)
        now = decode(packer, payloads[: -(-rows // TOKENS)], rows)
        for index in (0, 1, 3):
            assert same_bits(now[index], was[index])
        assert same_bits(now[2][:, :TOKENS], was[2][:, :TOKENS])
        assert same_bits(now[2][:, TOKENS : 2 * TOKENS], tensors[2].array[:, TOKENS:rows][:, :8])
        assert same_bits(now[2][:, 2 * TOKENS :], was[2][:, 2 * TOKENS :])


def test_a_bad_first_block_is_an_exception_too() -> None:
    """The block with the sinks may be the one that is raw: those after it decode without it."""
    specs = [TensorSpec(2, 64, mx.float32)] * 2
    packer, tensors = make_packer(specs), make_tensors(specs)
    tensors[1].array[0, 0, 0] = mx.inf
    payloads = packer.encode(tensors, 0, TOKENS, 2)
    decoded = decode(packer, payloads, 2 * TOKENS)[1]
    assert same_bits(decoded[:, :TOKENS], tensors[1].rows(0, TOKENS))
    assert close(decoded[:, TOKENS:], tensors[1].rows(TOKENS, 2 * TOKENS))


@pytest.mark.parametrize(
    "codec", [RotatedCodec(CodecOptions(4, 64)), RawCodec()], ids=["rotated", "raw"]
)
def test_nan_in_a_raw_tensor_is_no_exception(codec: Codec) -> None:
    """What is raw anyway, by its width or by the user's choice, keeps its NaN and is kept once."""
    specs = [TensorSpec(2, 80, mx.float32)]
    packer, tensors = Packer(specs, codec, codec), make_tensors(specs)
    tensors[0].array[0, 0, 0] = mx.nan
    (payload,) = packer.encode(tensors, 0, TOKENS)
    assert not payload.exceptions
    assert same_bits(decode(packer, [payload])[0], tensors[0].rows(0, TOKENS))


def test_layers_are_stacked() -> None:
    """Sixty layers take as many buffers as one: a handful, not hundreds for each block."""
    few, many = (
        make_packer([TensorSpec(2, 64, mx.float16)] * 2 * layers).encode(
            make_tensors([TensorSpec(2, 64, mx.float16)] * 2 * layers), 0, TOKENS
        )[0]
        for layers in (1, 60)
    )
    assert len(list(arrays_of(many))) == len(list(arrays_of(few))) == 5
    assert all(array.shape[0] == 120 for array in arrays_of(many))


def test_a_payload_owns_its_memory() -> None:
    """No array looks into MLX's memory, nor into one that is larger than itself."""
    tensors = make_tensors()
    tensors[0].array[0, TOKENS, 0] = mx.nan
    payloads = make_packer().encode(tensors, 0, TOKENS, 2)
    assert payloads[1].exceptions
    for payload in payloads:
        for array in arrays_of(payload):
            assert array.flags.owndata and array.base is None


def test_a_payload_outlives_its_tensors() -> None:
    """Whoever writes into the tensors afterwards writes nothing into the payload."""
    tensors = make_tensors()
    packer = make_packer()
    (payload,) = packer.encode(tensors, 0, TOKENS)
    before = content(payload)
    for tensor in tensors:
        tensor.array[:, :TOKENS] = 0
        mx.eval(tensor.array)
    assert content(payload) == before


@pytest.mark.parametrize(
    ("codec", "spoilt"), [("raw", False), ("rotated", False), ("rotated", True)]
)
def test_nbytes_is_what_the_payload_takes(codec: str, spoilt: bool) -> None:
    """Counted to the byte: the allocator that Python and numpy share says the same.

    But for 64 bytes a payload: the head that the garbage collector puts before it, the number in
    `nbytes`, and the list that this test keeps payloads in.
    """
    made = RawCodec() if codec == "raw" else RotatedCodec(CodecOptions(4, 64))
    packer, tensors = Packer(MIXED, made, made), make_tensors()
    if spoilt:
        tensors[0].array[0, 0, 0] = mx.nan
    # numpy fills its own small caches once, and each thread has memory that it uses again
    warm = [packer.encode(tensors, 0, TOKENS) for _ in range(40)][0]
    assert bool(warm[0].exceptions) == spoilt
    count = 100
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        payloads = [packer.encode(tensors, 0, TOKENS)[0] for _ in range(count)]
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert abs(taken - sum(payload.nbytes for payload in payloads)) <= 64 * count


def test_a_short_tensor_is_charged_for_its_tokens() -> None:
    """A buffer of 256 rows that holds ten tokens costs ten (upstream pads to multiples of 256)."""
    specs = [TensorSpec(2, 64, mx.float16)] * 2
    (payload,) = make_packer(specs).encode(make_tensors(specs, tokens=256), 0, 10)
    full_precision = 2 * 2 * 10 * 64 * 2
    sinks = 2 * 2 * 4 * 64 * 2
    assert payload.nbytes < full_precision + sinks + 1500


def test_four_bits_hold_less() -> None:
    """A block of 128 tokens at 4 bits is well under a third of 16-bit KV, everything counted."""
    specs = [TensorSpec(2, 64, mx.float16)] * 8
    packer, tensors = make_packer(specs, bits=4), make_tensors(specs, tokens=256)
    (payload,) = packer.encode(tensors, 128, 128)
    assert payload.nbytes < 0.3 * sum(tensor.rows(128, 256).nbytes for tensor in tensors)


def test_what_is_decoded_in_one_go_is_of_one_size() -> None:
    """Short tensors go together, long ones alone: what is needed beside the result stays small."""
    packer = Packer([TensorSpec(2, 64, mx.float16)] * 8, *[RawCodec()] * 2)
    assert packer.batches(1) == [list(range(8))]
    assert packer.batches(PIECE_ELEMENTS // (2 * 64) // 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert packer.batches(PIECE_ELEMENTS) == [[index] for index in range(8)]


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is encoded and decoded at once, bytes and numbers are the same."""
    packer, tensors = make_packer(bits=4), make_tensors()
    payloads = packer.encode(tensors, 0, TOKENS, 3)
    decoded = decode(packer, payloads, 3 * TOKENS - 1)
    monkeypatch.setattr(sizes, "PIECE_ELEMENTS", 1)
    assert list(map(content, packer.encode(tensors, 0, TOKENS, 3))) == list(map(content, payloads))
    for one, other in zip(decode(packer, payloads, 3 * TOKENS - 1), decoded, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("magnitude", [1e-3, 1e-4, 1e-6, 0.0])
def test_numbers_too_faint_for_their_scales_stay_raw(magnitude: float) -> None:
    """float16 has no precision left for scales below 2**-14; zeros need none."""
    specs = [TensorSpec(2, 64, mx.float32)] * 2
    faint = Rows(make_tensors(specs)[0].array / 50 * magnitude)
    packer = make_packer(specs, bits=8)
    (payload,) = packer.encode([faint, make_tensors(specs)[1]], TOKENS, TOKENS)
    assert set(payload.exceptions) == ({0} if magnitude else set())
    decoded, _ = decode(packer, [payload])
    assert mx.abs(decoded - faint.rows(TOKENS, 2 * TOKENS)).max() < 1e-6
