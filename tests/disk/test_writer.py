"""Writing: what is written, by which rights, and what is held meanwhile."""

from __future__ import annotations

import gc
import os
import stat
import weakref
from pathlib import Path

import numpy as np
import pytest

from mlx_lm_kvcache_plugin.disk.files import Record
from mlx_lm_kvcache_plugin.disk.tier import Offer
from tests.disk.records import (
    HOME,
    LAYOUT,
    ids,
    make_record,
    names_of,
    offers_of,
    open_tier,
    path_of,
    put,
    same,
    stored,
)


def test_nobody_else_may_look(tmp_path: Path) -> None:
    """Folders 0700, files 0600, whatever the umask allows; folders on the way are the user's."""
    before = os.umask(0)
    try:
        with open_tier(tmp_path / "cache") as tier:
            put(tier, "abc!")
            path_of(tmp_path / "cache", names_of("ab")[0]).write_bytes(b"broken")
            tier.read(HOME, names_of("ab")[0])
    finally:
        os.umask(before)
    paths = [tmp_path / "cache", *tmp_path.joinpath("cache").rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in paths}
    assert modes == {(True, 0o700), (False, 0o600)}
    assert len(paths) > 8


def test_what_is_gone_by_then_is_left_out(tmp_path: Path) -> None:
    """And what hangs below it, since it could not be found; a sibling is written."""
    with open_tier(tmp_path) as tier:
        offers = offers_of("abcdef!")
        offers[1] = Offer(offers[1].name, lambda: None)
        tier.offer(HOME, LAYOUT, [*offers, *offers_of("xyz")])
        assert tier.flush(60)
        assert stored(tier, "abcdef!") == "ab...."
        assert stored(tier, "xyz") == "xyz"
        assert tier.counters.errors == 0


def test_a_checkpoint_whose_tail_is_gone_is_left_out(tmp_path: Path) -> None:
    """It could not be used; one that has no tail stands alone."""
    with open_tier(tmp_path) as tier:
        offers = offers_of("abc!")
        tier.offer(HOME, LAYOUT, [offers[0], Offer(offers[1].name, lambda: None), offers[2]])
        assert tier.flush(60)
        assert [tier.has(HOME, name) for name in names_of("abc!")] == [True, False, False]
        tier.offer(HOME, LAYOUT, [offers[0], offers_of("abc!")[2]])
        assert tier.flush(60)
        assert [tier.has(HOME, name) for name in names_of("abc!")] == [True, False, True]


def test_a_record_that_cannot_be_made_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else's mistake: one line, and the next path is written without a pause."""
    with open_tier(tmp_path) as tier:
        (name,) = names_of("ab")
        bad = Record(ids("ab"), {}, {"words": np.array(["text"])})
        for make in (lambda: bad, lambda: bad, lambda: 1 // 0):
            tier.offer(HOME, LAYOUT, [Offer(name, make)])
        put(tier, "cd")
        assert (stored(tier, "ab"), stored(tier, "cd")) == ("..", "cd")
        assert tier.counters.errors == 3
        assert len(caplog.records) == 2


def test_nothing_is_made_that_is_there_already(tmp_path: Path) -> None:
    """Not even asked for."""
    with open_tier(tmp_path) as tier:
        put(tier, "abcd!")
        asked = []
        offers = [Offer(offer.name, lambda: asked.append(1)) for offer in offers_of("abcd!")]
        tier.offer(HOME, LAYOUT, offers)
        assert tier.flush(60)
        assert (asked, tier.counters.files_written) == ([], 3)


def test_a_record_is_not_held_longer_than_its_write(tmp_path: Path) -> None:
    """While the next one is made the one before is gone already; so are its maker's things."""
    with open_tier(tmp_path) as tier:
        alive: list[weakref.ref[np.ndarray]] = []
        counted: list[int] = []

        def make(letters: str) -> Record:
            gc.collect()
            counted.append(sum(ref() is not None for ref in alive))
            record = make_record(letters)
            alive.extend(weakref.ref(array) for array in record.arrays.values())
            return record

        names = names_of("abcdef")
        parts = ("ab", "cd", "ef")
        offers = [Offer(n, lambda p=p: make(p)) for n, p in zip(names, parts, strict=True)]
        tier.offer(HOME, LAYOUT, offers)
        assert tier.flush(60)
        gc.collect()
        assert counted == [0, 0, 0]
        assert [ref() for ref in alive if ref() is not None] == []


def test_something_else_in_a_place_is_moved_before_writing(tmp_path: Path) -> None:
    """A folder where a file should be would make the write fail for ever."""
    with open_tier(tmp_path) as tier:
        put(tier, "ab")
        path = path_of(tmp_path, names_of("ab")[0])
        path.unlink()
        path.mkdir()
        put(tier, "ab")
        assert same(tier.read(HOME, names_of("ab")[0]), make_record("ab"))
        assert (tier.counters.quarantined, tier.counters.errors) == (1, 0)


def test_texts_that_were_deleted_are_written_again(tmp_path: Path) -> None:
    """With the next path of their namespace, even if its records are all there."""
    with open_tier(tmp_path) as tier:
        put(tier, "ab")
        for path in tmp_path.joinpath(HOME.namespace.hex()).glob("*.json"):
            path.unlink()
        assert tier.layouts(HOME) == {}
        put(tier, "ab")
        assert list(tier.layouts(HOME).values()) == [LAYOUT]
        assert tmp_path.joinpath(HOME.namespace.hex(), "about.json").exists()
