"""What is told of one setting, over all documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from ..options import DEFAULT_GROUP_SIZE
from ..settings import Settings
from .choices import DEFAULT_CODEC
from .footprint import Footprint
from .scoring import GREEDY_TOKENS, Score

MOST_NATS = 700.0
"""More would not fit into a float, and says no more."""


@dataclass(frozen=True, slots=True)
class Loss:
    """How far a model strayed, over all documents.

    Attributes:
        documents: how many.
        kl: KL divergence of the next token from that of the original cache, mean, in nats.
        top1: the share of positions whose likeliest token is the same.
        perplexity_ratio: perplexity of the text to that with the original cache.
        same_greedy: documents whose likeliest continuation is the same to its last token.
    """

    documents: int
    kl: float
    top1: float
    perplexity_ratio: float
    same_greedy: int

    @classmethod
    def of(cls, scores: Sequence[Score]) -> Loss:
        return cls(
            documents=len(scores),
            kl=fmean(score.kl for score in scores),
            top1=fmean(score.top1 for score in scores),
            perplexity_ratio=math.exp(min(MOST_NATS, fmean(score.surprise for score in scores))),
            same_greedy=sum(score.same_tokens == GREEDY_TOKENS for score in scores),
        )


@dataclass(frozen=True, slots=True)
class Room:
    """What the store took, over all documents.

    Attributes:
        full_bits_per_element: of keys, values and windows in the model's own precision; None for a
            model that has nothing but states, which no codec touches.
        bits_per_element: all that was stored of them, index included.
        codec_bits_per_element: what of it the codec made, without index and objects.
        bytes_per_token: all that was stored, index and states included.
    """

    full_bits_per_element: float | None
    bits_per_element: float | None
    codec_bits_per_element: float | None
    bytes_per_token: float

    @classmethod
    def of(cls, held: Sequence[Footprint]) -> Room:
        elements = sum(each.elements for each in held)

        def bits(nbytes: int) -> float | None:
            return nbytes * 8 / elements if elements else None

        return cls(
            full_bits_per_element=bits(sum(each.full_bytes for each in held)),
            bits_per_element=bits(sum(each.held_bytes - each.state_bytes for each in held)),
            codec_bits_per_element=bits(sum(each.codec_bytes for each in held)),
            bytes_per_token=sum(each.held_bytes for each in held)
            / sum(each.tokens for each in held),
        )

    @property
    def is_smaller(self) -> bool:
        """Whether a codec has made less of anything."""
        codec, full = self.codec_bits_per_element, self.full_bits_per_element
        return codec is not None and full is not None and codec < full


@dataclass(frozen=True, slots=True)
class Summary:
    """One setting over all documents."""

    settings: Settings
    loss: Loss
    room: Room

    def plain(self) -> dict[str, Any]:
        """What JSON holds of it: `bits` and `value_bits` are null for full precision."""
        settings = self.settings
        return {
            "codec": settings.codec,
            "bits": settings.key_bits,
            "value_bits": settings.value_bits,
            "group_size": settings.group_size,
            **asdict(self.loss),
            **asdict(self.room),
        }


def bits_text(settings: Settings) -> str:
    """The bits as `--bits` takes them; a dash for a codec that has none."""
    if settings.key_bits is None:
        return "-"
    same = settings.key_bits == settings.value_bits
    return f"{settings.key_bits}" if same else f"{settings.key_bits}/{settings.value_bits}"


def flags(settings: Settings) -> str:
    """What `mlx_lm.server` has to be told to keep prefixes so."""
    if settings.key_bits is None:
        return f"--kv-cache-codec {settings.codec}"
    given = [f"--kv-cache-bits {settings.key_bits}"]
    if settings.value_bits != settings.key_bits:
        given.append(f"--kv-cache-value-bits {settings.value_bits}")
    if settings.codec != DEFAULT_CODEC:
        given.append(f"--kv-cache-codec {settings.codec}")
    if settings.group_size != DEFAULT_GROUP_SIZE:
        given.append(f"--kv-cache-group-size {settings.group_size}")
    return " ".join(given)
