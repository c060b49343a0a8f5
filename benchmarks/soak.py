"""Two thousand requests of random agents under a small limit: what is held, and what leaks.

The stock `mlx_lm.server` in a process of its own, with a tiny random model, gets the requests of
`traffic.Agents`, four at a time; then another one without the plugin's flags gets the same. A
hundred of the longest come first. After every ten requests the server is asked what its memory
holds (watched.py).

Memory is flat if what is in use grows by no more than 1% of what is resident over 1,000 requests,
and the number of Python's allocations by no more than 1%. Both are the growth of the line of least
squares through the last three quarters, which leaves the warm-up out; its noise is the standard
error of the line through the means of ten equal parts. Resident memory itself has no target: it
follows the peaks of malloc, which gives little back, and of MLX's pool of free buffers.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tqdm import tqdm

from demo import DemoError
from demo.client import Message, Reply, chat
from demo.report import HELD_LINE
from demo.server import Server, free_ports
from tests import models

from . import figures
from .report import Report, Row
from .traffic import Agents

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REQUESTS, QUICK_REQUESTS = 2000, 100
LONGEST_FIRST = 100
"""What codecs and allocators keep for later is as much as the longest needed."""

AT_ONCE = 4
GENERATED_TOKENS = 4

BETWEEN_READINGS = 10
SETTLE_S, ANSWER_S = 0.1, 10.0
"""What a server needs to store its last answer, and how long it may take to tell its memory."""

LIMIT_MB = 4
SERVERS = {
    "ours": ("--kv-cache-bits", "4", "--cache-memory-mb", str(LIMIT_MB)),
    "stock": (),
}

PARTS = 10
MOST_GROWTH = 0.01
GROWING = {
    "used": "what is in use",
    "python_blocks": "Python's allocations",
    "resident": "resident memory",
}

Reading = dict[str, int]
"""What watched.py tells, each time."""


# A line through readings


@dataclass(frozen=True, slots=True)
class Line:
    """A line through readings.

    Attributes:
        mean: of the readings.
        growth: how much the line rises over 1,000 requests.
        error: the standard error of that.
    """

    mean: float
    growth: float
    error: float


def line_through(readings: Sequence[float], between: int = BETWEEN_READINGS) -> Line:
    """The line of least squares through the means of equal parts.

    Args:
        readings: at least as many as there are parts.
        between: how many requests there are between two of them.
    """
    parts = np.array_split(np.array(readings, np.float64), PARTS)
    places = np.array_split(np.arange(len(readings)) * between / 1000, PARTS)
    means = [part.mean() for part in parts]
    (slope, _), covariance = np.polyfit([p.mean() for p in places], means, 1, cov=True)
    return Line(float(np.mean(readings)), float(slope), float(np.sqrt(covariance[0, 0])))


def after_warm_up(readings: Sequence[float]) -> Sequence[float]:
    """The last three quarters."""
    return readings[len(readings) // 4 :]


# Servers


@dataclass
class Soak:
    """What one server answered, and what it told.

    Attributes:
        replies: the answers.
        readings: of its memory.
        most_held: bytes; the most that its log ever tells. Stock's does not.
    """

    replies: list[Reply] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    most_held: int = 0

    def of(self, what: str) -> list[int]:
        """One figure of all readings."""
        return [reading[what] for reading in self.readings]

    @property
    def missed(self) -> float:
        """The share of all prompt tokens that was no hit."""
        hits = sum(reply.cached_tokens for reply in self.replies)
        return 1 - hits / sum(reply.prompt_tokens for reply in self.replies)


def build(folder: Path) -> Path:
    """A tiny model whose tokenizer splits words, as all do.

    It remembers each word that it has met: with a whole message for a word that would be a leak.
    """
    models.llama(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def soak(model: Path, flags: Sequence[str], requests: Sequence[list[Message]]) -> Soak:
    """Start a server, let it answer, and ask for its memory in between."""
    (port,) = free_ports(1)
    told = model / f"{port}.jsonl"
    server = Server(model, flags, port=port, log=told.with_suffix(".log"))
    server.command[:1] = [sys.executable, "-m", f"{__package__}.watched", str(told)]
    found = Soak()

    def ask(messages: list[Message]) -> None:
        try:
            found.replies.append(chat(server, messages, max_tokens=GENERATED_TOKENS))
        except DemoError:
            server.check_alive()  # else the count of the answers tells

    with server, ThreadPoolExecutor(AT_ONCE) as threads:
        server.wait_until_healthy()
        read = reader(server, told)
        longest = Agents(seed=1, longest=True)
        list(threads.map(ask, [longest.request() for _ in range(LONGEST_FIRST)]))
        found.replies.clear()
        for first in tqdm(range(0, len(requests), BETWEEN_READINGS), leave=False):
            list(threads.map(ask, requests[first : first + BETWEEN_READINGS]))
            time.sleep(SETTLE_S)
            found.readings.append(read())
        held = HELD_LINE.findall(server.log_text())
    found.most_held = max((int(n_bytes) for n_bytes, *_ in held), default=0)
    return found


def reader(server: Server, told: Path) -> Callable[[], Reading]:
    """Asks a server for its memory."""
    process = psutil.Process(server.pid)
    told.touch()
    lines = told.open(encoding="utf-8")

    def read() -> Reading:
        process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + ANSWER_S
        while not (line := lines.readline()):
            if time.monotonic() > deadline:
                raise server.failure("the server did not tell its memory")
            time.sleep(0.01)
        reading: Reading = json.loads(line)
        return reading

    return read


# What it came to


def measure(arguments: argparse.Namespace) -> Report:
    """Both servers, the same requests."""
    agents = Agents()
    count = QUICK_REQUESTS if arguments.quick else REQUESTS
    requests = [agents.request() for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder))
        soaks = {name: soak(model, flags, requests) for name, flags in SERVERS.items()}
    readings = {name: each.readings for name, each in soaks.items()}
    data = {"limit": LIMIT_MB << 20, "between": BETWEEN_READINGS, "readings": readings}
    return Report([*rows(soaks, count), *comparisons(soaks)], data)


def rows(soaks: Mapping[str, Soak], count: int) -> Iterator[Row]:
    """The figures that have a target."""
    ours, limit = soaks["ours"], LIMIT_MB << 20
    yield Row(f"requests answered, of {count:,}", len(ours.replies), count, at_least=True)
    note = f"{ours.most_held:,} of {limit:,} bytes"
    yield Row("most bytes ever held, to the limit", ours.most_held / limit, 1.0, note)
    for name, each in soaks.items():
        target = MOST_GROWTH if each is ours else None
        yield from growths(name, each, target)


def growths(name: str, found: Soak, target: float | None) -> Iterator[Row]:
    """How memory grows, if there are readings enough to tell."""
    if len(after_warm_up(found.readings)) < 2 * PARTS:
        return
    for what, words in GROWING.items():
        values = after_warm_up(found.of(what))
        if None in values:
            continue
        line = line_through(values)
        whole = line.mean if what != "used" else np.mean(after_warm_up(found.of("resident")))
        yield Row(
            f"growth of {words} over 1,000 requests, {name}",
            float(line.growth / whole),
            None if what == "resident" else target,
            f"{line.growth:+,.0f}, standard error {line.error:,.0f}, of {whole:,.0f}",
        )


def comparisons(soaks: Mapping[str, Soak]) -> Iterator[Row]:
    """Ours beside stock's."""
    for name, each in soaks.items():
        yield Row(f"most resident memory, {name}, MB", max(each.of("resident")) / 1e6)
        yield Row(f"most bytes held between requests, {name}, MB", max(each.of("held")) / 1e6)
        yield Row(f"share of the prompt tokens that missed, {name}", each.missed)


def draw(data: Mapping[str, Any]) -> Figure:
    """Resident memory, what is in use of it, and what is held, over requests."""
    figure = figures.new(2, sharex=True)
    memory, held = figure.axes
    curves = ((memory, "resident", "-"), (memory, "used", ":"), (held, "held", "-"))
    for colour, (name, readings) in zip(figures.COLOURS, data["readings"].items(), strict=False):
        requests = [data["between"] * (place + 1) for place in range(len(readings))]
        for axes, what, style in curves:
            sizes = [(reading[what] or 0) / 1e6 for reading in readings]
            label = f"{name}, {what}" if axes is memory else name
            axes.plot(requests, sizes, style, color=colour, label=label)
    held.axhline(data["limit"] / 1e6, color=figures.INK, linestyle="--", label="our limit")
    for axes, title in ((memory, "memory of the process, MB"), (held, "held, MB")):
        axes.set(title=title, xlabel="requests answered", ylim=(0, None))
        axes.legend()
    return figure
