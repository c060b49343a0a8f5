"""What share of a real trace's prompt tokens is a hit, by store and memory.

    python -m benchmarks hit_rate TRACE [--quick]

TRACE is a file in the Mooncake format: JSON lines with `input_length` and `hash_ids`, one id for
each 512 tokens of the prompt, where equal ids mean an equal prefix up to and with them. Such files
came with the Mooncake paper (kvcache-ai/Mooncake, FAST25-release/traces).

Each request is fetched for, then its prompt is inserted. What is generated is left out: the trace
gives it no ids, so that no store could hit it. Nor can any hit what a prompt's last id stands for,
if that is less than 512 tokens, when the next prompt goes on: that has another id there. Budgets
are bytes, as many as so many tokens of Llama 3.2 3B take in 16 bits. The stores are the real
classes; what they hold counts as many bytes as the real thing would, and is nothing.

- stock: mlx-lm's LRUPromptCache with its limit of ten sequences, and without; copies in 16 bits
- vllm-mlx: its MemoryAwarePrefixCache; copies in 16 bits, the least recently used goes first
- ours: PrefixCache with its blocks of 128 tokens, index included; raw is 16 bits
- optimum: what no store can beat that holds as many tokens as the budget has room for in 16 bits,
  or in the bytes of our blocks of 4 bits: it knows what will be asked for (replay/optimum.py)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from mlx_lm_kvcache_plugin.prefix_cache import BLOCK_TOKENS

from . import figures
from .replay.optimum import Optimum
from .replay.ours import Ours, block_bytes
from .replay.trace import Request, TraceError, read_trace
from .replay.whole import Stock, VllmMlx
from .report import Report, Row
from .samples import ModelShape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = ModelShape(layers=28, heads=8, head_dim=128)
"""Of Llama 3.2 3B."""

TOLD = 3_000_000
"""The budget of the table, in tokens of 16 bits as all budgets here."""

BUDGETS = (100_000, 300_000, 1_000_000, TOLD, 10_000_000)
QUICK_BUDGETS = (300_000, TOLD)
QUICK_REQUESTS = 1000

LEAST = {"ours, 4 bits": 0.28}
"""The least hit rate that meets the target, by store."""

BOUNDS = {"ours, raw": "optimum, 16 bits", "ours, 4 bits": "optimum, 4 bits"}
"""What could at most be had in as few bytes."""

FOUR_BITS = {"kv_cache_bits": 4}


class Store(Protocol):
    """Whatever a trace can be replayed through."""

    def serve(self, request: Request) -> int:
        """Fetch for the prompt, then insert it; returns how many of its tokens were a hit."""


def optimum_at_4_bits(requests: Sequence[Request], limit_bytes: int) -> Optimum:
    """For as many tokens as our blocks of 4 bits have room for, without any index."""
    return Optimum(requests, limit_bytes * BLOCK_TOKENS // block_bytes(SHAPE, FOUR_BITS))


STORES: Mapping[str, Callable[[Sequence[Request], int], Store]] = {
    "stock": lambda requests, limit: Stock(SHAPE.token_bytes, limit, 10),
    "stock, any number": lambda requests, limit: Stock(SHAPE.token_bytes, limit, None),
    "vllm-mlx": lambda requests, limit: VllmMlx(SHAPE.token_bytes, limit),
    "ours, raw": lambda requests, limit: Ours(SHAPE, {"kv_cache_codec": "raw"}, limit),
    "ours, 8 bits": lambda requests, limit: Ours(SHAPE, {"kv_cache_bits": 8}, limit),
    "ours, 4 bits": lambda requests, limit: Ours(SHAPE, FOUR_BITS, limit),
    "optimum, 16 bits": lambda requests, limit: Optimum(requests, limit // SHAPE.token_bytes),
    "optimum, 4 bits": optimum_at_4_bits,
}
"""Made for a trace and a limit in bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Args: parser: of this benchmark."""
    parser.add_argument("trace", type=Path, help="a file in the Mooncake format")


def measure(arguments: argparse.Namespace) -> Report:
    """Replay the trace through all stores."""
    budgets, most = (QUICK_BUDGETS, QUICK_REQUESTS) if arguments.quick else (BUDGETS, None)
    requests = requests_of(arguments.trace, most)
    rates = replay(requests, budgets)
    prompt_tokens = sum(request.tokens for request in requests)
    data = {
        "requests": len(requests),
        "prompt_tokens": prompt_tokens,
        "budget_tokens": budgets,
        "hit_rates": rates,
        "evicting_nothing": hit_rate(Optimum(requests, prompt_tokens), requests),
    }
    told = {name: of_store[budgets.index(TOLD)] for name, of_store in rates.items()}
    return Report(list(rows(told, data)), data)


def requests_of(trace: Path, most: int | None) -> list[Request]:
    """The requests of a trace; what is wrong with it is told in one line."""
    try:
        return read_trace(trace, most)
    except (TraceError, OSError) as error:
        raise SystemExit(f"benchmarks: {error}") from None


def replay(requests: Sequence[Request], budgets: Sequence[int]) -> dict[str, list[float]]:
    """The hit rates of each store, one for each budget."""
    rates: dict[str, list[float]] = {name: [] for name in STORES}
    with tqdm(total=len(budgets) * len(STORES), unit="replay") as bar:
        for budget, (name, make) in product(budgets, STORES.items()):
            bar.set_postfix_str(f"{name}, {budget:,} tokens")
            rates[name].append(hit_rate(make(requests, budget * SHAPE.token_bytes), requests))
            bar.update()
    return rates


def hit_rate(store: Store, requests: Iterable[Request]) -> float:
    """The share of all prompt tokens that was a hit."""
    hit_tokens = prompt_tokens = 0
    for request in requests:
        hit_tokens += store.serve(request)
        prompt_tokens += request.tokens
    return hit_tokens / prompt_tokens


def rows(told: Mapping[str, float], data: Mapping[str, Any]) -> Iterator[Row]:
    """The hit rates with one budget, and how near the best ones come to what could be had."""
    yield Row(
        "hit rate if nothing had to be evicted",
        data["evicting_nothing"],
        note=f"{data['requests']:,} requests, {data['prompt_tokens']:,} prompt tokens",
    )
    for name, rate in told.items():
        what = f"hit rate in the bytes of {TOLD:,} 16-bit tokens, {name}"
        yield Row(what, rate, LEAST.get(name), at_least=name in LEAST)
    for name, bound in BOUNDS.items():
        if told[bound]:
            yield Row(f"the same, {name}, to {bound}", told[name] / told[bound])


def draw(data: Mapping[str, Any]) -> Figure:
    """The hit rate over the budget, one line for each store."""
    figure = figures.new(height=4.2)
    (axes,) = figure.axes
    for name, rates in data["hit_rates"].items():
        bound: dict[str, Any] = {"color": figures.INK, "linestyle": "--" if "16" in name else ":"}
        style = bound if name in BOUNDS.values() else {"marker": "o"}
        axes.plot(data["budget_tokens"], rates, label=name, **style)
    axes.axhline(data["evicting_nothing"], color=figures.GRID, label="nothing evicted")
    axes.set_xscale("log")
    budgets = data["budget_tokens"]
    axes.set_xticks(budgets, [f"{tokens / 1e6:g}M" for tokens in budgets])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("memory, as many bytes as so many tokens take in 16 bits")
    axes.set_ylabel("share of prompt tokens that hit")
    axes.set_title(f"{data['requests']:,} requests, {data['prompt_tokens']:,} prompt tokens")
    figure.legend(loc="outside right center")
    return figure
