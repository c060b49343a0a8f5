"""Servers that find what others left in a folder: they hit it, and never wrongly."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from transformers import PreTrainedTokenizerFast

from mlx_lm_kvcache_plugin.disk.contents import all_files
from mlx_lm_kvcache_plugin.disk.ledger import locked
from tests import models
from tests.conftest import RunPython
from tests.integration.clients import ANSWER_SECONDS, MODES, Answer, Client, same_answer
from tests.integration.local_server import LocalServer
from tests.integration.stock_server import StockServer
from tests.integration.test_switching import adapter
from tests.models import prompt

RAW = ("--kv-cache-codec", "raw")
TEXT = prompt("A text to come back to", 300)
HIT_TOKENS = 299
"""The last token of a prompt is always computed."""

MIB = 1 << 20


@contextmanager
def keeping(disk: Path, *arguments: str, model: Path | None = None) -> Iterator[LocalServer]:
    """A server on that folder; what it stored is written by its end, and nothing failed in it."""
    named = ("--model", str(model)) if model else ()
    with LocalServer(*named, "--kv-cache-dir", str(disk), *arguments) as server:
        yield server
        server.settle()
        assert server.tier.flush()
        assert server.is_alive() and not server.recorder.errors


@dataclass
class Restarted:
    """Asks each request of a server of its own, one after the other on the same folder."""

    disk: Path
    arguments: Sequence[str]
    model: Path

    def text(self, prompt: str, **options: Any) -> Answer:
        with keeping(self.disk, *self.arguments, model=self.model) as server:
            return server.text(prompt, **options)

    def chat(self, messages: Sequence[dict[str, str]], **options: Any) -> Answer:
        with keeping(self.disk, *self.arguments, model=self.model) as server:
            return server.chat(messages, **options)


def ask_all(server: Client | Restarted, **options: Any) -> list[Answer]:
    """Two chats with one system prompt, of which one goes on, and texts that leave a stored one."""
    system = {"role": "system", "content": prompt("Be brief", 150)}
    chat = [system, {"role": "user", "content": prompt("one", 40)}]
    other = [system, {"role": "user", "content": prompt("two", 40)}]
    answers = [server.chat(chat, **options), server.chat(other, **options)]
    chat.append({"role": "assistant", "content": answers[0].text})
    chat.append({"role": "user", "content": prompt("more", 40)})
    answers += [server.chat(chat, **options), server.text(TEXT, **options)]
    for text in (TEXT + answers[-1].text + "?", TEXT, TEXT[:200] + "!" * 20):
        answers.append(server.text(text, **options))
    return answers


def slow(value: Any) -> Any:
    """A parameter that is left out of the default run."""
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def any_configuration() -> Iterator[None]:
    """Upstream's way to a tokenizer checks the configuration of models that it knows itself."""
    with mock.patch("mlx_lm.tokenizer_utils.AutoTokenizer", PreTrainedTokenizerFast):
        yield


def records(disk: Path) -> list[Path]:
    """All files of blocks and checkpoints."""
    return sorted(disk.glob("*/*/*.safetensors"))


# What a restarted server finds


@pytest.mark.parametrize("mode", ["batched", slow("sequential")])
@pytest.mark.parametrize("family", ["llama", *map(slow, ("gemma3_text", "mamba")), "qwen3_next"])
def test_a_restarted_server_hits_what_a_running_one_would(
    family_folder: Callable[[str], Path], tmp_path: Path, family: str, mode: str
) -> None:
    """Rows, windows and states: as many tokens, and the answers of a server without a cache."""
    model, options = family_folder(family), MODES[mode]
    with LocalServer("--model", str(model), "--disable-prefix-cache") as server:
        cold = ask_all(server, **options)
    with LocalServer("--model", str(model), *RAW) as server:
        running = ask_all(server, **options)
    restarted = ask_all(Restarted(tmp_path, RAW, model), **options)
    assert all(map(same_answer, restarted, cold))
    cached = [answer.cached_tokens for answer in restarted]
    assert cached == [answer.cached_tokens for answer in running]
    assert cached[0] == 0 < cached[2] and cached[-2] == HIT_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--kv-cache-bits", "4"), ("--kv-cache-codec", "affine")])
