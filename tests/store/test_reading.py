"""What readers of the tree rely on: chains, tallies, times, and a lock that every change holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from mlx_lm_kvcache_plugin.store.blocks import TOKEN_BYTES, Block, Tally, chain_of
from mlx_lm_kvcache_plugin.store.eviction import Cause, Evicted
from mlx_lm_kvcache_plugin.store.insertion import Insertion
from mlx_lm_kvcache_plugin.store.tree import BlockTree
from tests.store.reading import WatchedLock, assert_whole
from tests.store.trees import MODEL, Load, ids, letters_of, make_tree, put, put_checkpoint, use

# Chains


def chains(tree: BlockTree) -> dict[str, int]:
    """By what a node stands for, with all before it."""
    return {"".join(map(letters_of, node.path())): node.chain for node in tree}


def test_a_chain_tells_a_sequence_from_others() -> None:
    """By its namespace and by all of its tokens, and not by their blocks alone."""
    tree = make_tree()
    for letters in ("abab", "cdab", "abc"):
        put(tree, letters)
    put(tree, "abab", "other")
    assert len({node.chain for node in tree}) == len(tree) == 7


def test_a_chain_is_the_same_again() -> None:
    """In another tree, and after it was given up; so what is gone can be known by it."""
    tree, other = make_tree(), make_tree()
    put(tree, "abcde")
    put(other, "abcde")
    before = chains(tree)
    assert chains(other) == before
    tree.evict_to(0, Cause.TRIM)
    put(tree, "abcdef")
    assert chains(tree)["abcd"] == before["abcd"]
    assert chains(tree)["abcdef"] == chain_of(before["abcd"], ids("ef").tobytes())


def test_a_chain_begins_with_its_namespace() -> None:
    """By its hash, whatever it is."""
    tree = make_tree()
    for namespace in ("name", ("model", None, 3)):
        put(tree, "ab", namespace)
        root = tree.root(namespace)
        assert (root.chain, root.root) == (hash(namespace), root)
    assert all(node.root is tree.root(node.root.namespace) for node in tree)


# Tallies


def test_every_root_tells_what_is_below_it() -> None:
    """Blocks, tails and checkpoints; and all of them what the tree holds."""
    tree = make_tree()
    assert tree.tally() == Tally()
    put(tree, "abcdefg", "one")
    put(tree, "abcdxyz", "one")
    put_checkpoint(tree, "abc", "other", row_bytes=10)
    one, other = tree.root("one").tally, tree.root("other").tally
    assert (one.blocks, one.tails, one.checkpoints, one.tokens) == (4, 2, 0, 10)
    assert (other.blocks, other.tails, other.checkpoints, other.tokens) == (1, 1, 1, 3)
    assert one.used_bytes + other.used_bytes == tree.used_bytes
    assert tree.tally() == Tally(tree.used_bytes, 5, 3, 1, 13)
    tree.evict_sequences(1, Cause.COUNT)
    assert tree.tally() == tree.root("other").tally


def test_a_root_that_comes_back_begins_anew() -> None:
    """What it held before is gone; a root that held nothing yet tells nothing."""
    tree = make_tree()
    put(tree, "abcd")
    before = tree.root(MODEL).tally
    tree.drop(MODEL, Cause.CLEARED)
    assert before == tree.root(MODEL).tally == Tally()
    put(tree, "ab")
    assert (tree.root(MODEL).tally.blocks, before.blocks) == (1, 0)


def test_tallies_add_up_to_a_new_one() -> None:
    """Neither of the two changes."""
    one, other = Tally(1, 2, 3, 4, 5), Tally(10, 20, 30, 40, 50)
    assert one + other == Tally(11, 22, 33, 44, 55)
    assert (one, other) == (Tally(1, 2, 3, 4, 5), Tally(10, 20, 30, 40, 50))
    assert one + Tally() is not one


# Times


def test_a_use_is_noted_along_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not beside it; and what is added is new from the first moment on."""
    now = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tree = make_tree()
    put(tree, "abcd")
    now = 20.0
    put(tree, "abxy")
    now = 30.0
    with Insertion(tree, MODEL, ids("uvwx"), "") as insertion:
        insertion.add(2, Load(1))
        assert insertion.tip.used_at == 30.0
    use(tree, "ab")
    assert {letters_of(node): node.used_at for node in tree} == {
        "cd": 10.0,
        "xy": 20.0,
        "uv": 30.0,
        "ab": 30.0,
    }


def test_what_is_preferred_is_not_used() -> None:
    """It goes later, and is as old as before."""
    tree = make_tree()
    put(tree, "abcd", "one")
    put(tree, "uv", "other")
    before = {node: node.used_at for node in tree}
    tree.renew(["one"])
    assert {node: node.used_at for node in tree} == before


