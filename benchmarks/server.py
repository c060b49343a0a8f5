"""An agent's chat on stock's server, with our cache and without it.

Three `mlx_lm.server` processes with SmolLM2: ours at 4 and at 8 bits, and stock without a flag of
ours. Each turn of the chat goes to all of them, one after the other, each time another one first.
What agents say is taken from a book and not from the model, so that all get the same prompts. On
some turns three sub-agents begin with the same system prompt, all at once, as they do.

Then one request decodes while others with new prompts arrive and are stored, at one server after
the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from demo.client import Message, Reply, chat, complete
from demo.server import Server, find_openblas, free_ports

from . import figures
from .report import Report, Row, in_turn
from .restart import model, passage
from .traffic import Samples, resident_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Answer = TypeVar("Answer")

STOCK = "stock"
SERVERS = {
    "ours, 4 bits": ("--kv-cache-bits", "4"),
    "ours, 8 bits": ("--kv-cache-bits", "8"),
    STOCK: (),
}

TURNS = 20
SYSTEM_TOKENS, LINE_TOKENS = 1500, 25
SUB_AGENTS, SUB_AGENT_TURNS = 3, (5, 10, 15)
GENERATED_TOKENS = 8

HIT = 0.95
"""The share of a prompt that has to be a hit, at all servers, for a turn to be compared."""

PAIRS = 5
LONG_PROMPT_TOKENS, LONG_ANSWER_TOKENS = 200, 120
OTHERS, OTHER_PROMPT_TOKENS = 4, 300

LINE_PLACE, SUB_AGENT_PLACE, LONG_PLACE, OTHER_PLACE = 2, 45, 70, 80
"""Where in the book each kind of text begins, in thousands of tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The chat's next request at one server, and what its sub-agents needed on this turn."""

    reply: Reply
    sub_agents: list[Reply] = field(default_factory=list)


def measure(arguments: argparse.Namespace) -> Report:
    """Both parts, on servers that are started once."""
    turns, pairs = (6, 2) if arguments.quick else (TURNS, PAIRS)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        ports = free_ports(len(SERVERS))
        servers = {
            name: running.enter_context(
                Server(
                    model(),
                    flags,
                    port=port,
                    log=Path(folder, f"{port}.log"),
                    preload=find_openblas(),
                )
            )
            for (name, flags), port in zip(SERVERS.items(), ports, strict=True)
        }
        for server in servers.values():
            server.wait_until_healthy()
            complete(server, passage(LONG_PROMPT_TOKENS, LONG_PLACE - 1), max_tokens=2)  # warm
        memory = running.enter_context(resident_memory(servers))
        held = in_rounds(servers, turns, "turns", take_turn)
        speeds = in_rounds(servers, pairs, "rounds", tokens_a_second)
    rows = [*chat_rows(held), *speed_rows(speeds), *memory_rows(memory)]
    return Report(rows, data_of(held, memory))


def in_rounds(
    servers: Mapping[str, Server], rounds: int, what: str, ask: Callable[[Server, int], Answer]
) -> dict[str, list[Answer]]:
    """What each server answers in each round; every time another one is the first."""
    answers: dict[str, list[Answer]] = {name: [] for name in servers}
    for number in tqdm(range(rounds), desc=what, leave=False):
        for name in in_turn(number, list(servers)):
            answers[name].append(ask(servers[name], number))
    return answers


# The chat


def messages(turn: int) -> list[Message]:
    """The prompt of a turn: all that was said before it, and a tool's result."""
    found = [
        {"role": "system", "content": passage(SYSTEM_TOKENS, 0)},
        {"role": "user", "content": passage(LINE_TOKENS, LINE_PLACE)},
    ]
    for place in range(LINE_PLACE + 1, LINE_PLACE + 1 + 2 * turn, 2):
        result = "Result: " + passage(LINE_TOKENS, place + 1)
        found += [
            {"role": "assistant", "content": passage(LINE_TOKENS, place)},
            {"role": "user", "content": result},
        ]
    return found


def sub_agents(turn: int) -> list[list[Message]]:
    """Chats that begin with the same system prompt and have a task each."""
    places = range(SUB_AGENT_PLACE + turn, SUB_AGENT_PLACE + turn + SUB_AGENTS)
    tasks = [{"role": "user", "content": passage(LINE_TOKENS, place)} for place in places]
    return [[messages(0)[0], task] for task in tasks]


def take_turn(server: Server, turn: int) -> Turn:
    """The chat's next request, and perhaps those of its sub-agents."""
    reply = chat(server, messages(turn), max_tokens=GENERATED_TOKENS)
    if turn not in SUB_AGENT_TURNS:
        return Turn(reply)

    def ask(chat_messages: list[Message]) -> Reply:
        return chat(server, chat_messages, max_tokens=GENERATED_TOKENS)

    with ThreadPoolExecutor(SUB_AGENTS) as threads:
        return Turn(reply, list(threads.map(ask, sub_agents(turn))))


