"""What gives way first: the least recently used, children before parents, tails before blocks."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvcache_plugin.disk.contents import Found, Role
from mlx_lm_kvcache_plugin.disk.folder import Folder, Home
from mlx_lm_kvcache_plugin.disk.limit import eviction_order
from mlx_lm_kvcache_plugin.disk.names import BLOCK, CHECKPOINT, layout_digest
from mlx_lm_kvcache_plugin.disk.tier import Offer
from tests.disk.records import (
    HOME,
    age,
    make_record,
    names_of,
    open_tier,
    path_of,
    put,
    stored,
    used,
)

KIB = 1 << 10


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    """A read and an offer are uses; children go before their parents, whatever their times."""
    with open_tier(tmp_path, 100 * KIB) as tier:
        for number, letters in enumerate(["ab", "cd", "ef", "ghij"]):
            put(tier, letters, 16 * KIB)
            age(tmp_path, names_of(letters), 1000 - 100 * number)
        age(tmp_path, names_of("ghij")[:1], 5000)
        put(tier, "ab", 16 * KIB)
        assert tier.read(HOME, names_of("cd")[0])
        put(tier, "kl", 20 * KIB)
        everything = ["ab", "cd", "ef", "ghij", "kl"]
        assert [stored(tier, each) for each in everything] == ["ab", "cd", "..", "ghij", "kl"]
        put(tier, "mn", 20 * KIB)
        assert [stored(tier, each) for each in everything] == ["ab", "cd", "..", "gh..", "kl"]
        put(tier, "op", 12 * KIB)
        assert [stored(tier, each) for each in everything] == ["ab", "cd", "..", "....", "kl"]


def test_a_use_is_noted_once_in_a_while(tmp_path: Path) -> None:
    """A file that was used within the last minute is not written to again."""
    with open_tier(tmp_path) as tier:
        put(tier, "ab")
        (name,) = names_of("ab")
        for use in (lambda: put(tier, "ab"), lambda: tier.read(HOME, name)):
            for seconds, is_noted in ((20, False), (100, True)):
                os.utime(path_of(tmp_path, name), (time.time() - seconds,) * 2)
                before = path_of(tmp_path, name).stat().st_mtime
                use()
                assert (path_of(tmp_path, name).stat().st_mtime > before) == is_noted
        assert tier.counters.files_written == 1


def test_a_path_that_is_too_long_keeps_its_beginning(tmp_path: Path) -> None:
    """What does not fit is left out; older paths give way, the path itself does not."""
    with open_tier(tmp_path, 64 * KIB) as tier:
        put(tier, "xyzw", 20 * KIB)
        put(tier, "abcdefghij", 20 * KIB)
        assert (
            stored(tier, "abcdefghij") == "abcd......" or stored(tier, "abcdefghij") == "abcdef...."
        )
        assert stored(tier, "xyzw") == "...."
        assert tier.counters.skipped >= 1
        assert used(tmp_path) <= 64 * KIB


def test_a_tail_gives_way_to_what_continues_it(tmp_path: Path) -> None:
    """To the block that it begins; what differs stays, in its tokens or in its layout."""
    with open_tier(tmp_path) as tier:
        for letters in ("abc", "abx"):
            put(tier, letters)
        elsewhere = replace(names_of("abc")[-1], layout=layout_digest("another"))
        tier.offer(HOME, "another", [Offer(elsewhere, lambda: make_record("c"))])
        put(tier, "abcd")
        assert [stored(tier, each) for each in ("abcd", "abc", "abx")] == ["abcd", "ab.", "abx"]
        assert tier.has(HOME, elsewhere)
        assert tier.used_bytes == used(tmp_path)


def test_a_tail_that_bears_a_checkpoint_stays(tmp_path: Path) -> None:
    """The checkpoint stands at the end of its rows."""
    with open_tier(tmp_path) as tier:
        put(tier, "abc!")
        put(tier, "abcd")
        assert (stored(tier, "abc!"), stored(tier, "abcd")) == ("abcc", "abcd")


times = st.integers(0, 5)
PATHS = ("ab", "abcd", "abx", "abx!", "ab!", "xy")


@given(st.lists(st.tuples(st.sampled_from(PATHS), times)))
def test_the_order_of_eviction(uses: list[tuple[str, int]]) -> None:
    """Children before parents, and a checkpoint before its tail.

    Else by the last use of a file or of anything below it.
    """
    last = {letters[:end]: t for letters, t in uses for end in (2, 3, 4) if letters[:end] in PATHS}
    last |= {letters: t for letters, t in uses}
    files = [
        Found(letters, Role.RECORD, 1, when, "ns", names_of(letters)[-1])
        for letters, when in last.items()
    ]
    order = [file.path for file in eviction_order(files)]
    assert sorted(order) == sorted(last)
    effective = {
        letters: max(when for other, when in last.items() if other.startswith(letters))
        for letters in last
    }
    assert [effective[letters] for letters in order] == sorted(effective.values())
    for place, letters in enumerate(order):
        assert not any(other.startswith(letters) for other in order[place + 1 :])


def test_a_circle_of_names_that_lie_is_no_trap() -> None:
    """Names are not believed: two blocks that each claim to be below the other."""
    a, b = names_of("abcd")
    lies = [type(a)(a.own, b.own, 2, "b", a.layout), type(a)(b.own, a.own, 2, "b", a.layout)]
    files = [Found(str(n), Role.RECORD, 1, n, "ns", name) for n, name in enumerate(lies)]
    assert len(eviction_order(files)) == 2


def test_a_checkpoint_gives_way_before_its_tail(tmp_path: Path) -> None:
    """Whichever was used last: without the tail it could not be used."""
    with open_tier(tmp_path, 100 * KIB) as tier:
        put(tier, "abc!", 20 * KIB)
        age(tmp_path, names_of("abc!")[:2], 2000)
        age(tmp_path, names_of("abc!")[2:], 1000)
        put(tier, "xy", 45 * KIB)
        assert [tier.has(HOME, name) for name in names_of("abc!")] == [True, True, False]


def test_a_path_is_compared_with_its_siblings_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is below a block that was just written is not older than it."""
    with open_tier(tmp_path) as tier:
        for letters in ("a", "abc"):
            put(tier, letters)
        listed: list[bytes] = []
        real = Folder.filenames

        def filenames(folder: Folder, home: Home, parent: bytes, **more: Any) -> list[str]:
            listed.append(parent)
            return real(folder, home, parent, **more)

        monkeypatch.setattr(Folder, "filenames", filenames)
        put(tier, "abcdefghi")
        assert listed == [names_of("ab")[0].own]
        assert [stored(tier, each) for each in ("abcdefghi", "abc", "a")] == [
            "abcdefghi",
            "ab.",
            ".",
        ]


def test_children_are_chosen_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kind and layout; no file is asked for its time unless there are more than wanted."""
    with open_tier(tmp_path) as tier:
        for seconds, letters in enumerate(["abc!", "abd", "abe", "xy"]):
            put(tier, letters)
            age(tmp_path, names_of(letters)[1:], 100 * seconds)
        parent, layout = names_of("ab")[0].own, names_of("ab")[0].layout
        tails = [names_of(letters)[1] for letters in ("abc!", "abd", "abe")]
        last_used = tier.children(HOME, parent, BLOCK, layout, most=2)
        assert sorted(last_used, key=tails.index) == tails[:2]
        for call in ("stat", "lstat"):
            monkeypatch.setattr(os, call, None)
        assert set(tier.children(HOME, parent)) == {*names_of("abc!")[1:], *tails}
        assert set(tier.children(HOME, parent, BLOCK, most=3)) == set(tails)
        assert tier.children(HOME, parent, CHECKPOINT, layout) == names_of("abc!")[2:]
        assert tier.children(HOME, parent, layout=layout_digest("another")) == []
        monkeypatch.undo()
