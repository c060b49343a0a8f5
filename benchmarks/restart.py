"""What a start finds that another process has computed, and what keeping it on disk costs.

Everything runs on the real SmolLM2, on Linux with OpenBLAS: the stock commands in processes of
their own, and a script as anybody would write it. Every yardstick is measured in the same run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import pydoc_data.topics
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from demo.client import Reply
from demo.model_folder import default_cache_dir
from demo.server import HOST, Server, free_ports
from demo.sessions import Chat
from demo.smollm2 import ensure_model
from tests.integration.local_server import LocalServer

from .report import Report, Row, in_turn, report_of

BITS = ("--kv-cache-bits", "4")
PROMPT_TOKENS = 600
CALLS = 10

SCRIPT = """
import sys
from mlx_lm import load, stream_generate

model, tokenizer = load(sys.argv[1])
seconds = 0.0
for ending in sys.argv[3:]:
    prompt = sys.argv[2] + ending
    *_, last = stream_generate(model, tokenizer, prompt, max_tokens=8)
    seconds += last.prompt_tokens / last.prompt_tps
print(seconds)
"""
"""Asks the model in its first argument for what the second one begins and each other one ends."""

CHAT_TURNS = 5
SYSTEM_TOKENS, LINE_TOKENS, ANSWER_TOKENS = 300, 60, 40

SERIES_REQUESTS = 3
SERIES_PROMPT_TOKENS, SERIES_ANSWER_TOKENS = 300, 100


@cache
def model() -> Path:
    """The folder of the real SmolLM2-135M-Instruct in float32."""
    return ensure_model(default_cache_dir())


@cache
def _book() -> tuple[Tokenizer, list[int]]:
    tokenizer = Tokenizer.from_file(str(model() / "tokenizer.json"))
    topics = pydoc_data.topics.topics
    return tokenizer, tokenizer.encode("\n\n".join(topics[key] for key in sorted(topics))).ids


def passage(tokens: int, place: int) -> str:
    """So many tokens of the Python reference; two places share no text."""
    tokenizer, ids = _book()
    start = 1000 * place
    text: str = tokenizer.decode(ids[start : start + tokens])
    return text


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Where the models are, which is a real disk: the system's own may be in memory."""
    return tempfile.TemporaryDirectory(dir=default_cache_dir(), prefix="bench-")


# Commands and scripts


def next_command(quick: bool) -> Iterator[Row]:
    """The stock command twice with the same prompt, in a new folder each time."""
    firsts, ratios, told = [], [], ""
    for _ in tqdm(range(2 if quick else 5), desc="commands", leave=False):
        with temporary_folder() as folder:
            flags = (*BITS, "--kv-cache-dir", folder)
            first, _ = prompt_seconds(flags)
            second, told = prompt_seconds(flags)
        firsts.append(first)
        ratios.append(second / first)
    what = "prompt time of the second mlx_lm.generate, to the first's"
    note = f"first {statistics.median(firsts):.2f} s; {told}"
    yield Row(what, statistics.median(ratios), 1 / 5, note)


def prompt_seconds(flags: tuple[str, ...]) -> tuple[float, str]:
    """Run the stock command: its prompt time, and the line of ours."""
    command = [str(Path(sys.executable).with_name("mlx_lm.generate")), "--model", str(model())]
    command += ["--prompt", passage(PROMPT_TOKENS, 0), "--max-tokens", "8", "--temp", "0"]
    printed = run([*command, *flags])
    found = re.search(r"Prompt: (\d+) tokens, ([\d.]+) tokens-per-sec", printed)
    told = re.search(r"Prefix cache: .*", printed)
    assert found and told, printed
    return int(found[1]) / float(found[2]), told[0]


def run(command: list[str], **variables: str) -> str:
    """What a command prints."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, text=True
    ).stdout


def calls_of_a_script(quick: bool) -> Iterator[Row]:
    """One script without a change in it, with and without a variable in its environment."""
    endings = [passage(12, place) for place in range(1, 1 + CALLS)]
    arguments = [str(model()), passage(PROMPT_TOKENS, 0), *endings]
    stock, ours = [], []
    for _ in tqdm(range(1 if quick else 3), desc="scripts", leave=False):
        for seconds, variables in ((stock, {}), (ours, {"MLX_LM_KV_CACHE_BITS": "4"})):
            seconds.append(float(run([sys.executable, "-c", SCRIPT, *arguments], **variables)))
    what = f"prompt time of {CALLS} calls that share {PROMPT_TOKENS} tokens, to that without us"
    note = f"{statistics.median(ours):.2f} and {statistics.median(stock):.2f} s"
    yield Row(what, statistics.median(ours) / statistics.median(stock), 1 / 4, note)


# Servers


@contextmanager
def started(*flags: str) -> Iterator[Server]:
    """The stock server in its own process; SIGTERM ends it."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as logs:
        with Server(model(), (*BITS, *flags), port=port, log=Path(logs, "log")) as server:
            server.wait_until_healthy()
            yield server


