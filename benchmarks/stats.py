"""What statistics cost a server, and how soon they are told while it is busy.

Two `mlx_lm.server` processes with a tiny model, with statistics and without, are asked short
requests in turn. Then SmolLM2 computes a prompt for more than ten seconds, while its server is
asked for its statistics over and over, as a page and a scraper would.
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from demo.client import complete
from demo.server import HOST, Server, find_openblas, free_ports
from tests import models

from .report import Report, Row, in_turn
from .restart import model, passage

WITH, WITHOUT = "with statistics", "without"
FLAGS = {WITH: (), WITHOUT: ("--disable-cache-stats",)}
PLUGIN = ("--kv-cache-bits", "4", "--log-level", "INFO")

ROUNDS, REQUESTS = 25, 40
PROMPT_BYTES, ANSWER_TOKENS = 60, 8
"""Of a short request: it has a token for each byte."""

HELD_PROMPTS, HELD_TOKENS = 6, 400
"""What the busy server holds already, so that there is something to tell."""

PREFILL_SECONDS = 10.0
PAUSE_SECONDS = 0.05
PATHS = ("/v1/cache/stats", "/metrics")


def measure(arguments: argparse.Namespace) -> Report:
    """Both parts."""
    rounds, tokens = (5, 1000) if arguments.quick else (ROUNDS, 2500)
    with tempfile.TemporaryDirectory() as folder:
        rates = requests_a_second(Path(folder), rounds)
        seconds, prefill_seconds = answer_seconds(Path(folder), tokens)
    rows = [rate_row(rates), *answer_rows(seconds, prefill_seconds, arguments.quick)]
    return Report(rows, {"requests_a_second": rates, "answer_seconds": seconds})


# What they cost


def requests_a_second(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Of both servers, round by round. A model as tiny as this one needs no OpenBLAS."""
    tiny = folder / "tiny"
    tiny.mkdir()
    models.llama(tiny)
    with ExitStack() as running:
        servers = {
            name: running.enter_context(server(tiny, flags, folder, port))
            for (name, flags), port in zip(FLAGS.items(), free_ports(len(FLAGS)), strict=True)
        }
        for each in servers.values():
            each.wait_until_healthy()
        ask_in_turn(servers, -1)  # warm
        found = [ask_in_turn(servers, n) for n in tqdm(range(rounds), desc="rounds", leave=False)]
        return {name: [rates[name] for rates in found] for name in FLAGS}


def server(
    model: Path, flags: tuple[str, ...], folder: Path, port: int, preload: str | None = None
) -> Server:
    """With our cache."""
    log = folder / f"{port}.log"
    return Server(model, (*PLUGIN, *flags), port=port, log=log, preload=preload)


def ask_in_turn(servers: Mapping[str, Server], number: int) -> dict[str, float]:
    """Requests a second of each, by a client whose requests are short and all different.

    They take turns at every request, so that whatever else the machine does slows down both.
    """
    seconds = dict.fromkeys(servers, 0.0)
    for request in range(REQUESTS):
        prompt = f"{number} {request} ".ljust(PROMPT_BYTES, "x")
        for name in in_turn(request, list(servers)):
            begun = time.perf_counter()
            complete(servers[name], prompt, max_tokens=ANSWER_TOKENS)
            seconds[name] += time.perf_counter() - begun
    return {name: REQUESTS / taken for name, taken in seconds.items()}


def rate_row(rates: Mapping[str, list[float]]) -> Row:
    """With to without, round by round."""
    pairs = zip(rates[WITH], rates[WITHOUT], strict=True)
    return Row.of(
        "requests a second, with statistics to without",
        [one / other for one, other in pairs],
        0.98,
        " and ".join(f"{statistics.median(rates[name]):.1f}" for name in FLAGS),
        at_least=True,
    )


# How soon they are told


def answer_seconds(folder: Path, tokens: int) -> tuple[dict[str, list[float]], float]:
    """How long each answer took while a prompt of so many tokens was computed, and that took."""
    (port,) = free_ports(1)
    with (
        server(model(), (), folder, port, find_openblas()) as busy,
        ThreadPoolExecutor(1) as thread,
    ):
        busy.wait_until_healthy()
        for number in range(HELD_PROMPTS):
            complete(busy, passage(HELD_TOKENS, number), max_tokens=2)
        begun = time.perf_counter()
        prefill = thread.submit(complete, busy, passage(tokens, HELD_PROMPTS + 1), max_tokens=1)
        seconds = dict(ask_while(prefill, port))
        return seconds, prefill.result().first_token_s or time.perf_counter() - begun


def ask_while(prefill: Future[object], port: int) -> Iterator[tuple[str, list[float]]]:
    """The seconds of each path's answers, asked in turn until the prompt is computed."""
    found: dict[str, list[float]] = {path: [] for path in PATHS}
    while not prefill.done():
        for path in PATHS:
            found[path].append(get(port, path))
            time.sleep(PAUSE_SECONDS)
    yield from found.items()


def get(port: int, path: str) -> float:
    """Seconds from connecting to the last byte."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        if response.status != http.client.OK or not response.read():
            raise SystemExit(f"benchmarks: {path} answered {response.status}")
    finally:
        connection.close()
    return time.perf_counter() - begun


def answer_rows(
    seconds: Mapping[str, list[float]], prefill_seconds: float, quick: bool
) -> Iterator[Row]:
    """The median and the slowest of all answers."""
    if prefill_seconds < PREFILL_SECONDS and not quick:
        raise SystemExit(f"benchmarks: the prompt took {prefill_seconds:.1f} s alone: too few")
    for path, taken in seconds.items():
        ms = sorted(1000 * each for each in taken)
        yield Row.of(
            f"{path} while a prompt is computed, ms",
            ms,
            50 if path == PATHS[0] else None,
            f"{len(ms)} answers in {prefill_seconds:.1f} s",
        )
    slowest = 1000 * max(seconds[PATHS[0]])
    yield Row(f"the slowest {PATHS[0]} of these, ms", slowest, 50)