def test_what_is_quantized_comes_back_bit_for_bit(
    model: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """So that the answers are those of a running server, too."""
    with LocalServer("--model", str(model), *arguments) as server:
        running = ask_all(server)
    restarted = ask_all(Restarted(tmp_path, arguments, model))
    assert all(map(same_answer, restarted, running))
    assert [a.cached_tokens for a in restarted] == [a.cached_tokens for a in running]


# How it ends

SLOW_DISK = """
import os, time
_fsync = os.fsync
os.fsync = lambda descriptor: (time.sleep({seconds}), _fsync(descriptor))
"""


def end(server: StockServer, number: signal.Signals) -> tuple[int, float]:
    """Send a signal: the exit status, and how many seconds it took."""
    begun = time.monotonic()
    server._process.send_signal(number)
    return server._process.wait(timeout=30), time.monotonic() - begun


def wait_for_inserts(server: StockServer, count: int) -> None:
    """Wait until so many were logged."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while server.output().count("prefix cache holds") < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def slow_disk(folder: Path, seconds: float) -> dict[str, str]:
    """Variables for a process in which waiting for the disk takes so long."""
    (folder / "sitecustomize.py").write_text(SLOW_DISK.format(seconds=seconds))
    return {"PYTHONPATH": str(folder)}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_what_is_queued_is_written_before_the_end(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """And the exit status is that of a server without a folder."""
    arguments = ("--model", str(model), *RAW, "--log-level", "DEBUG")
    with StockServer(tmp_path / "log", *arguments) as server:
        server.text(TEXT)
        expected, _ = end(server, number)
    arguments += ("--kv-cache-dir", str(tmp_path / "disk"))
    texts = [prompt(f"{n} is queued", 300) for n in range(6)]
    with StockServer(tmp_path / "log", *arguments, **slow_disk(tmp_path, 0.05)) as server:
        for text in texts:
            server.text(text)
        wait_for_inserts(server, 2 * len(texts))  # at a prompt's end and behind its answer
        written = len(records(tmp_path / "disk"))
        status, _ = end(server, number)
    if number == signal.SIGTERM:  # MLX may abort a Python that ends by itself
        assert status == expected == -number
    assert written < 3 * len(texts)
    with keeping(tmp_path / "disk", *RAW, model=model) as again:
        cached = [again.text(text).cached_tokens for text in texts]
    assert cached == [HIT_TOKENS] * len(cached)


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_disk_that_hangs_does_not_keep_a_server(model: Path, tmp_path: Path) -> None:
    """It is given some seconds, and no more."""
    arguments = ("--model", str(model), *RAW, "--kv-cache-dir", str(tmp_path / "disk"))
    with StockServer(tmp_path / "log", *arguments, **slow_disk(tmp_path, 20)) as server:
        server.text(TEXT)
        status, seconds = end(server, signal.SIGTERM)
    assert status == -signal.SIGTERM and seconds < 10


# What is not the same


@pytest.fixture
def anything() -> Iterator[LocalServer]:
    """A server that knows no model yet, and prefills everything."""
    with LocalServer("--disable-prefix-cache") as server:
        yield server


SETTINGS = [
    ("--kv-cache-bits", "8"),
    ("--kv-cache-bits", "4"),
    ("--kv-cache-bits", "8", "--kv-cache-value-bits", "4"),
    ("--kv-cache-bits", "8", "--kv-cache-group-size", "32"),
    ("--kv-cache-bits", "8", "--kv-cache-codec", "affine"),
    RAW,
]


def test_another_setting_never_hits(model: Path, tmp_path: Path) -> None:
    """And once all have stored the same text, each finds its own."""
    for cached in (0, HIT_TOKENS):
        for arguments in SETTINGS:
            with keeping(tmp_path, *arguments, model=model) as server:
                assert server.text(TEXT).cached_tokens == cached


def test_memory_and_checkpoint_settings_are_no_other(model: Path, tmp_path: Path) -> None:
    """What does not change the numbers does not part them either."""
    with keeping(tmp_path, *RAW, model=model) as server:
        server.text(TEXT)
    more = ("--cache-memory-mb", "64", "--kv-cache-checkpoint-tokens", "64")
    with keeping(tmp_path, *RAW, *more, "--kv-cache-disk-mb", "99", model=model) as server:
        assert server.text(TEXT).cached_tokens == HIT_TOKENS


def changed(model: Path, folder: Path, **config: Any) -> Path:
    """A copy of a model whose configuration says something else."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def retrain(model: Path, seed: int) -> None:
    """Put other weights in the place of a model's."""
    other = models.llama(model.with_name(f"{model.name} {seed}"), seed=seed)
    os.replace(other / "model.safetensors", model / "model.safetensors")


def test_another_model_never_hits(model: Path, tmp_path: Path) -> None:
    """Other weights, another configuration, an adapter, a draft: each finds its own alone."""
    mine = changed(model, tmp_path / "mine")
    other = models.llama(tmp_path / "other", seed=1)
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "itself": (str(mine), {}),
        "weights": (str(other), {}),
        "rope": (str(changed(mine, tmp_path / "rope", rope_theta=500.0)), {}),
        "eps": (str(changed(mine, tmp_path / "eps", rms_norm_eps=0.1)), {}),
        "adapter": (str(mine), {"adapters": str(adapter(tmp_path / "lora", mine, 1))}),
        "draft": (str(mine), {"draft_model": str(other), "num_draft_tokens": 2}),
    }
    answers: dict[str, Answer] = {}
    with LocalServer("--disable-prefix-cache") as server:
        cold = {
            name: server.text(TEXT, model=path, **more) for name, (path, more) in options.items()
        }
    for turn in range(2):
        for name, (path, more) in options.items():
            with keeping(tmp_path / "disk", *RAW) as server:
                answers[name] = server.text(TEXT, model=path, **more)
            assert same_answer(answers[name], cold[name]), name
            assert (answers[name].cached_tokens > 250) is bool(turn), name
            assert turn or not answers[name].cached_tokens, name
    different = {answer.logprobs for name, answer in cold.items() if name != "draft"}
    assert len(different) == len(options) - 1


