"""Finding in the tree of blocks: exact to the token, and without a trace."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mlx_lm_kvcache_plugin.store.insertion import Insertion
from tests.store.trees import (
    MODEL,
    Load,
    ids,
    letters_of,
    make_tree,
    matched,
    order,
    put,
    put_checkpoint,
)


@pytest.mark.parametrize(
    ("wanted", "tokens"),
    [
        ("abcdefg", 7),
        ("abcdefgh", 7),
        ("abcdef", 6),
        ("abcde", 5),
        ("abcdx", 4),
        ("abcx", 3),
        ("ax", 1),
        ("a", 1),
        ("xbcdefg", 0),
        ("", 0),
        ("bcdefg", 0),
    ],
)
def test_a_match_is_exact_to_the_token(wanted: str, tokens: int) -> None:
    """Whole blocks, then the longest run inside of one more block or tail."""
    tree = make_tree()
    put(tree, "abcdefg")
    match = tree.match(MODEL, ids(wanted))
    assert match.tokens == tokens
    assert "".join(map(letters_of, match.blocks))[:tokens] == wanted[:tokens]
    assert sum(block.tokens for block in match.blocks[:-1]) + match.rows == tokens


def test_the_longest_of_several_runs_is_found() -> None:
    """However many siblings begin alike, and in whichever order they came."""
    for order_of_arrival in (["abcd", "abce", "abx", "a"], ["a", "abx", "abce", "abcd"]):
        tree = make_tree(block_tokens=4)
        for letters in order_of_arrival:
            put(tree, letters)
        assert matched(tree, "abcey") == 4
        assert matched(tree, "abcz") == 3
        assert matched(tree, "abxz") == 3


def test_a_short_sequence_hides_no_longer_one() -> None:
    """A stored prefix of its own is one match among others, and never the better one."""
    for sequences in (["abc", "abcdefgh"], ["abcdefgh", "abc"]):
        tree = make_tree(block_tokens=4)
        for letters in sequences:
            put(tree, letters)
        assert matched(tree, "abcdefgx") == 7


def test_namespaces_never_meet() -> None:
    """The same tokens of another model are other tokens."""
    tree = make_tree()
    put(tree, "abcd", namespace="one")
    assert matched(tree, "abcd", namespace="other") == 0
    assert tree.has("one") and not tree.has("other")


def test_looking_up_changes_nothing() -> None:
    """Neither the order nor the namespaces that are known."""
    tree = make_tree()
    put(tree, "abcd")
    put(tree, "xy")
    before = order(tree)
    matched(tree, "abcd")
    tree.match("other", ids("abcd"))
    tree.root("other")
    assert order(tree) == before
    assert not tree.has("other")


@pytest.mark.parametrize("token", [-(2**60) + 1, -1, 0, 2**31, 2**63 - 1, -(2**63)])
def test_ids_have_64_bits(token: int) -> None:
    """Images come with negative ids of 60 bits; none is taken for another one."""
    tree = make_tree()
    sequence = np.array([7, token, token, 9, token], np.int64)
    with Insertion(tree, MODEL, sequence, "") as insertion:
        for count in (2, 2, 1):
            insertion.add(count, Load(1))
    tree.check()
    assert tree.match(MODEL, sequence).tokens == 5
    for position in range(5):
        other = sequence.copy()
        other[position] ^= 1 << 40
        assert tree.match(MODEL, other).tokens == position


def test_bytes_of_a_token_are_not_shared_between_tokens() -> None:
    """Keys are compared token by token: one whose first bytes agree is another one."""
    tree = make_tree()
    put(tree, "ab")
    assert tree.match(MODEL, np.array([ord("a") + 256, ord("b")], np.int64)).tokens == 0
    assert tree.match(MODEL, np.array([ord("a"), ord("b") + 2**40], np.int64)).tokens == 1


@pytest.mark.parametrize("seed", range(10))
def test_the_longest_run_is_the_naive_one(seed: int) -> None:
    """Among many siblings of every length, blocks, tails and bearers: as by comparing each."""
    choose = random.Random(seed)
    tree = make_tree(block_tokens=6)

    def letters() -> str:
        return "".join(choose.choice("ab") for _ in range(choose.randrange(1, 7)))

    for _ in range(choose.randrange(1, 40)):
        (put_checkpoint if seed % 2 else put)(tree, letters())
    siblings = [letters_of(block) for block in tree.root(MODEL).children.values()]
    for _ in range(50):
        wanted = letters() + choose.choice(["", "x", "abab"])
        runs = [
            sum(wanted.startswith(sibling[:end]) for end in range(1, len(sibling) + 1))
            for sibling in siblings
        ]
        node, run = tree.longest_run(tree.root(MODEL), ids(wanted))
        assert run == max(runs)
        assert (letters_of(node)[:run] if node else "") == wanted[:run]


def test_thousands_of_siblings() -> None:
    """A system prompt that is followed by anything: one more question about one of them."""
    tree = make_tree(block_tokens=8)
    put(tree, "abcdefgh")
    for number in range(3000):
        with Insertion(tree, MODEL, ids(f"abcdefgh{number:08}"), "") as insertion:
            insertion.add(8, Load(1))
    tree.check()
    assert matched(tree, "abcdefgh00001234") == 16
    assert matched(tree, "abcdefgh00001299x") == 16
    assert matched(tree, "abcdefgh0000299x") == 15
    assert matched(tree, "abcdefgh00003500") == 12
    assert matched(tree, "abcdefgh9") == 8