def new_chat(place: int) -> Chat:
    """A chat about one place in the book, and the next ones."""
    lines = [f"Explain: {passage(LINE_TOKENS, place + turn + 1)}" for turn in range(CHAT_TURNS)]
    return Chat("a chat", passage(SYSTEM_TOKENS, place), lines)


def say(server: Any, session: Chat, line: str) -> Reply:
    """One turn."""
    session.say(line)
    reply = session.ask(server, ANSWER_TOKENS)
    session.keep(reply.text)
    return reply


def last_turn(folder: str, place: int, *, restarts: bool) -> Reply:
    """Hold a chat, and perhaps let a new server have its last turn."""
    session = new_chat(place)
    *lines, last = session.lines
    with started("--kv-cache-dir", folder) as server:
        for line in lines:
            say(server, session, line)
        server.quiet_log_text()  # an answer is stored once it is out
        if not restarts:
            return say(server, session, last)
    with started("--kv-cache-dir", folder) as server:
        return say(server, session, last)


def restarted_server(quick: bool) -> Iterator[Row]:
    """The last turn of a chat, at the server that had all turns and at one that is new."""
    lost, note = [], ""
    for number in tqdm(range(1 if quick else 3), desc="restarts", leave=False):
        with temporary_folder() as one, temporary_folder() as other:
            running = last_turn(one, 10 * number, restarts=False)
            restarted = last_turn(other, 10 * number, restarts=True)
        lost.append(1 - restarted.cached_tokens / running.cached_tokens)
        note = f"{restarted.cached_tokens} and {running.cached_tokens} of {running.prompt_tokens}"
    what = "share of a running server's cached tokens that a restart loses"
    yield Row(what, statistics.median(lost), 0.1, note)


def bytes_on_disk(quick: bool) -> Iterator[Row]:
    """What a chat's files have, against what the same chat holds in memory."""
    ratios, note = [], ""
    for number in tqdm(range(1 if quick else 3), desc="chats", leave=False):
        session = new_chat(10 * number)
        with (
            temporary_folder() as folder,
            LocalServer("--model", str(model()), *BITS, "--kv-cache-dir", folder) as server,
        ):
            for line in session.lines:
                say(server, session, line)
            server.settle()
            assert server.tier.flush()
            held = server.cache.tree.used_bytes
            sizes = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
        ratios.append(sum(sizes) / held)
        note = f"{sum(sizes):,} bytes in {len(sizes)} files, to {held:,} bytes"
    what = f"bytes on disk to bytes in memory, after {CHAT_TURNS} turns"
    yield Row(what, statistics.median(ratios), 1.05, note)


def generation(quick: bool) -> Iterator[Row]:
    """New prompts back to back, by turns at a server with a folder and at one without."""
    ratios, speeds = [], []
    series, requests = (2, 2) if quick else (5, SERIES_REQUESTS)
    with (
        temporary_folder() as folder,
        started("--kv-cache-dir", folder) as on,
        started() as off,
    ):
        for number in tqdm(range(series), desc="series", leave=False):
            places = range(number * requests, (number + 1) * requests)
            pair = {
                server: speed(server, places, Path(folder)) for server in in_turn(number, (on, off))
            }
            ratios.append(pair[off] / pair[on])
            speeds.append(pair[on])
    what = "tokens a second of a server without a folder, to one that has one"
    note = f"{statistics.median(speeds):.1f} with it; {min(ratios):.3f} to {max(ratios):.3f}"
    yield Row(what, statistics.median(ratios), 1 / 0.97, note)


def speed(server: Server, places: Iterable[int], folder: Path) -> float:
    """Generated tokens a second, of new prompts and until all is written."""
    begun, tokens = time.time(), 0
    for place in places:
        tokens += complete(server, passage(SERIES_PROMPT_TOKENS, place))
    ended = time.time()
    server.quiet_log_text(quiet_s=0.5)  # so that its writing is not the other one's burden
    written = [path.stat().st_mtime for path in folder.glob("*/*/*.safetensors")]
    return tokens / (max([ended, *(when for when in written if when > begun)]) - begun)


def complete(server: Server, prompt: str) -> int:
    """Let a server go on with a prompt: how many tokens it generated."""
    connection = http.client.HTTPConnection(HOST, server.port)
    body = {"prompt": prompt, "max_tokens": SERIES_ANSWER_TOKENS, "temperature": 0.0}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = json.load(connection.getresponse())
    connection.close()
    tokens: int = answer["usage"]["completion_tokens"]
    return tokens


MEASURES: tuple[Callable[[bool], Iterator[Row]], ...] = (
    next_command,
    calls_of_a_script,
    restarted_server,
    bytes_on_disk,
    generation,
)


def measure(arguments: argparse.Namespace) -> Report:
    """All of them."""
    return report_of(MEASURES, arguments.quick)
