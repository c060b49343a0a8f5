"""What is remembered of what was given up: which way it went on, how far, and why it went."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import pytest

from mlx_lm_kvcache_plugin.stats import evictions
from mlx_lm_kvcache_plugin.stats.evictions import RecentEvictions
from mlx_lm_kvcache_plugin.store.blocks import Block, Root, chain_of
from mlx_lm_kvcache_plugin.store.eviction import Cause, Evicted
from tests.store.trees import MODEL, Load, ids

STEP = 4


def parts(letters: str) -> Iterator[bytes]:
    """The tokens of its blocks, the last of which need not be whole."""
    return (ids(letters[at : at + STEP]).tobytes() for at in range(0, len(letters), STEP))


def evicted(letters: str, cause: Cause = Cause.MEMORY) -> Evicted:
    """The last node of a sequence."""
    *way, last = parts(letters)
    return Evicted(reduce(chain_of, way, hash(MODEL)), last, cause)


def path(letters: str) -> list[Block]:
    """The nodes of a sequence that is stored."""
    nodes: list[Block] = [Root(MODEL)]
    for key in parts(letters):
        nodes.append(Block(nodes[-1], key, Load(1), ""))
    return nodes[1:]


def cause(recent: RecentEvictions, letters: str, least_tokens: int = 1) -> Cause | None:
    """Why what a prompt begins with was given up."""
    gone = recent.rows(hash(MODEL), parts(letters), least_tokens)
    return None if gone is None else gone[1]


def remembering(*gone: Evicted) -> RecentEvictions:
    recent = RecentEvictions(STEP)
    recent.add(gone)
    return recent


@pytest.mark.parametrize("why", Cause)
def test_a_block_is_remembered_with_its_cause(why: Cause) -> None:
    """For whoever goes on with so many of its tokens; others are told nothing."""
    recent = remembering(evicted("abcd", why))
    assert cause(recent, "abcd", 4) == cause(recent, "abcdxyz", 4) == why
    assert cause(recent, "abcx", 3) == cause(recent, "abc", 3) == why
    assert cause(recent, "abcx", 4) is cause(recent, "abc", 4) is cause(recent, "") is None


@pytest.mark.parametrize("tail", ["a", "ab", "abc"])
def test_a_tail_is_remembered_too(tail: str) -> None:
    """Whatever its length; a prompt that goes on with it lost it."""
    recent = remembering(evicted(tail))
    assert cause(recent, tail) == cause(recent, tail + "xyz") == Cause.MEMORY
    assert cause(recent, "x" + tail) is None


def test_a_checkpoint_holds_no_tokens() -> None:
    """It is no reason why they are gone."""
    recent = remembering(Evicted(hash(MODEL), b"", Cause.MEMORY))
    assert recent.rows(hash(MODEL), [b""], 0) is None
    assert recent.checkpoint(hash(MODEL), [], 0, 0) == (0, Cause.MEMORY)


def test_what_is_stored_again_is_forgotten() -> None:
    """All nodes of its path, and nothing else."""
    recent = remembering(evicted("abcdef"), evicted("abcd"), evicted("abcx"))
    recent.forget(path("abcdef"))
    assert cause(recent, "abcdef", 4) is None
    assert cause(recent, "abcx", 4) == Cause.MEMORY


def test_the_last_cause_counts() -> None:
    """Of what was given up, stored again and given up once more."""
    assert cause(remembering(evicted("abcd"), evicted("abcd", Cause.TRIM)), "abcd") == Cause.TRIM


def test_only_what_goes_far_enough_is_a_loss() -> None:
    """A tail that was given up is in a longer one by now, or in another namespace's blocks."""
    recent = remembering(evicted("ab"), evicted("abcd", Cause.TRIM), evicted("abcdef", Cause.COUNT))
    expected = {1: Cause.TRIM, 4: Cause.TRIM, 5: Cause.COUNT, 6: Cause.COUNT, 7: None, 8: None}
    assert {least: cause(recent, "abcdefgh", least) for least in expected} == expected


def test_the_longest_counts() -> None:
    """Of several that a prompt goes on with, whatever else was given up beside them."""
    others = [evicted(letters) for letters in ("b", "aab", "az", "abb", "abd")]
    recent = remembering(evicted("a", Cause.TRIM), evicted("abc", Cause.COUNT), *others)
    assert [cause(recent, "abcx", n) for n in range(1, 5)] == [Cause.COUNT] * 3 + [None]


def test_the_way_there_has_to_be_lost_too() -> None:
    """What hangs below a block that nobody lost is found from that block on."""
    recent = remembering(evicted("abcdefgh"))
    assert cause(recent, "abcdefgh") is None
    behind = chain_of(hash(MODEL), ids("abcd").tobytes())
    assert recent.rows(behind, parts("efgh"), 4) == (4, Cause.MEMORY)


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a most of them; what is evicted anew counts as new."""
    monkeypatch.setattr(evictions, "MOST_REMEMBERED", 2)
    recent = remembering(evicted("aaaa"), evicted("bbbb"), evicted("aaaa"), evicted("cccc"))
    assert [cause(recent, letter * 4) for letter in "abc"] == [Cause.MEMORY, None, Cause.MEMORY]
