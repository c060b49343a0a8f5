"""A server of the status page that shows what a test gives it, over the real endpoints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mlx_lm_kvcache_plugin.web import endpoints

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Asked:
    """A request that came."""

    method: str
    target: str
    origin: str | None


@dataclass
class StatusServer:
    """What the server says, and what it was asked; an `Inspector` of the endpoints.

    Attributes:
        stats_answer: the statistics that it gives.
        refuses: the line with which it refuses to clear, if any.
        fails: whether there are no statistics to be had.
        may_answer: statistics wait while this is not set.
        at_once: how many requests for statistics are under way.
        most_at_once: the most that ever were.
    """

    stats_answer: dict[str, Any]
    refuses: str = ""
    fails: bool = False
    asked: list[Asked] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)
    at_once: int = 0
    most_at_once: int = 0
    port: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.may_answer.set()

    @property
    def origin(self) -> str:
        """The address without a path."""
        return f"http://{HOST}:{self.port}"

    def stats(self, shows_text: bool) -> dict[str, Any]:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        assert self.may_answer.wait(timeout=30)
        with self._lock:
            self.at_once -= 1
        if self.fails:
            raise endpoints.Refusal(500, "no statistics")
        return self.stats_answer

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return b"", "text/plain"

    def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        return {}

    def clear(self, memory_alone: bool) -> dict[str, int]:
        if self.refuses:
            raise endpoints.Refusal(503, self.refuses)
        return {"freed_bytes": 1 << 30, "deleted_files": 0 if memory_alone else 1310}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Answer; at the same port as before, if there was one."""
        server = ThreadingHTTPServer((HOST, self.port), _handler(self))
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _handler(status: StatusServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status.asked.append(Asked(self.command, self.path, self.headers["Origin"]))
            response = endpoints.answer(self._request(), status)
            if response is None:
                self.send_error(404)
                return
            self.send_response(response.status)
            headers = {"Content-Type": response.content_type, **response.headers}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(response.body)

        do_DELETE = do_GET

        def _request(self) -> endpoints.Request:
            return endpoints.Request(
                method=self.command,
                target=self.path,
                headers=self.headers,
                peer=self.client_address[0],
                hosts=frozenset(),
                port=status.port,
                read=self.rfile.read,
            )

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler
