"""Packing the windows of a model: what each held comes back, however long it was."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin.codecs.affine import AffineCodec
from mlx_lm_kvcache_plugin.codecs.base import Codec, CodecOptions
from mlx_lm_kvcache_plugin.codecs.packing import Packer
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.codecs.registry import BUILT_IN, CodecRegistry
from mlx_lm_kvcache_plugin.codecs.sequence import SequencePackers
from mlx_lm_kvcache_plugin.codecs.tensors import TensorSpec
from mlx_lm_kvcache_plugin.codecs.windows import MOST_LENGTHS, WindowPacker
from mlx_lm_kvcache_plugin.settings import Settings
from tests.tensors import Window

MIXED = (
    TensorSpec(2, 64, mx.bfloat16),
    TensorSpec(2, 128, mx.bfloat16),
    TensorSpec(1, 64, mx.float16),
    TensorSpec(1, 64, mx.float16),
    TensorSpec(2, 80, mx.float32),  # no group size divides it
    TensorSpec(2, 0, mx.float32),  # no values at all
)

STAYS_RAW = (4, 5)
"""Those of `MIXED` that no quantizing codec takes."""

LENGTHS = (12, 12, 7, 7, 1, 1)
"""Of keys and values of one layer alike."""


def eight_bits() -> Codec:
    return AffineCodec(CodecOptions(8, 64))


def make_windows(
    specs: Sequence[TensorSpec] = MIXED, lengths: Sequence[int] = LENGTHS, seed: int = 7
) -> list[Window]:
    random = np.random.default_rng(seed)
    return [
        Window(mx.array(random.normal(size=(spec.heads, length, spec.dim))).astype(spec.dtype))
        for spec, length in zip(specs, lengths, strict=True)
    ]


def same_bits(one: mx.array, window: Window) -> bool:
    return (
        one.shape == window.array.shape
        and one.dtype == window.array.dtype
        and bool(mx.array_equal(one.view(mx.uint8), window.array.view(mx.uint8)))
    )


def error(found: mx.array, window: Window) -> float:
    assert (found.shape, found.dtype) == (window.array.shape, window.array.dtype)
    wanted = window.array.astype(mx.float32)
    return (mx.linalg.norm(found.astype(mx.float32) - wanted) / mx.linalg.norm(wanted)).item()


@pytest.mark.parametrize("lengths", [LENGTHS, (5,) * 6, (1, 1, 2, 2, 3, 3), (3, 2, 3, 1, 2, 1)])
def test_raw_windows_come_back_bit_for_bit(lengths: tuple[int, ...]) -> None:
    """Whatever their lengths, and whichever of them have the same."""
    packer, windows = WindowPacker(MIXED, RawCodec()), make_windows(lengths=lengths)
    payload = packer.encode(windows)
    assert payload.lengths == lengths
    assert [p.tokens for p in payload.payloads] == sorted(set(lengths), reverse=True)
    decoded = packer.decode(payload)
    assert all(same_bits(one, window) for one, window in zip(decoded, windows, strict=True))


def test_eight_bits_are_near_exact() -> None:
    """Each tensor in its own shape and dtype; those that no codec takes are raw."""
    packer, windows = WindowPacker(MIXED, eight_bits()), make_windows()
    for index, decoded in enumerate(packer.decode(packer.encode(windows))):
        if index in STAYS_RAW:
            assert same_bits(decoded, windows[index])
        else:
            assert 0 < error(decoded, windows[index]) < 0.01


def test_windows_that_slide_do_not_drift() -> None:
    """Stored, fetched, moved on by a token, again and again: rows near exact to the last."""
    specs = (TensorSpec(2, 64, mx.float32),) * 2
    packer, exact = WindowPacker(specs, eight_bits()), make_windows(specs, (60, 60))
    held = [window.array[:, :32] for window in exact]
    for end in range(33, 61):
        held = packer.decode(packer.encode([Window(array) for array in held]))
        held = [
            mx.concatenate([array[:, 1:], window.array[:, end - 1 : end]], axis=1)
            for array, window in zip(held, exact, strict=True)
        ]
    for array, window in zip(held, exact, strict=True):
        assert error(array, Window(window.array[:, 28:])) < 0.008


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_cannot_be_quantized_is_kept_raw(bad: float) -> None:
    """That tensor, and none beside it."""
    packer, windows = WindowPacker(MIXED, eight_bits()), make_windows()
    windows[3].array[0, 4, 5] = bad
    decoded = packer.decode(packer.encode(windows))
    assert same_bits(decoded[3], windows[3])
    assert 0 < error(decoded[2], windows[2]) < 0.01


def test_a_model_without_windows_has_none() -> None:
    """Nothing in, nothing out, and hardly a byte."""
    packer = WindowPacker([], eight_bits())
    payload = packer.encode([])
    assert (payload.lengths, payload.payloads) == ((), ())
    assert packer.decode(payload) == []
    assert 0 < payload.nbytes < 200


def test_a_payload_is_the_packers_own_memory() -> None:
    """Whoever writes into a window afterwards, or into what was decoded, writes into nothing."""
    packer, windows = WindowPacker(MIXED, RawCodec()), make_windows()
    wanted = [Window(mx.array(window.array)) for window in windows]
    payload = packer.encode(windows)
    for _ in range(2):
        decoded = packer.decode(payload)
        assert all(map(same_bits, decoded, wanted))
        for array in [*decoded, *(window.array for window in windows)]:
            array[:] = 7
            mx.eval(array)


@pytest.mark.parametrize("codec", [RawCodec(), eight_bits()], ids=["raw", "affine"])
@pytest.mark.parametrize("lengths", [LENGTHS, (5,) * 6])
def test_nbytes_is_what_the_payload_takes(codec: Codec, lengths: tuple[int, ...]) -> None:
    """Counted to the byte: the allocator that Python and numpy share says the same.

    But for 64 bytes an object: its head for the garbage collector, the number in `nbytes`, and the
    list that this test keeps payloads in.
    """
    packer, windows = WindowPacker(MIXED, codec), make_windows(lengths=lengths)
    packer.encode(windows)  # numpy fills its own small caches once
    count = 50
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        payloads = [packer.encode(windows) for _ in range(count)]
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    objects = sum(1 + len(payload.payloads) for payload in payloads)
    assert abs(taken - sum(payload.nbytes for payload in payloads)) <= 64 * objects


def test_eight_bits_hold_less() -> None:
    """A window of 512 tokens in 16 bits takes little more than half of that, all counted."""
    specs = (TensorSpec(4, 64, mx.bfloat16),) * 8
    windows = make_windows(specs, (512,) * 8)
    payload = WindowPacker(specs, eight_bits()).encode(windows)
    full = sum(window.array.nbytes for window in windows)
    assert 0.5 * full < payload.nbytes < 0.57 * full


def test_layers_of_one_length_are_stacked() -> None:
    """Sixty windows take as many buffers as one: a handful, not hundreds."""
    specs = (TensorSpec(2, 64, mx.float16),) * 120
    payload = WindowPacker(specs, eight_bits()).encode(make_windows(specs, (5,) * 120))
    (packed,) = payload.payloads
    assert sum(map(len, packed.groups)) == 3
    assert all(part.shape[0] == 120 for parts in packed.groups for part in parts)


@pytest.mark.parametrize(("options", "name"), [({}, "raw"), ({"kv_cache_bits": 2}, "affine")])
def test_windows_are_near_exact_whatever_blocks_are(options: dict[str, int], name: str) -> None:
    """8 bits, or raw where blocks are: they are encoded anew as they slide."""
    registry = CodecRegistry()
    for each, factory in BUILT_IN.items():
        registry.register(each, factory)
    settings = Settings.resolve({"cache_memory_mb": 1, **options})
    packer = SequencePackers(settings, registry).for_windows(MIXED[:2])
    windows = make_windows(MIXED[:2], (9, 9))
    for decoded, window in zip(packer.decode(packer.encode(windows)), windows, strict=True):
        assert error(decoded, window) < 0.01
        assert same_bits(decoded, window) == (name == "raw")


def test_lengths_that_keep_changing_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk has any number of rows: what is kept for each length is bounded."""
    specs = (TensorSpec(1, 64, mx.float32),) * 2
    packer = WindowPacker(specs, RawCodec())
    made = 0
    make = Packer.__init__

    def counting(self: Packer, *args: object) -> None:
        nonlocal made
        made += 1
        make(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Packer, "__init__", counting)
    for _ in range(3):
        packer.decode(packer.encode(make_windows(specs, (1, 1))))
    assert made == 1
    for length in range(2, 10 * MOST_LENGTHS):
        packer.decode(packer.encode(make_windows(specs, (length, length))))
    assert packer._runs.cache_info().currsize == MOST_LENGTHS
