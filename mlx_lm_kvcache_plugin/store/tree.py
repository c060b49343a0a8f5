"""The tree of blocks: adding, evicting, and the count of what it all takes."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

from .audit import audit
from .blocks import Block, Root, Sized, Tally
from .eviction import Cause, Evicted, RecencyList
from .lookup import Lookup

Params = ParamSpec("Params")
Result = TypeVar("Result")


def _exclusive(
    method: Callable[Concatenate[BlockTree, Params], Result],
) -> Callable[Concatenate[BlockTree, Params], Result]:
    """Make a method hold the tree's lock."""

    @functools.wraps(method)
    def call(tree: BlockTree, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        with tree.lock:
            return method(tree, *args, **kwargs)

    return call


class BlockTree(Lookup):
    """The blocks of all namespaces, and what they hold.

    Owned by one thread, which alone changes it. Others may read it while they hold `lock`: then no
    change is halfway, though what the owner is about may take several. At every moment
    `used_bytes <= limit_bytes` unless the limit was just lowered and `evict_to_limit` is still to
    come, and no leaf is a bearer.

    Args:
        block_tokens: tokens of a complete block.
        limit_bytes: what the tree may hold.

    Attributes:
        used_bytes: what it holds, index included.
        tokens: that its nodes stand for.
        sequences: the number of leaves by label. A stored sequence is a leaf: what only leads to
            others is no sequence of its own.
        bytes_by_label: `used_bytes` by the label that each node was stored with.
        evicted, evicted_bytes: what was given up, and bytes by cause, until the owner clears them.
        lock: held by every change, for no longer than it takes.
    """

    def __init__(self, block_tokens: int, limit_bytes: int) -> None:
        super().__init__(block_tokens)
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.sequences: Counter[str] = Counter()
        self.bytes_by_label: Counter[str] = Counter()
        self.evicted: list[Evicted] = []
        self.evicted_bytes: Counter[Cause] = Counter()
        self.tokens = 0
        self.lock = threading.RLock()
        self._recency: RecencyList[Block] = RecencyList()
        self._size = 0

    def __len__(self) -> int:
        """The number of nodes below the roots."""
        return self._size

    def __iter__(self) -> Iterator[Block]:
        """All nodes below the roots, from the least to the most recently used."""
        return iter(self._recency)

    def __reversed__(self) -> Iterator[Block]:
        """The same from the most to the least recently used; so parents come before children."""
        return reversed(self._recency)

    @property
    def evicted_blocks(self) -> Counter[Cause]:
        """How many nodes were given up, by cause, until the owner clears `evicted`."""
        return Counter(node.cause for node in self.evicted)

    def reset_lock(self) -> None:
        """Nobody holds it, whatever it says: after a fork the threads that did are gone."""
        self.lock = threading.RLock()

    def tally(self) -> Tally:
        """What all namespaces hold."""
        return sum((root.tally for root in self.roots()), Tally())

    @_exclusive
    def add(
        self,
        parent: Block,
        key: bytes,
        payload: Sized | None,
        label: str,
        is_bearer: bool = False,
    ) -> Block | None:
        """Store a node below `parent`, evicting what is older than its path to make room.

        Args:
            parent: its path must have been touched, so that all of it is newer than the rest.
            key: the bytes of the node's tokens; `parent` must not have it yet.

        Returns:
            The node, or None if there was no room.
        """
        block = Block(parent, key, payload, label, is_bearer)
        parent_was_leaf = self._is_leaf(parent)
        assert key not in parent.children, "blocks are immutable"
        parent.children[key] = block
        if not self._make_room(block):
            self._take_back(block, parent_was_leaf)
            return None
        if isinstance(parent, Root):
            self._roots[parent.namespace] = parent
        self.sequences[parent.label] -= parent_was_leaf
        self.sequences[label] += 1
        self._recency.append(block)
        block.used_at = time.monotonic()
        self._enter(block, 1)
        self._recount(parent)  # first: its dict may have shrunk, which was counted upon
        self._recount(block)
        return block

    def _take_back(self, block: Block, parent_was_leaf: bool) -> None:
        """Undo the link to a node that found no room; its siblings may have gone meanwhile."""
        parent = block.parent
        assert parent is not None
        del parent.children[block.key]
        # The dict may have grown for nothing: laid anew it is as small as can be.
        parent.children = {key: child for key, child in parent.children.items()}
        if not parent.nbytes:
            return  # a root that was to hold its first sequence
        self._recount(parent)
        if not parent.children and not parent_was_leaf:
            self._lose_last_child(parent)
            if parent.is_bearer:
                self.remove(parent)

    @_exclusive
    def touch(self, block: Block) -> None:
        """Mark the path of a node as just used, from the leaf to the root."""
        node, now = block, time.monotonic()
        while node.parent is not None:
            self._recency.touch(node)
            node.used_at = now
            node = node.parent

    @_exclusive
    def renew(self, namespaces: Collection[Hashable]) -> None:
        """Make all of these namespaces more recently used than anything else, in their order."""
        renewed = set[Block]()
        waiting: list[Block] = [self._roots[name] for name in namespaces if name in self._roots]
        while waiting:
            children = waiting.pop().children.values()
            renewed.update(children)
            waiting += children
        for block in [block for block in self if block in renewed]:
            self._recency.touch(block)

    @_exclusive
    def remove(self, block: Block, keep: Block | None = None) -> list[Block]:
        """Take out a leaf, and whatever above it served that leaf alone, but not `keep`.

        Returns:
            What was taken out.
        """
        gone: list[Block] = []
        node: Block | None = block
        while node is not None:
            parent = node.parent
            self._unlink(node)
            gone.append(node)
            is_useless = parent is not None and parent.is_bearer and not parent.children
            node = parent if is_useless and parent is not keep else None
        return gone

    def _unlink(self, block: Block) -> None:
        assert not block.children and block.parent is not None
        parent = block.parent
        del parent.children[block.key]
        self._recency.remove(block)
        self._enter(block, -1)
        self.sequences[block.label] -= 1
        self._account(block, -block.nbytes)
        if not parent.children:  # A dict does not shrink before it is empty.
            parent.children = {}
            self._recount(parent)
            self._lose_last_child(parent)

    def _lose_last_child(self, parent: Block) -> None:
        if isinstance(parent, Root):
            del self._roots[parent.namespace]
            self._account(parent, -parent.nbytes)
        else:
            self.sequences[parent.label] += 1

    @_exclusive
    def supersede(self, block: Block) -> None:
        """Take out the tails beside a node that it begins with: it holds all that they do."""
        assert block.parent is not None
        for key, sibling in list(block.parent.children.items()):
            shorter = 0 < len(key) < len(block.key)
            if shorter and not sibling.children and block.key.startswith(key):
                self.remove(sibling)

    @_exclusive
    def evict_to(self, n_bytes: int, cause: Cause, keep: Block | None = None) -> None:
        """Evict until at most `n_bytes` are held, or only `keep` and its path are left."""
        while self.used_bytes > n_bytes:
            victim = self._victim()
            if victim is None or victim is keep:
                break
            self._evict(victim, cause, keep)

    @_exclusive
    def evict_sequences(self, n_sequences: int, cause: Cause) -> None:
        """Evict until at most `n_sequences` are left.

        A sequence goes whole where nothing of it was used since: its blocks are the next oldest.
        """
        while self.sequences.total() > n_sequences:
            victim = self._victim()
            if victim is None:
                break
            self._evict(victim, cause)

    def drop(self, namespace: Hashable, cause: Cause) -> None:
        """Evict all of a namespace, node by node, so that nobody waits for all of it."""
        nodes: list[Block] = [self._roots[namespace]] if namespace in self._roots else []
        for node in nodes:  # which grows meanwhile
            nodes += node.children.values()
        for node in reversed(nodes[1:]):
            if node in self:  # not gone already with the last one that it bore
                self._evict(node, cause)

    def _victim(self) -> Block | None:
        """The least recently used leaf; None if all that is left is being added to."""
        oldest = self._recency.oldest
        return oldest if oldest is not None and not oldest.children else None

    def _evict(self, block: Block, cause: Cause, keep: Block | None = None) -> None:
        n_bytes = self.used_bytes
        gone = self.remove(block, keep)
        self.evicted += [
            Evicted(node.parent.chain, node.key, cause) for node in gone if node.parent
        ]
        self.evicted_bytes[cause] += n_bytes - self.used_bytes

    def _make_room(self, block: Block) -> bool:
        """Evict until `block`, already linked but not yet counted, fits beside the rest."""
        parent = block.parent
        assert parent is not None
        needed_bytes = block.measure() + parent.measure() - parent.nbytes
        if needed_bytes > self.limit_bytes:
            return False  # before anything is evicted in vain
        if self.used_bytes + needed_bytes > self.limit_bytes:
            self.supersede(block)  # the first to go is what it makes useless
        self.evict_to(self.limit_bytes - needed_bytes, Cause.MEMORY)
        return self.used_bytes + needed_bytes <= self.limit_bytes

    def _is_leaf(self, block: Block) -> bool:
        return block.parent is not None and not block.children

    def _enter(self, block: Block, sign: int) -> None:
        """Count a node that comes in, or one that goes by a sign of -1."""
        self._last_run = None
        tally, tokens = block.root.tally, block.tokens
        self._size += sign
        self.tokens += sign * tokens
        tally.tokens += sign * tokens
        tally.blocks += sign * (tokens == self.block_tokens)
        tally.checkpoints += sign * (not tokens)
        tally.tails += sign * (0 < tokens < self.block_tokens)

    def _recount(self, block: Block) -> None:
        self._account(block, block.measure() - block.nbytes)

    def _account(self, block: Block, n_bytes: int) -> None:
        """The one place where bytes are counted."""
        block.nbytes += n_bytes
        self.used_bytes += n_bytes
        self.bytes_by_label[block.label] += n_bytes
        block.root.tally.used_bytes += n_bytes

    def check(self) -> None:
        """Audit everything; raise AssertionError naming what is wrong."""
        audit(self)
