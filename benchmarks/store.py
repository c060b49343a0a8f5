"""Insert, fetch, look up, hold: our store beside stock's and vllm-mlx's.

All get the same arrays and are asked in turn, in one process; what is fetched is evaluated inside
the timing. Stock keeps the arrays that it is given, at 16 bits, and the copies that it hands out
share their memory until the model goes on with them. So it is compared by a fetch together with
what the model's next step does to its caches.
"""

from __future__ import annotations

import argparse
import statistics
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from tqdm import tqdm

from . import figures
from .peers import Peer, evaluate, held_by_chats, ours, stock, vllm_mlx
from .report import Report, Row, in_turn, median_seconds, seconds
from .samples import SMALL, TINY, ModelShape
from .stores import sequence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BITS = (4, 8)
PEERS: tuple[Callable[[], Peer], ...] = (
    lambda: ours(4),
    lambda: vllm_mlx(4),
    lambda: ours(8),
    lambda: vllm_mlx(8),
    stock,
)

STEP_TOKENS = 100

INSERT = "insert, {}"
FETCH = "fetch, {}"
GO_ON = f"fetch and the next {STEP_TOKENS} tokens, {{}}"
PART = "fetch of 200 of {}"
HALF = "fetch of half of {}"

Samples = Mapping[str, Mapping[str, list[float]]]
"""Seconds by operation and by peer's name, one for each round."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is stored, and in words what is unusual about it."""

    shape: ModelShape
    tokens: int
    told: str = ""

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens{self.told}"


MAIN = Case(SMALL, 4096)
SIZES = (
    Case(SMALL, 1024),
    MAIN,
    Case(SMALL, 16_384),
    Case(replace(SMALL, layers=2), 65_536, " of 2 layers"),
)
OTHERS = (
    Case(replace(SMALL, dtype=mx.float16), 4096, " in float16"),
    Case(ModelShape(layers=30, heads=3, head_dim=64), 4096, " of SmolLM2's shape"),
)

LIMITS = {(INSERT, 4): 1.0, (FETCH, 4): 1 / 3, (PART, 4): 1 / 20}
"""By operation and bits, of the time that vllm-mlx takes in the main case."""


def fetched(peer: Peer, ids: list[int], shared: int, step: mx.array | None = None) -> None:
    """Fetch, append the step to every layer if there is one, and compute everything."""
    caches, hit_tokens = peer.fetch(ids)
    assert hit_tokens == shared, f"{peer.name}: {hit_tokens:,} tokens hit, of {shared:,}"
    if step is not None:
        for cache in caches:
            cache.update_and_fetch(step, step)
    evaluate(caches)


def next_step(shape: ModelShape) -> mx.array:
    """What each layer is given to append, as keys and as values."""
    step = mx.zeros((1, shape.heads, STEP_TOKENS, shape.head_dim), shape.dtype)
    mx.eval(step)
    return step


def sharing(ids: list[int], shared: int) -> list[int]:
    """A request as long as what is stored, or one token longer if it shares all of that."""
    return ids[:shared] + sequence(max(1, len(ids) - shared), seed=1)


# Time


def timed(case: Case, rounds: int) -> Samples:
    """All operations at all peers, each of which has its turn; the first round only warms up."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    caches = case.shape.prompt_cache(case.tokens)
    for number in tqdm(range(rounds + 1), desc=str(case), leave=False):
        for make in in_turn(number, PEERS):
            peer = make()
            for operation, taken in asked(peer, case, caches):
                if number:
                    found[operation][peer.name].append(taken)
    return found


def asked(peer: Peer, case: Case, caches: list[Any]) -> Iterator[tuple[str, float]]:
    """The seconds that each operation takes."""
    ids, whole, half = sequence(case.tokens), case.tokens, case.tokens // 2
    yield INSERT, seconds(peer.insert, ids, caches)
    yield FETCH, seconds(fetched, peer, sharing(ids, whole), whole)
    yield GO_ON, seconds(fetched, peer, sharing(ids, whole), whole, next_step(case.shape))
    yield PART, seconds(fetched, peer, sharing(ids, 200), 200)
    yield HALF, seconds(fetched, peer, sharing(ids, half), half)


def compared(case: Case, samples: Samples) -> Iterator[Row]:
    """Ours at each number of bits to vllm-mlx at the same, and at 4 bits to stock."""
    for operation in (INSERT, FETCH, GO_ON, PART, HALF) if case is MAIN else (INSERT, FETCH):
        for bits in BITS:
            what = f"{operation.format(case)}, {bits} bits, to vllm-mlx's time"
            names = f"ours, {bits} bits", f"vllm-mlx, {bits} bits"
            limit = LIMITS.get((operation, bits)) if case is MAIN else None
            yield ratio(what, samples[operation], names, limit)
    what = f"{GO_ON.format(case)}, 4 bits, to stock's time"
    yield ratio(what, samples[GO_ON], ("ours, 4 bits", "stock"))


def ratio(
    what: str,
    samples: Mapping[str, list[float]],
    names: tuple[str, str],
    limit: float | None = None,
) -> Row:
    """What one peer takes to what another takes in the same round."""
    one, other = (samples[name] for name in names)
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    note = f"{statistics.median(one) * 1e3:.4g} and {statistics.median(other) * 1e3:.4g} ms"
    return Row.of(what, ratios, limit, note)


def lookup(quick: bool) -> Iterator[Row]:
    """A long sequence is stored, and a request shares its first 100 tokens."""
    tokens, rounds = (16_384, 3) if quick else (65_536, 7)
    ids, caches = sequence(tokens), TINY.prompt_cache(tokens)
    peers = (ours(4), stock(), vllm_mlx(4))
    for peer in peers:
        peer.insert(ids, caches)
    samples: dict[str, list[float]] = defaultdict(list)
    for _ in tqdm(range(rounds), desc="lookup", leave=False):
        for peer in peers:
            times = 1 if peer.name == "stock" else 9  # it takes seconds
            taken = median_seconds(times, fetched, peer, sharing(ids, 100), 100)
            samples[peer.name].append(taken)
    what = f"lookup, {tokens:,} tokens stored, 100 shared, 4 bits"
    yield ratio(f"{what}, to stock's time", samples, (peers[0].name, peers[1].name), 1 / 2000)
    yield ratio(f"{what}, to vllm-mlx's time", samples, (peers[0].name, peers[2].name))


# Bytes


def stored(bits: int) -> tuple[Peer, Peer]:
    """Ours and vllm-mlx's, with the main case in it."""
    peers = ours(bits), vllm_mlx(bits)
    ids, caches = sequence(MAIN.tokens), MAIN.shape.prompt_cache(MAIN.tokens)
    for peer in peers:
        peer.insert(ids, caches)
    return peers


