"""The endpoints on the real server: what they answer, to whom, and when; and what stays stock's."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx_lm.models.cache
import psutil
import pytest

from mlx_lm_kvcache_plugin.codecs.rotated import RotatedCodec
from mlx_lm_kvcache_plugin.disk.tier import DiskTier
from mlx_lm_kvcache_plugin.patches import endpoints
from mlx_lm_kvcache_plugin.web import page
from tests import models
from tests.integration.clients import ANSWER_SECONDS, HOST, MODES, Client, Reply
from tests.integration.local_server import LocalServer, stopped
from tests.integration.stock_server import StockServer
from tests.models import prompt
from tests.web import figures

TEXT = prompt("A text that is known", 300)
LONGER = TEXT[:200] + prompt("and here it leaves", 200)
PATHS = {
    "/v1/cache/stats": "GET",
    "/metrics": "GET",
    "/cache": "GET",
    "/v1/cache/explain": "POST",
    "/v1/cache": "DELETE",
}
FOR_LOOPBACK_ALONE = ("/v1/cache/explain", "/v1/cache")
BODY = {"prompt": LONGER}


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[LocalServer]:
    """One that keeps 4 bits."""
    with LocalServer("--model", str(model), "--kv-cache-bits", "4") as server:
        yield server


@pytest.fixture
def server(running: LocalServer) -> LocalServer:
    """The same, which was asked for a text and for nothing else since it was cleared."""
    if not running.cache.tree.tokens:
        running.text(TEXT)
        running.settle()
    return running


@pytest.fixture(scope="module")
def with_disk(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """One with a disk tier."""
    disk = str(tmp_path_factory.mktemp("disk"))
    arguments = ("--model", str(model), "--kv-cache-bits", "4", "--kv-cache-dir", disk)
    with LocalServer(*arguments) as server:
        yield server


@pytest.fixture(scope="module")
def without_model() -> Iterator[LocalServer]:
    """One that has not loaded anything yet."""
    with LocalServer("--kv-cache-bits", "4") as server:
        yield server


@pytest.fixture(scope="module")
def stock() -> Iterator[LocalServer]:
    """Upstream's own classes: no flag of ours was given."""
    with LocalServer() as server:
        yield server


def ask(server: Client, path: str, **headers: str) -> Reply:
    """Ask a path of ours as it wants to be asked."""
    body = BODY if PATHS[path] == "POST" else None
    return server.request(PATHS[path], path, body, **headers)


def ask_all(server: Client, **headers: str) -> dict[str, Reply]:
    """Ask all of them, the one that clears at last."""
    return {path: ask(server, path, **headers) for path in PATHS}


def statuses(server: Client, **headers: str) -> list[int]:
    return [reply.status for reply in ask_all(server, **headers).values()]


def has_cors(reply: Reply) -> bool:
    return any(name.startswith("access-control-") for name in reply.headers)


@contextmanager
def peer(server: LocalServer, address: str) -> Iterator[None]:
    """Have whoever connects come from another address, as far as the server's handler can tell."""
    finish: Any = server._httpd.finish_request

    def from_there(connection: Any, client: Any) -> None:
        finish(connection, (address, *client[1:]))

    with mock.patch.object(server._httpd, "finish_request", from_there):
        yield


