"""The content of a record's file: any tool opens it, and every change to it is found."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from safetensors import safe_open
from safetensors.numpy import load, save

from mlx_lm_kvcache_plugin.disk.access import BrokenFile
from mlx_lm_kvcache_plugin.disk.files import Record, decode, encode, read_record, read_tokens
from mlx_lm_kvcache_plugin.disk.names import CHECKPOINT, Name
from tests.disk.records import ids, make_record, names_of, same

TYPES = "bool u1 i1 u2 i2 f2 u4 i4 f4 u8 i8 f8 c8 >f4 >i8".split()

arrays = st.sampled_from(TYPES).flatmap(
    lambda kind: arrays_of.arrays(np.dtype(kind), arrays_of.array_shapes(min_dims=0, min_side=0))
)
keys = st.text(max_size=12).filter(lambda key: key not in ("tokens", "__metadata__"))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def name_of(letters: str) -> Name:
    return names_of(letters)[-1]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(keys, arrays, max_size=5),
    st.dictionaries(st.text(max_size=9), json_values, max_size=4),
)
def test_what_comes_out_is_what_went_in(
    content: dict[str, np.ndarray], meta: dict[str, object]
) -> None:
    """Every type and shape, none and scalars too; and each array owns its memory."""
    name = name_of("ab")
    record = decode(name, encode(name, Record(ids("ab"), meta, content)))
    little = {k: np.asarray(v, v.dtype.newbyteorder("<")) for k, v in content.items()}
    assert same(record, Record(ids("ab"), meta, little))
    assert all(a.flags.owndata and a.base is None for a in record.arrays.values())


def test_an_array_that_is_no_plain_block_of_memory() -> None:
    """Transposed, cut and broadcast ones are written as what they show."""
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = {"turned": whole.T, "cut": whole[1:, ::2], "broad": np.broadcast_to(whole[0], (3, 6))}
    name = name_of("ab")
    record = decode(name, encode(name, Record(ids("ab"), {}, views)))
    assert all(np.array_equal(record.arrays[key], view) for key, view in views.items())


@pytest.mark.parametrize("letters", ["ab", "abc", "ab!", "abc!"])
def test_any_tool_opens_it(tmp_path: Path, letters: str) -> None:
    """It is a safetensors file: the tokens, the arrays by name, and what it says of itself."""
    name = name_of(letters)
    tokens = ids("ab"[: name.tokens] if len(letters.strip("!")) == 2 else "c")
    record = replace(make_record("x"), tokens=tokens)
    path = tmp_path / name.filename
    path.write_bytes(encode(name, record))
    with safe_open(path, "np") as file:
        assert set(file.keys()) == {"tokens", *record.arrays}
        assert file.get_tensor("tokens").tobytes() == tokens
        assert file.metadata()["format"] == "mlx_lm_kvcache_plugin/1"
        assert file.metadata()["parent"] == name.parent.hex()
        assert json.loads(file.metadata()["meta"]) == record.meta
    with path.open("rb") as opened:
        assert read_tokens(name, opened) == tokens


@pytest.mark.parametrize(
    ("key", "array"),
    [
        ("tokens", np.zeros(1)),
        ("__metadata__", np.zeros(1)),
        ("words", np.zeros(1, np.complex128)),
        ("words", np.array(["text"])),
        ("words", np.array([None])),
    ],
)
def test_what_no_file_can_hold_is_refused(key: str, array: np.ndarray) -> None:
    """Before anything is written."""
    with pytest.raises(ValueError, match="array"):
        encode(name_of("ab"), Record(ids("ab"), {}, {key: array}))


DATA = encode(name_of("abcd"), make_record("cd", 40))


def test_every_flipped_bit_is_found() -> None:
    """Wherever it is: in the head, in what the file says of itself, in a number."""
    for bit in range(8 * len(DATA)):
        data = bytearray(DATA)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BrokenFile):
            decode(name_of("abcd"), bytes(data))


@pytest.mark.parametrize("length", [*range(0, 20), len(DATA) // 2, len(DATA) - 1])
def test_every_missing_end_is_found(length: int) -> None:
    """Down to the empty file."""
    with pytest.raises(BrokenFile):
        decode(name_of("abcd"), DATA[:length])


def test_more_than_there_should_be_is_found() -> None:
    """A byte behind the last tensor belongs to nothing."""
    with pytest.raises(BrokenFile):
        decode(name_of("abcd"), DATA + b"\0")


def lie(**changes: object) -> bytes:
    """A whole and sound safetensors file in which one thing is changed."""
    head = json.loads(DATA[8 : 8 + int.from_bytes(DATA[:8], "little")])
    tensors, about = load(DATA), head["__metadata__"]
    for key, value in changes.items():
        if isinstance(value, np.ndarray):
            tensors[key] = value
        elif value is None:
            about.pop(key, None)
            tensors.pop(key, None)
        else:
            about[key] = value
    return save(tensors, about)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": "mlx_lm_kvcache_plugin/2"}, "its format is"),
        ({"format": None}, "not readable"),
        ({"checksum": None}, "not readable"),
        ({"meta": "{}"}, "its checksum"),
        ({"meta": None}, "its checksum"),
        ({"kind": "c"}, "its checksum"),
        ({"more": "words"}, "its checksum"),
        ({"parent": "00" * 16}, "its checksum"),
        ({"tokens": np.arange(2)}, "its checksum"),
        ({"tokens": None}, "its checksum"),
        ({"words": np.zeros(40, np.uint8)}, "its checksum"),
        ({"scales": None}, "its checksum"),
        ({"added": np.zeros(3)}, "its checksum"),
        ({"scalar": np.array([7], np.int32)}, "its checksum"),
        ({"none": np.zeros((0, 4), np.int32)}, "its checksum"),
    ],
)
def test_a_sound_file_that_was_tampered_with(changes: dict[str, object], why: str) -> None:
    """The checksum covers names, types, shapes, numbers, tokens and metadata."""
    assert same(decode(name_of("abcd"), lie()), make_record("cd", 40))
    with pytest.raises(BrokenFile, match=why):
        decode(name_of("abcd"), lie(**changes))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"parent": bytes(16)}, "its parent"),
        ({"kind": CHECKPOINT}, "its kind"),
        ({"layout": bytes(8)}, "its layout"),
        ({"own": bytes(16)}, "its tokens do not have the key"),
        ({"tokens": 1}, "does not hold the 1 tokens"),
        ({"tokens": 3}, "does not hold the 3 tokens"),
    ],
)
def test_a_name_that_lies(wrong: dict[str, object], why: str) -> None:
    """A whole file under another name is not believed; the head alone shows that tokens differ."""
    name = replace(name_of("abcd"), **wrong)
    with pytest.raises(BrokenFile, match=why):
        decode(name, DATA)
    if "tokens" in why:
        with pytest.raises(BrokenFile, match="tokens"):
            read_tokens(name, io.BytesIO(DATA))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_foreign_bytes_are_no_error(data: bytes) -> None:
    """Whatever they are: one kind of exception."""
    framed = len(data).to_bytes(8, "little") + data
    for content in (data, framed):
        with pytest.raises(BrokenFile):
            decode(name_of("ab"), content)
        with pytest.raises(BrokenFile):
            read_tokens(name_of("ab"), io.BytesIO(content))


@pytest.mark.parametrize(
    "head",
    [
        '{"tokens": 1}',
        '{"tokens": {"data_offsets": [0, "16"]}}',
        '{"tokens": {"data_offsets": [-999, -983]}}',
        '{"tokens": {"data_offsets": [9999, 10015]}}',
        '{"tokens": {"data_offsets": [0, 1e99]}}',
        "[" * 100_000,
        "[]",
        "5",
    ],
)
def test_a_head_of_nonsense(head: str) -> None:
    """JSON, but nothing that describes tensors; also nested too deep for the parser."""
    content = len(head).to_bytes(8, "little") + head.encode()
    with pytest.raises(BrokenFile):
        decode(name_of("ab"), content)
    with pytest.raises((BrokenFile, OSError)):
        read_tokens(name_of("ab"), io.BytesIO(content))


def head_of(**tensors: dict[str, object]) -> bytes:
    """A head that says so of tensors, and the content of a whole file behind it."""
    length = int.from_bytes(DATA[:8], "little")
    head = json.loads(DATA[8 : 8 + length])
    for key, changes in tensors.items():
        head[key] |= changes
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + DATA[8 + length :]


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [41]},
        {"shape": [-40]},
        {"shape": [40.0]},
        {"shape": [True, 40]},
        {"shape": "40"},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [0, 1 << 70]},
        {"dtype": "F4"},
        {"data_offsets": [0, 1 << 60]},
        {"data_offsets": [-40, 0]},
        {"data_offsets": [0, 40]},
        {"data_offsets": [40, 0]},
        {"data_offsets": [0, 20, 40]},
        {"data_offsets": None},
    ],
)
def test_a_head_that_does_not_fit_its_content(changes: dict[str, object]) -> None:
    """Nothing is asked of memory for what is not there; tensors do not overlap."""
    assert same(decode(name_of("abcd"), head_of()), make_record("cd", 40))
    with pytest.raises(BrokenFile):
        decode(name_of("abcd"), head_of(words=changes))


def test_a_file_that_becomes_shorter_while_it_is_read() -> None:
    """Its size was asked before."""
    with pytest.raises(BrokenFile, match="became shorter"):
        read_record(name_of("abcd"), io.BytesIO(DATA[:-1]), len(DATA))


def test_a_name_that_asks_for_too_much_memory() -> None:
    """Of a file whose head agrees with it, as one with holes may."""
    name = replace(name_of("ab"), tokens=999_999_999)
    nbytes = 8 * name.tokens
    head = json.dumps({"tokens": {"data_offsets": [0, nbytes]}}).encode()
    with pytest.raises(BrokenFile, match="tokens of its name"):
        read_tokens(name, io.BytesIO(len(head).to_bytes(8, "little") + head))
