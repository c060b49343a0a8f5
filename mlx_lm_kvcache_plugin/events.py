"""What the cache tells about itself: one event per request or registration, never per block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hit:
    """A prompt began with tokens that were stored.

    Attributes:
        prompt_tokens: tokens of the prompt.
        hit_tokens: those that need not be computed.
        seconds: for decoding them and handing them over.
    """

    prompt_tokens: int
    hit_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing that a prompt begins with was stored."""

    prompt_tokens: int


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
        cause: "memory", "count", "pressure", "trim" or "replaced".
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


Event = Hit | Miss | Insert | Restore | Evict | Error


@dataclass(slots=True)
class Counters:
    """Sums over all events since the start."""

    hits: int = 0
    misses: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    inserts: int = 0
    stored_tokens: int = 0
    restored_tokens: int = 0
    evicted_blocks: int = 0
    evicted_bytes: int = 0
    errors: int = 0

    def count(self, event: Event) -> None:
        """Add an event."""
        match event:
            case Hit():
                self.hits += 1
                self.prompt_tokens += event.prompt_tokens
                self.hit_tokens += event.hit_tokens
            case Miss():
                self.misses += 1
                self.prompt_tokens += event.prompt_tokens
            case Insert():
                self.inserts += 1
                self.stored_tokens += event.new_tokens
            case Restore():
                self.restored_tokens += event.tokens
            case Evict():
                self.evicted_blocks += event.blocks
                self.evicted_bytes += event.nbytes
            case Error():
                self.errors += 1