def keys(value: Any) -> Any:
    """What an object has, and what the objects in it have; a list is like its first item."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    return keys(value[0]) if isinstance(value, list) and value else None


# What they answer


def test_the_statistics(server: LocalServer) -> None:
    """All that is told, in the shape that the page and the metrics were written for."""
    told, expected = server.stats(), figures.busy()
    assert told.keys() == expected.keys()
    objects = ("settings", "memory", "hit_rate", "misses", "inserts", "evictions", "timing")
    for name in (*objects, "history", "models", "last_misses", "sizing"):
        assert keys(told[name]) == keys(expected[name]), name
    assert len(told["history"]) == 90
    (root,) = told["sequences"]["roots"]
    (expected_root, _) = expected["sequences"]["roots"]
    assert root.keys() == expected_root.keys()
    assert root["nodes"][0].keys() == expected_root["nodes"][0].keys()


def test_what_is_stored(server: LocalServer, model: Path) -> None:
    """Figures of the tree inside, and the words that a run begins with."""
    told = server.stats()
    tree = server.cache.tree
    assert told["enabled"] is told["shows_text"] is True
    assert told["settings"] == {
        "codec": "rotated",
        "key_bits": 4,
        "value_bits": 4,
        "group_size": 64,
        "block_tokens": 128,
    }
    held = {"used_bytes": tree.used_bytes, "tokens": tree.tokens}
    assert told["memory"].items() >= {**held, "sequences": tree.sequences.total()}.items()
    assert told["models"][0].items() >= {"model": str(model), "is_loaded": True, **held}.items()
    (root,) = told["sequences"]["roots"]
    (node,) = root["nodes"]
    assert root["model"] == str(model)
    assert node["words"] == TEXT[:24]
    assert (node["end"], node["label"]) == (308, "assistant")


def test_the_metrics(server: LocalServer) -> None:
    """The same figures, in the format that is asked for."""
    plain = server.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    used_bytes = server.stats()["memory"]["used_bytes"]
    assert f"mlx_lm_kvcache_memory_used_bytes {float(used_bytes)!r}" in plain.body.decode()
    modern = server.get("/metrics", Accept="application/openmetrics-text")
    assert modern.headers["content-type"].startswith("application/openmetrics-text")
    assert modern.body.endswith(b"# EOF\n")


def test_the_page(server: LocalServer) -> None:
    """As it is in the package, with the policy that lets it do nothing else."""
    reply = server.get("/cache")
    assert (reply.status, reply.body) == (200, page.body())
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"] == page.headers()["Content-Security-Policy"]


def test_every_answer_is_whole_and_for_nobody_else(server: LocalServer) -> None:
    """A length, no cache on the way, and no header of CORS; requests that are refused alike."""
    replies = [*ask_all(server).values(), *ask_all(server, Origin="http://elsewhere").values()]
    for path in PATHS:
        other = "GET" if PATHS[path] != "GET" else "POST"
        for method in (other, "OPTIONS"):
            reply = server.request(method, path, BODY if method == "POST" else None)
            assert (reply.status, reply.headers["allow"]) == (405, PATHS[path])
            replies.append(reply)
    for reply in replies:
        assert not has_cors(reply)
        assert reply.headers["content-length"] == str(len(reply.body))
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-content-type-options"] == "nosniff"
        if reply.status >= 400:
            assert set(reply.json) == {"error"} and "\n" not in reply.json["error"]


def test_asking_is_no_line_of_the_log(server: LocalServer) -> None:
    """A page that asks every other second would bury all else. Stock's own paths are logged."""
    lines: list[str] = []
    handler = server._httpd.RequestHandlerClass
    with mock.patch.object(handler, "log_message", lambda self, *line: lines.append(line[0])):
        ask_all(server)
        ask_all(server, Origin="http://elsewhere")
        assert lines == []
        server.health()
        assert len(lines) == 1


# Who is answered


STRANGE = {
    "another origin": {"Origin": "http://elsewhere.example"},
    "an origin of another port": {"Origin": f"http://{HOST}:1"},
    "no origin at all": {"Origin": "null"},
    "a name that leads here": {"Host": "rebound.example"},
    "that name and its own origin": {
        "Host": "rebound.example",
        "Origin": "http://rebound.example",
    },
    "another site": {"Sec_Fetch_Site": "cross-site"},
    "a neighbouring site": {"Sec_Fetch_Site": "same-site"},
}


@pytest.mark.parametrize("kind", STRANGE)
def test_pages_of_others_are_refused(server: LocalServer, kind: str) -> None:
    """Each path, and nothing is done."""
    before = server.cache.tree.used_bytes
    replies = ask_all(server, **STRANGE[kind])
    assert [reply.status for reply in replies.values()] == [403] * len(PATHS)
    assert not any(map(has_cors, replies.values()))
    assert server.cache.tree.used_bytes == before
    for path in PATHS:
        assert server.request("OPTIONS", path, **STRANGE[kind]).status == 403


