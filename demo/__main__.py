"""Run the demo: two chats or texts that begin alike, with and without a prefix cache."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from . import DemoError, prompts, report
from .client import Reply, complete
from .model_folder import default_cache_dir
from .models import MODELS, Model
from .server import Server, find_openblas, free_ports
from .sessions import Session

LENGTHS_TOKENS = (120, 800)
"""Shortest and longest beginning. The machine's speed decides, see `prompt_length`."""

REQUESTS_LIMIT_S = 200.0
QUICK_LIMIT_S = 60.0
"""What all requests together may take, as estimated. The demo is to end within five minutes on two
cores without OpenBLAS (8 to 12 tokens/s); starting, converting and a busy machine need the rest."""

TURN_TOKENS = 40
"""About what a line, its answer and the chat template add to a prompt."""

PROBE = "The harbour lies at the end of the street, behind the old customs house. " * 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of the servers."""

    turns: int
    max_tokens: int
    limit_s: float

    @property
    def requests(self) -> int:
        return self.turns + 1  # the second session has one turn


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    args = parse(argv)
    # so that a terminated demo unwinds, and ends its servers too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    plan = Plan(args.turns, args.max_tokens, QUICK_LIMIT_S if args.quick else REQUESTS_LIMIT_S)
    model = MODELS[args.model]
    bits = model.bits if args.bits is None else args.bits
    flags_on = ["--kv-cache-bits", str(bits)]
    try:
        folder = model.ensure(
            default_cache_dir(),
            lambda names: tqdm(names, desc="convert the weights", unit="tensor"),
        )
        print(f"model: {folder}")
        print(run(model, folder, plan, flags_on, ["--disable-prefix-cache"]))
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    defaults = ", ".join(f"{model.bits} for {name}" for name, model in MODELS.items())
    parser.add_argument(
        "--bits", type=int, help=f"the server's --kv-cache-bits (default: {defaults})"
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=3,
        choices=range(1, len(prompts.FIRST_CHAT) + 1),
        help="turns of the first chat or text (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=16, help="tokens of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a shorter beginning where the machine is slow, about a third of the time",
    )
    return parser.parse_args(argv)


def run(
    model: Model, folder: Path, plan: Plan, flags_on: Sequence[str], flags_off: Sequence[str]
) -> str:
    """Start both servers, hold the sessions at both, and return the report.

    Args:
        folder: the model's.
        flags_on: what turns the prefix cache on.
        flags_off: what turns it off.
    """
    preload = find_openblas()
    if sys.platform.startswith("linux"):
        print(f"OpenBLAS: {preload or 'not found, so this is slow (Debian: libopenblas0)'}")
    with TemporaryDirectory(prefix="mlx-lm-kvcache-demo-") as logs, ExitStack() as stack:
        ports = free_ports(2)
        on, off = (
            stack.enter_context(
                Server(folder, flags, port=port, log=Path(logs, f"{port}.log"), preload=preload)
            )
            for port, flags in zip(ports, (flags_on, flags_off), strict=True)
        )
        speed = start(on, off)
        beginning = _beginning(folder, prompt_length(speed, plan))
        rows = hold(model.sessions(beginning, plan.turns), on, off, plan)
        held = report.held_bytes(on.quiet_log_text())
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parts = (
        report.table(rows),
        report.legend(flags_on, flags_off),
        report.answers(rows),
        report.memory(held, report.fp16_bytes_per_token(config)),
    )
    return "\n" + "\n\n".join(parts)


def start(on: Server, off: Server) -> float:
    """Wait until both servers have loaded the model; returns the prefill speed in tokens/s."""
    with tqdm(total=5, desc="start the servers", unit="step") as bar, ticking(bar):
        for server in (on, off):
            server.wait_until_healthy()
            bar.update()
        for server in (on, off):
            # /health answers before the model is loaded: one token, so that no figure holds that
            complete(server, "A", max_tokens=1)
            bar.update()
        # where nothing is kept, so that the cache stays as it is
        probe = complete(off, PROBE, max_tokens=1)
        bar.update()
    return probe.prompt_tokens / probe.first_token_s


def prompt_length(tokens_per_s: float, plan: Plan) -> int:
    """The beginning's length in tokens with which the requests take about `plan.limit_s`.

    Without a cache each request prefills it; with a cache only the first one does. What the turns
    add and what is generated is taken off first.
    """
    budget = tokens_per_s * plan.limit_s
    turns = TURN_TOKENS * plan.turns * (plan.turns + 1) // 2
    generated = 2 * plan.requests * plan.max_tokens
    length = (budget - turns - generated) / (plan.requests + 1)
    shortest, longest = LENGTHS_TOKENS
    return int(min(max(length, shortest), longest))


def _beginning(folder: Path, limit_tokens: int) -> str:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return prompts.system_prompt(limit_tokens, lambda text: len(tokenizer.encode(text).ids))


def hold(sessions: Sequence[Session], on: Server, off: Server, plan: Plan) -> list[report.Row]:
    """Hold the sessions; every request goes to both servers, one after the other, never at once."""
    rows = []
    with tqdm(total=2 * plan.requests, desc="requests", unit="request") as bar, ticking(bar):
        for session in sessions:
            for turn, line in enumerate(session.lines, start=1):
                session.say(line)
                with_cache, without_cache = _ask_both(session, on, off, plan.max_tokens, bar)
                rows.append(_row(f"{session.name}, turn {turn}", with_cache, without_cache))
                answer = with_cache.text
                session.keep(answer)
                shown = f"{session.name}  {line.strip()}  ->  {' '.join(answer.split())}"
                tqdm.write(shown, sys.stdout)
    return rows


def _ask_both(
    session: Session, on: Server, off: Server, max_tokens: int, bar: tqdm[Any]
) -> tuple[Reply, Reply]:
    with_cache = session.ask(on, max_tokens)
    bar.update()
    without_cache = session.ask(off, max_tokens)
    bar.update()
    if without_cache.cached_tokens:
        raise DemoError("the server without a prefix cache reports a hit: nothing to compare with")
    return with_cache, without_cache


def _row(label: str, on: Reply, off: Reply) -> report.Row:
    return report.Row(
        label,
        on.prompt_tokens,
        on.cached_tokens,
        on.first_token_s,
        off.first_token_s,
        same_answer=on.text == off.text,
    )


@contextmanager
def ticking(bar: tqdm[Any], every_s: float = 1.0) -> Iterator[None]:
    """Keep a bar's clock going while one long step is waited for; only where someone looks on."""
    done = Event()

    def tick() -> None:
        while not done.wait(every_s):
            bar.refresh()

    thread = Thread(target=tick, daemon=True)
    if sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


if __name__ == "__main__":
    sys.exit(main())
