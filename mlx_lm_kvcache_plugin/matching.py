"""Finds the longest prefix of a prompt that is stored; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .spaces import Space
from .store.blocks import TOKEN_BYTES, Block, Match, Tokens, before_image
from .store.prompt import TokenIds
from .store.tree import BlockTree


@dataclass(frozen=True, slots=True)
class Prefix:
    """A stored prefix of a prompt.

    Attributes:
        space: where it is stored.
        tokens: how many tokens it stands for.
        blocks: the nodes that hold its rows; all but the last are wanted whole.
        checkpoint: the node that holds the rest, if there is a rest.
    """

    space: Space
    tokens: int
    blocks: tuple[Block, ...]
    checkpoint: Block | None = None


LOOKED_AT_FIRST = 4096
"""Tokens. To make an array of a whole prompt takes most of a lookup; most prompts need that only
where they go on being stored."""


def find_longest(
    tree: BlockTree, spaces: Sequence[Space], tokens: TokenIds, longest: int
) -> Prefix | None:
    """The longest stored prefix of a prompt in any of these spaces, of at most so many tokens."""
    ids, look = _as_far_as_stored(tree, spaces, tokens, longest)
    wanted = ids[: before_image(ids, look)]
    found = [find_prefix(tree, space, wanted) for space in spaces]
    return max(filter(None, found), key=lambda prefix: prefix.tokens, default=None)


def find_common(
    tree: BlockTree, spaces: Sequence[Space], tokens: TokenIds
) -> list[tuple[Space, Match]]:
    """By space, the longest run that a prompt has in common with what is stored, of use or not.

    Where it can be cut anywhere that is short of its last token, as `find_longest` looks for it.
    """
    ids, look = _as_far_as_stored(tree, spaces, tokens, len(tokens))
    short = ids[: min(look, len(tokens) - 1)]
    return [
        (space, tree.match(space, ids[:look] if space.layout.needs_checkpoint else short))
        for space in spaces
    ]


def ways_on(node: Block, rows: int) -> Iterator[tuple[Block, int]]:
    """What is stored behind the first rows of a node: each node that has some of it, and behind how
    many of that one's own rows."""
    if rows < node.tokens:
        yield node, rows
    else:
        yield from ((child, 0) for child in node.children.values() if child.key)
    # A tail gives way to what goes on from its end, unless it bears a checkpoint.
    if node.parent is not None and (rows < node.tokens or node.is_bearer):
        common = node.key[: rows * TOKEN_BYTES]
        for other in node.parent.children.values():
            if other is not node and other.key.startswith(common):
                yield other, rows


def _as_far_as_stored(
    tree: BlockTree, spaces: Sequence[Space], tokens: TokenIds, longest: int
) -> tuple[Tokens, int]:
    """The first tokens of a prompt, one more than may be stored; and how many may be."""
    look = min(LOOKED_AT_FIRST, longest)
    while True:
        ids = np.asarray(tokens[: look + 1], np.int64)
        blocks = look // tree.block_tokens
        if look == longest or all(len(tree.walk(space, ids[:look])) < blocks for space in spaces):
            return ids, look
        look = min(4 * look, longest)


def find_prefix(tree: BlockTree, space: Space, wanted: Tokens) -> Prefix | None:
    """The longest stored prefix of these tokens that does not end inside of an image."""
    if space.layout.needs_checkpoint:
        return _find_checkpoint(tree, space, wanted)
    match = tree.match(space, wanted)
    whole_tokens = before_image(wanted, match.tokens)
    if whole_tokens < match.tokens:  # its last blocks were evicted, or had no room
        match = tree.match(space, wanted[:whole_tokens])
    return Prefix(space, match.tokens, match.blocks) if match.tokens else None


def _find_checkpoint(tree: BlockTree, space: Space, wanted: Tokens) -> Prefix | None:
    for node, position in tree.checkpoints(space, wanted):
        if before_image(wanted, position) == position:
            return Prefix(space, position, tuple(node.path()[:-1]), node)
    return None
