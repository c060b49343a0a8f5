"""Opens the prefix cache that the settings ask for, and tells it which model a namespace is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..disk.tier import DiskTier, flush_at_exit
from ..events import Event
from ..fingerprint import fingerprint
from ..layers import LayerKinds
from ..options import MIB
from ..plugins import plugins
from ..prefix_cache import PrefixCache
from ..settings import Settings
from ..stats.history import History
from ..store.budget import Budget
from .announcement import bits_of
from .models_cache import empty_caches
from .portable import PortableLayers


def open_cache(
    settings: Settings,
    *,
    ceiling: Callable[[], int | None] = lambda: None,
    ceiling_origin: str = "a ceiling",
    max_sequences: int | None = None,
    emit: Callable[[Event], None] | None = None,
    history: History | None = None,
) -> PrefixCache:
    """A prefix cache, with its disk tier if there is to be one.

    Args:
        ceiling, ceiling_origin: of the `Budget`.
        max_sequences: how many sequences may be held; None for any number.
        emit: is told of every event; by default the plugins alone are.
        history: is told what is asked for and stored; None if nobody wants to know.
    """
    budget = Budget(
        limit_bytes=None if settings.memory_mb is None else settings.memory_mb * MIB,
        percent=settings.memory_percent,
        ceiling=ceiling,
        ceiling_origin=ceiling_origin,
        relieve=mx.clear_cache,
    )
    tier = None
    if settings.disk_folder is not None:
        tier = DiskTier(settings.disk_folder, settings.disk_mb * MIB)
        flush_at_exit(tier)
    return PrefixCache(
        settings,
        plugins().codecs(),
        budget,
        tier=tier,
        emit=emit or tell_plugins,
        max_sequences=max_sequences,
        history=history,
    )


Identity = tuple[bytes, Hashable, bytes | None]
"""A model, how upstream treats the caches that it decodes with, and its draft model: by content. As
in the server's keys, the third tells whether there is a draft model."""


IN_BATCH = "batch"
"""How upstream treats caches when it computes prompts beside others: in some models with states it
takes the padding for tokens, and what a batch left of states is not for a prompt that is alone."""

LIVE_QUANTIZATION = ("kv_bits", "kv_group_size", "quantized_kv_start")
"""What says how upstream quantizes the caches that it decodes with, as an argument or a flag."""


def identify(model: Any, treatment: Hashable = None, draft_model: Any = None) -> Identity:
    """All that the numbers in a model's caches depend on."""
    draft = None if draft_model is None else fingerprint(draft_model)
    return fingerprint(model), treatment, draft


def attach(
    cache: PrefixCache,
    namespace: Hashable,
    identity: Identity,
    models: Sequence[Any],
    kinds: LayerKinds,
    name: str = "",
) -> None:
    """Tell a cache which model a namespace stands for.

    Args:
        identity: of the models.
        models: the model, and its draft model if there is one.
        name: of the model, for people; by default, what it is.
    """
    model, treatment, draft = identity
    digest = blake2b(model + (draft or b"") + repr(treatment).encode(), digest_size=32)
    digest.update(fingerprint(cache.packers.codecs))  # a codec may change under its name
    about = {
        "model": name or _described(models[0]),
        "codec": f"{cache.settings.codec}, {bits_of(cache.settings)}",
    }
    cache.attach(
        namespace, digest.digest(), about, PortableLayers(kinds, list(map(empty_caches, models)))
    )


def _described(model: Any) -> str:
    kind = str(getattr(model, "model_type", type(model).__name__))
    if not hasattr(model, "parameters"):
        return kind
    leaves: Any = tree_flatten(model.parameters())
    return f"{kind}, {sum(array.size for _, array in leaves):,} parameters"


def tell_plugins(event: Event) -> None:
    """Pass an event on to whoever has the hook."""
    plugins().call("kvcache_event", event=event)