def test_the_page_itself_is_answered(server: LocalServer) -> None:
    """By any name of this machine, as a browser asks for it and as the page then asks."""
    for name in (HOST, "localhost"):
        host = f"{name}:{server.port}"
        typed = {"Host": host, "Sec_Fetch_Site": "none"}
        assert server.get("/cache", **typed).status == 200
        asks = {"Host": host, "Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin"}
        assert server.get("/v1/cache/stats", **asks).status == 200
        assert server.explain(BODY, **asks).status == 200


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::7", "::ffff:192.0.2.7"])
def test_other_machines_see_figures_alone(server: LocalServer, address: str) -> None:
    """No words, no clearing, no explaining."""
    with peer(server, address):
        check_stranger(server)


@pytest.mark.parametrize("header", ["X_Forwarded_For", "Forwarded", "Via", "X_Real_IP"])
def test_a_proxy_stands_for_another_machine(server: LocalServer, header: str) -> None:
    """Whatever it says about whom it asks for."""
    check_stranger(server, **{header: HOST})


def check_stranger(server: LocalServer, **headers: str) -> None:
    """Ask as somebody who is to see no text."""
    before = server.cache.tree.used_bytes
    replies = ask_all(server, **headers)
    for path, reply in replies.items():
        assert reply.status == (403 if path in FOR_LOOPBACK_ALONE else 200)
    told = replies["/v1/cache/stats"].json
    assert told["shows_text"] is False
    assert told["memory"] == server.stats()["memory"]
    (root,) = told["sequences"]["roots"]
    assert [node["words"] for node in root["nodes"]] == [None]
    assert TEXT[:10] not in replies["/v1/cache/stats"].body.decode()
    assert server.cache.tree.used_bytes == before


@pytest.mark.parametrize("address", ["127.0.0.2", "::1", "::ffff:127.0.0.1"])
def test_every_loopback_is_this_machine(server: LocalServer, address: str) -> None:
    """Also where IPv4 comes in the clothes of IPv6."""
    with peer(server, address):
        assert server.stats()["shows_text"] is True
        assert server.explain(BODY).status == 200


def test_the_folder_on_disk_is_text_too(with_disk: LocalServer) -> None:
    """Other machines see how full it is, and not where it is."""
    own = with_disk.stats()["disk"]
    assert own["folder"] == with_disk.tier._folder.root
    with peer(with_disk, "192.0.2.7"):
        assert with_disk.stats()["disk"] == {**own, "folder": None}


# When they answer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("after", [0, 4], ids=["prefill", "decoding"])
def test_they_answer_while_the_model_computes(server: LocalServer, mode: str, after: int) -> None:
    """In the middle of a prefill, and of an answer, all the same; and that goes on."""
    language_model = type(server.generator.model_provider.model)
    with stopped(language_model, "__call__", after) as is_held:
        asked = server.start(LONGER, **MODES[mode])
        assert is_held.wait(ANSWER_SECONDS)
        assert statuses(server) == [200] * len(PATHS)
        assert server.stats()["memory"]["tokens"] == 0
        assert not asked.done()
    assert (len(asked.result().text), asked.result().cached_tokens) == (8, 200)
    server.settle()
    server.delete()  # which has more now than the others expect


@pytest.mark.parametrize("what", ["encode", "decode", "restore"])
def test_they_answer_while_the_cache_is_at_work(with_disk: LocalServer, what: str) -> None:
    """All but clearing, which waits until what is being stored or fetched is."""
    server = with_disk
    owner, name = (DiskTier, "read") if what == "restore" else (RotatedCodec, what)
    server.text(TEXT)
    server.settle()
    assert server.tier.flush()
    if what == "restore":
        server.delete("/v1/cache?tier=memory")
    with stopped(owner, name) as is_held:
        asked = server.start(LONGER)
        assert is_held.wait(ANSWER_SECONDS)
        for path in PATHS:
            if path != "/v1/cache":
                assert ask(server, path).status == 200
        clearing = server._threads.submit(server.delete)
    assert asked.result().cached_tokens == 200
    assert clearing.result().status == 200
    server.settle()
    server.delete()


class Watched:
    """MLX, for modules that ask it for something: who did is noted."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.threads.add(threading.current_thread().name)
        return getattr(mx, name)


def modules_with_mlx(server: LocalServer) -> list[Any]:
    """All of ours and of upstream's that know it as `mx`, and the fresh copy that serves."""
    packages = {"mlx", "mlx_lm", "mlx_lm_kvcache_plugin"}
    known = [module for name, module in sys.modules.items() if name.partition(".")[0] in packages]
    return [module for module in [*known, server.module] if getattr(module, "mx", None) is mx]


