"""All that is told about a running server's prefix cache, as JSON holds it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from typing import Any

from .. import __version__
from ..prefix_cache import BLOCK_TOKENS, PrefixCache
from ..settings import Settings
from ..stats.history import Predicted
from ..stats.statistics import Statistics
from ..store.blocks import Root, Tally
from .sequences import Listing, Words, list_sequences
from .sizing import sizing


@dataclass(frozen=True, slots=True)
class Models:
    """What is known of the models behind namespaces.

    Attributes:
        name: of a namespace's, for people.
        is_loaded: whether it is the one that is loaded now.
        words: what its tokens say.
    """

    name: Callable[[Hashable], str]
    is_loaded: Callable[[Hashable], bool]
    words: Words


def report(
    settings: Settings,
    cache: PrefixCache | None,
    statistics: Statistics,
    models: Models,
    shows_text: bool,
    lists_sequences: bool = True,
) -> dict[str, Any]:
    """What is held, asked for and evicted; docs/statistics.md tells each. Any thread may ask.

    Args:
        cache: None if nothing is kept.
        shows_text: whether whoever asks may see what prompts say, and where files lie.
        lists_sequences: whether to tell what is stored one by one.
    """
    told = statistics.told()
    restored_tokens = told.pop("restored_tokens")
    if not shows_text:
        told["last_error"] = None  # it may name files
    return {
        "version": __version__,
        "time": time.time(),
        "enabled": cache is not None,
        "shows_text": shows_text,
        "settings": {
            "codec": settings.codec,
            "key_bits": settings.key_bits,
            "value_bits": settings.value_bits,
            "group_size": settings.group_size,
            "block_tokens": BLOCK_TOKENS if cache is None else cache.tree.block_tokens,
        },
        **told,
        **_held(cache, models, shows_text, lists_sequences),
        "disk": _disk(settings, cache, restored_tokens, shows_text),
    }


def _held(
    cache: PrefixCache | None, models: Models, shows_text: bool, lists_sequences: bool
) -> dict[str, Any]:
    """What the tree holds: read while nothing changes, told when it may change again."""
    if cache is None:
        return {
            "memory": _memory(Tally(), 0, "nothing is kept", False, 0),
            "models": [],
            "sizing": sizing(Predicted(), 0),
            "sequences": {"total": 0, "shown": 0, "roots": []},
        }
    with cache.tree.lock:
        tallies = [(root, root.tally + Tally()) for root in cache.tree.roots()]
        listing = list_sequences(cache.tree, None if lists_sequences else 0)
    budget = cache.budget
    predicted = cache.history.predicted if cache.history is not None else Predicted()
    total = sum((tally for _, tally in tallies), Tally())
    return {
        "memory": _memory(total, budget.last_bytes, budget.origin, budget.is_short, listing.total),
        "models": _models(tallies, models),
        "sizing": sizing(predicted, budget.last_bytes),
        "sequences": _sequences(listing, models, shows_text),
    }


def _memory(
    tally: Tally, limit_bytes: int, origin: str, is_short: bool, sequences: int
) -> dict[str, Any]:
    return {
        "limit_bytes": limit_bytes,
        "origin": origin,
        "is_short": is_short,
        "sequences": sequences,
        **asdict(tally),
    }


def _models(tallies: list[tuple[Root, Tally]], models: Models) -> list[dict[str, Any]]:
    """By model: one may have more than one root."""
    sums: defaultdict[Hashable, Tally] = defaultdict(Tally)
    for root, tally in tallies:
        sums[_model_of(root)] += tally
    return [
        {"model": models.name(model), "is_loaded": models.is_loaded(model), **asdict(tally)}
        for model, tally in sums.items()
    ]


def _sequences(listing: Listing, models: Models, shows_text: bool) -> dict[str, Any]:
    def words(space: Any, tokens: list[int]) -> str | None:
        return models.words(space.namespace, tokens) if shows_text else None

    return {
        "total": listing.total,
        "shown": listing.shown,
        "roots": [
            {
                "model": models.name(_model_of(root)),
                "is_loaded": models.is_loaded(_model_of(root)),
                "nodes": nodes,
            }
            for root, nodes in listing.told(words).items()
        ],
    }


def _model_of(root: Root) -> Hashable:
    """The namespace of its space."""
    space: Any = root.namespace
    namespace: Hashable = space.namespace
    return namespace


def _disk(
    settings: Settings, cache: PrefixCache | None, restored_tokens: int, shows_text: bool
) -> dict[str, Any] | None:
    if cache is None or cache.tier is None:
        return None
    return {
        "folder": str(settings.disk_folder) if shows_text else None,
        "limit_bytes": cache.tier.limit_bytes,
        "used_bytes": cache.tier.used_bytes,
        "restored_tokens": restored_tokens,
        **asdict(cache.tier.counters),
    }
