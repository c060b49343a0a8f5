"""Checkpoints in the tree: the states of all layers, each at one exact position."""

from __future__ import annotations

import pytest

from mlx_lm_kvcache_plugin.store.blocks import Block
from mlx_lm_kvcache_plugin.store.insertion import Insertion
from mlx_lm_kvcache_plugin.store.tree import BlockTree, Cause
from tests.store.trees import (
    MODEL,
    Load,
    ids,
    letters_of,
    make_tree,
    matched,
    order,
    put_checkpoint,
)


def found(tree: BlockTree, letters: str) -> int:
    """For how many of the letters the deepest checkpoint stands."""
    node, tokens = tree.find_checkpoint(MODEL, ids(letters))
    assert (node is None) == (tokens == 0)
    if node is not None:
        assert node.payload is not None
        assert "".join(map(letters_of, node.path())) == letters[:tokens]
    return tokens


def longer(tree: BlockTree, letters: str, largest: int = 10**9) -> tuple[str, int] | None:
    """The sequence of a checkpoint beyond the letters that match, and how many do.

    Only payloads of at most `largest` bytes will do.
    """
    node, tokens = tree.find_longer_checkpoint(
        MODEL, ids(letters), lambda payload: payload.nbytes <= largest
    )
    return None if node is None else ("".join(map(letters_of, node.path())), tokens)


@pytest.mark.parametrize("letters", ["a", "ab", "abc", "abcd", "abcde"])
def test_a_checkpoint_stands_at_its_exact_position(letters: str) -> None:
    """At a block's end, inside of a block, inside of the first one: found there and not before."""
    tree = make_tree()
    put_checkpoint(tree, letters)
    for end in range(len(letters)):
        assert found(tree, letters[:end]) == 0
    assert found(tree, letters) == len(letters)
    assert found(tree, letters + "xyz") == len(letters)
    assert found(tree, "x" + letters[1:]) == 0


def test_the_deepest_of_several_is_found() -> None:
    """Those on the way of a sequence; what branches off it is not on the way."""
    tree = make_tree(block_tokens=4)
    for letters in ("ab", "a", "abcd", "abcdefghi", "abcdex", "abx"):
        put_checkpoint(tree, letters)
    depths = {
        "abcdefghij": 9,
        "abcdefghi": 9,
        "abcdefgh": 4,
        "abcdexy": 6,
        "abcde": 4,
        "abc": 2,
        "abxy": 3,
        "ax": 1,
        "x": 0,
    }
    assert {letters: found(tree, letters) for letters in depths} == depths


def test_namespaces_never_meet() -> None:
    """A checkpoint of another model is none."""
    tree = make_tree()
    put_checkpoint(tree, "abc", namespace="other")
    assert found(tree, "abcd") == 0
    assert longer(tree, "ab") is None


def test_a_longer_checkpoint_beyond_what_matches() -> None:
    """Its maker may be able to cut it: it is found with the length of the common run."""
    tree = make_tree()
    put_checkpoint(tree, "abcdef")
    for letters, shared in {"abcdex": 5, "abcd": 4, "abx": 2, "a": 1}.items():
        assert longer(tree, letters) == ("abcdef", shared)
    assert longer(tree, "x") is None
    assert longer(tree, "") is None


@pytest.mark.parametrize("arrival", [["abcdefgh", "abcd"], ["abcd", "abcdefgh"]])
def test_the_nearest_longer_checkpoint_is_taken(arrival: list[str]) -> None:
    """The less there is to cut off the better, if its payload will do at all."""
    tree = make_tree()
    for letters in arrival:
        put_checkpoint(tree, letters, nbytes=500 if letters == "abcd" else 10)
    assert longer(tree, "abx") == ("abcd", 2)
    assert longer(tree, "abx", largest=100) == ("abcdefgh", 2)
    assert longer(tree, "abx", largest=1) is None


def test_storing_the_same_again_stores_nothing() -> None:
    """A checkpoint that is there already is touched, and the first one stays."""
    tree = make_tree()
    put_checkpoint(tree, "abc")
    put_checkpoint(tree, "x")
    nodes = set(tree)
    assert put_checkpoint(tree, "abc").added_tokens == 0
    assert set(tree) == nodes
    assert order(tree) == ["", "x", "", "c", "ab"]


def test_a_checkpoint_does_not_hide_the_tail_that_bears_it() -> None:
    """A longer tail takes the place of a shorter one, but not if a checkpoint hangs there."""
    tree = make_tree(block_tokens=4)
    put_checkpoint(tree, "ab")
    put_checkpoint(tree, "abc")
    put_checkpoint(tree, "abcd")
    assert [found(tree, letters) for letters in ("abx", "abcx", "abcdx")] == [2, 3, 4]


