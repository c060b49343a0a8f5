"""Processes that are killed while they write: what they leave behind is right, or not there.

Each is forked from one that has imported everything and used nothing of MLX, or two hundred would
take too long to start: `python -m tests.integration.test_kill` is that one.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_lm_kvcache_plugin.disk import tier as disk_tier
from mlx_lm_kvcache_plugin.disk.contents import Found, Role, all_files
from mlx_lm_kvcache_plugin.disk.files import decode
from mlx_lm_kvcache_plugin.disk.ledger import locked
from mlx_lm_kvcache_plugin.events import Error
from mlx_lm_kvcache_plugin.patches.layer_kinds import BuiltInLayerKinds
from mlx_lm_kvcache_plugin.patches.opening import attach, identify, open_cache
from mlx_lm_kvcache_plugin.patches.prompt_cache import PrefixPromptCache
from mlx_lm_kvcache_plugin.patches.ranks import Ranks
from mlx_lm_kvcache_plugin.plugins import plugins
from mlx_lm_kvcache_plugin.settings import Settings
from tests import models
from tests.events import Events

KILLS, AT_ONCE = 200, 2
SOONEST_S, LATEST_S = 0.02, 0.4
PIECE_BYTES, PIECE_S = 1 << 15, 0.001
LIMIT_MB, MEMORY_MB = 6, 3
ANSWER_TOKENS = 4
NAMESPACE = ("model", None, None)
FAMILIES = ("llama", "lfm")
"""Rows alone, and states beside them."""

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


# In a process that will be killed, and in this one


@dataclass(frozen=True)
class Outcome:
    """What a model said: greedy tokens and their logprobs, and how much of the prompt was a hit."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    hit_tokens: int

    def is_like(self, other: Outcome) -> bool:
        """Up to the noise of another order of summation."""
        return self.tokens == other.tokens and np.allclose(self.logprobs, other.logprobs, atol=1e-3)


@contextmanager
def opened(model: Any, disk: Path, events: Events) -> Iterator[PrefixPromptCache]:
    """A new prefix cache on that folder, as a server has it; `events` gets what it tells."""
    settings = Settings.resolve(
        {"kv_cache_codec": "raw", "kv_cache_dir": disk, "kv_cache_disk_mb": LIMIT_MB}
        | {"cache_memory_mb": MEMORY_MB}
    )
    plugins().register(BuiltInLayerKinds(), BuiltInLayerKinds.NAME)
    kinds = plugins().layer_kinds()
    prefixes = open_cache(settings, emit=events.append)
    attach(prefixes, NAMESPACE, identify(model), [model], kinds)
    yield PrefixPromptCache(prefixes, kinds, Ranks())
    tier_of(prefixes).close()


def tier_of(prefixes: Any) -> disk_tier.DiskTier:
    return prefixes._offload._tier


def answer(model: Any, prompt: list[int], face: PrefixPromptCache | None, stores: bool) -> Outcome:
    """Go on with a prompt from what the face has of it, and perhaps store what was computed."""
    caches, rest = None, prompt
    if face is not None:
        caches, rest = face.fetch_nearest_cache(NAMESPACE, prompt)
    caches = caches or make_prompt_cache(model)
    if rest[:-1]:
        model(mx.array([rest[:-1]]), cache=caches)
    if stores:
        face.insert_cache(NAMESPACE, prompt[:-1], caches, cache_type="user")
    tokens, logprobs = [], []
    token = prompt[-1]
    for _ in range(ANSWER_TOKENS):
        logits = model(mx.array([[token]]), cache=caches)[0, -1]
        token = int(logits.argmax().item())
        tokens.append(token)
        logprobs.append(float((logits[token] - mx.logsumexp(logits)).item()))
    if stores:
        face.insert_cache(NAMESPACE, prompt + tokens[:-1], caches)
    return Outcome(tuple(tokens), tuple(logprobs), len(prompt) - len(rest))


def prompts_of(seed: int) -> Iterator[list[int]]:
    """What a process asks, in turn: system prompts that all share, some endings that all share."""
    choose = random.Random(seed)
    for number in range(1 << 30):
        system = models.prompt(f"{choose.randrange(3)} is the system prompt", 200)
        name = choose.randrange(6) if number % 2 else f"{seed} {number}"
        yield list((system + models.prompt(f"{name} asks", choose.choice((60, 150)))).encode())


def work(folder: Path, disk: Path, seed: int) -> None:
    """Generate and store until killed, or left alone in the world."""
    model, _ = load_model(folder)
    parent = os.getppid()
    with opened(model, disk, Events()) as face:
        os.write(1, f"{os.getpid()}\n".encode())
        for prompt in prompts_of(seed):
            answer(model, prompt, face, stores=True)
            if os.getppid() != parent:
                os._exit(1)


def write_slowly(descriptor: int, data: memoryview | bytes, stock: Any = os.write) -> int:
    """A piece after the other, so that many are killed between two of them."""
    if threading.current_thread().name != "kvcache-disk":
        return stock(descriptor, data)
    time.sleep(PIECE_S)
    return stock(descriptor, data[:PIECE_BYTES])


def nurse() -> None:
    """Fork a process for each line "SEED FOLDER DISK"; its own end is its only failure."""
    os.write = write_slowly
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody has to wait for them
    for line in sys.stdin:
        seed, folder, disk = line.rstrip("\n").split(" ", 2)
        if not os.fork():
            try:
                work(Path(folder), Path(disk), int(seed))
            except BaseException:
                traceback.print_exc()
                os.write(1, b"\n")  # nobody should wait for it to begin
            os._exit(1)


