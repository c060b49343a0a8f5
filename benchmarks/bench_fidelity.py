"""What a hit costs in fidelity: SmolLM2 goes on after a prefix that was stored and fetched.

    python -m benchmarks.bench_fidelity [--quick]

For each document the model reads a prefix, and its cache goes through the store. Then come, with
the fetched cache and with the original one, the next tokens of the text (KL divergence, and how
often the likeliest token is the same) and a greedy continuation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from .report import save
from .samples import TOPICS, divergence, logprobs_after, read, smollm2, topic_ids
from .stores import MODEL, make_store

SETTINGS = (("rotated", 8), ("affine", 8), ("rotated", 4), ("affine", 4))
PREFIX_TOKENS = 1024
SCORED_TOKENS = 128
GREEDY_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Score:
    """One document under one setting.

    Attributes:
        kl: mean KL divergence of the next token from the original's, in nats.
        top1: the share of positions whose likeliest token is the original's.
        same_greedy: whether the greedy continuation is the original's.
    """

    kl: float
    top1: float
    same_greedy: bool


def stored_and_fetched(caches: list[Any], ids: Sequence[int], codec: str, bits: int) -> list[Any]:
    """A cache as a hit hands it out."""
    store, _ = make_store(kv_cache_codec=codec, kv_cache_bits=bits)
    store.insert_cache(MODEL, list(ids), caches)
    fetched, rest = store.fetch_nearest_cache(MODEL, [*ids, 0])
    assert fetched is not None and rest == [0]
    return fetched


def greedy(caches: list[Any], token: int) -> list[int]:
    """The likeliest tokens after `token`."""
    tokens = []
    for _ in range(GREEDY_TOKENS):
        token = int(mx.argmax(logprobs_after(smollm2()[0], caches, [token])[-1]).item())
        tokens.append(token)
    return tokens


def back_to(caches: list[Any], tokens: int) -> list[Any]:
    """Forget what came after the first `tokens`."""
    for cache in caches:
        cache.trim(cache.offset - tokens)
    return caches


def score(topic: str) -> dict[tuple[str, int], Score]:
    """All settings on one document."""
    ids = topic_ids(topic, PREFIX_TOKENS + SCORED_TOKENS)
    prefix, rest = ids[:PREFIX_TOKENS], ids[PREFIX_TOKENS:]
    original = read(prefix)
    wanted = logprobs_after(smollm2()[0], original, rest)
    wanted_greedy = greedy(back_to(original, PREFIX_TOKENS), rest[0])
    back_to(original, PREFIX_TOKENS)
    scores = {}
    for codec, bits in SETTINGS:
        fetched = stored_and_fetched(original, prefix, codec, bits)
        found = logprobs_after(smollm2()[0], fetched, rest)
        kl = divergence(wanted, found)
        top1 = (mx.argmax(wanted, axis=-1) == mx.argmax(found, axis=-1)).mean().item()
        same = greedy(back_to(fetched, PREFIX_TOKENS), rest[0]) == wanted_greedy
        scores[codec, bits] = Score(kl, float(top1), same)
    return scores


def summary(codec: str, bits: int, scores: Sequence[Score]) -> dict[str, Any]:
    """One line of the table."""
    return {
        "codec": codec,
        "bits": bits,
        "kl": statistics.fmean(score.kl for score in scores),
        "top1": statistics.fmean(score.top1 for score in scores),
        "same_greedy": sum(score.same_greedy for score in scores),
        "documents": len(scores),
    }


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(prog="benchmarks.bench_fidelity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one document; nothing is saved")
    quick = parser.parse_args().quick
    scores = [score(topic) for topic in tqdm(TOPICS[:1] if quick else TOPICS, unit="document")]
    rows = [summary(*setting, [each[setting] for each in scores]) for setting in SETTINGS]
    print(f"SmolLM2-135M-Instruct, {SCORED_TOKENS} tokens scored after {PREFIX_TOKENS}")
    print(f"codec    bits       KL   top-1  same {GREEDY_TOKENS} greedy tokens")
    for row in rows:
        same = f"{row['same_greedy']} of {row['documents']}"
        print(f"{row['codec']:8} {row['bits']:4} {row['kl']:8.5f} {row['top1']:7.1%}  {same}")
    if not quick:
        save("bench_fidelity", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