def test_the_same_model_under_another_path_hits(model: Path, tmp_path: Path) -> None:
    """Its content is what counts; other weights under the old path are another model."""
    mine = changed(model, tmp_path / "mine")
    with keeping(tmp_path / "disk", *RAW, model=mine) as server:
        first = server.text(TEXT)
    copy = changed(mine, tmp_path / "elsewhere" / "copy")
    with keeping(tmp_path / "disk", *RAW, model=copy) as server:
        again = server.text(TEXT)
    assert again.cached_tokens == HIT_TOKENS and same_answer(again, first)
    retrain(mine, 1)
    with keeping(tmp_path / "disk", *RAW, model=mine) as server:
        assert server.text(TEXT).cached_tokens == 0


@pytest.mark.parametrize("is_on_disk", [slow(True), False])
def test_weights_that_change_while_a_server_runs(
    model: Path, anything: LocalServer, tmp_path: Path, is_on_disk: bool
) -> None:
    """It switches to another model and back: what it has of the old weights is not for the new."""
    mine, other = changed(model, tmp_path / "mine"), models.llama(tmp_path / "other", seed=2)
    original = (mine / "model.safetensors").read_bytes()
    folder = ("--kv-cache-dir", str(tmp_path / "disk")) if is_on_disk else ()

    def ask(path: Path) -> Answer:
        answer = server.text(TEXT, model=str(path))
        server.settle()
        return answer

    with LocalServer(*RAW, *folder) as server:
        before = ask(mine)
        retrain(mine, 1)
        assert ask(other).cached_tokens == 0
        after = ask(mine)
        assert after.cached_tokens == 0 and not same_answer(after, before)
        assert same_answer(after, anything.text(TEXT, model=str(mine)))
        assert ask(mine).cached_tokens == HIT_TOKENS
        (mine / "old").write_bytes(original)
        os.replace(mine / "old", mine / "model.safetensors")
        assert ask(other).cached_tokens == HIT_TOKENS
        again = ask(mine)
        assert again.cached_tokens == (HIT_TOKENS if is_on_disk else 0)
        assert same_answer(again, before)


# Several on one folder


def ask_until(server: Client, texts: Sequence[str], done: threading.Event) -> dict[str, Answer]:
    """Ask for one text after the other: the last answers."""
    answers = {}
    while not done.is_set():
        answers |= {text: server.text(text) for text in texts}
    return answers


