"""The recency list: an order, literally."""

from __future__ import annotations

import pytest

from mlx_lm_kvcache_plugin.store.eviction import RecencyList


class Member:
    def __init__(self, name: str) -> None:
        self.name = name
        self.older: Member | None = None
        self.newer: Member | None = None


def make_list(names: str) -> tuple[RecencyList[Member], dict[str, Member]]:
    recency: RecencyList[Member] = RecencyList()
    members = {name: Member(name) for name in names}
    for member in members.values():
        recency.append(member)
    return recency, members


def order(recency: RecencyList[Member]) -> str:
    """From the oldest on, and the same backwards."""
    forwards = list(recency)
    assert list(reversed(recency)) == forwards[::-1]
    assert recency.oldest is (forwards[0] if forwards else None)
    return "".join(member.name for member in forwards)


def test_an_empty_list_has_no_oldest() -> None:
    """Nothing in, nothing out."""
    recency, _ = make_list("")
    assert recency.oldest is None
    assert order(recency) == ""


@pytest.mark.parametrize(("name", "left"), [("a", "bcd"), ("b", "acd"), ("d", "abc")])
def test_removing_joins_the_neighbours(name: str, left: str) -> None:
    """The first, a middle and the last one; the slots of the one removed are free again."""
    recency, members = make_list("abcd")
    recency.remove(members[name])
    assert order(recency) == left
    assert members[name].older is members[name].newer is None
    recency.append(members[name])
    assert order(recency) == left + name


def test_removing_the_only_one_empties_the_list() -> None:
    """And what comes afterwards begins a new one."""
    recency, members = make_list("a")
    recency.remove(members["a"])
    assert order(recency) == ""
    recency.append(members["a"])
    assert order(recency) == "a"


@pytest.mark.parametrize(("name", "touched"), [("a", "bcda"), ("c", "abdc"), ("d", "abcd")])
def test_touching_makes_the_newest(name: str, touched: str) -> None:
    """Only the place of the one touched changes."""
    recency, members = make_list("abcd")
    recency.touch(members[name])
    assert order(recency) == touched
