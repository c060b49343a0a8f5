"""The tree of blocks: what is shared, what goes first, and what it all weighs."""

from __future__ import annotations

import gc
import random
import tracemalloc

import numpy as np
import pytest

from mlx_lm_kvcache_plugin.store.blocks import Block
from mlx_lm_kvcache_plugin.store.eviction import Cause
from mlx_lm_kvcache_plugin.store.insertion import Insertion
from mlx_lm_kvcache_plugin.store.tree import BlockTree
from tests.store.trees import (
    MODEL,
    Load,
    ids,
    make_tree,
    matched,
    order,
    put,
    put_checkpoint,
    use,
)

# Sharing


def test_what_is_shared_is_stored_once() -> None:
    """Two sequences are two paths: the blocks that they begin with are one."""
    tree = make_tree()
    put(tree, "abcdef")
    insertion = put(tree, "abcdxy")
    assert sorted(order(tree)) == ["ab", "cd", "ef", "xy"]
    assert (insertion.tokens, insertion.added_tokens) == (6, 2)
    assert tree.tokens == 8


def test_storing_the_same_again_stores_nothing() -> None:
    """Neither whole blocks nor a tail are added twice; they are touched."""
    tree = make_tree()
    put(tree, "abc")
    put(tree, "xy")
    held = tree.used_bytes
    assert put(tree, "abc").added_tokens == 0
    assert put(tree, "a").added_tokens == 0
    assert tree.used_bytes == held
    assert order(tree) == ["xy", "c", "ab"]


@pytest.mark.parametrize("covering", ["abcd", "abc"])
def test_a_tail_that_another_one_covers_is_not_stored(covering: str) -> None:
    """A block or a longer tail that begins with it holds all its tokens."""
    tree = make_tree(block_tokens=4)
    put(tree, covering)
    insertion = put(tree, "ab")
    assert order(tree) == [covering]
    assert (insertion.tokens, insertion.added_tokens) == (2, 0)


@pytest.mark.parametrize("longer", ["abc", "abcd", "abcdefg"])
def test_a_tail_gives_way_to_what_it_begins(longer: str) -> None:
    """A longer tail or the complete block takes its place; other tails beside it stay."""
    tree = make_tree(block_tokens=4)
    for letters in ("ab", "ax", "b"):
        put(tree, letters)
    put(tree, longer)
    assert "ab" not in order(tree)
    assert {"ax", "b"} < set(order(tree))
    assert matched(tree, "ab") == 2


# Order of eviction


def test_a_path_is_touched_from_the_leaf_to_the_root() -> None:
    """So that every parent is newer than its children, and the oldest node is a leaf."""
    tree = make_tree()
    put(tree, "abcdef")
    assert order(tree) == ["ef", "cd", "ab"]
    put(tree, "uvwx")
    assert order(tree) == ["ef", "cd", "ab", "wx", "uv"]
    put(tree, "abcdyz")
    assert order(tree) == ["ef", "wx", "uv", "yz", "cd", "ab"]
    use(tree, "uv")
    assert order(tree) == ["ef", "wx", "yz", "cd", "ab", "uv"]


def test_the_least_recently_used_leaf_goes_first() -> None:
    """One by one, literally: a shared block goes after all that needs it."""
    tree = make_tree()
    put(tree, "abcdef")
    put(tree, "uvwx")
    put(tree, "abyz")
    use(tree, "uvwx")
    gone = []
    while len(tree):
        before = order(tree)
        tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
        tree.check()
        gone += [letters for letters in before if letters not in order(tree)]
    assert gone == ["ef", "cd", "yz", "ab", "wx", "uv"]


def test_a_hit_saves_a_sequence() -> None:
    """Room for two: A, B, a hit on A, C: A stays and B goes."""
    tree = make_tree()
    put(tree, "aa")
    put(tree, "bb")
    tree.limit_bytes = tree.used_bytes
    use(tree, "aa")
    put(tree, "cc")
    assert order(tree) == ["aa", "cc"]


