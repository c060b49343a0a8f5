"""The store that all generation of a process shares when no caller brings a prompt cache along."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..codecs.threads import in_codec_thread
from ..layers import LayerKinds
from ..settings import Settings
from ..spaces import MOST_NAMESPACES
from ..store.thinning import GENERATED
from . import complain
from .layer_kinds import known_kinds
from .models_cache import LayerCaches, empty_caches, has_states, needs_checkpoints
from .opening import IN_BATCH, Identity, attach, identify, open_cache
from .prompt_cache import PrefixPromptCache
from .ranks import Ranks

logger = logging.getLogger("mlx_lm_kvcache_plugin")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that was looked up.

    Attributes:
        namespace: where its model's sequences are.
        tokens: the whole prompt.
        caches: to go on with: those of the reused tokens, or empty ones.
        reused: how many tokens were a hit.
        is_token_wise: whether what was computed can be cut at any token.
        models: the model, and its draft model or None.
    """

    namespace: Identity
    tokens: list[int]
    caches: LayerCaches
    reused: int
    is_token_wise: bool
    models: tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Tally:
    """How much of the prompts of one call was reused.

    Attributes:
        prompts: of each prompt, the reused tokens and all.
    """

    prompts: list[tuple[int, int]] = field(default_factory=list)

    def line(self) -> str:
        """What the statistics say."""
        reused = sum(each for each, _ in self.prompts)
        tokens = sum(each for _, each in self.prompts)
        return f"Prefix cache: {reused} of {tokens} prompt tokens reused"


_tally: ContextVar[Tally | None] = ContextVar("mlx_lm_kvcache_plugin tally", default=None)


@contextmanager
def tallied() -> Iterator[Tally]:
    """Counts the prompts that are looked up inside, on this thread."""
    tally = Tally()
    token = _tally.set(tally)
    try:
        yield tally
    finally:
        _tally.reset(token)


def _fresh_caches(model: Any, draft_model: Any | None) -> LayerCaches | None:
    """Of both models before their first token; None where upstream could not tell them apart."""
    fresh = empty_caches(model)
    if draft_model is None:
        return fresh
    if len(fresh) != len(model.layers):  # by which upstream tells the two apart
        return None
    return fresh + empty_caches(draft_model)


class Scripts:
    """The process-wide store, opened by the first prompt. Any thread may call; others wait.

    Whatever fails in here is a miss or an insert that is skipped: it is never the caller's problem.

    Args:
        settings: what was asked for; None to read the environment by then.
    """

    def __init__(self, settings: Settings | None) -> None:
        self._settings = settings
        self._reset_lock()
        _all.add(self)
        self._is_open = False
        self._face: PrefixPromptCache | None = None
        self._kinds = LayerKinds()
        self._logged: set[type] = set()
        self._attached: set[Identity] = set()
        self.checkpoint_tokens = 0

    def _reset_lock(self) -> None:
        self._lock = threading.RLock()
        self._is_inside = False

    @property
    def face(self) -> PrefixPromptCache | None:
        """Where everything is kept; None if nothing is, or not yet."""
        return self._face

    def look_up(
        self,
        model: Any,
        tokens: list[int],
        *,
        draft_model: Any | None = None,
        quantization: tuple[Any, ...] | None = None,
        in_batch: bool = False,
        like: Request | None = None,
    ) -> Request | None:
        """The longest stored prefix of a prompt; None if upstream has to go on without us.

        Args:
            quantization: how upstream quantizes the caches.
            in_batch: whether other prompts are computed beside this one.
            like: an earlier one of the same batch: what it is about need not be found out again.
        """
        with self._entered() as face, self.failing_softly():
            if face is None:
                return None
            fresh: LayerCaches = []
            if like is None:
                if (made := _fresh_caches(model, draft_model)) is None:
                    return None
                fresh = made
                is_token_wise = not needs_checkpoints(fresh, self._kinds)
                is_padded = in_batch and has_states(fresh, self._kinds)
                treatment = IN_BATCH if is_padded else quantization
                namespace = identify(model, treatment, draft_model)
                self._attach(face, namespace, [model, draft_model])
            else:
                namespace, is_token_wise = like.namespace, like.is_token_wise
            is_copied = in_batch or quantization is not None  # by upstream, in any case
            fetch = face.fetch_nearest_cache if is_copied else face.fetch_alone
            caches, rest = fetch(namespace, tokens)
            reused = len(tokens) - len(rest) if caches is not None else 0
            models = (model, draft_model)
            return Request(namespace, tokens, caches or fresh, reused, is_token_wise, models)
        return None  # for type checkers: what fails above comes here

    def is_of_today(self, request: Request) -> bool:
        """Whether its models still are what they were: a script may have trained them meanwhile."""
        with self.failing_softly():
            model, draft_model = request.models
            return identify(model, request.namespace[1], draft_model) == request.namespace
        return False

    def _attach(self, face: PrefixPromptCache, namespace: Identity, models: list[Any]) -> None:
        if face.cache is not None and namespace not in self._attached:
            if len(self._attached) == MOST_NAMESPACES:
                self._attached.clear()  # the cache remembers no more either
            models = [model for model in models if model is not None]
            attach(face.cache, namespace, namespace, models, self._kinds)
            self._attached.add(namespace)

    def store(
        self,
        namespace: Identity,
        tokens: Sequence[int],
        caches: LayerCaches,
        label: str = GENERATED,
    ) -> None:
        """Store what the caches hold for the first of these tokens."""
        if sys.is_finalizing():
            return
        with self._entered() as face, self.failing_softly():
            if face is not None:
                face.insert_cache(namespace, list(tokens), caches, cache_type=label)

    @contextmanager
    def _entered(self) -> Iterator[PrefixPromptCache | None]:
        """The store, for one thread at a time.

        None where this thread is inside already, or works for one that is: there the collector
        has just ended a generator.
        """
        if in_codec_thread():
            yield None
            return
        with self._lock:
            if self._is_inside:
                yield None
                return
            self._is_inside = True
            try:
                if not self._is_open:
                    self._is_open = True
                    self._face = self._open()
                yield self._face
            finally:
                self._is_inside = False

    def _open(self) -> PrefixPromptCache | None:
        try:
            settings = self._settings or Settings.resolve(None, os.environ)
            if settings.disabled:
                return None
            ranks = Ranks()
            if ranks.size > 1:
                logger.warning(
                    "prefix cache: nothing is reused with %d ranks, outside of the server",
                    ranks.size,
                )
                return None
            self.checkpoint_tokens = settings.checkpoint_tokens
            self._kinds = known_kinds()
            return PrefixPromptCache(open_cache(settings), self._kinds, ranks)
        except Exception as error:
            complain(f"nothing is reused: {error}")
            return None

    @contextmanager
    def failing_softly(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.warning("prefix cache: a prompt is not looked up: %r", error, exc_info=error)


def count(reused: int, tokens: int) -> None:
    """Add a prompt to the tally, if one is kept."""
    tally = _tally.get()
    if tally is not None:
        tally.prompts.append((reused, tokens))


_all: weakref.WeakSet[Scripts] = weakref.WeakSet()


def _reset_in_child() -> None:
    """A forked child has the locks, but not the thread that may hold them."""
    for scripts in list(_all):
        scripts._reset_lock()
        if scripts.face is not None:
            scripts.face.reset_locks()


os.register_at_fork(after_in_child=_reset_in_child)
