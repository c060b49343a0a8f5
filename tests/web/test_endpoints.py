"""The endpoints: what is asked with what, what comes back, and what bodies are not read."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.web import endpoints, page
from mlx_lm_kvcache_plugin.web.endpoints import LONGEST_BODY_BYTES, answer
from mlx_lm_kvcache_plugin.web.messages import Refusal, Response
from tests.web import figures
from tests.web.asking import LOCAL, request

CORS = "access-control-"
STRANGER = "192.168.1.9"
SAFETY = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
PATHS = {
    "/v1/cache/stats": "GET",
    "/metrics": "GET",
    "/cache": "GET",
    "/v1/cache": "DELETE",
    "/v1/cache/explain": "POST",
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", "")


class Inspector:
    """Answers with what it was asked, or raises what it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[object] = []

    def stats(self, shows_text: bool) -> dict[str, Any]:
        self._note(shows_text)
        return {**figures.busy(), "shows_text": shows_text}

    def metrics(self, accept: str) -> tuple[bytes, str]:
        self._note(accept)
        return b"a_metric 1\n", "text/plain; version=0.0.4; charset=utf-8"

    def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        self._note(body)
        return {"prompt_tokens": 3}

    def clear(self, memory_alone: bool) -> dict[str, int]:
        self._note(memory_alone)
        return {"freed_bytes": 4096, "deleted_files": 0 if memory_alone else 2}

    def _note(self, what: object) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error


def ask(
    target: str, method: str | None = None, *, to: Inspector | None = None, **others: Any
) -> Response:
    """The answer of a path that is one of ours, by its own method if no other is given."""
    path = target.partition("?")[0]
    asked = request(target, PATHS[path] if method is None else method, **others)
    response = answer(asked, to or Inspector())
    assert response is not None
    assert not [name for name in response.headers if name.lower().startswith(CORS)]
    return response