def test_a_part_of_a_block_counts_as_use_of_it() -> None:
    """A hit of one token touches the block that it lies in."""
    tree = make_tree()
    put(tree, "ab")
    put(tree, "xy")
    use(tree, "a")
    assert order(tree) == ["xy", "ab"]


def fill_three(tree: BlockTree) -> None:
    """Three namespaces, the oldest first; the second one is used again in part."""
    put(tree, "abcdef", "one")
    put(tree, "abcd", "two")
    put(tree, "abx", "two")
    put(tree, "uv", "three")
    put_checkpoint(tree, "xyz", "three")
    use(tree, "abx", "two")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ["ef", "cd", "ab", "cd", "uv", "", "z", "xy", "x", "ab"]),
        (["one"], ["cd", "uv", "", "z", "xy", "x", "ab", "ef", "cd", "ab"]),
        (["two"], ["ef", "cd", "ab", "uv", "", "z", "xy", "cd", "x", "ab"]),
        (["three", "one"], ["cd", "x", "ab", "ef", "cd", "ab", "uv", "", "z", "xy"]),
        (["three", "two", "one"], ["ef", "cd", "ab", "cd", "uv", "", "z", "xy", "x", "ab"]),
        (["never stored"], ["ef", "cd", "ab", "cd", "uv", "", "z", "xy", "x", "ab"]),
    ],
)
def test_what_is_renewed_goes_last(names: list[str], expected: list[str]) -> None:
    """In the order that it had, after all that is not renewed, in the order which that had."""
    tree = make_tree()
    fill_three(tree)
    tree.renew(names)
    tree.check()
    assert order(tree) == expected


def test_what_is_renewed_is_evicted_last() -> None:
    """To the last node, though it was the oldest of all; nothing of it is lost by that."""
    tree = make_tree()
    fill_three(tree)
    held, nodes = tree.used_bytes, set(tree)
    tree.renew(["one"])
    assert (tree.used_bytes, set(tree)) == (held, nodes)
    while tree.has("two") or tree.has("three"):
        assert matched(tree, "abcdef", "one") == 6
        tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
        tree.check()


def test_renewing_ten_thousand_nodes() -> None:
    """Deep or broad: nothing recurses."""
    tree = make_tree(block_tokens=1)
    put(tree, "ab" * 5000, "deep")
    for number in range(3000):
        with Insertion(tree, "broad", ids([number]), "") as insertion:
            insertion.add(1, Load(1))
    before = order(tree)
    tree.renew(["deep"])
    tree.check()
    assert order(tree) == before[10_000:] + before[:10_000]


@pytest.mark.parametrize("sequences", range(4))
def test_a_limit_on_sequences(sequences: int) -> None:
    """The oldest sequences go whole, and what they share with others stays."""
    tree = make_tree()
    for letters in ("abcdef", "uvwxyz", "abcdgh"):
        put(tree, letters)
    tree.evict_sequences(sequences, Cause.COUNT)
    tree.check()
    assert tree.sequences.total() == sequences
    expected = {
        3: {"abcdef": 6, "uvwxyz": 6, "abcdgh": 6},
        2: {"abcdef": 4, "uvwxyz": 6, "abcdgh": 6},
        1: {"abcdef": 4, "uvwxyz": 0, "abcdgh": 6},
        0: {"abcdef": 0, "uvwxyz": 0, "abcdgh": 0},
    }
    assert {key: matched(tree, key) for key in expected[3]} == expected[sequences]


def test_a_beginning_that_is_used_outlives_the_rest_of_its_sequence() -> None:
    """By number too it is the least recently used that goes, and not what lies above it.

    A system prompt that was just a hit stays, though the one chat that it is stored with is old.
    """
    tree = make_tree()
    put(tree, "abcdef")
    put(tree, "xy")
    use(tree, "ab")
    tree.evict_sequences(1, Cause.COUNT)
    tree.check()
    assert order(tree) == ["ab"]


