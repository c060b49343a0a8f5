"""The tree of what is stored, as people read it: runs of blocks, and where they branch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np

from ..store.blocks import Block, Root, common_tokens
from ..store.tree import BlockTree

MOST_SEQUENCES = 100
MOST_NODES = 4000
"""So that it takes no longer than some ten milliseconds, in which nothing can be stored."""

FIRST_TOKENS, COMMON_TOKENS = 24, 4
"""Of a run, for its first words; and of those that another one begins with too."""

Words = Callable[[Hashable, list[int]], str | None]
"""What the tokens of a root's sequences say; None where it cannot be told."""


@dataclass(slots=True)
class Run:
    """Nodes below one another of which each but the last has one child.

    Attributes:
        id: the same as long as it begins alike.
        first: the tokens that it begins with, or soon after that, those that no other one has.
        is_cut: whether it begins before them.
        tokens: that it stands for.
        end: the position in its sequence at which it ends.
        nbytes: what it holds.
        used_at: when it was last used, as its nodes tell it.
        label: of its last node.
        kind: of its first one.
    """

    id: str
    first: list[int]
    is_cut: bool
    tokens: int
    end: int
    nbytes: int
    used_at: float
    label: str
    kind: str
    children: list[Run] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Listing:
    """What is stored, the most recently used sequences first.

    Attributes:
        total: how many sequences there are.
        shown: how many of them are in `roots`.
        roots: the runs below each root.
    """

    total: int
    shown: int
    roots: dict[Root, list[Run]]

    def told(self, words: Words) -> dict[Root, list[dict[str, Any]]]:
        """The runs of each root as JSON holds them."""
        now = time.monotonic()
        return {
            root: [_told(run, root.namespace, words, now) for run in runs]
            for root, runs in self.roots.items()
        }


def list_sequences(tree: BlockTree, most: int | None = None) -> Listing:
    """List what a tree holds. The caller holds its lock.

    Args:
        most: how many sequences to list; by default `MOST_SEQUENCES`.
    """
    most = MOST_SEQUENCES if most is None else most
    below: defaultdict[Block, list[Block]] = defaultdict(list)
    shown = ways = 0
    for node in islice(reversed(tree), MOST_NODES):  # parents come before their children
        assert node.parent is not None
        ways += isinstance(node.parent, Root) or node.parent in below
        if ways > most:
            break
        below[node.parent].append(node)
        shown += not node.children
    step = tree.block_tokens
    roots = {root: _runs(root, below, step) for root in list(below) if isinstance(root, Root)}
    return Listing(tree.sequences.total(), shown, roots)


def _runs(root: Root, below: dict[Block, list[Block]], step: int) -> list[Run]:
    found: list[Run] = []
    waiting: list[tuple[Block, int, list[Run]]] = [(root, 0, found)]
    for parent, start, runs in waiting:  # which grows meanwhile
        siblings = below.get(parent, [])
        for node, common in zip(siblings, _common_with_another(siblings), strict=True):
            run = _run_from(node, start, common, step)
            runs.append(run)
            last = node
            while len(below.get(last, ())) == 1 and below[last][0].tokens:
                last = below[last][0]
                run.tokens += last.tokens
                run.nbytes += last.nbytes
                run.label = last.label
            run.end = start + run.tokens
            waiting.append((last, run.end, run.children))
    return found


def _common_with_another(siblings: list[Block]) -> list[int]:
    """For each one, how many tokens it has in common with the one that is most like it."""
    common = dict.fromkeys(siblings, 0)
    for one, other in pairwise(sorted(siblings, key=lambda node: node.key)):
        shared = common_tokens(one.key, other.key)
        common[one], common[other] = max(common[one], shared), max(common[other], shared)
    return list(common.values())


def _run_from(node: Block, start: int, common: int, step: int) -> Run:
    begin = max(0, common - COMMON_TOKENS)
    tokens = np.frombuffer(node.key, np.int64)[begin:][:FIRST_TOKENS].tolist()
    kind = "checkpoint" if not node.tokens else "tail" if node.tokens < step else "blocks"
    return Run(
        f"{node.chain & 0xFFFFFFFFFFFFFFFF:x}",
        tokens,
        begin > 0,
        node.tokens,
        start,
        node.nbytes,
        node.used_at,
        node.label,
        kind,
    )


def _told(run: Run, namespace: Hashable, words: Words, now: float) -> dict[str, Any]:
    """As JSON holds it. No deeper than there are sequences."""
    text = words(namespace, run.first) if run.first else None
    return {
        "id": run.id,
        "tokens": run.tokens,
        "end": run.end,
        "bytes": run.nbytes,
        "age_seconds": max(0.0, now - run.used_at),
        "label": run.label,
        "kind": run.kind,
        "words": f"… {text}" if text is not None and run.is_cut else text,
        "children": [_told(child, namespace, words, now) for child in run.children],
    }
