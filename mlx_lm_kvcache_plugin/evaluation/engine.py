"""The evaluation: every document under every setting, each through the real store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..layers import LayerKinds
from ..patches.layer_kinds import known_kinds
from ..patches.models_cache import empty_caches
from ..settings import Settings
from .documents import Document
from .footprint import Footprint, store_and_fetch
from .rounding import rounded
from .scoring import Score, expect, read, score
from .summary import Loss, Room, Summary, bits_text

Tell = Callable[[str, str], object]
"""Is told the document, and what is about to be done with it."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One document under one setting."""

    document: Document
    settings: Settings
    score: Score
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured.

    Attributes:
        measurements: of each document under each setting.
        rounding: by document, what the model's own rounding does.
    """

    measurements: list[Measurement] = field(default_factory=list)
    rounding: list[Score] = field(default_factory=list)

    def summaries(self) -> list[Summary]:
        """One for each setting, in the order in which they were measured first."""
        return [
            Summary(
                settings,
                Loss.of([each.score for each in self.of(settings)]),
                Room.of([each.footprint for each in self.of(settings)]),
            )
            for settings in dict.fromkeys(each.settings for each in self.measurements)
        ]

    def of(self, settings: Settings) -> list[Measurement]:
        """Those of one setting, in the order of the documents."""
        return [each for each in self.measurements if each.settings == settings]


def steps(documents: Sequence[Document], settings: Sequence[Settings]) -> int:
    """How often `evaluate` tells something."""
    return len(documents) * (2 + len(settings))


def evaluate(
    model: Any,
    documents: Sequence[Document],
    settings: Sequence[Settings],
    tell: Tell = lambda document, what: None,
) -> Evaluation:
    """Let a model read each document once, and go on from its caches as each setting keeps them.

    Raises:
        KVCachePluginError: if the caches of this model cannot be stored, or it computes no numbers.
    """
    evaluation, kinds = Evaluation(), known_kinds()
    for document in documents:
        _evaluate(model, document, settings, kinds, tell, evaluation)
        mx.clear_cache()
    return evaluation


def _evaluate(
    model: Any,
    document: Document,
    settings: Sequence[Settings],
    kinds: LayerKinds,
    tell: Tell,
    evaluation: Evaluation,
) -> None:
    """Add what one document shows."""
    tell(document.name, "reading")
    original = empty_caches(model)
    read(model, original, document.prefix)
    expected = expect(model, original, document)
    tell(document.name, "rounding")
    evaluation.rounding.append(score(model, rounded(original), document, expected))
    for each in settings:
        tell(document.name, f"{each.codec} {bits_text(each)}")
        fetched, footprint = store_and_fetch(original, document.prefix, each, kinds)
        found = score(model, fetched, document, expected)
        evaluation.measurements.append(Measurement(document, each, found, footprint))