def test_evicting_a_checkpoint_prunes_what_only_led_to_it() -> None:
    """Nodes without payload serve the checkpoints below them alone."""
    tree = make_tree()
    put_checkpoint(tree, "abcde")
    put_checkpoint(tree, "abxy")
    tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
    tree.check()
    assert order(tree) == ["", "xy", "ab"]
    assert (found(tree, "abcdef"), found(tree, "abxyz")) == (0, 4)
    tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
    tree.check()
    assert (len(tree), tree.used_bytes) == (0, 0)


def test_pruned_nodes_are_counted_with_the_checkpoint() -> None:
    """What an eviction says is what is gone: the nodes above it too, and all their bytes."""
    tree = make_tree()
    put_checkpoint(tree, "abcde")
    held = tree.used_bytes
    tree.evict_to(0, Cause.TRIM)
    assert tree.evicted_blocks == {Cause.TRIM: 4}
    assert tree.evicted_bytes == {Cause.TRIM: held}


def test_a_checkpoint_without_room_leaves_nothing_behind() -> None:
    """Neither its own way there, though there was room for that, nor a namespace."""
    tree = make_tree(limit_bytes=1500)
    put_checkpoint(tree, "abcdefgh", nbytes=1200)
    assert order(tree) == []
    assert tree.used_bytes == 0
    assert not tree.has(MODEL)


def test_a_checkpoint_that_is_refused_in_the_end_leaves_nothing_useless() -> None:
    """Those beside it may have gone to make room, and yet there was too little by a few bytes.

    No node is left that leads nowhere, and the next checkpoint finds its place.
    """
    refused = 0
    for nbytes in range(1000, 3600, 20):
        tree = make_tree()
        for letters in ("ab", "abcd", "abcdef"):
            put_checkpoint(tree, letters, nbytes=500)
        tree.limit_bytes = 3600
        put_checkpoint(tree, "abcd" if nbytes % 40 else "abxy", nbytes=nbytes)
        put_checkpoint(tree, "ab", nbytes=nbytes)
        refused += found(tree, "ab") == 0
        put_checkpoint(tree, "uv", nbytes=100)
        assert found(tree, "uv") == 2
    assert refused > 10


def test_a_refused_node_leaves_no_leaf_that_holds_nothing() -> None:
    """The node that was to bear it goes, if the checkpoint below it has gone to make room."""
    tree = make_tree()
    put_checkpoint(tree, "ab")
    bearer = tree.match(MODEL, ids("ab")).blocks[0]
    tree.limit_bytes = tree.used_bytes
    tree.touch(bearer)
    assert tree.add(bearer, ids("cd").tobytes(), Load(tree.used_bytes - 400), "") is None
    tree.check()
    assert len(tree) == tree.used_bytes == 0


def test_a_checkpoint_that_can_never_fit_displaces_nothing() -> None:
    """One that is larger than the whole budget does not evict what it cannot replace."""
    tree = make_tree()
    put_checkpoint(tree, "ab")
    put_checkpoint(tree, "xyz", namespace="other")
    tree.limit_bytes = tree.used_bytes + 2000
    put_checkpoint(tree, "abcdef", nbytes=10**6)
    assert found(tree, "abcdef") == 2
    assert tree.has("other")


def test_a_failed_insertion_takes_back_the_nodes_on_the_way() -> None:
    """However many of them had been added when it failed."""
    tree = make_tree()
    put_checkpoint(tree, "ab")
    before = (set(tree), tree.used_bytes)
    for added in range(4):
        with (
            pytest.raises(ValueError),
            Insertion(tree, MODEL, ids("abcdef"), "") as insertion,
        ):
            for _ in range(min(added, 2)):
                insertion.add(2, None)
            if added == 3:
                insertion.add(0, Load(10))
            raise ValueError
        tree.check()
        assert (set(tree), tree.used_bytes) == before


def test_a_limit_on_sequences_prunes_up_to_the_next_payload() -> None:
    """Below a block with a payload of its own, a whole sequence is that block too."""
    tree = make_tree()
    for letters in ("abc", "xyz"):
        with Insertion(tree, MODEL, ids(letters), "") as insertion:
            insertion.add(2, Load(10))
            insertion.add(1, None)
            insertion.add(0, Load(5))
        tree.check()
    tree.evict_sequences(1, Cause.COUNT)
    tree.check()
    assert order(tree) == ["", "z", "xy"]
    tree.evict_sequences(0, Cause.COUNT)
    tree.check()
    assert len(tree) == 0


def test_ten_thousand_nodes_on_the_way() -> None:
    """Nothing recurses, pruning them neither."""
    tree = make_tree(block_tokens=1)
    letters = "ab" * 5000
    put_checkpoint(tree, letters)
    assert matched(tree, letters) == 10_000
    assert longer(tree, "ab" * 10) == (letters, 20)
    tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
    tree.check()
    assert len(tree) == 0


def test_where_a_node_ends() -> None:
    """The position of a checkpoint is that of the node that bears it."""
    tree = make_tree()
    tip: Block = put_checkpoint(tree, "abcde").tip
    assert tip.tokens == 0
    assert tip.depth_tokens() == 5
    assert [letters_of(node) for node in tip.path()] == ["ab", "cd", "e", ""]
