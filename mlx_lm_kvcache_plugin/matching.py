"""Finds the longest prefix of a prompt that is stored in one space; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from .spaces import Space
from .store.blocks import Block, Tokens, before_image
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
