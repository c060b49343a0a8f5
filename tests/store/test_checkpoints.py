"""Checkpoints in the tree: what belongs to one exact position, and the bearers that lead to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from mlx_lm_kvcache_plugin.store.blocks import Block
from mlx_lm_kvcache_plugin.store.eviction import Cause
from mlx_lm_kvcache_plugin.store.insertion import Insertion
from mlx_lm_kvcache_plugin.store.tree import BlockTree
from tests.store.trees import (
    MODEL,
    Load,
    ids,
    letters_of,
    make_tree,
    matched,
    order,
    put_checkpoint,
    use,
)

Put = Callable[..., Insertion]


@pytest.fixture(params=[None, 100], ids=["without rows", "with rows"])
def put(request: pytest.FixtureRequest) -> Put:
    """Stores a checkpoint, of a model whose bearers hold rows, or of one that has none."""
    return partial(put_checkpoint, row_bytes=request.param)


def found(tree: BlockTree, letters: str) -> int:
    """For how many of the letters the deepest checkpoint stands."""
    node, tokens = tree.find_checkpoint(MODEL, ids(letters))
    assert (node is None) == (tokens == 0)
    if node is not None:
        assert node.payload is not None
        assert "".join(map(letters_of, node.path())) == letters[:tokens]
    return tokens


@pytest.mark.parametrize("letters", ["a", "ab", "abc", "abcd", "abcde"])
def test_a_checkpoint_stands_at_its_exact_position(put: Put, letters: str) -> None:
    """At a block's end, inside of a block, inside of the first one: found there and not before."""
    tree = make_tree()
    put(tree, letters)
    for end in range(len(letters)):
        assert found(tree, letters[:end]) == 0
    assert found(tree, letters) == len(letters)
    assert found(tree, letters + "xyz") == len(letters)
    assert found(tree, "x" + letters[1:]) == 0


def test_the_deepest_of_several_is_found(put: Put) -> None:
    """Those on the way of a sequence; what branches off it is not on the way."""
    tree = make_tree(block_tokens=4)
    for letters in ("ab", "a", "abcd", "abcdefghi", "abcdex", "abx"):
        put(tree, letters)
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


def test_all_on_the_way_are_listed_from_the_deepest_on(put: Put) -> None:
    """With their positions: in tails of one block, at its end, and in the next one."""
    tree = make_tree(block_tokens=4)
    for letters in ("abc", "a", "abcdef", "abcd", "abcdex", "abcdefghij"):
        put(tree, letters)
    listed = [position for _, position in tree.checkpoints(MODEL, ids("abcdefghijkl"))]
    assert listed == [10, 6, 4, 3, 1]
    listed = [position for _, position in tree.checkpoints(MODEL, ids("abcdef"))]
    assert listed == [6, 4, 3, 1]


def test_namespaces_never_meet(put: Put) -> None:
    """A checkpoint of another model is none."""
    tree = make_tree()
    put(tree, "abc", namespace="other")
    assert found(tree, "abcd") == 0


def test_what_leads_to_two_checkpoints_is_stored_once(put: Put) -> None:
    """Two sequences are two paths: the bearers that they begin with are one."""
    tree = make_tree()
    put(tree, "abcde")
    insertion = put(tree, "abcdxy")
    assert sorted(order(tree)) == ["", "", "ab", "cd", "e", "xy"]
    assert (insertion.tokens, insertion.added_tokens) == (6, 2)


def test_storing_the_same_again_stores_nothing(put: Put) -> None:
    """A checkpoint that is there already is touched, and the first one stays."""
    tree = make_tree()
    put(tree, "abc")
    put(tree, "x")
    nodes = set(tree)
    assert put(tree, "abc").added_tokens == 0
    assert set(tree) == nodes
    assert order(tree) == ["", "x", "", "c", "ab"]


def test_a_checkpoint_does_not_hide_the_tail_that_bears_it(put: Put) -> None:
    """A longer tail takes the place of a shorter one, but not if a checkpoint hangs there."""
    tree = make_tree(block_tokens=4)
    put(tree, "ab")
    put(tree, "abc")
    put(tree, "abcd")
    assert [found(tree, letters) for letters in ("abx", "abcx", "abcdx")] == [2, 3, 4]


@pytest.mark.parametrize("longer", ["abcd", "abcdefg"])
def test_a_checkpoint_inside_of_a_longer_one_has_a_tail_of_its_own(longer: str, put: Put) -> None:
    """Its rows end where it stands: the complete block that they begin will not do for them."""
    tree = make_tree(block_tokens=4)
    put(tree, longer)
    insertion = put(tree, "ab")
    assert insertion.added_tokens == 2
    assert [node.tokens for node in insertion.tip.path()] == [2, 0]
    assert (found(tree, "abx"), found(tree, longer)) == (2, len(longer))


