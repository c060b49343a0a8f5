"""One record as the content of a safetensors file, and back: nothing is believed unchecked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from io import BufferedIOBase, BytesIO
from typing import Any, BinaryIO

import numpy as np
from safetensors.numpy import save

from .access import BrokenFile
from .names import FORMAT, Name, child_key

TOKENS = "tokens"
"""The tensor that holds the record's tokens; no array of a record has this name."""

TOKEN_BYTES = 8

_METADATA = "__metadata__"

_DTYPES = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
}
"""What safetensors calls the types that numpy has; a file holds little-endian numbers."""

_LONGEST_HEAD = 1 << 24
"""Bytes. A head of ours has a few thousand; a length beyond this is no length."""

_LONGEST_TOKENS = 1 << 24
"""Bytes. A block of ours has two thousand; before the checksum a name alone says how many."""


@dataclass(frozen=True, slots=True)
class Record:
    """What one file holds.

    Attributes:
        tokens: the tokens that the name counts, as int64, little endian.
        meta: whatever JSON can say.
        arrays: numpy arrays by name; of a record that was read each one owns its memory.
    """

    tokens: bytes
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]


def encode(name: Name, record: Record) -> bytes:
    """The content of the record's file.

    Raises:
        ValueError: an array has a reserved name, or a type that no file can hold.
    """
    arrays = {TOKENS: np.frombuffer(record.tokens, "<i8")}
    for key, array in record.arrays.items():
        if key in (TOKENS, _METADATA):
            raise ValueError(f"no array of a record may be named {key!r}")
        arrays[key] = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        if arrays[key].dtype.str not in _DTYPES.values():
            raise ValueError(f"array {key!r} has the type {array.dtype}, which no file can hold")
    about = _about(name) | {"meta": json.dumps(record.meta, sort_keys=True)}
    return save(arrays, about | {"checksum": _checksum(about, arrays)})


def decode(name: Name, data: bytes) -> Record:
    """The record that a file holds.

    Raises:
        BrokenFile: the content is not whole, or not what the name says.
    """
    return read_record(name, BytesIO(data), len(data))


def read_record(name: Name, file: BufferedIOBase, nbytes: int) -> Record:
    """The record that a file holds, read once and straight into its arrays.

    Args:
        nbytes: the size of the file; no more is asked of memory before the head agrees with it.

    Raises:
        BrokenFile: the content is not whole, or not what the name says.
        OSError, MemoryError: the file cannot be read, or not held.
    """
    try:
        return _read_record(name, file, nbytes)
    except (BrokenFile, OSError, MemoryError):
        raise
    except Exception as error:  # the bytes may be anything, and so may what parsers say of them
        raise BrokenFile(f"not readable as safetensors: {error!r}") from None


def _read_record(name: Name, file: BufferedIOBase, nbytes: int) -> Record:
    length = _head_bytes(file.read(8))
    head = _parse_head(file.read(length))
    about = head.pop(_METADATA)
    if about["format"] != FORMAT:
        raise BrokenFile(f"its format is {about['format']!r}, not {FORMAT!r}")
    checksum = about.pop("checksum")
    arrays = _read_arrays(file, head, nbytes - 8 - length)
    if checksum != _checksum(about, arrays):
        raise BrokenFile("its checksum does not agree with its content")
    for key, value in _about(name).items():
        if about[key] != value:
            raise BrokenFile(f"its {key} is not that of its name")
    tokens = arrays.pop(TOKENS).tobytes()
    _compare(name, tokens)
    meta = json.loads(about["meta"])
    if not isinstance(meta, dict):
        raise BrokenFile("its metadata is no object")
    return Record(tokens, meta, arrays)


def read_tokens(name: Name, file: BinaryIO) -> bytes:
    """The tokens of a record, from its file's head; they agree with the name's key.

    Raises:
        BrokenFile: the head is not readable, or the tokens are not those of the name.
        OSError: the file cannot be read.
    """
    try:
        length = _head_bytes(file.read(8))
        begin, end = _parse_head(file.read(length))[TOKENS]["data_offsets"]
        if end - begin == TOKEN_BYTES * name.tokens <= _LONGEST_TOKENS:
            file.seek(8 + length + begin)
            tokens = file.read(end - begin)
        else:
            tokens = b""
    except (BrokenFile, OSError):
        raise
    except Exception as error:
        raise BrokenFile(f"its head is not readable: {error!r}") from None
    _compare(name, tokens)
    return tokens


def _head_bytes(data: bytes) -> int:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > _LONGEST_HEAD:
        raise BrokenFile("it has no head")
    return length


def _parse_head(text: bytes) -> dict[str, Any]:
    head = json.loads(text)
    if not isinstance(head, dict):
        raise BrokenFile("its head is no object")
    return head


def _read_arrays(
    file: BufferedIOBase, head: Mapping[str, Any], nbytes: int
) -> dict[str, np.ndarray]:
    """All tensors, from where the head ends; nothing is read unless they fill all that is left."""
    places = sorted((*_place(tensor), key) for key, tensor in head.items())
    reached = 0
    for begin, end, _ in places:
        if begin != reached:
            raise BrokenFile("its tensors do not lie one behind the other")
        reached = end
    if reached != nbytes:
        raise BrokenFile(f"{nbytes:,} bytes follow its head, which tells of {reached:,}")
    return {key: _read_array(file, head[key]) for _, _, key in places}


def _place(tensor: Mapping[str, Any]) -> tuple[int, int]:
    """Where a tensor begins and ends, as its type and shape say too."""
    (begin, end), shape = tensor["data_offsets"], tensor["shape"]
    if any(type(number) is not int or number < 0 for number in (begin, end, *shape)):
        raise BrokenFile("its head has numbers that are none")
    if end - begin != math.prod(shape) * np.dtype(_DTYPES[tensor["dtype"]]).itemsize:
        raise BrokenFile("its head has a tensor that does not fit its place")
    return begin, end


def _read_array(file: BufferedIOBase, tensor: Mapping[str, Any]) -> np.ndarray:
    array = np.empty(tensor["shape"], _DTYPES[tensor["dtype"]])
    if file.readinto(_bytes_of(array)) != array.nbytes:
        raise BrokenFile("it became shorter while it was read")
    return array


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _compare(name: Name, tokens: bytes) -> None:
    if len(tokens) != TOKEN_BYTES * name.tokens:
        raise BrokenFile(f"it does not hold the {name.tokens} tokens of its name")
    if child_key(name.parent, tokens) != name.own:
        raise BrokenFile("its tokens do not have the key of its name")


def _about(name: Name) -> dict[str, str]:
    """What a file says of itself beside its tokens: under another name it is not believed."""
    return {
        "format": FORMAT,
        "parent": name.parent.hex(),
        "kind": name.kind,
        "layout": name.layout.hex(),
    }


def _checksum(about: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> str:
    """BLAKE2b over all else that a file says; every part is preceded by its length."""
    digest = blake2b(digest_size=32)

    def feed(part: bytes | memoryview) -> None:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    feed(json.dumps(about, sort_keys=True).encode())
    for key in sorted(arrays):
        array = arrays[key]
        feed(json.dumps([key, array.dtype.str, array.shape]).encode())
        feed(_bytes_of(array))
    return digest.hexdigest()
