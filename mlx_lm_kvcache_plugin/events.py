"""What the cache tells about itself: one event per request or registration, never per block."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reason(enum.StrEnum):
    """Why no more of a prompt was a hit. docs/statistics.md tells what to do about each."""

    NOTHING_STORED = "nothing stored"
    """What is stored of it ends there: what follows is new."""
    OTHER_MODEL = "other model"
    """Nothing is stored of this model, though something is of others."""
    DIVERGED = "diverged"
    """What is stored goes on with other tokens there."""
    EVICTED = "evicted"
    """What follows was stored, and was given up."""
    BELOW_ONE_TOKEN = "below one token"
    """The last token of a prompt is always computed, and it has no other."""
    NOT_RESTORABLE = "not restorable"
    """More is in common with what is stored, but some layer can be restored at checkpoints alone,
    and none is nearer; where there was one, its cause says why it was given up."""
    DISABLED = "disabled"
    """Nothing is kept."""
    ERROR = "error"
    """Looking it up failed; the log says why."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a prompt ceased to be a hit, and why.

    Attributes:
        token: how many of its first tokens are in common with what is stored.
        cause: of what was evicted, or of a checkpoint before that, why it was: as in `Evict`.
    """

    reason: Reason
    token: int = 0
    cause: str = ""

    def __str__(self) -> str:
        match self.reason:
            case Reason.NOTHING_STORED if self.token:
                return f"nothing stored beyond token {self.token:,}"
            case Reason.DIVERGED:
                return f"diverged at token {self.token:,}"
            case Reason.EVICTED:
                return f"evicted from token {self.token:,} on ({self.cause})"
            case Reason.NOT_RESTORABLE:
                evicted = f": evicted ({self.cause})" if self.cause else ""
                return f"a layer is not restorable before token {self.token:,}{evicted}"
        return str(self.reason.value)

    def told(self) -> dict[str, str | int | None]:
        """As JSON holds it."""
        return {
            "reason": self.reason.value,
            "token": self.token,
            "cause": self.cause or None,
            "text": str(self),
        }


class SkipReason(enum.StrEnum):
    """Why a sequence was not stored."""

    NO_ROOM = "no room"
    """It, or what belongs to its end alone, is larger than all that may be held."""
    DRAFT_MODEL = "draft model"
    """A window holds tokens that a draft got wrong, and upstream cannot take them back."""
    UNKNOWN_LAYERS = "unknown layers"
    """Its layers hold nothing, or stand for different numbers of tokens."""
    ERROR = "error"
    """Storing it failed; the log says why."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A prompt began with tokens that were stored.

    Attributes:
        prompt_tokens: tokens of the prompt.
        hit_tokens: those that need not be computed.
        seconds: for decoding them and handing them over.
        stop: why they are no more; None where only the last token has to be computed, or where
            nobody keeps statistics.
    """

    prompt_tokens: int
    hit_tokens: int
    seconds: float
    stop: Stop | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing that a prompt begins with could be used."""

    prompt_tokens: int
    stop: Stop | None = None


@dataclass(frozen=True, slots=True)
class Insert:
    """A sequence was stored.

    Attributes:
        tokens: its length.
        stored_tokens: how many of them, from the first, are stored now.
        new_tokens: how many of those were not stored before.
        seconds: for encoding and storing them.
    """

    tokens: int
    stored_tokens: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Skip:
    """A sequence was not stored."""

    tokens: int
    reason: SkipReason


@dataclass(frozen=True, slots=True)
class Restore:
    """What a prompt begins with was read from disk, before it is looked up in memory.

    Attributes:
        tokens: how many it stands for.
        seconds: for reading and checking it.
    """

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Evict:
    """Blocks were given up.

    Attributes:
        blocks, nbytes: how many, and what they held.
        cause: "memory", "count", "pressure", "trim", "replaced" or "cleared".
    """

    blocks: int
    nbytes: int
    cause: str


@dataclass(frozen=True, slots=True)
class Error:
    """Something of ours failed, and the request went on without it.

    Attributes:
        operation: "fetch", "insert", "restore", ...
        cause: the exception, as text.
    """

    operation: str
    cause: str


Event = Hit | Miss | Insert | Skip | Restore | Evict | Error
