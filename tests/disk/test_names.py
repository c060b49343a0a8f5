"""Names: what a record stands for, where its file lies, and what is no name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvcache_plugin.disk.names import (
    BLOCK,
    CHECKPOINT,
    KEY_BYTES,
    Name,
    child_key,
    layout_digest,
    may_be_child,
    root_key,
)
from tests.disk.records import ids

keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
layouts = st.binary(min_size=8, max_size=8)
blocks = st.builds(Name, keys, keys, st.integers(1, 999_999), st.just(BLOCK), layouts)
checkpoints = st.builds(Name, keys, keys, st.integers(0, 999_999), st.just(CHECKPOINT), layouts)


@given(blocks | checkpoints)
def test_a_name_comes_back_from_its_file(name: Name) -> None:
    """And its subfolder depends on the parent alone."""
    assert Name.parse(name.filename) == name
    assert name.subfolder == name.filename[:2]


@given(blocks | checkpoints, st.data())
def test_whatever_parses_is_written_in_the_same_way(name: Name, data: st.DataObject) -> None:
    """Strict: there is one spelling of each name, and a changed character is another or none."""
    place = data.draw(st.integers(0, len(name.filename) - 1))
    other = data.draw(st.characters(codec="utf-8"))
    changed = name.filename[:place] + other + name.filename[place + 1 :]
    parsed = Name.parse(changed)
    assert parsed is None or parsed.filename == changed


GOOD = Name(bytes(16), bytes(16), 5, BLOCK, bytes(8)).filename


@pytest.mark.parametrize(
    "filename",
    [
        "",
        ".DS_Store",
        GOOD.upper(),
        GOOD + "\n",
        " " + GOOD,
        GOOD.replace("-5b-", "-05b-"),
        GOOD.replace("-5b-", "-0b-"),
        GOOD.replace("-5b-", "--5b-"),
        GOOD.replace("-5b-", "-٥b-"),
        GOOD.replace("-5b-", "-5d-"),
        GOOD.replace("-5b-", "-5b-00"),
        GOOD.removesuffix("tensors"),
        "../" + GOOD,
    ],
)
def test_what_is_no_name(filename: str) -> None:
    """A block of no tokens, other spellings, other files."""
    assert Name.parse(GOOD)
    assert Name.parse(filename) is None


def test_keys_are_chained_and_kept_apart() -> None:
    """The same tokens elsewhere, in another role or split otherwise have another key."""
    root = root_key(b"one")
    ab = child_key(root, ids("ab"))
    all_keys = [
        root,
        root_key(b"another"),
        root_key(b""),
        ab,
        child_key(root_key(b"another"), ids("ab")),
        child_key(root, ids("abcd")),
        child_key(ab, ids("cd")),
        child_key(ab, ids("ab")),
        child_key(root, b""),
    ]
    assert {len(key) for key in all_keys} == {KEY_BYTES}
    assert len(set(all_keys)) == len(all_keys)
    assert layout_digest("one") != layout_digest("another")
    assert len(layout_digest("")) == 8


@given(blocks | checkpoints, blocks | checkpoints, st.sampled_from([None, BLOCK, CHECKPOINT]))
def test_what_a_name_shows_unparsed(name: Name, other: Name, kind: str | None) -> None:
    """Its parent, its kind and its layout."""
    for one in (name, replace(other, parent=name.parent), replace(other, layout=name.layout)):
        expected = one.parent == name.parent and kind in (None, one.kind)
        assert may_be_child(name.parent, kind)(one.filename) == expected
        expected &= one.layout == name.layout
        assert may_be_child(name.parent, kind, name.layout)(one.filename) == expected
