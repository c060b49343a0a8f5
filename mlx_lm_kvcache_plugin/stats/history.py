"""What was stored before: why it is gone, and what stores of other sizes would still hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..store.blocks import TOKEN_BYTES, Block, Root, chain_of
from ..store.eviction import Cause, Evicted
from ..store.prompt import TokenIds
from .evictions import RecentEvictions
from .ghosts import Ghosts

SCALES = (0.5, 2.0, 4.0)
"""Of the budget, for which it is told what would have been a hit."""

MOST_NAMESPACES = 64

LOOKED_AT_ONCE = 4096
"""Tokens of a prompt; most are stored no further."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What would have been a hit so far.

    Attributes:
        prompt_tokens: of all requests.
        hit_tokens: those that were a hit in memory.
        at: by scale of the budget, those that would have been; without a scale of which too few
            chains could be kept.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    at: dict[float, int] = field(default_factory=lambda: dict.fromkeys(SCALES, 0))


class History:
    """Told by the owner of a tree what is asked for, used and evicted.

    Args:
        block_tokens: tokens of a complete block.

    Attributes:
        block_tokens: as it was given.
        predicted: replaced at every request, so that any thread may read it.
    """

    def __init__(self, block_tokens: int) -> None:
        self.predicted = Predicted()
        self.block_tokens = block_tokens
        self._evictions = RecentEvictions(block_tokens)
        self._ghosts = Ghosts(SCALES, block_tokens)
        self._roots: OrderedDict[Hashable, dict[int, bool]] = OrderedDict()
        self._told_scales = set(SCALES)

    def roots(self, namespace: Hashable) -> dict[int, bool]:
        """The chains that sequences of a namespace began with, whether or not any is left; and
        which of them can be restored at checkpoints alone."""
        return self._roots.get(namespace, {})

    def evicted(self, nodes: Sequence[Evicted]) -> None:
        """These were given up."""
        causes = {node.cause for node in nodes}
        if Cause.CLEARED in causes:
            self._ghosts.clear()  # whoever had more memory would have lost them too
            self._evictions.clear()  # nothing is kept of what was to go
            return
        if Cause.REPLACED in causes:
            self._ghosts.forget_roots({n.parent for n in nodes if n.cause is Cause.REPLACED})
        self._evictions.add(nodes)

    def lost_rows(
        self, chain: int, start: int, tokens: TokenIds, hit_tokens: int
    ) -> tuple[int, Cause] | None:
        """How much of a prompt would have been a hit but for rows that were given up, and why they
        were; None if that is no loss.

        Args:
            chain: of its last whole block that is there, or its root.
            start: the position at which that ends.
        """
        least_tokens = self._least_loss(tokens, hit_tokens) - start
        gone = self._evictions.rows(chain, self._keys(tokens, start, len(tokens) - 1), least_tokens)
        return None if gone is None else (start + gone[0], gone[1])

    def lost_checkpoint(
        self, root: int, tokens: TokenIds, hit_tokens: int, held_tokens: int
    ) -> tuple[int, Cause] | None:
        """The same but for a checkpoint.

        Args:
            root: the chain that the prompt begins with.
            held_tokens: as many of its tokens are there in whole blocks.
        """
        least_tokens = self._least_loss(tokens, hit_tokens)
        keys = self._keys(tokens, 0, len(tokens) - 1)  # the last token is computed in any case
        return self._evictions.checkpoint(root, keys, least_tokens, held_tokens)

    def _least_loss(self, tokens: TokenIds, hit_tokens: int) -> int:
        """How much of a prompt would have to have been a hit for it to be a loss that less was.

        That is a block more, or half of the rest: all prompts of a template begin alike.
        """
        return hit_tokens + max(1, min(self.block_tokens, (len(tokens) - hit_tokens) // 2))

    def found_no_room(self) -> None:
        """A sequence is larger than the budget: what a larger one would have held is not known."""
        self._told_scales = {scale for scale in SCALES if scale < 1}

    def thinned(self, checkpoints: Sequence[Block]) -> None:
        """Later ones have made these needless, whatever the limit."""
        self._ghosts.forget([node.chain for node in checkpoints])

    def used(
        self,
        namespace: Hashable,
        tip: Block,
        has_checkpoints: bool,
        limit: int,
        tokens: TokenIds = (),
    ) -> None:
        """A sequence was stored, or used up to some node.

        Args:
            tip: that node, in the tree.
            has_checkpoints: whether it can be restored at checkpoints alone.
            limit: the budget in bytes.
            tokens: all of what was to be stored, whether or not there was room for it.
        """
        path, root = tip.path(), tip.root
        if not path:
            return
        self._roots.setdefault(namespace, {})[root.chain] = has_checkpoints
        self._roots.move_to_end(namespace)
        if len(self._roots) > MOST_NAMESPACES:
            self._ghosts.forget_roots(self._roots.popitem(last=False)[1])
        self._evictions.forget(path)
        if not has_checkpoints:
            chains = [node.chain for node in path if node.tokens == self.block_tokens]
            for key in self._keys(tokens, len(chains) * self.block_tokens):
                if len(key) == self.block_tokens * TOKEN_BYTES:
                    chains.append(chain_of(chains[-1] if chains else root.chain, key))
            self._use(root, chains, root.tally.blocks, limit)
        elif not tip.tokens:
            behind = path[-2] if len(path) > 1 else root
            is_tail = 0 < behind.tokens < self.block_tokens
            block = behind.parent if is_tail else behind
            if block is not None:
                self._ghosts.note_checkpoint(block.chain, behind.tokens if is_tail else 0)
            self._use(root, [tip.chain], root.tally.checkpoints, limit)

    def _use(self, root: Root, chains: Sequence[int], units: int, limit: int) -> None:
        if chains and units:
            self._ghosts.use(root.chain, chains, root.tally.used_bytes / units, limit)

    def asked(self, namespace: Hashable, tokens: TokenIds, hit_tokens: int) -> None:
        """A prompt was looked up.

        Args:
            hit_tokens: how many of its tokens were a hit in memory.
        """
        most = max(0, len(tokens) - 1)
        held = dict.fromkeys(SCALES, 0)
        for root, has_checkpoints in self._roots.get(namespace, {}).items():
            if has_checkpoints:
                found = self._ghosts.held_checkpoints(root, self._keys(tokens), most)
            else:
                found = self._ghosts.held_blocks(root, self._keys(tokens))
            held = {scale: max(held[scale], min(most, found[scale])) for scale in SCALES}
        before = self.predicted
        self.predicted = Predicted(
            before.prompt_tokens + len(tokens),
            before.hit_tokens + hit_tokens,
            {
                scale: before.at[scale] + self._hit(scale, hit_tokens, held[scale])
                for scale in before.at
                if scale in self._told_scales and not self._ghosts.lists[scale].is_cut
            },
        )

    def _hit(self, scale: float, hit_tokens: int, held_tokens: int) -> int:
        """What a prompt would have hit with another budget; what was hit is known to the token."""
        if scale > 1:
            return max(hit_tokens, held_tokens)
        return hit_tokens if held_tokens > hit_tokens - self.block_tokens else held_tokens

    def _keys(self, tokens: TokenIds, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The tokens of a prompt's blocks from `start` on, the last of which need not be whole."""
        end = len(tokens) if end is None else end
        width = self.block_tokens * TOKEN_BYTES
        at_once = self.block_tokens * max(1, LOOKED_AT_ONCE // self.block_tokens)
        for begin in range(start, end, at_once):
            data = np.asarray(tokens[begin : min(begin + at_once, end)], np.int64).tobytes()
            yield from (data[place : place + width] for place in range(0, len(data), width))