def test_sequences_are_leaves() -> None:
    """What only leads to others is no sequence of its own, however it came; by label."""
    tree = make_tree()
    put(tree, "ab", label="system")
    assert +tree.sequences == {"system": 1}
    put(tree, "abcd", label="user")
    put(tree, "abxy", label="user")
    assert +tree.sequences == {"user": 2}
    tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
    tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
    tree.check()
    assert +tree.sequences == {"system": 1}


def test_evictions_are_counted_by_cause() -> None:
    """As many nodes and bytes as are gone, each under the reason why."""
    tree = make_tree()
    put(tree, "abcdef")
    put(tree, "uv", namespace="other")
    held = tree.used_bytes
    tree.evict_sequences(1, Cause.COUNT)
    left = tree.used_bytes
    assert tree.evicted_blocks == {Cause.COUNT: 3}
    assert tree.evicted_bytes == {Cause.COUNT: held - left}
    tree.drop("other", Cause.REPLACED)
    assert tree.evicted_blocks == {Cause.COUNT: 3, Cause.REPLACED: 1}
    assert tree.evicted_bytes == {Cause.COUNT: held - left, Cause.REPLACED: left}


def test_trimming_to_nothing_leaves_nothing() -> None:
    """Every byte and every namespace is given back."""
    tree = make_tree()
    for namespace in ("one", "other"):
        put(tree, "abcdef", namespace)
        put(tree, "abx", namespace)
    tree.evict_to(0, Cause.TRIM)
    tree.check()
    assert (len(tree), tree.tokens, tree.used_bytes) == (0, 0, 0)
    assert not tree.has("one") and not tree.has("other")


def test_dropping_a_namespace_leaves_the_others() -> None:
    """All of it goes, whatever its age, and nothing else."""
    tree = make_tree()
    put(tree, "abcd", namespace="one")
    put(tree, "abcdef", namespace="other")
    put(tree, "abxy", namespace="other")
    tree.drop("other", Cause.REPLACED)
    tree.check()
    assert order(tree) == ["cd", "ab"]
    assert tree.has("one") and not tree.has("other")
    tree.drop("never stored", Cause.REPLACED)
    assert len(tree) == 2


# The budget