def used_bytes(disk: Path) -> int:
    """What all files of ours have; nobody changes them meanwhile but by renaming."""
    with locked(str(disk)):
        return min(sum(file.nbytes for file in all_files(str(disk))) for _ in range(2))


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_two_servers_on_a_folder_that_is_cleared(
    model: Path, cold: LocalServer, tmp_path: Path, run_python: RunPython
) -> None:
    """Both answer right all the time, neither complains, and the limit holds."""
    disk, limit_mb = tmp_path / "disk", 2
    arguments = ("--model", str(model), *RAW, "--kv-cache-dir", str(disk))
    arguments += ("--kv-cache-disk-mb", str(limit_mb), "--cache-memory-mb", "1")
    texts = [prompt(f"{n % 3} of one system prompt", 200) + prompt(str(n), 150) for n in range(9)]
    expected = {text: cold.text(text) for text in texts}
    most, done = 0, threading.Event()
    with (
        StockServer(tmp_path / "one", *arguments) as one,
        StockServer(tmp_path / "two", *arguments) as two,
        ThreadPoolExecutor() as threads,
    ):
        asking = [threads.submit(ask_until, server, texts, done) for server in (one, two)]
        for _ in range(12):
            time.sleep(0.5)
            most = max(most, used_bytes(disk))
            result = run_python("disk", str(disk), "--clear", command="mlx_lm.kvcache")
            assert result.returncode == 0 and not result.stderr
        done.set()
        answers = [future.result() for future in asking]
        outputs = one.output() + two.output()
    for each in answers:
        assert all(same_answer(each[text], expected[text]) for text in texts)
    assert MIB < most <= limit_mb * MIB
    assert "Traceback" not in outputs and "WARNING" not in outputs
    assert not list((disk / "quarantine").glob("*"))


# A disk that fails

REFUSALS = [
    ("write", errno.ENOSPC),
    ("ftruncate", errno.ENOSPC),
    ("fsync", errno.EIO),
    ("rename", errno.EACCES),
    ("open", errno.EROFS),
]


