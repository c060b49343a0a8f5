"""How far a model strays: what it expects after a prefix, with one cache and with another."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import KVCachePluginError
from .documents import Document

READ_AT_ONCE = 512
"""Tokens of a prefix that a model reads in one step."""

SCORED_AT_ONCE = 64
"""Tokens whose logits are held at once: with a vocabulary of 262,144 that is 64 MiB."""

GREEDY_TOKENS = 64
"""How long an answer is compared, the likeliest token each time."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a model expects after a prefix that it has just read.

    Attributes:
        logprobs: of all tokens at each scored position, [positions, vocabulary], piece by piece.
        likely: the likeliest tokens, one after the other.
    """

    logprobs: Sequence[mx.array]
    likely: Sequence[int]


@dataclass(frozen=True, slots=True)
class Score:
    """How far what a model expects is from that, with a cache that was stored and fetched.

    Attributes:
        kl: mean KL divergence of the next token, in nats.
        top1: the share of positions whose likeliest token is the same.
        surprise: how many nats the text's own tokens lost, on average.
        same_tokens: how many of `GREEDY_TOKENS` likeliest tokens are the same before one is not.
    """

    kl: float
    top1: float
    surprise: float
    same_tokens: int


def read(model: Any, caches: Sequence[Any], tokens: list[int]) -> None:
    """Let a model read a prefix; its last layer's logits are not asked for, nor computed."""
    for start in range(0, len(tokens), READ_AT_ONCE):
        model(mx.array([tokens[start : start + READ_AT_ONCE]]), cache=caches)
        mx.eval([cache.state for cache in caches])


def expect(model: Any, caches: Sequence[Any], document: Document) -> Expected:
    """What is expected after a document's prefix; the caches, which hold it, stay as they are."""
    logprobs = list(logprobs_after(model, copy.deepcopy(caches), document.rest[:-1]))
    return Expected(logprobs, list(_likely(model, copy.deepcopy(caches), document.rest[0])))


def score(model: Any, caches: Sequence[Any], document: Document, expected: Expected) -> Score:
    """Hold caches of a document's prefix against what was expected with the original ones.

    Raises:
        KVCachePluginError: if the model expects nothing that can be compared.
    """
    found = logprobs_after(model, copy.deepcopy(caches), document.rest[:-1])
    sums, position = mx.zeros(3), 1
    for wanted, got in zip(expected.logprobs, found, strict=True):
        targets = mx.array(document.rest[position : position + len(got)])
        sums = sums + compare(wanted, got, targets)
        mx.eval(sums)
        position += len(got)
    means: Any = (sums / (len(document.rest) - 1)).tolist()
    if not all(map(math.isfinite, means)):
        raise KVCachePluginError(f"{document.name}: what the model expects are no finite numbers")
    likely = _likely(model, copy.deepcopy(caches), document.rest[0])
    kl = max(0.0, means[0])  # where it is nothing, the sum's rounding may leave less than that
    return Score(kl, means[1], means[2], _alike(expected.likely, likely))


def compare(wanted: mx.array, got: mx.array, targets: mx.array) -> mx.array:
    """Sums over positions: KL divergence, equal likeliest tokens, and what the targets lost.

    Args:
        wanted, got: log-probabilities, [positions, vocabulary].
        targets: the tokens of the text.
    """
    same = mx.argmax(wanted, axis=-1) == mx.argmax(got, axis=-1)
    lost = mx.take_along_axis(_difference(wanted, got), targets[:, None], axis=-1)
    divergences = divergence(wanted, got)
    return mx.stack([divergences.sum(), same.sum().astype(mx.float32), lost.sum()])


def divergence(wanted: mx.array, got: mx.array) -> mx.array:
    """KL divergence of the next token, in nats, at each position: [positions].

    Args:
        wanted, got: log-probabilities, [positions, vocabulary].
    """
    probabilities = mx.exp(wanted)
    terms = mx.where(probabilities > 0, probabilities * _difference(wanted, got), 0)
    return terms.sum(axis=-1)


def _difference(wanted: mx.array, got: mx.array) -> mx.array:
    return mx.where(wanted == got, 0, wanted - got)  # both minus infinity: a token barred


def logprobs_after(model: Any, caches: Sequence[Any], tokens: list[int]) -> Iterator[mx.array]:
    """The log-probabilities after each token, [positions, vocabulary], evaluated."""
    for start in range(0, len(tokens), SCORED_AT_ONCE):
        logits = model(mx.array([tokens[start : start + SCORED_AT_ONCE]]), cache=caches)[0]
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs, [cache.state for cache in caches])
        yield logprobs


def _likely(model: Any, caches: Sequence[Any], token: int) -> Iterator[int]:
    """The likeliest tokens after `token`, each computed when it is asked for."""
    for _ in range(GREEDY_TOKENS):
        logits: mx.array = model(mx.array([[token]]), cache=caches)[0, -1]
        token = int(mx.argmax(logits).item())  # type: ignore[arg-type]
        yield token


def _alike(one: Sequence[int], other: Iterator[int]) -> int:
    """How many tokens two answers begin with alike; nothing of the second is asked for beyond."""
    for place, token in enumerate(one):
        if next(other) != token:
            return place
    return len(one)
