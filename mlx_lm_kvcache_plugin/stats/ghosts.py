"""What stores of other sizes would hold, by chains alone, and what they would have hit.

A block is held where its last use lies among the most recent ones, up to the limit: the store gives
up what was used least recently, and whoever uses a block uses what leads to it. So a list of chains
in the order of their use, as long as the limit has room for, tells what a store of that size would
hold, and needs no tensors. (The ghost lists of ARC: Megiddo and Modha, FAST 2003.)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence

from ..store.blocks import CHECKPOINT, TOKEN_BYTES, chain_of

LEAST_KEYS, MOST_KEYS = 1 << 12, 1 << 19
"""How many chains a list may have, whatever the limit."""

BYTES_A_KEY = 1 << 16
"""Of the limit, for each chain that a list may have: all lists together take about 1% of it."""


class GhostList:
    """Chains from the least to the most recently used, as many as a store of some size would hold.

    Attributes:
        is_cut: whether it ever had more of them than may be kept.
    """

    def __init__(self) -> None:
        self._roots: OrderedDict[int, int] = OrderedDict()
        self._counts: Counter[int] = Counter()
        self.is_cut = False

    def __contains__(self, chain: int) -> bool:
        return chain in self._roots

    def __len__(self) -> int:
        return len(self._roots)

    @property
    def roots(self) -> set[int]:
        """Those that it has chains of."""
        return set(self._counts)

    def touch(self, chain: int, root: int) -> None:
        """Make a chain the most recently used one."""
        if chain in self._roots:
            self._roots.move_to_end(chain)
        else:
            self._roots[chain] = root
            self._counts[root] += 1

    def shrink(self, limit_bytes: float, weights: Mapping[int, float], most: int) -> None:
        """Give up the least recently used ones.

        Args:
            limit_bytes: what all may weigh.
            weights: bytes of one, by its root.
            most: how many there may be.
        """
        used_bytes = sum(count * weights[root] for root, count in self._counts.items())
        while self._roots and (used_bytes > limit_bytes or len(self._roots) > most):
            self.is_cut = self.is_cut or used_bytes <= limit_bytes
            oldest = next(iter(self._roots))
            used_bytes -= weights[self._roots[oldest]]
            self.discard(oldest)

    def discard(self, chain: int) -> None:
        """Give up a chain, if it is there."""
        root = self._roots.pop(chain, None)
        if root is not None:
            self._counts[root] -= 1
            if not self._counts[root]:
                del self._counts[root]

    def discard_roots(self, roots: Container[int]) -> None:
        """Give up all below these."""
        for chain in [chain for chain, root in self._roots.items() if root in roots]:
            self.discard(chain)

    def clear(self) -> None:
        """Give up all."""
        self._roots.clear()
        self._counts.clear()


class Ghosts:
    """Ghost lists at several scales of the budget. What is used is a block; where a model can be
    restored at checkpoints alone, it is a checkpoint.

    Args:
        scales: of the budget.
        block_tokens: tokens of a complete block.

    Attributes:
        lists: by scale.
    """

    def __init__(self, scales: Sequence[float], block_tokens: int) -> None:
        self.lists = {scale: GhostList() for scale in scales}
        self._step = block_tokens
        self._weights: dict[int, float] = {}
        self._tails: OrderedDict[int, set[int]] = OrderedDict()

    def use(self, root: int, chains: Sequence[int], weight_bytes: float, limit_bytes: int) -> None:
        """Note what was just used, or stored, in every list.

        Args:
            root: the chain that they begin with.
            chains: from the root's side.
            weight_bytes: of each of this root's, with its share of all else that is held.
            limit_bytes: the budget.
        """
        self._weights[root] = weight_bytes
        most = min(MOST_KEYS, max(LEAST_KEYS, limit_bytes // BYTES_A_KEY))
        for scale, ghosts in self.lists.items():
            for chain in reversed(chains):
                ghosts.touch(chain, root)
            ghosts.shrink(scale * limit_bytes, self._weights, most)
        held = set().union(*(ghosts.roots for ghosts in self.lists.values()))
        for gone in self._weights.keys() - held:
            del self._weights[gone]

    def note_checkpoint(self, block: int, tail_tokens: int) -> None:
        """There is a checkpoint so many tokens behind a whole block, or the root."""
        self._tails.setdefault(block, set()).add(tail_tokens)
        self._tails.move_to_end(block)
        while len(self._tails) > LEAST_KEYS:
            self._tails.popitem(last=False)

    def held_blocks(self, root: int, keys: Iterable[bytes]) -> dict[float, int]:
        """How many tokens of a prompt each list holds, by its whole blocks.

        Args:
            keys: the blocks' tokens.
        """
        held = dict.fromkeys(self.lists, 0)
        going, chain = set(self.lists), root
        for place, key in enumerate(keys):
            chain = chain_of(chain, key)
            going = {scale for scale in going if chain in self.lists[scale]}
            if not going:
                break
            held.update(dict.fromkeys(going, (place + 1) * self._step))
        return held

    def held_checkpoints(self, root: int, keys: Iterable[bytes], most: int) -> dict[float, int]:
        """The same by its deepest checkpoint.

        Args:
            keys: the tokens of its blocks, the last of which need not be whole.
            most: tokens that may be held.
        """
        held = dict.fromkeys(self.lists, 0)
        chain = root
        for place, key in enumerate(keys):
            for tokens in sorted(self._tails.get(chain, ())):
                position = place * self._step + tokens
                tail = key[: tokens * TOKEN_BYTES]
                if position <= most and len(tail) == tokens * TOKEN_BYTES:
                    checkpoint = checkpoint_chain(chain, tail)
                    for scale, ghosts in self.lists.items():
                        if checkpoint in ghosts:
                            held[scale] = position
            chain = chain_of(chain, key)
        return held

    def forget(self, chains: Iterable[int]) -> None:
        """These were given up, whatever the limit."""
        for chain in chains:
            for ghosts in self.lists.values():
                ghosts.discard(chain)

    def forget_roots(self, roots: Container[int]) -> None:
        """All below these was given up, whatever the limit."""
        for ghosts in self.lists.values():
            ghosts.discard_roots(roots)

    def clear(self) -> None:
        """Everything was given up, whatever the limit."""
        for ghosts in self.lists.values():
            ghosts.clear()


def checkpoint_chain(block: int, tail: bytes) -> int:
    """The chain of a checkpoint behind a whole block, or the root, and a tail that may be empty."""
    return chain_of(chain_of(block, tail) if tail else block, CHECKPOINT)
