"""What readers of a tree may count on, and a lock that tells when they may look."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from mlx_lm_kvcache_plugin.store.blocks import Block, Tally
from mlx_lm_kvcache_plugin.store.tree import BlockTree


class WatchedLock:
    """Counts who takes it; whoever has it may take it again.

    Attributes:
        taken, depth: how often it was; and how many times it is now.
        at_release: called each time that it is about to be free.
    """

    def __init__(self, at_release: Callable[[], object] = lambda: None) -> None:
        self.taken = 0
        self.at_release = at_release
        self.depth = 0

    def __enter__(self) -> None:
        self.taken += 1
        self.depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.depth == 1:
            self.at_release()
        self.depth -= 1


def assert_whole(tree: BlockTree) -> None:
    """What a reader may count on, whatever the owner of the tree is about."""
    nodes = list(reversed(tree))
    assert len(nodes) == len(tree)
    reached = 0
    total = Tally()
    for root in tree.roots():
        waiting: list[Block] = [root]
        tally = Tally(used_bytes=root.nbytes)
        for node in waiting:
            for key, child in node.children.items():
                assert (child.parent, child.key, child.root) == (node, key, root)
            waiting += node.children.values()
        for node in waiting[1:]:
            tally.used_bytes += node.nbytes
            tally.tokens += node.tokens
            tally.blocks += node.tokens == tree.block_tokens
            tally.checkpoints += not node.tokens
            tally.tails += 0 < node.tokens < tree.block_tokens
        assert tally == root.tally
        total += tally
        reached += len(waiting) - 1
    assert reached == len(set(nodes)) == len(nodes)
    assert total == tree.tally()
    assert (total.used_bytes, total.tokens) == (tree.used_bytes, tree.tokens)