def watch_the_limit(tree: BlockTree, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By how much the limit is exceeded, looked at with every single step of the count."""
    excesses: list[int] = []
    account = BlockTree._account

    def watching(self: BlockTree, block: Block, n_bytes: int) -> None:
        account(self, block, n_bytes)
        if self is tree and self.used_bytes > self.limit_bytes:
            excesses.append(self.used_bytes - self.limit_bytes)

    monkeypatch.setattr(BlockTree, "_account", watching)
    return excesses


@pytest.mark.parametrize("seed", range(8))
def test_the_limit_is_never_exceeded(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a moment: room is made before a block is counted."""
    tree = make_tree(limit_bytes=40_000)
    excesses = watch_the_limit(tree, monkeypatch)
    choose = random.Random(seed)
    for _ in range(150):
        letters = "".join(choose.choice("ab") for _ in range(choose.randrange(1, 14)))
        put(tree, letters, namespace=choose.choice("mn"), nbytes=choose.randrange(3000))
    assert tree.evicted_blocks[Cause.MEMORY] > 100
    assert excesses == []


def test_a_wide_node_does_not_exceed_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor while the dict of a node with many children grows and makes one of them go."""
    tree = make_tree(block_tokens=1)
    for token in range(100):
        put(tree, chr(token), nbytes=1)
    tree.limit_bytes = tree.used_bytes
    excesses = watch_the_limit(tree, monkeypatch)
    for token in range(100, 1000):
        put(tree, chr(token), nbytes=1)
    assert excesses == []
    assert len(tree) > 50


def test_used_bytes_are_what_python_allocates() -> None:
    """Counted to the byte, index included: the allocator says the same.

    But for 48 bytes a block, for the number in `nbytes`; and for what there is once, however many
    blocks there are: the dict of namespaces and the counters.
    """
    tree = make_tree(block_tokens=8)
    for warm in ("abcdefgh", "abcdefghi", "abcx"):
        put(tree, warm)
    tree.evict_to(0, Cause.TRIM)
    payload = Load(0)
    choose = random.Random(1)
    sequences = [
        np.array([choose.randrange(3) for _ in range(choose.randrange(100))], np.int64)
        for _ in range(300)
    ]
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for sequence in sequences:
            with Insertion(tree, MODEL, sequence, "user") as insertion:
                while insertion.tokens < len(sequence):
                    count = min(8, len(sequence) - insertion.tokens)
                    insertion.covers(count) or insertion.add(count, payload)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    tree.check()
    assert len(tree) > 1000
    assert abs(taken - tree.used_bytes) <= 48 * len(tree)


def test_the_index_costs_little() -> None:
    """At most 24 bytes a token with the block size in use, everything counted but payloads."""
    tree = make_tree(block_tokens=128)
    for user in range(8):
        sequence = np.arange(4000) + np.where(np.arange(4000) < 3000, 0, user << 20)
        with Insertion(tree, MODEL, sequence, "user") as insertion:
            while insertion.tokens < len(sequence):
                insertion.add(min(128, len(sequence) - insertion.tokens), Load(0))
    tree.check()
    assert tree.tokens >= 4000 + 7 * 1000
    assert tree.used_bytes <= 24 * tree.tokens


def test_a_block_without_room_is_not_stored() -> None:
    """It is answered with None, and what the path holds by then stays."""
    tree = make_tree()
    put(tree, "abcd")
    tree.limit_bytes = tree.used_bytes
    insertion = put(tree, "abcdef")
    assert (insertion.tokens, insertion.added_tokens) == (4, 0)
    assert matched(tree, "abcdef") == 4


def test_leading_blocks_of_what_does_not_fit_are_kept() -> None:
    """A prefix is still worth having: as many blocks as there is room for, from the first."""
    tree = make_tree(limit_bytes=6000)
    insertion = put(tree, "abcdefghijklmnop")
    assert 4 <= insertion.tokens < 16
    assert matched(tree, "abcdefghijklmnop") == insertion.tokens
    assert tree.used_bytes > 6000 - 2000


def test_a_block_that_is_refused_in_the_end_leaves_no_empty_namespace() -> None:
    """All else may have gone to make room, and yet there was too little: by a few bytes, or many.

    Every leaf holds something then too, every size is right, and the next block finds its place.
    """
    refused = 0
    for short_bytes in range(0, 2600, 20):
        for parent in ("", "ab"):
            tree = make_tree()
            for letters in ("cd", "ef"):
                put(tree, parent + letters)
            tree.limit_bytes = tree.used_bytes
            put(tree, parent + "zz", nbytes=tree.limit_bytes - short_bytes)
            refused += matched(tree, parent + "zz") == len(parent)
            put(tree, "uv", nbytes=100)
            assert matched(tree, "uv") == 2
    assert refused > 10


@pytest.mark.parametrize("extra_bytes", range(0, 1600, 40))
def test_room_is_made_for_the_parents_growth_too(extra_bytes: int) -> None:
    """A first child gives its parent a larger dict: to the byte, that fits or it does not."""
    tree = make_tree()
    put(tree, "ab")
    held = tree.used_bytes
    tree.limit_bytes = held + extra_bytes
    insertion = put(tree, "abcd")
    tree.limit_bytes = 10**9
    put(tree, "abcd")
    assert (insertion.tokens == 4) == (tree.used_bytes - held <= extra_bytes)


def test_others_make_room_for_what_is_being_added_to() -> None:
    """However long ago it was used: its path is the newest from the start."""
    tree = make_tree()
    put(tree, "ab")
    put(tree, "xy")
    tree.limit_bytes = tree.used_bytes + 300
    put(tree, "abcd")
    assert order(tree) == ["cd", "ab"]


@pytest.mark.parametrize("parent", ["", "ab"])
def test_a_node_whose_children_are_gone_is_as_before(parent: str) -> None:
    """Its dict does not stay as large as it once was."""
    tree = make_tree()
    put(tree, "zz", namespace="other")
    if parent:
        put(tree, parent)
    held = tree.used_bytes
    for letter in "cdefghijklmnopq":
        put(tree, parent + letter * 2)
    use(tree, "zz", namespace="other")
    tree.evict_to(held, Cause.TRIM)
    tree.check()
    assert tree.used_bytes == held
    assert order(tree) == ([parent] if parent else []) + ["zz"]


def test_what_can_never_fit_displaces_nothing() -> None:
    """A block larger than the whole budget does not evict what it cannot replace."""
    tree = make_tree()
    put(tree, "abcd")
    put(tree, "xy", namespace="other")
    tree.limit_bytes = tree.used_bytes
    put(tree, "uv", nbytes=tree.limit_bytes)
    put(tree, "abuv", nbytes=tree.limit_bytes)
    assert (matched(tree, "abcd"), matched(tree, "xy", namespace="other")) == (4, 2)


@pytest.mark.parametrize("children", range(1, 14))
def test_a_refused_block_leaves_every_size_right(children: int) -> None:
    """The dict that was to hold it is as large as before, or is counted anew.

    Whether its parent is a namespace or a block, has few children or many, or had more before.
    """
    for parent in ("", "ab"):
        tree = make_tree()
        for letter in "cdefghijklmno"[:children]:
            put(tree, parent + letter * 2)
        for _ in range(children - 1):
            tree.evict_to(tree.used_bytes - 1, Cause.TRIM)
        tree.check()
        tree.limit_bytes = tree.used_bytes
        put(tree, parent + "zz", nbytes=10**6)
        put(tree, "new", namespace="other", nbytes=10**6)


def test_a_failed_insertion_takes_back_what_it_added() -> None:
    """Whatever is raised: no block of it stays, no tail has given way, no namespace is new."""
    tree = make_tree()
    put(tree, "abcdx")
    put(tree, "uv")
    before = (set(tree), tree.used_bytes, tree.tokens, dict(+tree.sequences))
    for namespace, letters in [(MODEL, "abcdxyefgh"), (MODEL, "ghij"), ("other", "abcdef")]:
        with (
            pytest.raises(KeyboardInterrupt),
            Insertion(tree, namespace, ids(letters), "user") as insertion,
        ):
            while insertion.tokens < len(letters):
                insertion.add(2, Load(1000))
            raise KeyboardInterrupt
        tree.check()
        assert (set(tree), tree.used_bytes, tree.tokens, dict(+tree.sequences)) == before
    assert not tree.has("other")
    assert matched(tree, "abcdx") == 5


def test_a_failed_insertion_that_evicted_leaves_the_rest_right() -> None:
    """Room that was made stays free; what is left is whole."""
    tree = make_tree()
    put(tree, "abcd")
    put(tree, "uv")
    tree.limit_bytes = tree.used_bytes
    with pytest.raises(ValueError), Insertion(tree, MODEL, ids("uvwxyz"), "") as insertion:
        assert insertion.add(2, Load(900)) and insertion.add(2, Load(900))
        raise ValueError
    tree.check()
    assert order(tree) == ["uv"]


def test_a_path_of_ten_thousand_blocks() -> None:
    """Nothing recurses: storing, finding, using, checking, trimming and dropping it."""
    tree = make_tree(block_tokens=1)
    letters = "ab" * 5000
    assert put(tree, letters).tokens == 10_000
    assert matched(tree, letters + "c") == 10_000
    use(tree, letters)
    assert next(iter(tree)).depth_tokens() == 10_000
    tree.evict_to(tree.used_bytes // 2, Cause.TRIM)
    tree.check()
    assert 4000 < matched(tree, letters) < 6000
    tree.drop(MODEL, Cause.REPLACED)
    tree.check()
    assert len(tree) == 0


def test_a_broad_tree_is_dropped_whole() -> None:
    """Branches at every depth: none keeps the others alive."""
    tree = make_tree(block_tokens=1)
    for number in range(64):
        put(tree, f"{number:06b}")
    tree.drop(MODEL, Cause.REPLACED)
    tree.check()
    assert tree.used_bytes == 0
    assert tree.evicted_blocks[Cause.REPLACED] == 2 + 4 + 8 + 16 + 32 + 64