def test_bearers_go_with_the_last_checkpoint_below_them(put: Put) -> None:
    """They serve the checkpoints below them alone, rows or not."""
    tree = make_tree()
    put(tree, "abcde")
    put(tree, "abxy")
    tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
    tree.check()
    assert order(tree) == ["", "xy", "ab"]
    assert (found(tree, "abcdef"), found(tree, "abxyz")) == (0, 4)
    tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
    tree.check()
    assert (len(tree), tree.used_bytes) == (0, 0)


def test_a_bearer_stays_while_another_checkpoint_is_below_it(put: Put) -> None:
    """One that stands in the middle goes alone, its own tail with it."""
    tree = make_tree(block_tokens=4)
    for letters in ("abcd", "abcdef", "abcdefghi"):
        put(tree, letters)
    for letters, left in {
        "abcd": ["", "ef", "", "i", "efgh", "abcd"],
        "abcdef": ["", "i", "efgh", "abcd"],
        "abcdefghi": [],
    }.items():
        node, position = tree.find_checkpoint(MODEL, ids(letters))
        assert node is not None and position == len(letters)
        tree.remove(node)
        tree.check()
        assert order(tree) == left


def test_bearers_are_counted_with_the_checkpoint(put: Put) -> None:
    """What an eviction says is what is gone: the nodes above it too, and all their bytes."""
    tree = make_tree()
    put(tree, "abcde")
    held = tree.used_bytes
    tree.evict_to(0, Cause.TRIM)
    assert tree.evicted_blocks == {Cause.TRIM: 4}
    assert tree.evicted_bytes == {Cause.TRIM: held}


def test_the_oldest_checkpoint_goes_first(put: Put) -> None:
    """One by one, literally, whatever they share; a hit saves one, and what leads to it."""
    tree = make_tree()
    for letters in ("abcd", "ab", "xy", "abcdef"):
        put(tree, letters)
    tree.touch(tree.find_checkpoint(MODEL, ids("xy"))[0])  # type: ignore[arg-type]
    gone = []
    while len(tree):
        before = {letters for letters in ("abcd", "ab", "xy", "abcdef") if stands(tree, letters)}
        tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
        tree.check()
        gone += [letters for letters in before if not stands(tree, letters)]
    assert gone == ["abcd", "ab", "abcdef", "xy"]


def stands(tree: BlockTree, letters: str) -> bool:
    """Whether a checkpoint stands at the end of these letters."""
    return found(tree, letters) == len(letters)


def test_a_checkpoint_without_room_leaves_nothing_behind(put: Put) -> None:
    """Neither its own way there, though there was room for that, nor a namespace."""
    tree = make_tree(limit_bytes=1900)
    put(tree, "abcdefgh", nbytes=1200)
    assert order(tree) == []
    assert tree.used_bytes == 0
    assert not tree.has(MODEL)


def test_a_way_without_room_leaves_nothing_behind(put: Put) -> None:
    """Nor do as many bearers as had room, of no use to anything."""
    tree = make_tree(limit_bytes=3000)
    put(tree, "xy", nbytes=100)
    put(tree, "ab" * 50)
    assert found(tree, "ab" * 50) == 0
    assert set(order(tree)) <= {"", "xy"}


def test_a_checkpoint_that_is_refused_in_the_end_leaves_nothing_useless(put: Put) -> None:
    """Those beside it may have gone to make room, and yet there was too little by a few bytes.

    No node is left that leads nowhere, and the next checkpoint finds its place.
    """
    refused = 0
    for nbytes in range(1000, 4000, 20):
        tree = make_tree()
        for letters in ("ab", "abcd", "abcdef"):
            put(tree, letters, nbytes=500)
        tree.limit_bytes = tree.used_bytes
        put(tree, "abcd" if nbytes % 40 else "abxy", nbytes=nbytes)
        put(tree, "ab", nbytes=nbytes)
        refused += found(tree, "ab") == 0
        put(tree, "uv", nbytes=100)
        assert found(tree, "uv") == 2
    assert refused > 10


def test_a_refused_node_leaves_no_leaf_that_bears_nothing(put: Put) -> None:
    """The node that was to bear it goes, if the checkpoint below it has gone to make room."""
    tree = make_tree()
    put(tree, "ab")
    bearer = tree.match(MODEL, ids("ab")).blocks[0]
    tree.limit_bytes = tree.used_bytes
    tree.touch(bearer)
    payload = Load(tree.used_bytes - 400)
    assert tree.add(bearer, ids("cd").tobytes(), payload, "", is_bearer=True) is None
    tree.check()
    assert len(tree) == tree.used_bytes == 0


