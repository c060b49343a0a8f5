"""A running server: its prompt cache, its model, and what upstream's classes tell about them."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from typing import Any

from ..events import Event
from ..layers import LayerKinds
from ..plugins import plugins
from ..prefix_cache import BLOCK_TOKENS, PrefixCache
from ..settings import Settings
from ..stats.history import History
from ..stats.statistics import Statistics
from ..store.thinning import USER
from .announcement import announcement
from .arguments import StockDefault
from .checkpoints import (
    PrefillWatch,
    is_users_turn,
    label_before_last,
    split,
    start_of_thinking,
)
from .models_cache import empty_caches, has_states, needs_checkpoints
from .opening import (
    IN_BATCH,
    LIVE_QUANTIZATION,
    attach,
    identify,
    open_cache,
    tell_plugins,
)
from .prompt_cache import PrefixPromptCache

logger = logging.getLogger("mlx_lm_kvcache_plugin")

NO_LIMIT = 1 << 63
"""Upstream's default of `LRUPromptCache(max_bytes=)`."""

FURTHEST = 1 << 30
"""More tokens than any prompt has."""


class Serving:
    """What ties a server's settings, its model and its prompt cache together.

    Args:
        settings: what was asked for; None to read the environment once a prompt cache is made.
        prompt_cache_bytes: upstream's flag of that name.

    Attributes:
        settings: as they were given, or read when a prompt cache was made last.
        statistics: what the cache does; None while nobody is to know.
    """

    def __init__(self, settings: Settings | None, prompt_cache_bytes: int | None) -> None:
        self._given = settings
        self.settings = settings or Settings()
        self._prompt_cache_bytes = prompt_cache_bytes
        self.statistics: Statistics | None = None
        self._face: weakref.ref[PrefixPromptCache] | None = None
        self._generator: weakref.ref[Any] | None = None
        self._flags: Any = None
        self._sets_checkpoints = False
        self._checkpoint_tokens = 0
        self._last_label = USER

    @functools.cached_property
    def kinds(self) -> LayerKinds:
        """How cache objects are taken apart."""
        return plugins().layer_kinds()

    def name_of(self, model_key: Any) -> str:
        """What people call a model, by upstream's key of it: model, adapter, draft model."""
        model, adapter, *_ = model_key
        name = getattr(self._flags, "model", None) if model in (None, "default_model") else model
        return f"{name or ''}{f' with {adapter}' if adapter else ''}"

    def open(self, face: PrefixPromptCache) -> None:
        """From now on this is the prompt cache."""
        self._face = weakref.ref(face)  # it has to go with the thread that generates

    def make_cache(self, max_size: int, max_bytes: int) -> PrefixCache | None:
        """What a prompt cache is to keep everything in, as the settings want it."""
        settings = self.settings = self._given or Settings.resolve(None, os.environ)
        self._checkpoint_tokens = settings.checkpoint_tokens
        self.statistics = Statistics() if settings.has_stats else None
        if settings.disabled:
            return None
        return open_cache(
            settings,
            ceiling=lambda: min(max_bytes, self._unclaimed_bytes()),
            ceiling_origin="--prompt-cache-bytes, less what is being decoded with",
            max_sequences=None if isinstance(max_size, StockDefault) else max_size,
            emit=self.tell,
            history=History(BLOCK_TOKENS) if settings.has_stats else None,
        )

    def tell(self, event: Event) -> None:
        """Tell whoever wants to know what the cache does."""
        if self.statistics is not None:
            self.statistics.record(event)
        tell_plugins(event)

    @property
    def face(self) -> PrefixPromptCache | None:
        """The prompt cache, while there is one."""
        return self._face() if self._face else None

    def _unclaimed_bytes(self) -> int:
        """What `--prompt-cache-bytes` leaves beside the caches that are being decoded with."""
        if self._prompt_cache_bytes is None:
            return NO_LIMIT
        generator = self._generator() if self._generator else None
        return self._prompt_cache_bytes - (generator.prompt_cache_nbytes if generator else 0)

    def generates_with(self, generator: Any) -> None:
        """From now on this is the batch generator."""
        self._generator = weakref.ref(generator)

    def model_loaded(self, provider: Any) -> None:
        """Settle what the cache does for this model, the same on all ranks, and say it."""
        face = self.face
        self._flags = getattr(provider, "cli_args", None)
        if face is None:
            return
        needs = False
        try:
            if face.cache is not None:
                self._attach(face, face.cache, provider)
                with face.lock:
                    face.cache.prefer(provider.model_key)
                needs = needs_checkpoints(empty_caches(provider.model), self.kinds)
        except Exception as error:
            logger.warning("prefix cache: the model's layers cannot be told: %r", error)
        if face.ranks.size > 1:
            logger.info(
                "prefix cache: %d ranks agree on what is reused; one that was not given this "
                "plugin and its flags keeps the others waiting from here on",
                face.ranks.size,
            )
        self._sets_checkpoints = face.ranks.any(needs)
        every = self._checkpoint_tokens or FURTHEST
        self._checkpoint_tokens = face.ranks.agree(lambda most: min(every, most), FURTHEST)
        self._announce(face.cache, provider)

    def _attach(self, face: PrefixPromptCache, cache: PrefixCache, provider: Any) -> None:
        """Tell the cache which model goes by this key now; else it has no place on disk."""
        try:
            flags, draft_model = self._flags, getattr(provider, "draft_model", None)
            models = [model for model in (provider.model, draft_model) if model is not None]
            treatment: Any = tuple(getattr(flags, flag, None) for flag in LIVE_QUANTIZATION)
            if treatment[0] is None:
                caches = [cache for model in models for cache in empty_caches(model)]
                treatment = IN_BATCH if has_states(caches, self.kinds) else None
            identity = identify(provider.model, treatment, draft_model)
            name = self.name_of(provider.model_key)
            with face.lock:  # but not while all weights are read
                attach(cache, provider.model_key, identity, models, self.kinds, name)
        except Exception as error:
            logger.warning("prefix cache: the model itself cannot be told: %r", error)

    def _announce(self, cache: PrefixCache | None, provider: Any) -> None:
        if cache is None:
            logger.info("prefix cache: disabled, every request is prefilled from its first token")
            return
        try:
            draft_model = getattr(provider, "draft_model", None)
            logger.info(announcement(cache, self.kinds, provider.model, draft_model))
        except Exception as error:
            logger.warning("prefix cache: nothing can be told about it yet: %r", error)

    def cut(self, tokenizer: Any, request: Any, tokenized: tuple[Any, ...]) -> tuple[Any, ...]:
        """Cut the segments of a prompt further, where a checkpoint is wanted.

        Args:
            tokenized: what upstream's `_tokenize` returns: prompt, segments, their kinds, and more.
        """
        if not self._sets_checkpoints:
            return tokenized
        try:
            prompt, segments, labels, *others = tokenized
            thinking = start_of_thinking(tokenizer, prompt)
            self._last_label = label_before_last(prompt, thinking, is_users_turn(request))
            return (prompt, *split(segments, labels, self._checkpoint_tokens, thinking), *others)
        except Exception as error:  # the same on all ranks, so that they stay in step
            logger.warning("prefix cache: a prompt gets upstream's checkpoints alone: %r", error)
            return tokenized

    def watched(self, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of upstream's `stream_generate`, such that its prefill sets checkpoints.

        Upstream has just called `_tokenize` for the same prompt.
        """
        face = self.face
        report, caches = options.get("prompt_progress_callback"), options.get("prompt_cache")
        if not self._sets_checkpoints or face is None or report is None or caches is None:
            return options
        model, tokens, reused = face.fetched

        def store(position: int, label: str) -> None:
            face.insert_cache(model, tokens[:position], caches, cache_type=label)

        watch = PrefillWatch(report, store, reused, self._checkpoint_tokens, self._last_label)
        return {**options, "prompt_progress_callback": watch}
