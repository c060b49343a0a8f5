"""Finds out why no more of a prompt was a hit; changes nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .events import Reason, Stop
from .matching import find_common, ways_on
from .spaces import Space, Spaces
from .stats.history import History
from .store.blocks import Match
from .store.prompt import TokenIds
from .store.tree import BlockTree


def diagnose(
    tree: BlockTree,
    spaces: Spaces,
    history: History | None,
    namespace: Hashable,
    tokens: TokenIds,
    hit_tokens: int,
) -> Stop | None:
    """Why no more of a prompt was a hit; None where only its last token has to be computed.

    Args:
        history: what was evicted; None if nobody remembers.
        hit_tokens: how many of its tokens were a hit.
    """
    if len(tokens) < 2:
        return Stop(Reason.BELOW_ONE_TOKEN)
    if hit_tokens >= len(tokens) - 1:
        return None
    known = spaces.of(namespace)
    matches = find_common(tree, known, tokens)
    end = max((match.tokens for _, match in matches), default=0)
    lost_tokens, cause = 0, ""
    if history is not None:
        lost_tokens, cause = _lost(history, namespace, tokens, matches, hit_tokens)
    if lost_tokens > end:
        return Stop(Reason.EVICTED, end, cause)
    deepest = [(space, match) for space, match in matches if match.tokens == end]
    if end > hit_tokens and any(space.layout.needs_checkpoint for space, _ in deepest):
        return Stop(Reason.NOT_RESTORABLE, end, cause)
    if end:
        goes_on = any(True for _, match in deepest for _ in ways_on(match.blocks[-1], match.rows))
        return Stop(Reason.DIVERGED if goes_on else Reason.NOTHING_STORED, end)
    if any(map(tree.has, known)):
        return Stop(Reason.DIVERGED)
    return Stop(Reason.OTHER_MODEL if spaces.others_hold(namespace) else Reason.NOTHING_STORED)


def _lost(
    history: History,
    namespace: Hashable,
    tokens: TokenIds,
    matches: Sequence[tuple[Space, Match]],
    hit_tokens: int,
) -> tuple[int, str]:
    """How much of a prompt would have been a hit, had nothing been given up; and why that was.

    Args:
        matches: what is there of it.
    """
    found = [(0, "")]
    held = {match.blocks[0].root.chain: match for _, match in matches if match.blocks}
    for root, has_checkpoints in history.roots(namespace).items():
        match = held.get(root, Match())
        count = match.tokens // history.block_tokens
        start = count * history.block_tokens
        if has_checkpoints:
            lost = history.lost_checkpoint(root, tokens, hit_tokens, start)
        else:
            chain = match.blocks[count - 1].chain if count else root
            lost = history.lost_rows(chain, start, tokens, hit_tokens)
        if lost is not None:
            found.append((lost[0], lost[1].value))
    return max(found)
