"""What is stored, as people read it: runs, where they branch, and the last used ones first.

A token is a letter, a block two of them. A run is written as the letters of its first node and how
many it has in all, and what goes on from it below.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_lm_kvcache_plugin.inspection import sequences
from mlx_lm_kvcache_plugin.inspection.sequences import FIRST_TOKENS, list_sequences
from mlx_lm_kvcache_plugin.store.blocks import Root
from mlx_lm_kvcache_plugin.store.eviction import Cause
from mlx_lm_kvcache_plugin.store.insertion import Insertion
from mlx_lm_kvcache_plugin.store.tree import BlockTree
from tests.store.trees import MODEL, Load, ids, make_tree, put, put_checkpoint, use

Node = dict[str, Any]


def words(namespace: Hashable, tokens: Sequence[int]) -> str | None:
    return "".join(map(chr, tokens))


def told(tree: BlockTree, namespace: Hashable = MODEL) -> list[Node]:
    """The nodes of a namespace."""
    with tree.lock:
        listing = list_sequences(tree)
    found = {root.namespace: nodes for root, nodes in listing.told(words).items()}
    return found.get(namespace, [])


def shape(nodes: Sequence[Node]) -> list[Any]:
    """Runs, and what goes on from each."""
    return [
        [name(node), *shape(node["children"])] if node["children"] else name(node) for node in nodes
    ]


def name(node: Node) -> str:
    return f"{node['words']} {node['tokens']}"


def every(nodes: Sequence[Node]) -> Iterator[Node]:
    """They and all below them."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node["children"]


# Runs and branches


def test_nothing_is_stored() -> None:
    """Nothing is told of it."""
    listing = list_sequences(make_tree())
    assert (listing.total, listing.shown, listing.roots) == (0, 0, {})
    assert listing.told(words) == {}


@pytest.mark.parametrize("letters", ["ab", "abcdef", "abcdefg", "a"])
def test_a_sequence_is_one_run(letters: str) -> None:
    """Blocks and the tail behind them alike."""
    tree = make_tree()
    put(tree, letters, label="user")
    (node,) = told(tree)
    assert (node["words"], node["children"]) == (letters[:2], [])
    assert node["tokens"] == node["end"] == len(letters)
    assert node["bytes"] == tree.used_bytes - tree.root(MODEL).nbytes
    assert node["kind"] == ("tail" if letters == "a" else "blocks")
    assert node["label"] == "user"
    assert 0 <= node["age_seconds"] < 60


def test_sequences_branch_where_they_differ() -> None:
    """At the border of a block; the one that was used last comes first."""
    tree = make_tree()
    put(tree, "abcdef", label="system")
    put(tree, "abcdxyz")
    put(tree, "uv")
    assert shape(told(tree)) == ["uv 2", ["ab 4", "xy 3", "ef 2"]]
    use(tree, "abcdef")
    nodes = told(tree)
    assert shape(nodes) == [["ab 4", "ef 2", "xy 3"], "uv 2"]
    assert [
        (n["end"], n["tokens"], n["label"], n["kind"]) for n in [nodes[0], *nodes[0]["children"]]
    ] == [
        (4, 4, "system", "blocks"),
        (6, 2, "system", "blocks"),
        (7, 3, "assistant", "blocks"),
    ]


def test_a_run_has_the_label_of_its_end() -> None:
    """It goes on with what another kind of sequence added."""
    tree = make_tree()
    put(tree, "ab", label="system")
    put(tree, "abcd", label="user")
    (node,) = told(tree)
    assert (name(node), node["label"]) == ("ab 4", "user")


def test_tails_beside_each_other() -> None:
    """Each is a node of its own."""
    tree = make_tree(block_tokens=4)
    for letters in ("abcdx", "abcdyz", "abcdefghi"):
        put(tree, letters)
    (node,) = told(tree)
    assert [(n["words"], n["kind"], n["end"]) for n in node["children"]] == [
        ("efgh", "blocks", 9),
        ("yz", "tail", 6),
        ("x", "tail", 5),
    ]