def held(bits: int) -> Iterator[Row]:
    """What eight chats take, and one sequence."""
    (_, one), (_, other) = (held_by_chats(peer, SMALL) for peer in (ours(bits), vllm_mlx(bits)))
    what = f"eight chats that share 3,000 of 3,200 tokens, {bits} bits, to vllm-mlx's bytes"
    yield Row(what, one / other, 1 / 4, f"{one:,} and {other:,}")
    one, other = (peer.nbytes for peer in stored(bits))
    what = f"held, {MAIN}, {bits} bits, to vllm-mlx's bytes"
    yield Row(what, one / other, note=f"{one:,} and {other:,}")


def peaks(bits: int) -> Iterator[Row]:
    """What a fetch takes beside what is stored, alone and with the model's next step."""
    peers, shape = stored(bits), MAIN.shape
    handed = MAIN.tokens * shape.token_bytes
    for operation, step in ((FETCH, None), (GO_ON, next_step(shape))):
        rounds = [[extra_bytes(peer, MAIN, step) for peer in peers] for _ in range(3)]
        one, other = (statistics.median(taken) / handed for taken in zip(*rounds, strict=True))
        what = f"peak extra memory of a {operation.format(MAIN)}, {bits} bits, to vllm-mlx's"
        note = f"{one:.2f} and {other:.2f} times the {handed:,} bytes handed over"
        limit = 0.6 if step is None and bits == 4 else None
        yield Row.of(what, [mine / theirs for mine, theirs in rounds], limit, note)


def extra_bytes(peer: Peer, case: Case, step: mx.array | None) -> int:
    """The most that a fetch takes on top of what was there: the peaks of MLX and numpy together."""
    ids = sharing(sequence(case.tokens), case.tokens)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tracemalloc.start()
    fetched(peer, ids, case.tokens, step)
    _, traced = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return max(mx.get_peak_memory() - before, 0) + traced


def measure(arguments: argparse.Namespace) -> Report:
    """All of them; a quick run has the two smallest sizes, and fewer rounds."""
    vllm_mlx(4)  # if it is missing, that is told at once
    quick: bool = arguments.quick
    cases = SIZES[:2] if quick else (*SIZES, *OTHERS)
    samples = {case: timed(case, 3 if quick else 9) for case in cases}
    rows = [row for case in cases for row in compared(case, samples[case])]
    rows += lookup(quick)
    rows += [row for told in (held, peaks) for bits in BITS for row in told(bits)]
    return Report(rows, {"sizes": [size(case, samples[case]) for case in cases if case in SIZES]})


# The figure


def size(case: Case, samples: Samples) -> dict[str, Any]:
    """The medians that the figure shows, in milliseconds a layer."""
    return {
        "tokens": case.tokens,
        "milliseconds": {
            name: {
                peer: statistics.median(taken) * 1e3 / case.shape.layers
                for peer, taken in samples[operation].items()
            }
            for name, operation in (("insert", INSERT), ("fetch", FETCH))
        },
    }


LINES = {
    "ours, 4 bits": {"color": figures.COLOURS[0]},
    "ours, 8 bits": {"color": figures.COLOURS[0], "linestyle": "--"},
    "vllm-mlx, 4 bits": {"color": figures.COLOURS[1]},
    "vllm-mlx, 8 bits": {"color": figures.COLOURS[1], "linestyle": "--"},
    "stock": {"color": figures.COLOURS[2]},
}


def draw(data: Mapping[str, Any]) -> Figure:
    """Insert and fetch over the number of tokens, a line for each store."""
    figure = figures.new(2, height=4, sharey=True)
    tokens = [size["tokens"] for size in data["sizes"]]
    for axes, operation in zip(figure.axes, ("insert", "fetch"), strict=True):
        for peer, line in LINES.items():
            taken = [size["milliseconds"][operation][peer] for size in data["sizes"]]
            axes.loglog(tokens, taken, marker="o", label=peer, **line)
        axes.set(title=operation, xlabel="tokens")
        axes.set_xticks(tokens, [f"{number:,}" for number in tokens], minor=False)
        axes.minorticks_off()
    figure.axes[0].set_ylabel("milliseconds a layer")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure
