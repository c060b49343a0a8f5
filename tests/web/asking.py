"""Requests as the tests of the endpoints make them, and the server that they are made to."""

from __future__ import annotations

import io
from email.message import Message

from mlx_lm_kvcache_plugin.web.messages import Request

PORT = 8080
HOSTS = frozenset({"mac.local", "192.168.1.5", "::ffff:10.0.0.7", "fd00:0::5"})
"""What the server goes by, beside loopback; addresses as a socket may spell them."""

LOCAL = {"Host": f"localhost:{PORT}"}
"""The headers of a request that is nothing special."""


def request(
    target: str = "/v1/cache/stats",
    method: str = "GET",
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
    peer: str = "127.0.0.1",
    body: bytes = b"",
) -> Request:
    """A request; a header may come twice in a list of them."""
    message = Message()
    given = LOCAL if headers is None else headers
    for name, value in given.items() if isinstance(given, dict) else given:
        message[name] = value
    return Request(method, target, message, peer, HOSTS, PORT, io.BytesIO(body).read)
