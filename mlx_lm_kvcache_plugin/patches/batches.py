"""Upstream's `batch_generate`, over what the store holds of its prompts already."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

from .models_cache import LayerCaches, leaves_of
from .scripts import Request, Scripts, count, tallied
from .steps import Call

OWN_CACHES = ("prompt_caches", "max_kv_size")
"""Arguments with which the prompts are the caller's own business."""


def over_the_store(
    stock: Callable[..., Any], module: ModuleType, scripts: Scripts
) -> Callable[..., Any]:
    """Upstream's `batch_generate`, whose generator looks up and stores its prompts."""

    @functools.wraps(stock)
    def batch_generate(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(stock, args, kwargs)
        if call is None or not call.has_none_of(OWN_CACHES):
            return stock(*args, **kwargs)
        run = stock
        with scripts.failing_softly():
            run = _with_generator(stock, module, scripts)
        with tallied() as tally:
            response = run(*args, **kwargs)
        if call["verbose"] and tally.prompts:
            print(f"[batch_generate] {tally.line()}")
        return response

    return batch_generate


def _with_generator(
    stock: Callable[..., Any], module: ModuleType, scripts: Scripts
) -> Callable[..., Any]:
    """The stock function, which finds our class by the name of upstream's.

    The name in the module itself stays upstream's: the server imports it from there. The rest of
    the names are those of this moment, so that whatever else is patched counts.
    """
    assert isinstance(stock, FunctionType)
    names = {**vars(module), "BatchGenerator": generator_over_the_store(module, scripts)}
    copy = FunctionType(
        stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__
    )
    copy.__kwdefaults__ = stock.__kwdefaults__
    return copy


def generator_over_the_store(module: Any, scripts: Scripts) -> type:
    """A `BatchGenerator` that looks prompts up when their turn comes, and stores what finishes."""

    class BatchGenerator(module.BatchGenerator):  # type: ignore[misc]
        _kvcache_request: Request | None = None

        def _make_batch(self, n: int) -> Any:
            # No sooner: a thousand prompts' prefixes would not have room at once.
            waiting = self._unprocessed_sequences
            for place, sequence in enumerate(list(waiting)[:n]):
                waiting[place] = self._looked_up(sequence)
            return super()._make_batch(n)

        def _looked_up(self, sequence: tuple[Any, ...]) -> tuple[Any, ...]:
            with scripts.failing_softly():
                return _resumed(scripts, self, *sequence)
            return sequence

        def next_generated(self) -> Any:
            responses = super().next_generated()
            for response in responses:
                request = self._kvcache_request
                if response.finish_reason is not None and request is not None:
                    with scripts.failing_softly():
                        tokens = _ids(response.all_tokens)
                        scripts.store(request.namespace, tokens, response.prompt_cache)
            return responses

    return BatchGenerator


def _resumed(
    scripts: Scripts,
    generator: Any,
    uid: int,
    segments: Any,
    most: int,
    fresh: LayerCaches,
    before: Any,
    *others: Any,
) -> tuple[Any, ...]:
    """What upstream's generator keeps of a waiting prompt, less what is stored of it already.

    Args:
        generator: remembers one of its prompts for the others.
        most: tokens to generate.
        before: tokens that the caches stand for; with any, they are the caller's own.
    """
    sequence = (uid, segments, most, fresh, before, *others)
    tokens = [] if before else [t for each in segments for t in _ids(each)]
    like = generator._kvcache_request
    request = tokens and scripts.look_up(generator.model, tokens, in_batch=True, like=like)
    if not request:
        return sequence
    # The first one's caches are not kept with it.
    generator._kvcache_request = like or replace(request, caches=[], tokens=[])
    reused = request.reused if _are_alike(request.caches, fresh) else 0
    count(reused, len(tokens))
    if not reused:
        return sequence
    rest = _without(segments, reused)
    _add_prompt_tokens(generator, reused)
    return (uid, rest, most, request.caches, tokens[:reused], *others)


def _are_alike(caches: LayerCaches, fresh: LayerCaches) -> bool:
    """Whether a batch takes the one as it takes the other."""
    kinds = [list(map(type, leaves_of(each))) for each in (caches, fresh)]
    return kinds[0] == kinds[1] and all(hasattr(cache, "merge") for cache in caches)


def _ids(tokens: Any) -> list[int]:
    """Tokens as numbers, which a prompt may have as a list or as an array of them."""
    return list(map(int, tokens.tolist() if hasattr(tokens, "tolist") else tokens))


def _without(segments: Sequence[Any], tokens: int) -> list[Any]:
    """What is left of a prompt's segments behind its first tokens."""
    rest = []
    for segment in segments:
        left = segment[tokens:]
        tokens = max(0, tokens - len(segment))
        if len(left):
            rest.append(left)
    return rest


def _add_prompt_tokens(generator: Any, tokens: int) -> None:
    """Count reused tokens among the prompts', as upstream would have if it had computed them."""
    counters = getattr(generator, "_counters", None)
    if counters is not None:
        counters.prompt_tokens += tokens
    else:  # mlx-lm 0.31
        generator._prompt_tokens_counter += tokens
