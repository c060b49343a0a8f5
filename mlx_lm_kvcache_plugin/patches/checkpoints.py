"""Where a prompt gets its checkpoints, on both paths of the server.

Upstream stores a prompt's caches wherever a segment of it ends. For a model that can be resumed at
such points alone there should be one where the next request is likely to leave this one: before the
thinking that a template begins for the model, and now and then on a long way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..store.thinning import GENERATED, PROMPT, USER

THINKING_TAIL = 11
"""Within how many tokens before the end upstream looks for the thinking that a template begins."""

Store = Callable[[int, str], object]
"""Stores the caches as they are now: how many tokens they stand for, and a label."""


def split(
    segments: Sequence[Sequence[int]], labels: Sequence[str], every: int, thinking: int
) -> tuple[list[list[int]], list[str]]:
    """Cut upstream's segments of a prompt further. They stay the same prompt, token by token.

    Args:
        segments, labels: upstream's. It leaves a prompt whole, as a single "assistant", whose last
            message is not a user's.
        every: the most tokens between two cuts; 0 for any number.
        thinking: where the thinking at the prompt's end begins; negative if there is none.
    """
    ends, end = {}, 0
    for segment, label in zip(segments, labels, strict=True):
        end += len(segment)
        ends[end] = label
    if len(segments) == 1 and labels[0] == GENERATED:
        ends[end] = PROMPT
        if 0 < thinking < end:
            ends |= {thinking: PROMPT, end: GENERATED}
    # The last token has a segment of its own: a cut before it would be upstream's own.
    for position in range(every, end - 1, every) if every else ():
        ends.setdefault(position, PROMPT)
    prompt = [token for segment in segments for token in segment]
    cuts = sorted(ends)
    pieces = [prompt[start:stop] for start, stop in zip([0, *cuts], cuts, strict=False)]
    return pieces, [ends[position] for position in cuts]


def start_of_thinking(tokenizer: Any, prompt: Sequence[int]) -> int:
    """Where the thinking begins that a template opens at a prompt's end; negative if nowhere."""
    if not getattr(tokenizer, "has_thinking", False):
        return -1
    return int(tokenizer.rfind_think_start(prompt, start=max(0, len(prompt) - THINKING_TAIL)))


def is_users_turn(request: Any) -> bool:
    """Whether a request is a chat whose last message is a user's."""
    messages: list[Any] = getattr(request, "messages", None) or []
    return bool(messages) and messages[-1].get("role") == USER


def label_before_last(prompt: Sequence[int], thinking: int, is_users: bool) -> str:
    """The label of a checkpoint before the last token of a prompt that is computed alone."""
    if 0 <= thinking < len(prompt) - 1:
        return GENERATED
    return USER if is_users else PROMPT


class PrefillWatch:
    """A progress callback that sets checkpoints while a prompt is computed alone.

    Args:
        report: upstream's own callback.
        store: stores the caches.
        reused: how many tokens of the prompt were a hit.
        every: the least tokens between two checkpoints before the last; 0 for no such.
        last: the label of the one before the prompt's last token.
    """

    def __init__(
        self,
        report: Callable[[int, int], object],
        store: Store,
        reused: int,
        every: int,
        last: str = USER,
    ) -> None:
        self._report = report
        self._store = store
        self._reused = reused
        self._every = every
        self._last_label = last
        self._last = reused

    def __call__(self, computed: int, total: int) -> None:
        """Called before the first, between two and after all steps of the prefill."""
        self._report(computed, total)
        position = self._reused + computed
        if computed == total - 1 and computed:  # the last token begins what is generated
            self._store(position, self._last_label)
        elif 0 < computed < total and 0 < self._every <= position - self._last:
            self._store(position, PROMPT)
            self._last = position
