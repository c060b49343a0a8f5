"""Giving up checkpoints of a conversation that later ones have made needless.

A conversation sets checkpoints at every turn, each with a whole copy of its states. Most requests
resume at one of the last. The farther back a request leaves the conversation, the rarer it is: what
is farther back is kept in steps that grow with the distance, so that their number grows with its
logarithm, and what has to be computed anew is at most twice what is left behind, and a block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

from .blocks import TOKEN_BYTES, Block, Tokens, common_tokens
from .tree import BlockTree

SYSTEM, USER, PROMPT, GENERATED = "system", "user", "prompt", "assistant"
"""Labels of checkpoints: at the end of the system prompt, of a user's turn, of any other part of a
prompt, and of what was generated behind it."""

RANK = {USER: 0, PROMPT: 1, GENERATED: 2}
"""Where a request leaves a conversation, the likeliest first: what was generated comes back
changed, its thinking stripped and its tool calls rendered anew; what was a prompt does not."""

SPREAD = 3
"""How many times as far from the end as one checkpoint the next one back may be, beside a block."""

Placed = tuple[Block, int]
"""A checkpoint and the position at which it stands."""


def thin(tree: BlockTree, namespace: Hashable, tokens: Tokens, newest: Block) -> list[Block]:
    """Take out what the newest checkpoint of a sequence makes needless.

    Args:
        namespace, tokens: the sequence, at whose end the newest checkpoint stands.
        newest: just added.

    Returns:
        The checkpoints that are gone; each still knows its path.
    """
    needless: list[Block] = []
    way = _Way(tree, namespace, tokens)
    older = [placed for placed in tree.checkpoints(namespace, tokens) if placed[0] is not newest]
    # Behind a system prompt it may be another conversation that leaves.
    if newest.label != GENERATED and older and older[0][0].label != SYSTEM:
        needless = way.abandoned(older[0][1])
        for node in needless:
            tree.remove(node)
    kept = kept_of(older, len(tokens), tree.block_tokens)
    for (node, position), (_, following) in pairwise([*reversed(older), (newest, len(tokens))]):
        if node not in kept and not way.is_left_between(position, following):
            tree.remove(node)
            needless.append(node)
    return needless


def kept_of(older: Sequence[Placed], end: int, step: int) -> set[Block]:
    """The checkpoints to keep beside a newer one at `end`.

    All system prompts; the last of a prompt and the last of a user's turn, where the next turn will
    most likely resume; and of the others those without which the next one back would be too far
    from the one before it. As the end moves on, none of them can become too far for that.

    Args:
        older: the deepest first.
        step: tokens of a block.
    """
    needed = {node for node, _ in older if node.label == SYSTEM}
    for labels in ({USER}, {USER, PROMPT}):
        needed.update([node for node, _ in older if node.label in labels][:1])
    left = list(older)
    for rank in reversed(range(len(RANK) + 1)):  # the likeliest to be left at are the last to go
        kept, nearer = [], end
        next_back = [*(position for _, position in left[1:]), 0]
        for (node, position), farther in zip(left, next_back, strict=False):
            is_too_far = end - farther > SPREAD * (end - nearer) + step
            if is_too_far or node in needed or RANK.get(node.label, len(RANK)) != rank:
                kept.append((node, position))
                nearer = position
        left = kept
    return {node for node, _ in left}


class _Way:
    """The way to a checkpoint, and what leaves it."""

    def __init__(self, tree: BlockTree, namespace: Hashable, tokens: Tokens) -> None:
        self._parents = [tree.root(namespace), *tree.walk(namespace, tokens)]
        self._data = tokens.tobytes()
        self._step = tree.block_tokens

    def is_left_between(self, start: int, stop: int) -> bool:
        """Whether another sequence leaves the way at a token from `start` on and before `stop`."""
        return any(start <= leaves < stop for _, leaves in self._branches(start, stop))

    def abandoned(self, start: int) -> list[Block]:
        """The checkpoints of what leaves the way behind `start` and was generated, nothing else.

        What goes on from its very end is not abandoned yet.
        """
        found: list[Block] = []
        end = len(self._data) // TOKEN_BYTES
        for branch, leaves in self._branches(start, end):
            nodes = list(_nodes_from(branch)) if start <= leaves < end else []
            if all(node.label == GENERATED for node in nodes):
                found += [node for node in nodes if not node.tokens]
        return found

    def _branches(self, start: int, stop: int) -> Iterator[tuple[Block, int]]:
        """What hangs beside the way there, and the position at which each leaves it."""
        for depth in range(start // self._step, min(len(self._parents), stop // self._step + 1)):
            position = depth * self._step
            rest = self._data[position * TOKEN_BYTES : (position + self._step) * TOKEN_BYTES]
            for key, child in self._parents[depth].children.items():
                if not rest.startswith(key):
                    yield child, position + common_tokens(key, rest)


def _nodes_from(branch: Block) -> Iterator[Block]:
    """A node and all below it. One that came with a prompt tells so even if its checkpoint went."""
    waiting = [branch]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()
