"""Arrays by content: each is read whole when it is first seen, and in samples from then on."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import mlx.core as mx
import numpy as np

DIGEST_BYTES = 32

SAMPLES = 256
"""Elements of an array that are looked at again at each call, about. All of them would cost as much
as a token."""

WHOLE = 1024
"""An array of no more elements than this is looked at whole, each time."""

GOLDEN = 0.6180339887
"""Steps by this share of a row fall on columns that lie evenly, however many they are."""

GOLDEN_WORD = 0x9E3779B1
"""The share of 2 ** 32 and odd, so that it can be undone."""

CHUNK_BYTES = 1 << 24
"""Of an array that are read at a time: reading takes as much memory, and a little."""

UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
NUMPY_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

READS_IN_PLACE = mx.metal.is_available() or mx.default_device() == mx.Device(mx.cpu)
"""Whether the CPU reads arrays where they are. With CUDA it would move them there."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What was found when an array was read whole.

    Attributes:
        array: which; another one may have its id by now.
        digest: of all of it.
        sample: what it was taken for, to tell whether it changed in place.
    """

    array: weakref.ref[mx.array]
    shape: tuple[int, ...]
    dtype: mx.Dtype
    digest: bytes
    sample: bytes


_reads: dict[int, _Read] = {}
"""By the id of the array, as long as it lives."""


def digests(arrays: Sequence[mx.array]) -> Iterator[bytes]:
    """A digest of each array's shape, dtype and elements."""
    return map(_digest, arrays, _samples(arrays))


def _digest(array: mx.array, sample: bytes) -> bytes:
    key = id(array)
    known = _reads.get(key)
    if (
        known is not None
        and known.array() is array
        and known.sample == sample
        and known.shape == array.shape
        and known.dtype == array.dtype
    ):
        return known.digest
    digest = _read_whole(array)
    reference = weakref.ref(array, functools.partial(_forget, key))
    _reads[key] = _Read(reference, array.shape, array.dtype, digest, sample)
    return digest


def _forget(key: int, reference: weakref.ref[mx.array]) -> None:
    known = _reads.get(key)
    if known is not None and known.array is reference:
        _reads.pop(key, None)


# All of an array


def _read_whole(array: mx.array) -> bytes:
    """A digest that any change of one element changes, and with all but certainty any other change.

    It is one of a sum for each row, which the device takes at the speed of its memory, and nothing
    else leaves it. All is in integers that wrap around: the same on any device, in any order.
    """
    digest = hashlib.blake2b(
        repr((array.shape, str(array.dtype))).encode(), digest_size=DIGEST_BYTES
    )
    if array.dtype == mx.float64:  # no GPU takes it
        digest.update(np.array(array).tobytes())
    elif array.size:
        for sums in _sums(array):
            digest.update(np.array(sums).tobytes())
    return digest.digest()


def _sums(array: mx.array) -> Iterator[mx.array]:
    is_matrix = array.ndim > 1 and array.size > WHOLE
    if not is_matrix:
        array = array.reshape(-1, 1)  # each row of which is its own sum
    rows = max(1, CHUNK_BYTES * array.shape[0] // array.nbytes)
    for start in range(0, array.shape[0], rows):
        chunk = array[start : start + rows]
        yield _sum_rows(chunk) if is_matrix else chunk.view(UNSIGNED[array.itemsize]).sum(-1)


def _sum_rows(array: mx.array) -> mx.array:
    """Each word by a factor of its column, so that not even a swap leaves the sums as they were."""
    row_bytes = array.shape[-1] * array.itemsize
    words = array.view(UNSIGNED[gcd(row_bytes, 4)]).astype(mx.uint32)
    words = words * mx.array(GOLDEN_WORD, dtype=mx.uint32)  # bits go up
    words = words ^ (words >> 22)  # and down: signs alone would be lost where sums wrap around
    return (words * _factors(words.shape[-1])).sum(-1)


def _factors(columns: int) -> mx.array:
    return _factors_for(1 << (columns - 1).bit_length())[:columns]


@functools.cache
def _factors_for(columns: int) -> mx.array:
    """Odd, so that no change of a word is lost; without order (the last steps of MurmurHash3)."""
    factors = np.arange(1, columns + 1, dtype=np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        factors ^= factors >> np.uint32(shift)
        factors *= np.uint32(factor)
    found = mx.array(factors | np.uint32(1))
    mx.eval(found)
    return found


# Samples


def _samples(arrays: Sequence[mx.array]) -> Iterator[bytes]:
    """Elements from all over each array."""
    mx.eval(arrays)
    if READS_IN_PLACE:
        return map(_sample_in_place, arrays)
    parts = list(map(_part, arrays))
    mx.eval(parts)
    return (_view(part).tobytes() for part in parts)


def _sample_in_place(array: mx.array) -> bytes:
    size = array.size
    if not size:
        return b""
    if not _view(array).c_contiguous:
        return _view(_part(array)).tobytes()
    flat = np.frombuffer(array, NUMPY_UNSIGNED[array.itemsize])  # type: ignore[call-overload]
    step = 1 if size <= WHOLE else _step(size, array.shape[-1])
    return bytes(flat[::step].tobytes())


def _part(array: mx.array) -> mx.array:
    """A grid of elements, as an array of its own: no more than them is copied."""
    if array.size > WHOLE:
        each = round(SAMPLES ** (1 / array.ndim))
        array = array[tuple(slice(None, None, max(1, length // each)) for length in array.shape)]
    return mx.contiguous(array)


def _view(array: Any) -> memoryview:
    return memoryview(array)


@functools.cache
def _step(size: int, columns: int) -> int:
    """A step that comes by all columns, and by rows that lie evenly."""
    step = max(1, size // SAMPLES)
    if step > columns:
        step += round(GOLDEN * columns) - step % columns
    while gcd(step, columns) > 1:
        step += 1
    return step
