"""Upstream's generators of tokens, each over what the store holds of its prompt already."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import mlx.core as mx

from .checkpoints import PrefillWatch
from .layer_kinds import is_empty
from .models_cache import leaves_of
from .opening import LIVE_QUANTIZATION
from .scripts import Request, Scripts, count

Stock = Callable[..., Generator[Any, Any, Any]]

OWN_CACHE = ("prompt_cache", "input_embeddings", "max_kv_size")
"""Arguments with which a prompt is the caller's own business."""

PROBE_TOKENS = 3


class Call:
    """A call of one of upstream's functions, with its arguments by name.

    Args:
        stock: the function; its parameters are looked up by name.
        arguments: of the call, bound.
    """

    def __init__(self, stock: Callable[..., Any], arguments: inspect.BoundArguments) -> None:
        self.stock = stock
        self._arguments = arguments

    @classmethod
    def of(
        cls, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """None for arguments that the function does not take: it is to say so itself."""
        try:
            return cls(stock, inspect.signature(stock).bind(*args, **kwargs))
        except TypeError:
            return None

    def __getitem__(self, name: str) -> Any:
        """An argument, also one of those without a parameter; else its default, or None."""
        parameters = self._arguments.signature.parameters
        others = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), "")
        if name in self._arguments.arguments:
            return self._arguments.arguments[name]
        if name in parameters:
            return parameters[name].default
        return self._arguments.arguments.get(others, {}).get(name)

    def has_none_of(self, names: tuple[str, ...]) -> bool:
        """Whether all of these are absent or None."""
        return all(self[name] is None for name in names)

    def run(self, **changes: Any) -> Any:
        """Call the function, with some of its arguments changed."""
        arguments = inspect.BoundArguments(
            self._arguments.signature,
            self._arguments.arguments | changes,
        )
        return self.stock(*arguments.args, **arguments.kwargs)


def over_the_store(stock: Stock, scripts: Scripts, draws: bool) -> Stock:
    """Upstream's `generate_step`, or its `speculative_generate_step` if it draws on a draft."""

    @functools.wraps(stock)
    def step(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        call = Call.of(stock, args, kwargs)
        own = (*OWN_CACHE, "kv_bits") if draws else OWN_CACHE  # a draft's are lost to quantizing
        if call is None or not call.has_none_of(own):
            return stock(*args, **kwargs)
        return _generate(scripts, call, draws)

    return step


def _generate(scripts: Scripts, call: Call, draws: bool) -> Generator[Any, Any, Any]:
    request = _request(scripts, call, draws)
    if request is None:
        return (yield from call.run())
    count(request.reused, len(request.tokens))
    run = Run(scripts, request, call["prompt_progress_callback"], lag=int(draws))
    tokens = call.run(**run.changes(call, draws))
    try:
        for item in tokens:
            run.yields(item[0])
            yield item
            run.is_at_rest = False
        run.is_at_rest = True
    finally:
        tokens.close()  # which takes back what a draft got wrong
        run.finish()


def _request(scripts: Scripts, call: Call, draws: bool) -> Request | None:
    prompt, bits = call["prompt"], call["kv_bits"]
    if not isinstance(prompt, mx.array) or prompt.ndim != 1 or not prompt.size:
        return None
    if not mx.issubdtype(prompt.dtype, mx.integer):
        return None
    if call["logits_processors"] and not _can_be_probed(scripts, call.stock, draws):
        return None
    quantization = tuple(call[name] for name in LIVE_QUANTIZATION)
    return scripts.look_up(
        call["model"],
        cast(list[int], prompt.tolist()),
        draft_model=call["draft_model"] if draws else None,
        quantization=quantization if bits is not None else None,
    )


class Run:
    """One prompt under way: where its caches stand, and what of them is stored in the end.

    Args:
        report: the caller's own progress callback.
        lag: how many of the tokens that it yielded the caches may be behind.

    Attributes:
        is_at_rest: whether the caches stand for exactly what was yielded; else the model computes.
    """

    def __init__(
        self,
        scripts: Scripts,
        request: Request,
        report: Callable[[int, int], object] | None,
        lag: int,
    ) -> None:
        self._scripts = scripts
        self._request = request
        self._report = report
        self._lag = lag
        self._tokens = list(request.tokens)
        self._computed = request.reused
        self.is_at_rest = False

    def changes(self, call: Call, draws: bool) -> dict[str, Any]:
        """What is different from the caller's arguments."""
        request, prompt = self._request, call["prompt"]
        changes: dict[str, Any] = {"prompt": prompt[request.reused :]}
        changes["prompt_cache"] = request.caches
        if draws:
            self._computed = len(self._tokens) - 1  # it does not say how far its prefill is
        else:
            changes["prompt_progress_callback"] = self._watch()
        processors = call["logits_processors"]
        if processors and request.reused and shows_whole_prompt(call.stock, draws):
            reused = prompt[: request.reused]
            changes["logits_processors"] = [_behind(reused, each) for each in processors]
        return changes

    def _watch(self) -> Callable[[int, int], object]:
        if self._request.is_token_wise:
            return self._progress
        return PrefillWatch(
            self._progress, self._store, self._request.reused, self._scripts.checkpoint_tokens
        )

    def _progress(self, computed: int, total: int) -> None:
        self._computed = self._request.reused + computed
        if self._report is not None:
            self._report(self._computed, self._request.reused + total)

    def yields(self, token: int) -> None:
        """The caches stand for this token too, or will when upstream has cleaned up."""
        self._tokens.append(token)
        self._computed = len(self._tokens) - self._lag
        self.is_at_rest = True

    def _store(self, position: int, label: str) -> None:
        request = self._request
        self._scripts.store(request.namespace, self._tokens[:position], request.caches, label)

    def finish(self) -> None:
        """Store what was computed; of an exception's caches, what was complete before it."""
        request = self._request
        if not self._scripts.is_of_today(request):
            return
        if self.is_at_rest:
            self._scripts.store(request.namespace, self._tokens, request.caches)
        elif self._can_be_cut() and self._computed > request.reused:
            computed = self._tokens[: self._computed]
            self._scripts.store(request.namespace, computed, request.caches)

    def _can_be_cut(self) -> bool:
        """Whether caches that the model was computing on can be told how far all of them are."""
        caches = leaves_of(self._request.caches)
        # With a draft, an empty one is either unused or was not come to yet.
        return self._request.is_token_wise and not (self._lag and any(map(is_empty, caches)))


def _behind(reused: mx.array, processor: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A processor that is shown the reused tokens before those that upstream knows of."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        return processor(mx.concatenate([reused.astype(tokens.dtype), tokens]), logits)

    return process


def _can_be_probed(scripts: Scripts, stock: Stock, draws: bool) -> bool:
    with scripts.failing_softly():
        shows_whole_prompt(stock, draws)
        return True
    return False


@functools.cache
def shows_whole_prompt(stock: Stock, draws: bool) -> bool:
    """Whether upstream shows logits processors all of a prompt, or only what it computed last."""
    shown: list[int] = []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        shown.append(tokens.size)
        return logits

    models = [_NoModel()] * (2 if draws else 1)
    steps: Iterator[Any] = stock(
        mx.arange(PROBE_TOKENS),
        *models,
        max_tokens=0,
        logits_processors=[process],
        prompt_cache=[],
        prefill_step_size=1,
    )
    list(steps)
    return PROBE_TOKENS in shown


class _NoModel:
    """Computes the same for any token, and has nothing to cache."""

    layers: tuple[Any, ...] = ()

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return mx.zeros((1, tokens.shape[1], 2))