def test_no_client_has_its_thread_touch_mlx(tmp_path: Path) -> None:
    """MLX belongs to the thread that generates: streams and graphs of others are not for it.

    A model with states, rows and a disk tier, so that all there is is read, explained and dropped.
    """
    model, disk = models.lfm(tmp_path / "model"), tmp_path / "disk"
    arguments = ("--model", str(model), "--kv-cache-bits", "4", "--kv-cache-dir", str(disk))
    watched, clients = Watched(), set[str]()
    with LocalServer(*arguments) as server, pytest.MonkeyPatch.context() as patching:
        handler: Any = server._httpd.RequestHandlerClass
        setup = handler.setup

        def note(self: Any) -> None:
            clients.add(threading.current_thread().name)
            setup(self)

        patching.setattr(handler, "setup", note)
        for module in modules_with_mlx(server):
            patching.setattr(module, "mx", watched)
        for body in (TEXT, LONGER, TEXT):
            server.text(body)
        server.settle()
        assert server.tier.flush()
        for path, on_disk in (("/v1/cache?tier=memory", 0), ("/v1/cache", 299)):
            for each in ("/v1/cache/stats", "/metrics", "/cache"):
                assert ask(server, each).status == 200
            told = server.explain({"prompt": TEXT}).json
            assert (told["hit_tokens"], told["on_disk_tokens"]) == (299, on_disk)
            assert server.delete(path).status == 200
    assert server.generator._generation_thread.name in watched.threads
    assert len(clients) == 3 + 2 * 5 and clients.isdisjoint(watched.threads)


# What they explain and refuse


NONSENSE: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 400),
    "no JSON": (b"{", 400),
    "no UTF-8": (b'{"prompt": "\xff"}', 400),
    "a list": (b"[]", 400),
    "a number": (b"1", 400),
    "no prompt": (b"{}", 400),
    "a prompt that is none": (b'{"prompt": 3}', 400),
    "prompts": (b'{"prompt": ["one", "two"]}', 400),
    "no messages": (b'{"messages": []}', 400),
    "messages that are none": (b'{"messages": [3, null]}', 400),
    "messages that are a text": (b'{"messages": "hi"}', 400),
    "a message of no role": (b'{"messages": [{"content": "hi"}]}', 400),
    "a message of strange parts": (b'{"messages": [{"role": "user", "content": [3]}]}', 400),
    "half a character": (b'{"prompt": "\\ud800"}', 400),
    "a model that is none": (b'{"prompt": "hi", "model": {}}', 400),
    "a draft model that is none": (b'{"prompt": "hi", "draft_model": 3}', 400),
    "template arguments that are none": (
        b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": "hi"}',
        400,
    ),
    "deep": (b'{"prompt":' + b"[" * 100_000, 400),
    "another model": (b'{"prompt": "hi", "model": "no/such"}', 409),
    "another draft model": (b'{"prompt": "hi", "draft_model": "no/such"}', 409),
    "an adapter that is none": (b'{"prompt": "hi", "adapters": [3]}', 400),
    "an image": (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", '
        b'"image_url": {"url": "data:image/png;base64,AA=="}}]}]}',
        400,
    ),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_refused_in_one_line(server: LocalServer, kind: str) -> None:
    """Which says what is wrong; nobody's request is the worse for it."""
    body, status = NONSENSE[kind]
    reply = server.explain(body)
    assert reply.status == status
    assert set(reply.json) == {"error"}
    assert reply.json["error"].isprintable() and len(reply.json["error"]) < 400
    assert server.is_alive()