def test_checkpoints_have_no_words() -> None:
    """They stand at the end of what bears them, beside what goes on there."""
    tree = make_tree()
    put_checkpoint(tree, "abcde", row_bytes=10)
    put_checkpoint(tree, "abcd", row_bytes=10)
    (node,) = told(tree)
    assert (node["words"], node["kind"], node["end"]) == ("ab", "blocks", 4)
    checkpoint, tail = node["children"]
    assert (checkpoint["words"], checkpoint["kind"]) == (None, "checkpoint")
    assert (checkpoint["tokens"], checkpoint["end"], checkpoint["label"]) == (0, 4, "system")
    assert (tail["words"], tail["kind"], tail["end"]) == ("e", "tail", 5)
    assert [(n["kind"], n["end"]) for n in tail["children"]] == [("checkpoint", 5)]


def test_every_model_has_its_own() -> None:
    """The one that was used last comes first."""
    tree = make_tree()
    put(tree, "abcd", "one")
    put(tree, "abxy", "other")
    assert [root.namespace for root in list_sequences(tree).roots] == ["other", "one"]
    use(tree, "ab", "one")
    assert [root.namespace for root in list_sequences(tree).roots] == ["one", "other"]
    assert [shape(told(tree, namespace)) for namespace in ("one", "other")] == [["ab 4"]] * 2


def test_first_words_are_few() -> None:
    """Of the tokens that a run begins with; without them where nobody can say."""
    tree = make_tree(block_tokens=100)
    put(tree, "a" * 250)
    (node,) = told(tree)
    assert node["words"] == "a" * FIRST_TOKENS
    listing = list_sequences(tree)
    (nodes,) = listing.told(lambda namespace, tokens: None).values()
    assert nodes[0]["words"] is None


def test_words_begin_where_a_run_differs() -> None:
    """From others that begin alike: a little before that, with a sign that it was not the start."""
    tree = make_tree(block_tokens=40)
    for letters in ("abcdefgh" + "i" * 32, "abcdefgh" + "j" * 32, "abcx" + "k" * 36, "z" * 40):
        put(tree, letters)
    assert [node["words"] for node in told(tree)] == [
        "z" * FIRST_TOKENS,
        "abcx" + "k" * (FIRST_TOKENS - 4),
        "… efgh" + "j" * (FIRST_TOKENS - 4),
        "… efgh" + "i" * (FIRST_TOKENS - 4),
    ]
    (nodes,) = list_sequences(tree).told(lambda namespace, tokens: None).values()
    assert [node["words"] for node in nodes] == [None] * 4


def test_a_run_keeps_its_name() -> None:
    """As long as it begins alike, wherever it ends, and though it was gone; no other one has it."""
    tree = make_tree()
    put(tree, "abcd")
    put(tree, "abcd", "other")
    (node,), (other,) = told(tree), told(tree, "other")
    put(tree, "abcdef")
    put(tree, "abxy")
    (again,) = told(tree)
    assert (again["words"], again["id"]) == ("ab", node["id"])
    names = [each["id"] for each in every([*told(tree), other])]
    assert len(set(names)) == len(names) == 4
    tree.evict_to(0, Cause.TRIM)
    put(tree, "ab")
    assert [each["id"] for each in told(tree)] == [node["id"]]


def test_a_sequence_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """By when it was last used; not at all while it is being stored."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tree = make_tree()
    put(tree, "abcd")
    now = 1005.0
    put(tree, "abxy")
    now = 1012.0
    (node,) = told(tree)
    assert node["age_seconds"] == 7.0
    assert {n["words"]: n["age_seconds"] for n in node["children"]} == {"cd": 12.0, "xy": 7.0}
    with Insertion(tree, MODEL, ids("uvwx"), "user") as insertion:
        insertion.add(2, Load(1))
        assert [n["age_seconds"] for n in told(tree)] == [0.0, 7.0]


# How much is told


def test_sequences_beyond_a_number_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used last are, whole."""
    monkeypatch.setattr(sequences, "MOST_SEQUENCES", 3)
    tree = make_tree()
    for letters in ("abcd", "abxy", "uvwx", "uvyz", "ab12"):
        put(tree, letters)
    listing = list_sequences(tree)
    assert (listing.total, listing.shown) == (5, 3)
    assert shape(told(tree)) == ["ab 4", ["uv 2", "yz 2", "wx 2"]]