def chat_rows(held: Mapping[str, list[Turn]]) -> Iterator[Row]:
    """Ours to stock's, turn by turn."""
    turns = range(len(held[STOCK]))
    compared = [turn for turn in turns if all(is_hit(each[turn]) for each in held.values())]
    if not compared:
        raise SystemExit(f"benchmarks: no turn hit {HIT:.0%} of its prompt at every server")
    for name in held:
        if name != STOCK:
            pairs = [(held[name][turn].reply, held[STOCK][turn].reply) for turn in compared]
            yield Row.of(
                f"time to first token on a hit of >= {HIT:.0%}, {name}, to stock's",
                [one.first_token_s / other.first_token_s for one, other in pairs],
                1.15,
                f"{median_s(one for one, _ in pairs):.3f} and "
                f"{median_s(other for _, other in pairs):.3f} s, {len(pairs)} turns",
            )
    for name, each in held.items():
        replies = [reply for turn in each for reply in (turn.reply, *turn.sub_agents)]
        prompts = sum(reply.prompt_tokens for reply in replies)
        missed = 1 - sum(reply.cached_tokens for reply in replies) / prompts
        note = f"of {prompts:,} tokens in {len(replies)} requests"
        yield Row(f"share of the prompts that missed, {name}", missed, note=note)


def is_hit(turn: Turn) -> bool:
    return turn.reply.cached_tokens >= HIT * turn.reply.prompt_tokens


def median_s(replies: Iterator[Reply]) -> float:
    return statistics.median(reply.first_token_s for reply in replies)


# Decoding while others are stored


def tokens_a_second(server: Server, number: int) -> float:
    """Of a request whose decoding goes on while others arrive, one after the other."""
    has_begun = threading.Event()

    def others() -> float:
        has_begun.wait()
        for other in range(OTHERS):
            prompt = passage(OTHER_PROMPT_TOKENS, OTHER_PLACE + number * OTHERS + other)
            complete(server, prompt, max_tokens=1)
        return time.perf_counter()

    with ThreadPoolExecutor(1) as thread:
        others_end = thread.submit(others)
        prompt = passage(LONG_PROMPT_TOKENS, LONG_PLACE + number)
        try:
            reply = complete(
                server, prompt, max_tokens=LONG_ANSWER_TOKENS, on_first_token=has_begun.set
            )
        finally:
            has_begun.set()  # or the others would wait for ever
        ended = time.perf_counter()
    if others_end.result() > ended:
        raise SystemExit("the others took longer than the long request: it did not run beside them")
    return (reply.generated_tokens - 1) / (reply.last_token_s - reply.first_token_s)


def speed_rows(speeds: Mapping[str, list[float]]) -> Iterator[Row]:
    """Ours to stock's, round by round."""
    for name, ours in speeds.items():
        if name != STOCK:
            yield Row.of(
                f"tokens a second while {OTHERS} others are stored, {name}, to stock's",
                [one / other for one, other in zip(ours, speeds[STOCK], strict=True)],
                0.95,
                f"{statistics.median(ours):.1f} and {statistics.median(speeds[STOCK]):.1f}",
                at_least=True,
            )


# Memory


def memory_rows(samples: Samples) -> Iterator[Row]:
    """What each process has at the end."""
    for name, points in samples.items():
        yield Row(f"resident memory at the end, {name}, MB", points[-1][1] / 2**20)


def data_of(held: Mapping[str, list[Turn]], samples: Samples) -> dict[str, Any]:
    """What the figure is drawn from."""
    return {
        "first_token_s": {n: [turn.reply.first_token_s for turn in held[n]] for n in held},
        "cached_tokens": {n: [turn.reply.cached_tokens for turn in held[n]] for n in held},
        "prompt_tokens": [turn.reply.prompt_tokens for turn in held[STOCK]],
        "resident_mb": {
            name: [(round(s, 1), round(n_bytes / 2**20, 1)) for s, n_bytes in points]
            for name, points in samples.items()
        },
    }


def draw(data: Mapping[str, Any]) -> Figure:
    """Time to first token by turn, and resident memory."""
    figure = figures.new(2)
    times, memory = figure.axes
    for name, seconds in data["first_token_s"].items():
        times.plot(range(1, len(seconds) + 1), seconds, marker="o", label=name)
    times.set(title="time to first token", xlabel="turn", ylabel="seconds", yscale="log")
    times.legend()
    for name, points in data["resident_mb"].items():
        memory.plot(*zip(*points, strict=True), label=name)
    memory.set(title="resident memory", xlabel="seconds", ylabel="MB")
    memory.set_ylim(bottom=0)
    return figure