def explain(body: bytes, to: Inspector | None = None, **headers: str) -> Response:
    """The answer to a body; headers go by their names with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    given = {**LOCAL, "Content-Length": str(len(body)), **named}
    return ask("/v1/cache/explain", to=to, headers=given, body=body)


def content(response: Response) -> Any:
    """What a JSON answer says; fails if it is not strict JSON, or lacks a header."""
    assert response.content_type == "application/json"
    assert response.headers.items() >= SAFETY.items()

    def complain(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(response.body, parse_constant=complain)


def error(response: Response) -> str:
    """The one line of an answer that is an error."""
    said = content(response)
    assert set(said) == {"error"}
    assert said["error"].isprintable() and 0 < len(said["error"]) <= 310
    return str(said["error"])


@pytest.mark.parametrize("target", ["/v1/cache/stats", "/v1/cache/stats?", "/v1/cache/stats?x=1"])
def test_the_statistics(target: str) -> None:
    """As the inspector gives them, in JSON."""
    response = ask(target)
    assert response.status == 200
    assert content(response) == figures.busy()


@pytest.mark.parametrize(("peer", "is_shown"), [("127.0.0.1", True), (STRANGER, False)])
def test_the_inspector_is_told_who_asks(peer: str, is_shown: bool) -> None:
    """The words in statistics are for peers on this machine alone."""
    inspector = Inspector()
    assert content(ask("/v1/cache/stats", to=inspector, peer=peer))["shows_text"] == is_shown
    assert inspector.asked == [is_shown]


@pytest.mark.parametrize(
    ("accepts", "joined"), [([], ""), (["text/plain"], "text/plain"), (["a", "b;q=1"], "a, b;q=1")]
)
def test_metrics(accepts: list[str], joined: str) -> None:
    """What the inspector makes of the Accept header, with the content type that it names."""
    inspector = Inspector()
    headers = [*LOCAL.items(), *(("Accept", accept) for accept in accepts)]
    response = ask("/metrics", to=inspector, headers=headers, peer=STRANGER)
    assert (response.status, response.body) == (200, b"a_metric 1\n")
    assert response.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert response.headers == SAFETY
    assert inspector.asked == [joined]


def test_the_page() -> None:
    """With its own headers, for anyone who may ask: it has no figure in it."""
    response = ask("/cache", peer=STRANGER)
    assert (response.status, response.body) == (200, page.body())
    assert response.content_type == "text/html; charset=utf-8"
    assert response.headers == page.headers()
    assert response.headers.items() >= SAFETY.items()


@pytest.mark.parametrize(
    ("target", "memory_alone"),
    [("/v1/cache", False), ("/v1/cache?", False), ("/v1/cache?tier=memory", True)],
)
def test_clearing(target: str, memory_alone: bool) -> None:
    """All of it, or memory alone."""
    inspector = Inspector()
    response = ask(target, to=inspector)
    assert response.status == 200
    assert content(response) == {"freed_bytes": 4096, "deleted_files": 0 if memory_alone else 2}
    assert inspector.asked == [memory_alone]


@pytest.mark.parametrize(
    "query",
    ["tier=disk", "tier=", "tier", "tier=memory&", "tier=memory&x=1", "tier=MEMORY", "x=1"]
    + ["tier=memory&tier=disk", "tier=mem%6fry", "?", " "],
)
def test_a_query_that_is_not_understood_clears_nothing(query: str) -> None:
    """Somebody meant something else than all."""
    inspector = Inspector()
    response = ask(f"/v1/cache?{query}", to=inspector)
    assert (response.status, inspector.asked) == (400, [])
    assert "tier=memory" in error(response)


def test_explaining() -> None:
    """The inspector gets the body, whatever values it has."""
    inspector = Inspector()
    body = {"messages": [{"role": "user", "content": "日本\n"}], "top_p": float("inf")}
    response = explain(json.dumps(body, ensure_ascii=False).encode(), inspector)
    assert (response.status, content(response)) == (200, {"prompt_tokens": 3})
    assert inspector.asked == [body]


@pytest.mark.parametrize(
    "others",
    [{"peer": STRANGER}, {"headers": {**LOCAL, "Via": "1.1 proxy"}}, {"peer": "::ffff:10.0.0.1"}],
)
@pytest.mark.parametrize("target", ["/v1/cache", "/v1/cache?tier=disk", "/v1/cache/explain"])
def test_strangers_may_neither_clear_nor_explain(target: str, others: dict[str, Any]) -> None:
    """And no body of theirs is read."""
    inspector = Inspector()
    response = ask(target, to=inspector, body=b"{}", **others)
    assert (response.status, inspector.asked) == (403, [])
    assert "machine" in error(response)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", PATHS)
def test_other_methods(path: str, method: str) -> None:
    """The one that is answered is named; a preflight of CORS gets nothing that it asks for."""
    if method == PATHS[path]:
        pytest.skip("this is the one")
    inspector = Inspector()
    response = ask(path, method, to=inspector)
    assert (response.status, inspector.asked) == (405, [])
    assert response.headers == {**SAFETY, "Allow": PATHS[path]}
    assert PATHS[path] in error(response)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "evil.example"},
        {**LOCAL, "Origin": "http://evil.example"},
        {**LOCAL, "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_pages_of_others_get_nothing(path: str, method: str, headers: dict[str, str]) -> None:
    """Whatever they ask, and with whatever method: not even which methods there are."""
    inspector = Inspector()
    response = ask(path, method, to=inspector, headers=headers, body=b"{}")
    assert (response.status, inspector.asked) == (403, [])
    assert response.headers == SAFETY
    error(response)


@pytest.mark.parametrize(
    "target",
    ["/", "", "*", "/cache/", "/Cache", "/cached", "//cache", "/v1/cache/", "/v1/cache/other"]
    + ["/metrics/", "/v1/cache/stats/", "/v1/cache/%73tats", "/v1/cache/../cache", "/cache#x"]
    + ["/v1/models", "/v1/models/cache", "/health", "/v1/chat/completions", "/?x=/cache"]
    + ["http://localhost:8080/cache", "/v1/cache/stats;x", "/v1/cache/stats\n", "/x?/../cache"],
)
@pytest.mark.parametrize("headers", [LOCAL, {"Host": "evil.example", "Origin": "null"}])
def test_other_paths_are_upstreams(target: str, headers: dict[str, str]) -> None:
    """Whoever asks for them: it answers them as if we were not there."""
    for method in METHODS:
        assert answer(request(target, method, headers), Inspector()) is None


def unread(nbytes: int) -> bytes:
    raise AssertionError("nothing is to be read")


@pytest.mark.parametrize(
    ("lengths", "others", "status"),
    [
        ([], {}, 411),
        ([], {"Transfer-Encoding": "chunked"}, 411),
        (["2"], {"Transfer-Encoding": "chunked"}, 411),
        (["2"], {"Transfer-Encoding": "identity"}, 411),
        ([""], {}, 400),
        (["+2"], {}, 400),
        (["-2"], {}, 400),
        (["2 "], {}, 400),
        ([" 2"], {}, 400),
        (["2\n"], {}, 400),
        (["2.0"], {}, 400),
        (["2e0"], {}, 400),
        (["0x2"], {}, 400),
        (["1_0"], {}, 400),
        (["2, 2"], {}, 400),
        (["٢"], {}, 400),
        (["²"], {}, 400),
        (["two"], {}, 400),
        (["2", "2"], {}, 400),
        (["2", "3"], {}, 400),
        (["9" * 5000], {}, 400),
        ([str(LONGEST_BODY_BYTES + 1)], {}, 413),
        (["9" * 18], {}, 413),
    ],
)
def test_bodies_that_are_not_read(lengths: list[str], others: dict[str, str], status: int) -> None:
    """Those without a length, with one that is no number, and those that are too long."""
    headers = [*LOCAL.items(), *others.items(), *(("Content-Length", text) for text in lengths)]
    inspector = Inspector()
    given = request("/v1/cache/explain", "POST", headers)
    response = answer(replace(given, read=unread), inspector)
    assert response is not None
    assert (response.status, inspector.asked) == (status, [])
    assert ("Content-Length" if status < 413 else "2 MiB") in error(response)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b"{} {}", "not JSON"),
        (b'{"a": "line\nbreak"}', "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        ("\ufeff{}".encode(), "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": "é"}'.encode("latin-1"), "not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b"[]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"1", "not a JSON object"),
        (b'{"a":' * 100_000, "too deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "too deeply"),
    ],
)
def test_bodies_that_are_none(body: bytes, said: str) -> None:
    """What is no JSON object in UTF-8, and what no parser would follow to its end."""
    inspector = Inspector()
    response = explain(body, inspector)
    assert (response.status, inspector.asked) == (400, [])
    assert said in error(response)


def test_the_longest_body() -> None:
    """It is read, and one byte of the next request is not."""
    body = b"{" + b" " * (LONGEST_BODY_BYTES - 2) + b"}"
    headers = {**LOCAL, "Content-Length": str(len(body))}
    assert ask("/v1/cache/explain", headers=headers, body=body + b"x").status == 200


@pytest.mark.parametrize(
    ("fault", "status"), [(TimeoutError, 408), (ConnectionResetError, 400), (None, 400)]
)
def test_a_body_that_does_not_come(fault: type[OSError] | None, status: int) -> None:
    """In time, or not all of it: the client's fault, and no failure of ours."""

    def read(nbytes: int) -> bytes:
        if fault is not None:
            raise fault
        return b"{}"

    given = request("/v1/cache/explain", "POST", {**LOCAL, "Content-Length": "3"})
    response = answer(replace(given, read=read), Inspector())
    assert response is not None and response.status == status
    assert "body" in error(response)


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/cache"])
@pytest.mark.parametrize(
    "fault", [KeyError("a prompt\nof somebody"), RecursionError(), MemoryError(), OSError("/path")]
)
def test_a_failure_is_one_line(
    path: str, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its kind alone, as its text may have a prompt in it; all of it is in the log."""
    headers = {**LOCAL, "Content-Length": "2"}
    response = ask(path, to=Inspector(fault), headers=headers, body=b"{}")
    assert response.status == 500
    assert error(response) == f"{PATHS[path]} {path} failed: {type(fault).__name__}"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("mlx_lm_kvcache_plugin", logging.WARNING)
    assert record.exc_info is not None and record.exc_info[1] is fault


def test_statistics_that_are_no_json_are_a_failure() -> None:
    """Not a number is none in JSON, and a page would not read any of it."""

    class Wrong(Inspector):
        def stats(self, shows_text: bool) -> dict[str, Any]:
            return {"rate": float("nan")}

    response = ask("/v1/cache/stats", to=Wrong())
    assert (response.status, error(response)) == (500, "GET /v1/cache/stats failed: ValueError")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("the model is not loaded", "the model is not loaded"),
        ("one\r\ntwo\u2028three\x85 four\t", "one two three four"),
        ("x" * 100_000, "x" * 300 + " ..."),
    ],
)
def test_a_refusal_of_the_inspector(line: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """With its status, as one line that is not too long; and it is no failure to be logged."""
    response = explain(b"{}", Inspector(Refusal(409, line)))
    assert (response.status, error(response)) == (409, said)
    assert not caplog.records


class Served(BaseHTTPRequestHandler):
    """What a server does with the endpoints, in its least form."""

    timeout = 0.2
    """Seconds that a client may be silent."""

    def answer(self) -> None:
        host, port = self.client_address[0], self.server.server_address[1]
        asked = endpoints.Request(
            self.command, self.path, self.headers, host, frozenset(), port, self.rfile.read
        )
        response = answer(asked, Inspector())
        assert response is not None
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(response.body)

    do_GET = do_POST = do_DELETE = do_OPTIONS = answer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server that answers with the endpoints."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@contextmanager
def raw(port: int, sent: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(sent.replace(b"PORT", str(port).encode()))
        yield client


def received(client: socket.socket) -> tuple[int, str, Any]:
    """Status, headers and JSON of an answer, once the server has closed."""
    head, _, body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
    status, _, headers = head.decode().partition("\r\n")
    return int(status.split()[1]), headers, json.loads(body)


def test_a_client(port: int) -> None:
    """One that does as usual gets what it asks for."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v1/cache/explain", b'{"prompt": "a"}')
    response = connection.getresponse()
    assert (response.status, json.load(response)) == (200, {"prompt_tokens": 3})
    connection.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /v1/cache/stats HTTP/1.0\r\n\r\n", 403),
        (b"GET /v1/cache/stats HTTP/1.1\r\nHost: localhost:PORT\r\nhost: evil\r\n\r\n", 403),
        (b"GET /v1/cache/stats HTTP/1.1\r\nHost: localhost\r\n .evil.example\r\n\r\n", 403),
        (b"GET /v1/cache/stats HTTP/1.1\r\nHost: localh\xf6st\r\n\r\n", 403),
        (b"GET /v1/cache/stats HTTP/1.1\r\nHost:localhost:1\r\n\r\n", 200),
        (b"OPTIONS /v1/cache HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil\r\n\r\n", 403),
        (b"OPTIONS /v1/cache HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"POST /v1/cache/explain HTTP/1.1\r\nHost: localhost\r\n\r\n", 411),
        (
            b"POST /v1/cache/explain HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 99999999\r\n\r\n",
            413,
        ),
        (
            b"POST /v1/cache/explain HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 2\r\nContent-Length: 99\r\n\r\n{}",
            400,
        ),
    ],
)
def test_headers_as_they_come(port: int, sent: bytes, status: int) -> None:
    """What the parser of the standard library makes of odd headers is judged like the rest."""
    with raw(port, sent) as client:
        got, headers, said = received(client)
    assert (got, CORS in headers.lower()) == (status, False)
    assert ("error" in said) == (status != 200)


SHORT = (
    b'POST /v1/cache/explain HTTP/1.1\r\nHost: localhost:PORT\r\nContent-Length: 20\r\n\r\n{"a":'
)


def test_a_body_that_ends_early(port: int) -> None:
    """The client closes its side before all of it was sent."""
    with raw(port, SHORT) as client:
        client.shutdown(socket.SHUT_WR)
        status, _, said = received(client)
    assert (status, said) == (400, {"error": "the body broke off"})


def test_a_body_that_stalls(port: int) -> None:
    """The client falls silent, and is not waited for longer than the server does."""
    with raw(port, SHORT) as client:
        status, _, said = received(client)
    assert (status, said) == (408, {"error": "the body did not come in time"})
