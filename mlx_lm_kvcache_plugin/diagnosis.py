"""Finds out why no more of a prompt was a hit; changes nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .events import Reason, Stop
from .matching import find_common
from .spaces import Spaces
from .stats.history import History
from .store.blocks import TOKEN_BYTES, Match
from .store.eviction import Cause
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
    cause = None
    if history is not None:
        cause = _cause(history, namespace, tokens, [match for _, match in matches], end)
    if cause is not None:
        return Stop(Reason.EVICTED, end, cause.value)
    deepest = [(space, match) for space, match in matches if match.tokens == end]
    bound = [match for space, match in deepest if space.layout.needs_checkpoint]
    if end > hit_tokens and bound:
        if history is not None:
            cause = _checkpoint_cause(history, tokens, bound[0], hit_tokens)
        return Stop(Reason.NOT_RESTORABLE, end, cause.value if cause is not None else "")
    if end:
        goes_on = any(_goes_on(match) for _, match in deepest)
        return Stop(Reason.DIVERGED if goes_on else Reason.NOTHING_STORED, end)
    if any(map(tree.has, known)):
        return Stop(Reason.DIVERGED)
    return Stop(Reason.OTHER_MODEL if spaces.others_hold(namespace) else Reason.NOTHING_STORED)


def _cause(
    history: History,
    namespace: Hashable,
    tokens: TokenIds,
    matches: Sequence[Match],
    end: int,
) -> Cause | None:
    """Why what a prompt goes on with behind its first `end` tokens was given up, if it was."""
    step = history.block_tokens
    ends = dict.fromkeys(history.roots(namespace), 0)
    for match in matches:
        if whole := match.tokens // step:
            ends[match.blocks[whole - 1].chain] = whole * step
    causes = (history.cause(chain, tokens[at:], end - at) for chain, at in ends.items())
    return next((cause for cause in causes if cause is not None), None)


def _checkpoint_cause(
    history: History, tokens: TokenIds, match: Match, hit_tokens: int
) -> Cause | None:
    """Why a checkpoint on the way was given up, if one was that would have been more of a hit."""
    whole = match.blocks[: match.tokens // history.block_tokens]
    chains = [match.blocks[0].root.chain, *(block.chain for block in whole)]
    return history.checkpoint_cause(chains, tokens[: match.tokens], hit_tokens)


def _goes_on(match: Match) -> bool:
    """Whether what is stored goes on behind what is in common: below it, or beside its last node.

    A tail that bears a checkpoint stays beside the block that begins with it.
    """
    last = match.blocks[-1]
    if match.rows < last.tokens or any(child.key for child in last.children.values()):
        return True
    if not last.is_bearer:
        return False
    key = last.key[: match.rows * TOKEN_BYTES]
    siblings = last.parent.children if last.parent is not None else {}
    return any(len(other) > len(key) and other.startswith(key) for other in siblings)