# The test


@dataclass(frozen=True)
class Killed:
    """A process that was killed.

    Attributes:
        was_alive: until then.
        halves: the files that it was writing.
    """

    family: str
    seed: int
    was_alive: bool
    halves: list[Path]


class Nursery:
    """Starts processes one after the other, and kills each. Used by one thread."""

    def __init__(self, disk: Path, folders: dict[str, Path]) -> None:
        self._disk = disk
        self._folders = folders
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.test_kill"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def raise_and_kill(self, seed: int) -> Killed:
        family = FAMILIES[seed % len(FAMILIES)]
        print(seed, self._folders[family], self._disk, file=self._process.stdin, flush=True)
        pid = int(self._process.stdout.readline())
        time.sleep(random.Random(-seed).uniform(SOONEST_S, LATEST_S))
        was_alive = is_alive(pid)
        if was_alive:
            os.kill(pid, signal.SIGKILL)
        while is_alive(pid):
            time.sleep(0.001)
        files = (file for file in all_files(str(self._disk)) if file.role is Role.TEMPORARY)
        halves = [Path(file.path) for file in files if f"/.{pid}-" in file.path]
        return Killed(family, seed, was_alive, halves)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def kill_many(nursery: Nursery, seeds: Sequence[int], killed: queue.Queue[Killed | None]) -> None:
    """Let some live and die; None at the end, whatever comes."""
    try:
        for seed in seeds:
            killed.put(nursery.raise_and_kill(seed))
    finally:
        nursery.close()
        killed.put(None)


class Checker:
    """Starts anew on the folder and compares what it restores with what is computed cold."""

    def __init__(self, disk: Path, folders: dict[str, Path]) -> None:
        self._disk = disk
        self._models = {family: load_model(folder)[0] for family, folder in folders.items()}
        self._cold = cache(
            lambda family, prompt: answer(self._models[family], list(prompt), None, False)
        )
        self.checked = self.hits = self.evicted = self.most_bytes = 0
        self.wrong: list[tuple[Killed, Outcome, Outcome]] = []

    def check(self, killed: Killed) -> None:
        """Some of the prompts of a process that was killed."""
        asked = prompts_of(killed.seed)
        events = Events()
        with opened(self._models[killed.family], self._disk, events) as face:
            for prompt in (next(asked) for _ in range(4)):
                found = answer(self._models[killed.family], prompt, face, stores=False)
                cold = self._cold(killed.family, tuple(prompt))
                self.checked += 1
                self.hits += found.hit_tokens > 0
                if not found.is_like(cold):
                    self.wrong.append((killed, found, cold))
            assert not events.of(Error)
            counters = tier_of(face.cache).counters
            assert tier_of(face.cache).flush() and not counters.errors and not counters.quarantined
        self.evicted += counters.evicted_files
        self.most_bytes = max(self.most_bytes, used_bytes(self._disk))


def used_bytes(disk: Path) -> int:
    """What all files of ours have; nobody changes them meanwhile but by renaming."""
    with locked(str(disk)):
        return min(sum(file.nbytes for file in all_files(str(disk))) for _ in range(2))


def is_whole(file: Found) -> bool:
    """Whether a record can be read, if it is one."""
    if file.name is None:
        return file.role in (Role.TEXT, Role.TEMPORARY)
    decode(file.name, Path(file.path).read_bytes())
    return True


@pytest.fixture
def read_paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all files that this process reads from a tier."""
    paths: list[str] = []
    stock = disk_tier.open_file

    def open_file(path: str) -> Any:
        paths.append(path)
        return stock(path)

    monkeypatch.setattr(disk_tier, "open_file", open_file)
    return paths


@pytest.mark.slow
def test_processes_that_are_killed(tmp_path: Path, read_paths: list[str]) -> None:
    """200 of them at any moment of their writing: no wrong token, no crash, no broken file."""
    folders = {family: models.FAMILIES[family](tmp_path / family) for family in FAMILIES}
    disk = tmp_path / "disk"
    disk.mkdir()
    checker, killed = Checker(disk, folders), queue.Queue[Killed | None]()
    for slot in range(AT_ONCE):
        seeds = range(1 + slot, 1 + KILLS, AT_ONCE)
        arguments = (Nursery(disk, folders), seeds, killed)
        threading.Thread(target=kill_many, args=arguments, daemon=True).start()
    victims: list[Killed] = []
    left = AT_ONCE
    while left:
        victim = killed.get(timeout=60)
        if victim is None:
            left -= 1
            continue
        victims.append(victim)
        for path in victim.halves:  # as if they were older than any write takes
            os.utime(path, (0, 0))
        checker.check(victim)
    while_writing = sum(bool(victim.halves) for victim in victims)
    print(
        f"{len(victims)} killed, {while_writing} of them while a file was being written; "
        f"{checker.hits} hits among {checker.checked} prompts, {checker.evicted} files evicted by "
        f"starts, at most {checker.most_bytes:,} bytes of {LIMIT_MB * MIB:,}"
    )
    assert not checker.wrong
    assert len(victims) == KILLS and all(victim.was_alive for victim in victims)
    assert checker.hits > checker.checked / 20 and while_writing > KILLS / 20
    assert 0.9 < checker.most_bytes / (LIMIT_MB * MIB) <= 1
    assert all(map(is_whole, all_files(str(disk))))
    assert not [path for path in read_paths if path.endswith(".tmp")]


if __name__ == "__main__":
    nurse()