def test_a_body_that_does_not_come(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes silent in the middle of it is told so, and does not hold a thread for ever."""
    monkeypatch.setattr(endpoints, "READ_SECONDS", 0.05)
    with socket.create_connection((HOST, server.port), timeout=ANSWER_SECONDS) as connection:
        head = f"POST /v1/cache/explain HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 20\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt": ')
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.0 408 ")
    assert b"in time" in answer


LOCAL = f"Host: {HOST}"

NO_HEADERS: list[tuple[str, ...]] = [
    (" folded: x", LOCAL),
    (LOCAL, "From x"),
    (LOCAL, "X Foo: bar"),
    (LOCAL, "nothing"),
    (LOCAL, ": nameless"),
    (LOCAL, "X: a\rb"),
    (LOCAL, "X: a\r"),
    (LOCAL, "X: a\r\rB: c"),
    (LOCAL, "Content-Type: message/rfc822", "X: a\r"),
    (LOCAL, "Content-Type: multipart/mixed; boundary=b", "X: a\r", "--b", "--b--"),
]


@pytest.mark.parametrize("lines", NO_HEADERS)
def test_a_line_that_is_no_header(server: LocalServer, lines: tuple[str, ...]) -> None:
    """Whatever a proxy adds behind it might be lost, so that nobody knows whom it asks for."""
    behind = ("X-Forwarded-For: 192.0.2.1", "Sec-Fetch-Site: cross-site")
    for path, method in PATHS.items():
        answer = raw(server, f"{method} {path}", *lines, *behind)
        assert answer.startswith(b"HTTP/1.0 400 ") and b"among the headers" in answer
        assert raw(server, f"{method} {path}", *lines).startswith(b"HTTP/1.0 400 ")


def test_no_model_is_loaded_yet(without_model: LocalServer) -> None:
    """Then there is no tokenizer to explain with; the rest answers."""
    assert statuses(without_model) == [200, 200, 200, 503, 200]
    assert "no model is loaded yet" in without_model.explain(BODY).json["error"]
    assert without_model.stats()["models"] == []


# What stays stock's


LIKE_STOCK = [
    "GET /health",
    "GET /v1/models",
    "GET /v1/models/some/model",
    "GET /",
    "GET /nowhere",
    "GET /cache/",
    "GET /v1/cache/",
    "GET /v1/cache/stats/more",
    "GET /metrics/",
    "OPTIONS /v1/chat/completions",
    "OPTIONS /nowhere",
    "POST /nowhere",
    "POST /v1/completions",
    "PUT /v1/cache",
    "HEAD /cache",
    "PATCH /metrics",
    "DELETE /nowhere",
    "DELETE /v1/models",
    "DELETE /v1/chat/completions",
]


def raw(server: Client, request: str, *headers: str) -> bytes:
    """All bytes that come back, but for the time."""
    lines = (f"{request} HTTP/1.1", *headers, "", "")
    with socket.create_connection((HOST, server.port), timeout=ANSWER_SECONDS) as connection:
        connection.sendall("\r\n".join(lines).encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return re.sub(rb'Date: [^\r]*|"created": [0-9]*', b"", answer)


@pytest.mark.parametrize("request_line", LIKE_STOCK)
def test_all_else_stays_to_the_byte(
    without_model: LocalServer, stock: LocalServer, request_line: str
) -> None:
    """Headers of CORS included, whoever asks."""
    for headers in ((), ("Origin: http://elsewhere.example",), ("Host: rebound.example",)):
        expected = raw(stock, request_line, *headers)
        assert raw(without_model, request_line, *headers) == expected


WITHOUT: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "no flag": ((), {}),
    "a flag": (("--kv-cache-bits", "4", "--disable-cache-stats"), {}),
    "a flag alone": (("--disable-cache-stats",), {}),
    "a variable": (("--kv-cache-bits", "4"), {"MLX_LM_DISABLE_CACHE_STATS": "1"}),
    "a variable alone": ((), {"MLX_LM_DISABLE_CACHE_STATS": "1"}),
    "variables": ((), {"MLX_LM_DISABLE_CACHE_STATS": "on", "MLX_LM_KV_CACHE_BITS": "4"}),
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_there_is_none_of_them(stock: LocalServer, kind: str) -> None:
    """Without a flag of ours, or with the one against them: to the byte what stock answers."""
    arguments, variables = WITHOUT[kind]
    with LocalServer(*arguments, **variables) as server:
        assert statuses(server) == [404, 404, 404, 404, 501]
        for path, method in PATHS.items():
            assert raw(server, f"{method} {path}") == raw(stock, f"{method} {path}")
        is_stock = type(server.prompt_cache) is mlx_lm.models.cache.LRUPromptCache
        assert is_stock == (kind in ("no flag", "a flag alone", "a variable alone"))


def test_a_cache_without_statistics_works_as_ever(model: Path) -> None:
    """It hits, and says so in the log, without anybody who keeps a count."""
    arguments = ("--model", str(model), "--kv-cache-bits", "4", "--disable-cache-stats")
    with LocalServer(*arguments) as server:
        assert [server.text(TEXT).cached_tokens for _ in range(2)] == [0, 299]
        assert server.cache.history is None
        assert not server.recorder.errors
        assert len([line for line in server.messages() if line.startswith("match ")]) == 2


# The command itself


STOCK_LINES = ("Prompt Cache:", "- assistant:", "- user:", "- system:")


@pytest.mark.usefixtures("installed")
def test_the_real_command(model: Path, tmp_path: Path) -> None:
    """Its endpoints are there, and its log has stock's lines for each request, and one of ours."""
    arguments = ("--model", str(model), "--kv-cache-bits", "4", "--log-level", "DEBUG")
    with StockServer(tmp_path / "log", *arguments) as server:
        for text in (TEXT, TEXT, LONGER):
            server.text(text, seed=1)
        assert server.stats()["hit_rate"]["start"]["requests"] == 3
        for origin in ("http://elsewhere.example", f"http://{HOST}:{server.port}"):
            assert server.get("/health", Origin=origin).headers["access-control-allow-origin"]
            own = origin.endswith(str(server.port))
            assert ask(server, "/v1/cache/stats", Origin=origin).status == (200 if own else 403)
        assert statuses(server) == [200] * len(PATHS)
    lines = [line.partition(" - INFO - ")[2] for line in server.output().splitlines()]
    told = [line for line in lines if line.startswith(STOCK_LINES)]
    assert [line.partition(":")[0] + ":" for line in told] == 3 * [*STOCK_LINES]
    assert all(re.fullmatch(r".*: [0-9]+ sequences, [0-9]\.[0-9]{2} GB", line) for line in told)
    debug = [line.partition(" - DEBUG - ")[2] for line in server.output().splitlines()]
    matches = [line for line in debug if line.startswith("match ")]
    assert len(matches) == 3
    assert matches[0] == "match 0 of 300 tokens; nothing stored"
    assert re.fullmatch(
        r"match 299 of 300 tokens \(blocks 2, tail 43\), decoded in [0-9]+ ms", matches[1]
    )
    assert matches[2].endswith("; diverged at token 200")
    assert "/v1/cache" not in server.output() and '"GET /health HTTP/1.1" 200' in server.output()


def own_address() -> str:
    """An address of this machine that is no loopback."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return each.address
    pytest.skip("this machine has none but loopback")


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_server_for_other_machines(model: Path, tmp_path: Path, host: str) -> None:
    """By its address it tells figures, by loopback text; a name that only leads there, nothing."""
    address = own_address()
    arguments = ("--model", str(model), "--kv-cache-bits", "4", "--host", host)
    with StockServer(tmp_path / "log", *arguments) as server:
        server.text(TEXT)
        assert server.stats()["shows_text"] is True
        with socket.create_connection((address, server.port), timeout=ANSWER_SECONDS) as connection:
            host_header = f"Host: {address}:{server.port}"
            request = f"GET /v1/cache/stats HTTP/1.1\r\n{host_header}\r\n\r\n"
            connection.sendall(request.encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 200 ")
        assert json.loads(body)["shows_text"] is False
        assert server.get("/v1/cache/stats", Host=f"mac.example:{server.port}").status == 403


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_real_command_without_statistics(model: Path, tmp_path: Path) -> None:
    """One variable takes all of them away, and nothing else."""
    arguments = ("--model", str(model), "--kv-cache-bits", "4")
    variables = {"MLX_LM_DISABLE_CACHE_STATS": "1"}
    with StockServer(tmp_path / "log", *arguments, **variables) as server:
        assert [server.text(TEXT).cached_tokens for _ in range(2)] == [0, 299]
        assert statuses(server) == [404, 404, 404, 404, 501]
        assert "prefix cache: codec rotated" in server.output()


def test_nothing_went_wrong(server: LocalServer) -> None:
    """After all of that: the server is alive, and had nothing to warn of."""
    assert server.is_alive()
    assert server.messages(logging.WARNING) == []
    assert server.stats()["errors"] == {}
