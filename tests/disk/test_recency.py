"""What gives way first: the least recently used, children before parents, tails before blocks."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvcache_plugin.disk.contents import Found, Role
from mlx_lm_kvcache_plugin.disk.limit import eviction_order
from mlx_lm_kvcache_plugin.disk.names import layout_digest
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


@given(st.lists(st.tuples(st.sampled_from(["ab", "abcd", "abcdef", "abx", "xy"]), times)))
def test_the_order_of_eviction(uses: list[tuple[str, int]]) -> None:
    """Children before parents; else by the last use of a file or of anything below it."""
    last = {letters[:end]: t for letters, t in uses for end in range(2, len(letters) + 1, 2)}
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
