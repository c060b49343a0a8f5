"""Windows at 8 and at 4 bits: what docs/decisions/0002-windows-and-states.md rests on.

Gemma 3 270M, 15 of whose 18 layers hold a window of 512 tokens, reads a text. Its windows, and
nothing else, go through a codec as they would at a checkpoint, and the next tokens are scored:
after one checkpoint, and at the end of ten turns each of which resumed at the checkpoint before.
"""

from __future__ import annotations

import argparse
import functools
import pydoc_data.topics
import statistics
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from tqdm import tqdm

from demo.gemma3 import ensure_model
from demo.model_folder import default_cache_dir
from mlx_lm_kvcache_plugin.codecs.affine import AffineCodec
from mlx_lm_kvcache_plugin.codecs.base import Codec, CodecOptions
from mlx_lm_kvcache_plugin.codecs.rotated import RotatedCodec
from mlx_lm_kvcache_plugin.codecs.windows import WindowPacker
from mlx_lm_kvcache_plugin.evaluation import scoring
from mlx_lm_kvcache_plugin.layers import Layer
from mlx_lm_kvcache_plugin.patches.layer_kinds import Rotating

from .report import Report, Row
from .samples import TOPICS

CODECS: tuple[Codec, ...] = (
    AffineCodec(CodecOptions(8, 64)),
    AffineCodec(CodecOptions(4, 64)),
    RotatedCodec(CodecOptions(4, 64)),
)
NAMES = ("affine 8", "affine 4", "rotated 4")
PREFIX_TOKENS, SCORED_TOKENS, TURNS, TURN_TOKENS = 1024, 128, 10, 64


@functools.cache
def gemma3() -> tuple[Any, Any]:
    """The real Gemma 3 270M in float32, and its tokenizer."""
    loaded: Any = load(str(ensure_model(default_cache_dir())))
    return loaded[0], loaded[1]


def read(caches: list[Any], ids: list[int]) -> list[Any]:
    """Let the model read these tokens."""
    scoring.read(gemma3()[0], caches, ids)
    return caches


def expected(caches: list[Any], ids: list[int]) -> mx.array:
    """The log-probabilities after each of these tokens."""
    return mx.concatenate(list(scoring.logprobs_after(gemma3()[0], caches, ids)))


def divergence(wanted: mx.array, found: mx.array) -> float:
    """The mean over all tokens, in nats."""
    return float(scoring.divergence(wanted, found).mean().item())


def resumed(caches: Sequence[Any], codec: Codec | None) -> list[Any]:
    """The same caches as a checkpoint would give them back; without a codec, untouched copies."""
    kind, packed = Rotating(), []
    for cache in caches:
        layer = kind.take(cache) if type(cache) is RotatingKVCache else None
        assert layer is None or layer.window, "the window is not full yet"
        packed.append(layer)
    windows = [tensor for layer in packed if layer for tensor in layer.window]
    packer = WindowPacker([tensor.spec for tensor in windows], codec) if codec else None
    decoded = iter(
        packer.decode(packer.encode(windows))
        if packer
        else [tensor.rows(0, tensor.length) for tensor in windows]
    )
    return [
        copy_of(cache)
        if layer is None
        else kind.restore(Layer(layer.fixed, window=(next(decoded), next(decoded))), cache.offset)
        for cache, layer in zip(caches, packed, strict=True)
    ]


def copy_of(cache: Any) -> Any:
    """A plain cache with its own arrays."""
    copied = type(cache)()
    copied.keys, copied.values, copied.offset = cache.keys + 0, cache.values + 0, cache.offset
    return copied


def score(topic: str) -> list[tuple[float, float]]:
    """For each codec: the divergence after one checkpoint, and after ten in turn."""
    model, tokenizer = gemma3()
    needed = PREFIX_TOKENS + TURNS * TURN_TOKENS + SCORED_TOKENS
    ids: list[int] = tokenizer.encode(pydoc_data.topics.topics[topic])[:needed]
    assert len(ids) == needed, f"the chapter {topic!r} is too short"
    prefix = read(make_prompt_cache(model), ids[:PREFIX_TOKENS])
    turns = [
        ids[at : at + TURN_TOKENS]
        for at in range(PREFIX_TOKENS, needed - SCORED_TOKENS, TURN_TOKENS)
    ]
    after_prefix = ids[PREFIX_TOKENS : PREFIX_TOKENS + SCORED_TOKENS]
    once = expected(resumed(prefix, None), after_prefix)
    chained = expected(in_turns(prefix, turns, None), ids[-SCORED_TOKENS:])
    return [
        (
            divergence(once, expected(resumed(prefix, codec), after_prefix)),
            divergence(chained, expected(in_turns(prefix, turns, codec), ids[-SCORED_TOKENS:])),
        )
        for codec in CODECS
    ]


def in_turns(prefix: list[Any], turns: Sequence[list[int]], codec: Codec | None) -> list[Any]:
    """Go on turn by turn, each from the checkpoint of the one before."""
    caches = resumed(prefix, codec)
    for turn in turns:
        caches = resumed(read(caches, turn), codec)
    return caches


def measure(arguments: argparse.Namespace) -> Report:
    """The means of all documents; a quick run reads one."""
    topics = TOPICS[:1] if arguments.quick else TOPICS
    scores = [score(topic) for topic in tqdm(topics, unit="document")]
    rows = []
    for place, name in enumerate(NAMES):
        once, chained = (statistics.fmean(each[place][i] for each in scores) for i in (0, 1))
        note = f"mean of {len(scores)} documents, {SCORED_TOKENS} tokens scored"
        rows.append(Row(f"KL, windows {name}, one checkpoint", once, note=note))
        rows.append(Row(f"KL, windows {name}, {TURNS} turns", chained, note=note))
    return Report(rows)