def refuse(monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> None:
    """Let a function of `os` fail on the thread that writes."""
    original = getattr(os, function)

    def fail(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name == "kvcache-disk":
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    monkeypatch.setattr(os, function, fail)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What our logger complained of."""
    records = caplog.get_records("call")
    ours = [each for each in records if each.name == "mlx_lm_kvcache_plugin"]
    return [each.getMessage() for each in ours if each.levelno >= logging.WARNING]


def serves_on(server: LocalServer, cold: LocalServer, count: int = 3) -> bool:
    """Whether prompts that are new are answered, kept and hit."""
    for number in range(count):
        text = prompt(f"{number} is new", 200)
        answers = [server.text(text), server.text(text)]
        server.settle()
        server.tier.flush()
        assert all(same_answer(answer, cold.text(text)) for answer in answers)
        assert [answer.cached_tokens for answer in answers] == [0, 199]
    return server.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize(("function", "number"), REFUSALS)
def test_a_disk_that_refuses_while_a_server_runs(
    model: Path,
    cold: LocalServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: str,
    number: int,
) -> None:
    """It goes on from memory, says so once, leaves nothing half done, and writes again later."""
    with keeping(tmp_path, *RAW, model=model) as server:
        server.text(TEXT)
    before = {path: path.read_bytes() for path in records(tmp_path)}
    with keeping(tmp_path, *RAW, model=model) as server:
        assert server.tier.flush()
        with monkeypatch.context() as patched:
            refuse(patched, function, number)
            assert serves_on(server, cold)
            assert server.text(TEXT).cached_tokens == HIT_TOKENS  # reading works
            assert len(warnings_in(caplog)) == 1 and os.strerror(number) in caplog.text
            assert server.tier.counters.errors >= 1 and server.tier.counters.skipped
            assert {path: path.read_bytes() for path in records(tmp_path)} == before
            assert not list(tmp_path.rglob("*.tmp"))
        server.tier._writer._quiet_until = 0
        server.text(prompt("once more", 200))
        server.settle()
        assert server.tier.flush() and len(records(tmp_path)) > len(before)
        assert len(warnings_in(caplog)) == 1


def test_a_full_disk(
    model: Path, cold: LocalServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where not even the reserve is free nothing of ours stays, and that is no failure."""
    with keeping(tmp_path, *RAW, model=model) as server:
        server.text(TEXT)
        server.settle()
        assert server.tier.flush() and records(tmp_path)
        server.tier._limit._disk_usage = lambda folder: shutil._ntuple_diskusage(1 << 40, 0, 0)
        assert serves_on(server, cold)
        assert not records(tmp_path)
        assert server.tier.counters.errors == 0 and not warnings_in(caplog)


def test_a_folder_that_is_deleted_while_a_server_runs(
    model: Path, cold: LocalServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on from memory, and says so once."""
    disk = tmp_path / "disk"
    with keeping(disk, *RAW, model=model) as server:
        server.text(TEXT)
        server.settle()
        assert server.tier.flush()
        shutil.rmtree(disk)
        assert serves_on(server, cold)
        assert server.text(TEXT).cached_tokens == HIT_TOKENS
        assert len(warnings_in(caplog)) == 1


# Files that are not what they were


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 4
    path.write_bytes(data)


def flip_in_the_head(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(100))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_a_stranger(path: Path) -> None:
    mx.save_safetensors(str(path), {"tokens": mx.zeros(128, mx.int64)}, {"format": "mlx"})


def replace_by_a_link(path: Path) -> None:
    path.rename(path.with_name(f"linked {path.name}"))
    path.symlink_to(path.with_name(f"linked {path.name}"))


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").touch()


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: list[Callable[[Path], None]] = [
    truncate,
    flip,
    flip_in_the_head,
    lengthen,
    empty,
    replace_by_a_stranger,
    replace_by_a_link,
    replace_by_a_folder,
    replace_by_a_pipe,
]


@pytest.fixture(scope="module")
def stored(
    family_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path, Answer]]:
    """By family: the model, a folder with what it stored of `TEXT`, and the answer."""

    @functools.cache
    def make(family: str) -> tuple[Path, Path, Answer]:
        model, disk = family_folder(family), tmp_path_factory.mktemp("disk")
        with keeping(disk, *RAW, model=model) as server:
            return model, disk, server.text(TEXT)

    return make


def check_damaged(model: Path, disk: Path, expected: Answer) -> tuple[int, int]:
    """A right answer and no error: how long the hit was, and how many files were set aside."""
    with keeping(disk, *RAW, model=model) as server:
        answer = server.text(TEXT)
        server.settle()
        assert server.tier.flush() and same_answer(answer, expected)
        assert answer.cached_tokens is not None and server.tier.counters.errors == 0
        return answer.cached_tokens, server.tier.counters.quarantined


@pytest.mark.parametrize("family", ["llama", slow("qwen3_next")])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_records(
    stored: Callable[[str], tuple[Path, Path, Answer]],
    tmp_path: Path,
    family: str,
    damage: Callable[[Path], None],
) -> None:
    """All of them, however they are damaged: nothing is hit."""
    model, disk, expected = stored(family)
    copy = tmp_path / "copy"
    shutil.copytree(disk, copy)
    paths = records(copy)
    for path in paths:
        damage(path)
    cached, quarantined = check_damaged(model, copy, expected)
    assert cached == 0 and quarantined >= 1


@pytest.mark.parametrize("family", ["llama", slow("qwen3_next")])
def test_records_that_have_each_others_names(
    stored: Callable[[str], tuple[Path, Path, Answer]], tmp_path: Path, family: str
) -> None:
    """Whole ones, whose checksums are right."""
    model, disk, expected = stored(family)
    copy = tmp_path / "copy"
    shutil.copytree(disk, copy)
    paths = records(copy)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)
    cached, quarantined = check_damaged(model, copy, expected)
    assert cached == 0 and quarantined >= 1


@pytest.mark.slow
def test_a_damaged_block_in_the_middle(
    stored: Callable[[str], tuple[Path, Path, Answer]], tmp_path: Path
) -> None:
    """What is before it is hit, and it is written anew."""
    model, disk, expected = stored("llama")
    hits = set()
    for number, path in enumerate(records(disk)):
        copy = tmp_path / str(number)
        shutil.copytree(disk, copy)
        flip(copy / path.relative_to(disk))
        cached, quarantined = check_damaged(model, copy, expected)
        assert quarantined == 1
        hits.add(cached)
        assert check_damaged(model, copy, expected) == (HIT_TOKENS, 0)
    assert hits == {0, 128, 256}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["*/layout-*.json", "*/about.json", "usage.lock"])
@pytest.mark.parametrize(
    "damage", [truncate, empty, replace_by_a_stranger, replace_by_a_link, replace_by_a_folder]
)
def test_other_damaged_files(
    stored: Callable[[str], tuple[Path, Path, Answer]],
    tmp_path: Path,
    pattern: str,
    damage: Callable[[Path], None],
) -> None:
    """Answers are right, and the server goes on."""
    model, disk, expected = stored("llama")
    copy = tmp_path / "copy"
    shutil.copytree(disk, copy)
    (path,) = copy.glob(pattern)
    damage(path)
    for _ in range(2):
        with keeping(copy, *RAW, model=model) as server:
            answer = server.text(TEXT)
            assert same_answer(answer, expected)
            if "layout" not in pattern:
                assert answer.cached_tokens == HIT_TOKENS
    if damage not in (replace_by_a_link, replace_by_a_folder):
        assert answer.cached_tokens == HIT_TOKENS


# Without a server


def generate(run_python: RunPython, model: Path, text: str, *arguments: str) -> list[str]:
    """What the stock command prints, line by line."""
    command = ("--model", str(model), "--prompt", text, "--max-tokens", "8", "--temp", "0")
    result = run_python(*command, *arguments, command="mlx_lm.generate")
    assert result.returncode == 0 and not result.stderr, result.stderr
    return result.stdout.splitlines()


def reuse(lines: Sequence[str]) -> tuple[int, int]:
    """How many tokens of a prompt were reused, of how many."""
    (line,) = (line for line in lines if line.startswith("Prefix cache: "))
    words = line.split()
    return int(words[2]), int(words[4])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("family", ["llama", slow("lfm")])
def test_a_command_and_the_next_one(tmp_path: Path, run_python: RunPython, family: str) -> None:
    """The second reuses what the first computed; both say what the stock command says."""
    model = models.FAMILIES[family](tmp_path / family)
    plain = generate(run_python, model, TEXT)
    ours = (*RAW, "--kv-cache-dir", str(tmp_path / "disk"))
    first, second = (generate(run_python, model, TEXT, *ours) for _ in range(2))
    assert plain[:3] == first[:3] == second[:3] and plain[0] == plain[2] == "=" * 10
    (tokens,) = {reuse(first)[1], reuse(second)[1]}
    assert reuse(first)[0] == 0 and reuse(second)[0] == tokens - 1
    more = generate(run_python, model, TEXT + "?", *ours)
    assert reuse(more)[0] >= len(TEXT) - 1 or family == "lfm"


@pytest.mark.usefixtures("installed")
def test_a_command_and_a_server_share_a_folder(
    model: Path, tmp_path: Path, run_python: RunPython
) -> None:
    """What the one has computed, the other one hits; without a template, and with it."""
    ours = (*RAW, "--kv-cache-dir", str(tmp_path))
    message = {"role": "user", "content": prompt("a message", 250)}
    other = prompt("The server is first", 300)
    generate(run_python, model, TEXT, "--ignore-chat-template", *ours)
    generate(run_python, model, message["content"], *ours)
    with keeping(tmp_path, *RAW, model=model) as server:
        assert server.text(TEXT).cached_tokens == HIT_TOKENS
        chat = server.chat([message])
        assert chat.cached_tokens == chat.prompt_tokens - 1
        answer = server.text(other)
    lines = generate(run_python, model, other, "--ignore-chat-template", *ours)
    assert reuse(lines) == (HIT_TOKENS, 300)
    assert lines[1] == answer.text


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("family", "is_shared"), [("gemma", True), ("lfm", False)])
def test_what_a_server_batches_is_shared_but_for_states(
    tmp_path: Path, run_python: RunPython, family: str, is_shared: bool
) -> None:
    """In some models a batch takes padding for tokens: its states are for batches alone."""
    model, disk = models.FAMILIES[family](tmp_path / family), tmp_path / "disk"
    ours = ("--ignore-chat-template", *RAW, "--kv-cache-dir", str(disk))
    generate(run_python, model, TEXT, *ours)
    shared = HIT_TOKENS * is_shared
    with keeping(disk, *RAW, model=model) as server:
        assert [server.text(TEXT).cached_tokens for _ in range(2)] == [shared, HIT_TOKENS]
        server.text(prompt("The server is first", 300))
    lines = generate(run_python, model, prompt("The server is first", 300), *ours)
    assert reuse(lines)[0] == shared
    assert reuse(generate(run_python, model, TEXT, *ours)) == (HIT_TOKENS, 300)


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_command_with_another_model_never_hits(tmp_path: Path, run_python: RunPython) -> None:
    """Nor with other weights in the same place; with the same in another place it does."""
    model = models.llama(tmp_path / "model")
    ours = (*RAW, "--kv-cache-dir", str(tmp_path / "disk"))
    generate(run_python, model, TEXT, *ours)
    copy = changed(model, tmp_path / "copy")
    retrain(model, 1)
    plain = generate(run_python, model, TEXT)
    lines = generate(run_python, model, TEXT, *ours)
    assert reuse(lines)[0] == 0 and lines[1] == plain[1]
    reused, tokens = reuse(generate(run_python, copy, TEXT, *ours))
    assert reused == tokens - 1