def test_a_model_of_which_nothing_is_shown_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the number is reached before it is its turn."""
    monkeypatch.setattr(sequences, "MOST_SEQUENCES", 1)
    tree = make_tree()
    put(tree, "abcd", "one")
    put(tree, "abxy", "other")
    assert [root.namespace for root in list_sequences(tree).roots] == ["other"]


def test_nodes_beyond_a_number_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is cut then; what is not shown of it is no sequence that is."""
    monkeypatch.setattr(sequences, "MOST_NODES", 3)
    tree = make_tree()
    put(tree, "abcdefgh")
    listing = list_sequences(tree)
    assert (listing.total, listing.shown) == (1, 0)
    (node,) = told(tree)
    assert (name(node), node["end"]) == ("ab 6", 6)


def nested(branches: int) -> BlockTree:
    """A path that another sequence has left at every block, before it was used last."""
    tree = make_tree(block_tokens=1)
    put(tree, "a" * branches)
    way = list(tree)[::-1]
    for block in way[:-1]:
        tree.add(block, ids("b").tobytes(), Load(1), "user")
    tree.touch(way[-1])
    return tree


def depth(nodes: Sequence[Node]) -> int:
    """How many are below one another."""
    level, deep = list(nodes), 0
    while level:
        level, deep = [child for node in level for child in node["children"]], deep + 1
    return deep


@pytest.mark.parametrize("branches", [50, 99, 100, 101, 1500])
def test_no_depth_is_too_much(branches: int) -> None:
    """Neither for us nor for JSON: there are never more levels than sequences."""
    nodes = told(nested(branches))
    assert depth(nodes) <= sequences.MOST_SEQUENCES < sys.getrecursionlimit() // 4
    assert json.loads(json.dumps(nodes, allow_nan=False)) == nodes
    assert max(node["end"] for node in every(nodes) if node["words"] == "a") == branches
    assert sum(not node["children"] for node in every(nodes)) == min(100, branches)


# All of it


@st.composite
def trees(draw: st.DrawFn) -> BlockTree:
    """Blocks, tails and checkpoints of two models, some of which were evicted."""
    tree = make_tree()
    letters = st.text("ab", min_size=1, max_size=9)
    for namespace, text in draw(st.lists(st.tuples(st.sampled_from("mn"), letters), max_size=12)):
        if namespace == "m":
            put(tree, text, namespace)
        else:
            put_checkpoint(tree, text, namespace, row_bytes=draw(st.sampled_from([None, 7])))
    tree.evict_to(int(tree.used_bytes * draw(st.sampled_from([1.0, 0.6]))), Cause.TRIM)
    return tree


@settings(max_examples=60, deadline=None)
@given(trees())
def test_what_is_shown_adds_up(tree: BlockTree) -> None:
    """Every byte and every token once, and nothing changes by being looked at."""
    before = [(node, node.used_at) for node in tree], tree.used_bytes
    nodes = [node for each in ("m", "n") for node in every(told(tree, each))]
    roots_bytes = sum(root.nbytes for root in tree.roots())
    assert sum(node["bytes"] for node in nodes) == tree.used_bytes - roots_bytes
    assert sum(node["tokens"] for node in nodes) == tree.tokens
    listing = list_sequences(tree)
    leaves = [node for node in nodes if not node["children"]]
    assert listing.total == listing.shown == len(leaves) == tree.sequences.total()
    assert set(listing.roots) == set(tree.roots())
    for node in nodes:
        ages = [child["age_seconds"] for child in node["children"]]
        assert all(age >= node["age_seconds"] for age in ages)
        assert len(ages) != 1 or node["children"][0]["kind"] == "checkpoint"
        for child in node["children"]:
            assert child["end"] == node["end"] + child["tokens"]
    assert ([(node, node.used_at) for node in tree], tree.used_bytes) == before


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(1, 4), st.integers(1, 12))
def test_what_is_not_shown_is_older(tree: BlockTree, most: int, nodes: int) -> None:
    """Whatever the bounds are: it is a part of all that would be shown, the newest one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "MOST_SEQUENCES", most)
        patch.setattr(sequences, "MOST_NODES", nodes)
        listing = list_sequences(tree)
    shown = sum(run.tokens for runs in listing.roots.values() for run in all_runs(runs))
    newest: list[int] = []
    for node in reversed(tree):
        newest.append(node.tokens)
        if sum(newest) >= shown and len(newest) <= nodes:
            break
    assert shown == sum(newest) or not newest
    assert listing.shown <= min(most, listing.total)
    assert all(isinstance(root, Root) for root in listing.roots)


def all_runs(runs: Sequence[sequences.Run]) -> Iterator[sequences.Run]:
    """They and all below them."""
    for run in runs:
        yield run
        yield from all_runs(run.children)
