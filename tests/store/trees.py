"""Small trees for the tests of the store: a token is a letter, a block two of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_lm_kvcache_plugin.store.blocks import Block, Tokens
from mlx_lm_kvcache_plugin.store.insertion import Insertion
from mlx_lm_kvcache_plugin.store.tree import BlockTree

MODEL = "model"


@dataclass(eq=False)
class Load:
    """A payload that says how large it is."""

    nbytes: int


def make_tree(block_tokens: int = 2, limit_bytes: int = 10**9) -> BlockTree:
    return BlockTree(block_tokens, limit_bytes)


def ids(letters: Sequence[str | int]) -> Tokens:
    """Letters as tokens; what is a number is one already."""
    return np.array([ord(t) if isinstance(t, str) else t for t in letters], np.int64)


def letters_of(block: Block) -> str:
    return "".join(chr(token) for token in np.frombuffer(block.key, np.int64))


def put(
    tree: BlockTree,
    letters: str,
    namespace: Hashable = MODEL,
    nbytes: int = 1000,
    label: str = "assistant",
) -> Insertion:
    """Store a sequence as the composer does: the missing blocks, then the tail."""
    with Insertion(tree, namespace, ids(letters), label) as insertion:
        while (missing := len(letters) - insertion.tokens) > 0:
            count = min(missing, tree.block_tokens)
            if count < tree.block_tokens and insertion.covers(count):
                break
            if not insertion.add(count, Load(nbytes)):
                break
    tree.check()
    return insertion


def put_checkpoint(
    tree: BlockTree,
    letters: Sequence[str | int],
    namespace: Hashable = MODEL,
    nbytes: int = 1000,
    label: str = "system",
    row_bytes: int | None = None,
) -> Insertion:
    """Store a checkpoint as the composer does: bearers down to its position, and then itself.

    Args:
        row_bytes: what a bearer holds; None if the model has no rows.
    """
    with Insertion(tree, namespace, ids(letters), label, bears=True) as insertion:
        has_room = True
        while has_room and (missing := len(letters) - insertion.tokens) > 0:
            count = min(missing, tree.block_tokens)
            payload = None if row_bytes is None else Load(row_bytes)
            has_room = insertion.enter(count) or insertion.add(count, payload)
        if has_room and not insertion.enter(0):
            insertion.add(0, Load(nbytes))
    tree.check()
    return insertion


def matched(tree: BlockTree, letters: str, namespace: Hashable = MODEL) -> int:
    """How many of the letters are stored."""
    return tree.match(namespace, ids(letters)).tokens


def use(tree: BlockTree, letters: str, namespace: Hashable = MODEL) -> None:
    """Touch the path that matches, as a fetch does."""
    tree.touch(tree.match(namespace, ids(letters)).blocks[-1])
    tree.check()


def order(tree: BlockTree) -> list[str]:
    """What the nodes stand for, from the next one to be evicted on."""
    return [letters_of(block) for block in tree]
