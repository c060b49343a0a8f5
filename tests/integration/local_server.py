"""The server inside of this process, so that a test can look into its cache."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from types import ModuleType
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx_lm.server  # inspect finds the source of a fresh copy only beside the imported one
import numpy as np

import mlx_lm_kvcache_plugin as plugin
from mlx_lm_kvcache_plugin.events import Error, Event
from mlx_lm_kvcache_plugin.plugins import hookimpl, plugins
from mlx_lm_kvcache_plugin.prefix_cache import Prefix
from mlx_lm_kvcache_plugin.store.blocks import Block
from tests.events import Events
from tests.integration.clients import ANSWER_SECONDS, HOST, Answer, Client
from tests.integration.stock_server import clean_environment


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
        self.events = Events()

    @hookimpl
    def kvcache_event(self, event: Event) -> None:
        self.events.append(event)

    @property
    def errors(self) -> list[Error]:
        return self.events.of(Error)


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
                self._run, self.module.run = self.module.run, self._run_here
                self.module.main()
                self._said_at_start = len(self._records)
        except BaseException:
            self._stop_listening()
            raise
        return self

    def _run_here(self, *arguments: Any) -> None:
        """Upstream's `run`, once it is settled what its names are bound to."""
        self.module._run_http_server = self._serve
        self._run(*arguments)

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
        return getattr(self.prompt_cache, "cache", None)

    @property
    def tier(self) -> Any:
        """The `DiskTier` inside; None without a folder."""
        offload = getattr(self.cache, "_offload", None)
        return offload and offload._tier

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
        self.settle()
        for leaf in [node for node in self.cache.tree if not node.children]:
            path, sequence = leaf.path(), tokens_to(leaf)
            prefix = Prefix(path[0].parent.namespace, len(sequence), tuple(path))
            fetched = self.cache.fetch([*sequence, 0], prefix)
            caches = model.make_cache()
            model(mx.array([sequence]), cache=caches)
            expected = [side for layer in caches for side in (layer.keys, layer.values)]
            for stored, buffer in zip(fetched.rows, expected, strict=True):
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
                with self.prompt_cache.lock:  # a client may be clearing it
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


@contextmanager
def stopped(owner: Any, name: str, after: int = 0) -> Iterator[threading.Event]:
    """Hold up whoever calls a method, after the first few calls, until the end of this.

    Yields:
        What is set once somebody is held up.
    """
    is_held, go_on = threading.Event(), threading.Event()
    method, calls = getattr(owner, name), iter(range(10**9))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= after:
            is_held.set()
            assert go_on.wait(ANSWER_SECONDS)
        return method(*arguments, **options)

    with mock.patch.object(owner, name, call):
        try:
            yield is_held
        finally:
            go_on.set()


def tokens_to(node: Block) -> list[int]:
    """The tokens from the root of a node's namespace to its end."""
    return [int(t) for block in node.path() for t in np.frombuffer(block.key, np.int64)]
