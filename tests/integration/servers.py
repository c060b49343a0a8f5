"""The stock server, as its own process or inside of this one, and a small HTTP client."""

from __future__ import annotations

import http.client
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx_lm.server  # inspect finds the source of a fresh copy only beside the imported one
import numpy as np

import mlx_lm_kvcache_plugin as plugin
from mlx_lm_kvcache_plugin.events import Counters, Error, Event
from mlx_lm_kvcache_plugin.plugins import hookimpl, plugins
from mlx_lm_kvcache_plugin.store.blocks import Block
from tests.models import chat_tokens

HOST = "127.0.0.1"
START_SECONDS = 60
ANSWER_SECONDS = 60


@dataclass(frozen=True)
class Answer:
    """What a request got.

    Attributes:
        text: each character is one generated token, see tests/models.py.
        logprobs: of those tokens, where they can be asked for.
        prompt_tokens, cached_tokens: what the server counted.
        longest_hit: the most that could have been cached, had all earlier sequences been kept.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int | None
    longest_hit: int
    logprobs: tuple[float, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return list(self.text.encode())


class Client:
    """Talks to a server on this machine. Every answer is greedy, eight tokens long by default."""

    def __init__(self) -> None:
        self.port = 0
        self._sequences: list[list[int]] = []

    def text(self, prompt: str, **options: Any) -> Answer:
        body = {"prompt": prompt, **options}
        return self._ask("/v1/completions", body, list(prompt.encode()))

    def chat(self, messages: Sequence[dict[str, str]], **options: Any) -> Answer:
        body = {"messages": list(messages), **options}
        return self._ask("/v1/chat/completions", body, chat_tokens(messages))

    def health(self) -> int:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        finally:
            connection.close()

    def disconnect(self, path: str, body: dict[str, Any], after: int) -> None:
        """Ask for a stream, and hang up after some of its chunks."""
        with self._send(path, {**body, "stream": True}) as response:
            for _ in range(after):
                next(_chunks(response))

    def _ask(self, path: str, body: dict[str, Any], tokens: list[int]) -> Answer:
        body = {"max_tokens": 8, **body}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        else:
            body["logprobs"] = True
        shared = max((common_prefix(tokens, other) for other in self._sequences), default=0)
        hit = min(len(tokens) - 1, shared)  # the last token is always computed
        with self._send(path, body) as response:
            if response.status != 200:
                raise AssertionError(f"{response.status}: {response.read().decode()}")
            if body.get("stream"):
                answer = _answer_of_stream(_chunks(response), hit)
            else:
                answer = _answer(json.load(response), hit)
        assert answer.prompt_tokens == len(tokens)
        self._sequences.append([*tokens, *answer.tokens])
        return answer

    @contextmanager
    def _send(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("POST", path, json.dumps(body))
            yield connection.getresponse()
        finally:
            connection.close()


def same_answer(one: Answer, other: Answer) -> bool:
    """Tokens are equal; logprobs up to the noise of another order of summation."""
    return (
        (one.text, one.finish_reason) == (other.text, other.finish_reason)
        and len(one.logprobs) == len(other.logprobs)
        and np.allclose(one.logprobs, other.logprobs, atol=1e-3)
    )


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        kind, _, data = line.decode().strip().partition(": ")
        if kind == "data" and data != "[DONE]":
            yield json.loads(data)


def _content(choice: dict[str, Any]) -> str:
    return choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""


def _answer(body: dict[str, Any], longest_hit: int) -> Answer:
    (choice,) = body["choices"]
    usage = body["usage"]
    logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
    answer = Answer(
        _content(choice),
        choice["finish_reason"],
        usage["prompt_tokens"],
        usage.get("prompt_tokens_details", {}).get("cached_tokens"),
        longest_hit,
        logprobs,
    )
    assert [entry["id"] for entry in choice["logprobs"]["content"]] == answer.tokens
    return answer


def _answer_of_stream(chunks: Iterator[dict[str, Any]], longest_hit: int) -> Answer:
    text, finish_reason, usage = "", "", {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += _content(choice)
            finish_reason = choice.get("finish_reason") or finish_reason
    cached_tokens = usage.get("prompt_tokens_details", {}).get("cached_tokens")
    return Answer(text, finish_reason, usage["prompt_tokens"], cached_tokens, longest_hit)


class StockServer(Client):
    """The console command of this environment, in its own process.

    Args:
        log: the file that its output goes to.
        arguments: on its command line.
        variables: further environment variables.
    """

    def __init__(self, log: Path, *arguments: str, **variables: str) -> None:
        super().__init__()
        self.log = log
        self.port = _free_port()
        command = [str(Path(sys.executable).with_name("mlx_lm.server")), *arguments]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                cwd=log.parent,
                env=clean_environment(**variables),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str) -> str:
        """The first line of its output that has this text."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for line in self.output().splitlines():
                if text in line:
                    return line
            time.sleep(0.05)
        raise AssertionError(f"no {text!r} in:\n{self.output()}")

    def __enter__(self) -> StockServer:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end()
                raise AssertionError(f"the server did not start:\n{self.output()}")
            time.sleep(0.05)
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _is_up(self) -> bool:
        try:
            return self.health() == 200
        except OSError:
            return False

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without any setting of ours but those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLX_LM_")}
    return {**kept, "PYTHONWARNINGS": "", "HF_HUB_OFFLINE": "1", **variables}


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def fresh_server_module() -> ModuleType:
    """`mlx_lm.server` executed anew and patched, but not in `sys.modules`."""
    spec = plugin.PatchFinder().find_spec("mlx_lm.server", mlx_lm.__path__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder:
    """A plugin that takes note of everything."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.counters = Counters()

    @hookimpl
    def kvcache_event(self, event: Event) -> None:
        self.events.append(event)
        self.counters.count(event)

    @property
    def errors(self) -> list[Error]:
        return [event for event in self.events if isinstance(event, Error)]


@dataclass(frozen=True)
class Insertion:
    """What came in by `insert_cache`, and what was held after it.

    Attributes:
        held_bytes, sequences: of the prompt cache.
        active_bytes: of the batch that was being decoded.
    """

    tokens: list[int]
    cache_type: str
    held_bytes: int
    sequences: int
    active_bytes: int


@dataclass
class Watch:
    """Audits a prompt cache after every call, on the thread that calls."""

    insertions: list[Insertion] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)


class LocalServer(Client):
    """The server's own `main()` in this process, so that a test can look inside.

    All that differs from the stock command is who binds the port. After each call into our prompt
    cache its store is audited; a test fails at the end if an audit did.

    Args:
        arguments: on its command line.
        variables: environment variables.
        prepare: changes the fresh module before its `main()` runs.
    """

    def __init__(
        self,
        *arguments: str,
        prepare: Callable[[ModuleType], None] = lambda module: None,
        **variables: str,
    ) -> None:
        super().__init__()
        self._arguments = arguments
        self._variables = variables
        self._prepare = prepare
        self.watch = Watch()
        self.recorder = Recorder()
        self._records: list[logging.LogRecord] = []
        self._said_at_start = 0
        self.batches: list[weakref.ref[Any]] = []
        self.prefilled_together = self.decoded_together = 0
        self._threads = ThreadPoolExecutor()
        self._turns = 0
        self._is_at_gate = False
        self._gate = threading.Event()
        self._gate.set()

    def __enter__(self) -> LocalServer:
        self._listen()
        try:
            with (
                mock.patch.dict(os.environ, clean_environment(**self._variables), clear=True),
                mock.patch.object(sys, "argv", ["mlx_lm.server", *self._arguments]),
            ):
                plugins.cache_clear()
                self.module: Any = fresh_server_module()
                self._prepare(self.module)
                plugins().register(self.recorder, "recorder")
                self.module._run_http_server = self._serve
                self.module.main()
                self._said_at_start = len(self._records)
        except BaseException:
            self._stop_listening()
            raise
        return self

    def _serve(self, host: str, port: int, generator: Any) -> None:
        self.generator = generator
        self.prompt_cache = generator.prompt_cache
        self._next_request = generator._next_request
        generator._next_request = self._count_turn
        self._watch_batches()
        for name in ("fetch_nearest_cache", "insert_cache", "trim_to"):
            if self.cache is not None:
                setattr(self.prompt_cache, name, self._audited(name))

        class Handler(self.module.APIHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(generator, *arguments, system_fingerprint="test")

            def log_message(self, *arguments: Any) -> None:
                """One line for each request would bury what matters."""

        self._httpd = _QuietServer((HOST, 0), Handler)
        self.port = self._httpd.server_port
        self._thread = threading.Thread(target=self._httpd.serve_forever, args=(0.02,))
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._gate.set()
        self._threads.shutdown()
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()
        self.generator.stop_and_join()
        self._stop_listening()
        if exception[0] is None:
            assert not getattr(self.generator, "_generation_failed", False)
            assert not self.watch.failures, self.watch.failures

    # From other threads

    def start(self, prompt: str, **options: Any) -> Future[Answer]:
        """Ask in another thread."""
        return self._threads.submit(self.text, prompt, **options)

    # Looking inside

    @property
    def cache(self) -> Any:
        """The `PrefixCache` inside; None if stock's class runs, or if nothing is kept."""
        return getattr(self.prompt_cache, "_cache", None)

    def settle(self) -> None:
        """Wait until all that was answered has been stored too."""
        turn = self._turns
        self.wait_until(lambda: self._turns > turn and not self._is_decoding())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not condition():
            assert self.generator._generation_thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.005)

    def is_alive(self) -> bool:
        """Whether the generation thread is; mlx-lm 0.31 answers /health with yes even if not."""
        return self.generator._generation_thread.is_alive() and self.health() == 200

    def _is_decoding(self) -> bool:
        batch = self._batch()
        return batch is not None and any(
            map(len, (batch._generation_batch, batch._prompt_batch, batch._unprocessed_sequences))
        )

    def _batch(self) -> Any:
        return self.batches[-1]() if self.batches else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let requests queue up in the meantime, so that they are taken together after it."""
        self.settle()
        self._gate.clear()
        try:
            self.wait_until(lambda: self._is_at_gate)
            yield
        finally:
            self._gate.set()

    def messages(self, level: int = logging.DEBUG) -> list[str]:
        """What our logger said for this server, from this level on."""
        name = self.generator._generation_thread.name
        records = [
            record
            for place, record in enumerate(self._records)
            if record.threadName == name
            or (record.threadName == "MainThread" and place < self._said_at_start)
        ]
        return [record.getMessage() for record in records if record.levelno >= level]

    def sequences(self) -> list[list[int]]:
        """The tokens on the path to each leaf of the store, sorted."""
        self.settle()
        leaves = [node for node in self.cache.tree if not node.children]
        return sorted(tokens_to(leaf) for leaf in leaves)

    def check_rows(self, model: Any, error: float = 1e-3) -> None:
        """Compare every stored row with what the model computes for those tokens.

        Args:
            error: how far a row may be off, relative to the size of its tensor's rows.
        """
        for sequence in self.sequences():
            (root,) = self.cache.tree.roots()
            fetched = self.cache.fetch(root.namespace, [*sequence, 0])
            assert fetched is not None and fetched.tokens == len(sequence)
            caches = model.make_cache()
            model(mx.array([sequence]), cache=caches)
            expected = [side for layer in caches for side in (layer.keys, layer.values)]
            for stored, buffer in zip(fetched.tensors, expected, strict=True):
                computed = buffer[0, :, : len(sequence)]
                assert (stored.shape, stored.dtype) == (computed.shape, computed.dtype)
                sizes = np.linalg.norm(computed, axis=-1)
                errors = np.linalg.norm(stored - computed, axis=-1)
                assert errors.max() <= error * sizes.mean()

    # Threads of the server

    def _count_turn(self, timeout: float | None = None) -> Any:
        self._is_at_gate = True
        self._gate.wait()
        self._is_at_gate = False
        self._turns += 1
        return self._next_request(timeout)

    def _watch_batches(self) -> None:
        watched: Any = self.module.BatchGenerator
        server = self

        class BatchGenerator(watched):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                server.batches.append(weakref.ref(self))

            def next(self) -> Any:
                prompts, answers = super().next()
                server.prefilled_together = max(server.prefilled_together, len(prompts))
                server.decoded_together = max(server.decoded_together, len(answers))
                return prompts, answers

        self.module.BatchGenerator = BatchGenerator

    def _audited(self, name: str) -> Callable[..., Any]:
        method = getattr(self.prompt_cache, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            try:
                self.cache.tree.check()
                if name == "insert_cache":
                    self._note_insertion(arguments[1], options.get("cache_type", "assistant"))
            except BaseException as error:
                self.watch.failures.append(error)
            return result

        return call

    def _note_insertion(self, tokens: Sequence[int], cache_type: str) -> None:
        cache, batch = self.prompt_cache, self._batch()
        active_bytes = batch.prompt_cache_nbytes if batch is not None else 0
        insertion = Insertion(list(tokens), cache_type, cache.nbytes, len(cache), active_bytes)
        self.watch.insertions.append(insertion)

    # Logging

    def _listen(self) -> None:
        self._handler = logging.Handler()
        self._handler.emit = self._records.append  # type: ignore[method-assign]
        logger = logging.getLogger("mlx_lm_kvcache_plugin")
        self._level = logger.level
        logger.addHandler(self._handler)
        logger.setLevel(logging.DEBUG)

    def _stop_listening(self) -> None:
        logger = logging.getLogger("mlx_lm_kvcache_plugin")
        logger.removeHandler(self._handler)
        logger.setLevel(self._level)
        plugins.cache_clear()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of some tests."""


def tokens_to(node: Block) -> list[int]:
    """The tokens from the root of a node's namespace to its end."""
    return [int(t) for block in node.path() for t in np.frombuffer(block.key, np.int64)]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