def test_the_newest_come_first_backwards() -> None:
    """So that parents come before their children."""
    tree = make_tree()
    put(tree, "abcd")
    put(tree, "abxy")
    assert [letters_of(node) for node in reversed(tree)] == ["ab", "xy", "cd"]
    assert list(reversed(tree)) == list(tree)[::-1]


# What was given up


def test_what_was_given_up_is_named() -> None:
    """Each node, by what is above it and its tokens, and the cause: the leaves first."""
    tree = make_tree()
    put(tree, "abcde")
    above = {"": hash(MODEL), **chains(tree)}
    tree.evict_sequences(0, Cause.COUNT)
    assert tree.evicted == [
        Evicted(above[way], ids(letters).tobytes(), Cause.COUNT)
        for way, letters in (("abcd", "e"), ("ab", "cd"), ("", "ab"))
    ]
    assert tree.evicted_blocks == {Cause.COUNT: 3}


def test_what_goes_with_a_checkpoint_is_named_too() -> None:
    """What bore it alone."""
    tree = make_tree()
    put_checkpoint(tree, "abc", row_bytes=5)
    tree.evict_to(0, Cause.PRESSURE)
    assert [(len(gone.key) // TOKEN_BYTES, gone.cause) for gone in tree.evicted] == [
        (0, Cause.PRESSURE),
        (1, Cause.PRESSURE),
        (2, Cause.PRESSURE),
    ]


def test_what_gives_way_to_its_continuation_is_not_given_up() -> None:
    """Nor is what a failure takes back, or who takes it out himself."""
    tree = make_tree()
    put(tree, "abc")
    put(tree, "abcd")
    with pytest.raises(ValueError), Insertion(tree, MODEL, ids("uvwx"), "") as insertion:
        insertion.add(2, Load(1))
        raise ValueError
    gone = tree.remove(next(iter(tree)))
    assert [letters_of(node) for node in gone] == ["cd"]
    assert tree.evicted == [] and not tree.evicted_bytes


# The lock


def leaf(tree: BlockTree) -> Block:
    return next(iter(tree))


CHANGES: dict[str, Callable[[BlockTree], Any]] = {
    "add": lambda tree: tree.add(leaf(tree), ids("yz").tobytes(), Load(1), ""),
    "touch": lambda tree: tree.touch(leaf(tree)),
    "renew": lambda tree: tree.renew([MODEL]),
    "remove": lambda tree: tree.remove(leaf(tree)),
    "supersede": lambda tree: tree.supersede(leaf(tree)),
    "evict_to": lambda tree: tree.evict_to(0, Cause.TRIM),
    "evict_sequences": lambda tree: tree.evict_sequences(0, Cause.COUNT),
    "drop": lambda tree: tree.drop(MODEL, Cause.CLEARED),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_holds_the_lock(change: Callable[[BlockTree], Any]) -> None:
    """From before its first step until everything adds up again."""
    tree = make_tree()
    put(tree, "abcd")
    lock = WatchedLock(lambda: assert_whole(tree))
    tree.lock = lock  # type: ignore[assignment]
    steps: list[int] = []
    for name in ("_account", "_enter"):
        real = getattr(tree, name)

        def watching(*arguments: Any, real: Callable[..., Any] = real) -> None:
            steps.append(lock.depth)
            real(*arguments)

        setattr(tree, name, watching)
    change(tree)
    assert lock.taken and 0 not in steps


def test_an_insertion_can_be_read_between_its_steps() -> None:
    """It takes several: each of them leaves a tree that is whole."""
    tree = make_tree(limit_bytes=9000)
    lock = WatchedLock(lambda: assert_whole(tree))
    tree.lock = lock  # type: ignore[assignment]
    for letters in ("abcdefg", "abcdxyz", "uvwxyz", "abc"):
        put(tree, letters)
        put_checkpoint(tree, letters, "other", row_bytes=100)
    assert tree.evicted and lock.taken > 50


def test_dropping_looks_at_each_node_once() -> None:
    """A model's tree may be deep and wide: what is above a node is not walked anew for each."""
    tree = make_tree()
    for letters in ("abcdefgh", "abxy", "cd", "abcdmnop"):
        put(tree, letters)
    nodes = len(tree)
    with mock.patch.object(tree, "remove", side_effect=tree.remove) as remove:
        tree.drop(MODEL, Cause.CLEARED)
    assert remove.call_count == nodes == len(tree.evicted) and not len(tree)
    tree.check()
