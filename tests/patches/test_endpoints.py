"""The endpoints on upstream's request handler: what is read of a request, what is left alone."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.patches import endpoints
from mlx_lm_kvcache_plugin.patches.endpoints import Body, request_of, respond, with_endpoints
from mlx_lm_kvcache_plugin.patches.serving import Serving
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.stats.statistics import Statistics
from mlx_lm_kvcache_plugin.web.messages import Response

HEAD = "GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Stock(BaseHTTPRequestHandler):
    """What upstream's handler is to ours; it notes what it is asked."""

    def __init__(self, response_generator: Any, connection: Any) -> None:
        self.response_generator = response_generator
        self.asked: list[str] = []
        super().__init__(connection, ("127.0.0.1", 5), SimpleNamespace(server_address=("", 8080)))  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.asked.append(f"GET {self.path}")

    def do_POST(self) -> None:
        self.asked.append(f"POST {self.path}")

    def do_OPTIONS(self) -> None:
        self.asked.append(f"OPTIONS {self.path}")

    def log_message(self, *arguments: Any) -> None:
        """Nobody reads it."""


class Connection:
    """A socket that has one request in it."""

    def __init__(self, request: str) -> None:
        self.sent = b""
        self._file = io.BytesIO(request.encode())

    def makefile(self, mode: str, size: int) -> io.BytesIO:
        return self._file

    def sendall(self, data: bytes) -> None:
        self.sent += bytes(data)

    def getsockname(self) -> tuple[str, int]:
        raise OSError("the client is gone")


def handled(request: str, has_stats: bool = True) -> tuple[Stock, bytes]:
    """Have our handler deal with a request on a connection that is lost already."""
    serving = Serving(Settings(), None)
    serving.statistics = Statistics() if has_stats else None
    handler: Any = with_endpoints(Stock, serving, lambda *arguments: None)
    connection = Connection(request)
    generator = SimpleNamespace(model_provider=None)
    return handler(generator, connection), connection.sent


@pytest.mark.parametrize("target", ["/health", "/v1/models", "/nowhere", "/cache/", "/v1/cache?"])
def test_what_is_not_ours_is_stocks(target: str) -> None:
    """Nothing is looked into for it: a connection that is lost is for stock to find out."""
    for method in ("GET", "POST", "OPTIONS"):
        request = HEAD.format(target).replace("GET", method)
        if target != "/v1/cache?":
            assert handled(request)[0].asked == [f"{method} {target}"]
        assert handled(request, has_stats=False)[0].asked == [f"{method} {target}"]


def test_a_method_that_stock_lacks() -> None:
    """Is refused as `http.server` does it."""
    ours = handled(HEAD.format("/nowhere").replace("GET", "DELETE"))[1]
    other = handled(HEAD.format("/nowhere").replace("GET", "REMOVE"))[1]
    assert ours.startswith(b"HTTP/1.0 501 Unsupported method ('DELETE')\r\n")
    assert ours.replace(b"DELETE", b"REMOVE") == other


class Peer:
    """A handler that was connected to over a real socket."""

    command, path = "POST", "/v1/cache/explain"
    headers = Message()
    client_address = ("::1", 5, 0, 0)

    def __init__(self, connection: Any, flags: Any = None) -> None:
        self.connection = connection
        self.rfile = connection.makefile("rb") if isinstance(connection, socket.socket) else None
        self.server = SimpleNamespace(server_address=("::", 8080, 0, 0))
        self.response_generator = SimpleNamespace(cli_args=flags)


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        (None, {"fe80::2", "::"}),
        (SimpleNamespace(host="Mac.Local"), {"fe80::2", "::", "mac.local"}),
    ],
)
def test_what_the_server_goes_by(flags: Any, hosts: set[str]) -> None:
    """Where it was reached, where it listens, and what it was told to listen on."""
    connection = SimpleNamespace(getsockname=lambda: ("fe80::2", 8080, 0, 3))
    peer = Peer(connection, flags)
    request = request_of(peer, Body(peer))
    assert (request.peer, request.port, request.hosts) == ("::1", 8080, hosts)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A server's and a client's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        yield ours, theirs


def reads(ours: socket.socket, count: int) -> bytes:
    """Read a body, of which nothing is left to be discarded then."""
    peer = Peer(ours)
    assert peer.rfile is not None
    with peer.rfile:
        body = Body(peer)
        data = body.read(count)
        body.discard()
        return data


def test_a_body_is_read_whole(sockets: tuple[socket.socket, socket.socket]) -> None:
    """In whatever pieces it comes, and no byte more; fewer if it ends."""
    ours, theirs = sockets
    theirs.sendall(b"one")
    theirs.sendall(b"two and more")
    assert reads(ours, 6) == b"onetwo"
    theirs.sendall(b"less")
    theirs.shutdown(socket.SHUT_WR)
    assert reads(ours, 100) == b" and moreless"


def test_a_body_takes_too_long(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not help to send a byte now and then."""
    monkeypatch.setattr(endpoints, "READ_SECONDS", 0.05)
    ours, theirs = sockets
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.02):
            theirs.sendall(b".")

    trickling = threading.Thread(target=trickle)
    trickling.start()
    try:
        with pytest.raises(TimeoutError):
            reads(ours, 1000)
    finally:
        over.set()
        trickling.join()


@pytest.mark.parametrize("named", endpoints.BODY_HEADERS)
def test_what_nobody_wants_is_read_all_the_same(
    sockets: tuple[socket.socket, socket.socket], named: str
) -> None:
    """Else the client, who is still sending it, would see a broken connection and no answer."""
    ours, theirs = sockets
    size = 1 << 22  # more than a socket holds
    peer = Peer(ours)
    peer.headers = Message()
    peer.headers[named] = "whatever"

    def discard() -> None:
        assert peer.rfile is not None
        with peer.rfile:
            Body(peer).discard()

    discarding = threading.Thread(target=discard)
    discarding.start()
    theirs.sendall(bytes(size))
    theirs.shutdown(socket.SHUT_WR)
    discarding.join()
    assert theirs.recv(1) == b""  # ours has said all


def test_an_answer_has_no_headers_of_its_own() -> None:
    """But for the date and what is in it: above all none of CORS, and no line in the log."""

    class Handler(Stock):
        def do_GET(self) -> None:
            respond(self, Response(200, "text/plain", b"hello", {"X-One": "1"}))

        def log_message(self, *arguments: Any) -> None:
            raise AssertionError(arguments)

    connection = Connection(HEAD.format("/"))
    Handler(None, connection)
    head, _, body = connection.sent.partition(b"\r\n\r\n")
    status, date, *others = head.decode().split("\r\n")
    assert (status, body) == ("HTTP/1.0 200 OK", b"hello")
    assert date.startswith("Date: ")
    assert others == ["Content-Type: text/plain", "Content-Length: 5", "X-One: 1"]
