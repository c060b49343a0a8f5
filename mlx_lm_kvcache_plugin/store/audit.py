"""The self-check of the block tree: slow, complete, and independent of how the tree counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from .blocks import Block, Tally, chain_of

if TYPE_CHECKING:
    from .tree import BlockTree


def audit(tree: BlockTree) -> None:
    """Sizes add up, links agree; no orphan, no cycle, no useless node.

    Raises:
        AssertionError: naming what is wrong.
    """
    roots = tree.roots()
    reached = _reach(roots)
    listed = list(islice(tree, len(tree) + 1))  # a circle has no end
    assert set(reached) == set(listed), "the tree and the recency list differ"
    assert len(listed) == len(tree), "the number of nodes is wrong"
    rank = {node: place for place, node in enumerate(listed)}
    for node in reached:
        _check_node(node, rank, tree.block_tokens)
    assert all(root.children for root in roots), "a root without children was kept"
    _check_counts(tree, [*roots, *reached])


def _reach(roots: Sequence[Block]) -> list[Block]:
    """All nodes below the roots."""
    seen: set[Block] = set()
    waiting = [child for root in roots for child in root.children.values()]
    while waiting:
        node = waiting.pop()
        assert node not in seen, "a node is reached twice"
        seen.add(node)
        waiting += node.children.values()
    return list(seen)


def _check_node(node: Block, rank: dict[Block, int], block_tokens: int) -> None:
    parent = node.parent
    assert parent is not None and parent.children.get(node.key) is node, "a link is broken"
    assert node.tokens <= block_tokens, "a block is too long"
    assert node.children or not node.is_bearer, "a leaf bears nothing"
    assert node.payload is not None or node.is_bearer, "a node that bears nothing holds nothing"
    if parent in rank:
        assert rank[parent] > rank[node], "a parent is older than its child"
        complete = parent.tokens == block_tokens
        assert complete or not node.key, "a tail bears more than a checkpoint"


def _check_counts(tree: BlockTree, nodes: list[Block]) -> None:
    assert all(node.nbytes == node.measure() for node in nodes), "a node's size is stale"
    assert tree.used_bytes == sum(node.nbytes for node in nodes), "used_bytes does not add up"
    assert tree.used_bytes <= tree.limit_bytes, "the limit is exceeded"
    assert tree.tokens == sum(node.tokens for node in nodes), "tokens do not add up"
    leaves = Counter(node.label for node in nodes if not node.children)
    assert +tree.sequences == leaves, "the number of sequences is wrong"
    by_label: Counter[str] = Counter()
    for node in nodes:
        by_label[node.label] += node.nbytes
    assert +tree.bytes_by_label == by_label, "bytes by label do not add up"
    assert tree.tally() == _tally(tree, nodes), "what the roots tell does not add up"
    assert all(node.chain == _chain(node) for node in nodes), "a chain is wrong"


def _tally(tree: BlockTree, nodes: list[Block]) -> Tally:
    kinds = Counter(
        "checkpoint" if not node.tokens else "tail" if node.tokens < tree.block_tokens else "block"
        for node in nodes
        if node.parent is not None
    )
    tokens = sum(node.tokens for node in nodes)
    return Tally(tree.used_bytes, kinds["block"], kinds["tail"], kinds["checkpoint"], tokens)


def _chain(node: Block) -> int:
    return chain_of(node.parent.chain, node.key) if node.parent else hash(node.root.namespace)