def test_a_checkpoint_that_can_never_fit_displaces_nothing(put: Put) -> None:
    """One that is larger than the whole budget does not evict what it cannot replace."""
    tree = make_tree()
    put(tree, "ab")
    put(tree, "xyz", namespace="other")
    tree.limit_bytes = tree.used_bytes + 2000
    put(tree, "abcdef", nbytes=10**6)
    assert found(tree, "abcdef") == 2
    assert tree.has("other")


# What is evicted while a checkpoint is being added


@pytest.mark.parametrize("added", [0, 1, 2])
def test_what_is_being_added_to_stays_while_all_else_goes(put: Put, added: int) -> None:
    """Though the last checkpoint that it bore is among what goes: there is to be another one."""
    tree = make_tree()
    put(tree, "abcdef")
    put(tree, "xy")
    with Insertion(tree, MODEL, ids("abcdghij"), "", bears=True) as insertion:
        for _ in range(added):
            insertion.add(2, None)
        tree.evict_to(0, Cause.PRESSURE, keep=insertion.tip)
        assert set(order(tree)) == {"ab", "cd", "gh", "ij"} - set(["ij", "gh"][: 2 - added])
        while insertion.tokens < 8:
            assert insertion.add(2, None)
        assert insertion.add(0, Load(100))
    tree.check()
    assert order(tree) == ["", "ij", "gh", "cd", "ab"]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("added", [0, 1])
def test_what_bears_nothing_in_the_end_goes(put: Put, added: int, fails: bool) -> None:
    """All that the way bore was evicted, and nothing came: for want of room, or of luck."""
    tree = make_tree()
    put(tree, "abcdef")
    try:
        with Insertion(tree, MODEL, ids("abcdgh"), "", bears=True) as insertion:
            for _ in range(added):
                insertion.add(2, None)
            tree.evict_to(0, Cause.PRESSURE, keep=insertion.tip)
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    tree.check()
    assert len(tree) == tree.used_bytes == 0
    assert insertion.added_tokens == 0


def test_a_failed_insertion_takes_back_the_nodes_on_the_way(put: Put) -> None:
    """However many of them had been added when it failed."""
    tree = make_tree()
    put(tree, "ab")
    before = (set(tree), tree.used_bytes)
    for added in range(4):
        with (
            pytest.raises(ValueError),
            Insertion(tree, MODEL, ids("abcdef"), "", bears=True) as insertion,
        ):
            for _ in range(min(added, 2)):
                insertion.add(2, None)
            if added == 3:
                insertion.add(0, Load(10))
            raise ValueError
        tree.check()
        assert (set(tree), tree.used_bytes) == before


def test_a_limit_on_sequences_counts_checkpoints(put: Put) -> None:
    """Each is a sequence that can be gone on with; the oldest go, and what led to them alone."""
    tree = make_tree()
    for letters in ("abcd", "abce", "xyz"):
        put(tree, letters)
    assert tree.sequences.total() == 3
    tree.evict_sequences(2, Cause.COUNT)
    tree.check()
    assert order(tree) == ["", "ce", "ab", "", "z", "xy"]
    tree.evict_sequences(1, Cause.COUNT)
    tree.check()
    assert order(tree) == ["", "z", "xy"]
    tree.evict_sequences(0, Cause.COUNT)
    tree.check()
    assert len(tree) == 0


def test_dropping_a_namespace_drops_bearers_too(put: Put) -> None:
    """At every depth, and nothing of another one."""
    tree = make_tree()
    for letters in ("a", "abcdef", "abxy", "abcd"):
        put(tree, letters)
    put(tree, "abcd", namespace="other")
    tree.drop(MODEL, Cause.REPLACED)
    tree.check()
    assert order(tree) == ["", "cd", "ab"]
    assert tree.has("other") and not tree.has(MODEL)


def test_ten_thousand_nodes_on_the_way(put: Put) -> None:
    """Nothing recurses, pruning them neither."""
    tree = make_tree(block_tokens=1)
    letters = "ab" * 5000
    put(tree, letters)
    assert matched(tree, letters) == found(tree, letters) == 10_000
    use(tree, letters)
    tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
    tree.check()
    assert len(tree) == 0


def test_where_a_node_ends(put: Put) -> None:
    """The position of a checkpoint is that of the node that bears it."""
    tree = make_tree()
    tip: Block = put(tree, "abcde").tip
    assert tip.tokens == 0
    assert tip.depth_tokens() == 5
    assert [letters_of(node) for node in tip.path()] == ["ab", "cd", "e", ""]
