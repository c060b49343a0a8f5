"""The plugin's endpoints on upstream's HTTP server."""

from __future__ import annotations

import email.errors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.message import Message
from typing import TYPE_CHECKING, Any

from ..web.endpoints import answer, is_ours
from ..web.messages import Request, Response
from .inspector import ServerInspector

if TYPE_CHECKING:
    from .serving import Serving

READ_SECONDS = 30.0
"""How long a client may take for a body."""

READ_AT_ONCE = 1 << 16

DISCARD_SECONDS, DISCARDED_BYTES = 2.0, 1 << 26
"""What is done for a client that sends a body which nobody wants."""

DROPPED = (
    email.errors.FirstHeaderLineIsContinuationDefect,
    email.errors.InvalidHeaderDefect,
    email.errors.MisplacedEnvelopeHeaderDefect,
)
"""What Python says of lines that are no headers, and that it drops."""

BODY_HEADERS = ("Content-Length", "Transfer-Encoding")


def with_endpoints(stock: Any, serving: Serving, tokenize: Callable[..., Any]) -> type:
    """Upstream's request handler, with our endpoints while statistics are kept.

    Args:
        stock: upstream's class.
        tokenize: upstream's method that makes a prompt of a request.
    """

    class APIHandler(stock):  # type: ignore[misc]
        def do_GET(self) -> None:
            self._answer() or super().do_GET()

        def do_POST(self) -> None:
            self._answer() or super().do_POST()

        def do_OPTIONS(self) -> None:
            self._answer() or super().do_OPTIONS()

        def do_DELETE(self) -> None:
            if not self._answer():  # as `http.server` says it of a method that upstream lacks
                self.send_error(501, f"Unsupported method ({self.command!r})")

        def _answer(self) -> bool:
            """Answer, if the path is one of ours."""
            if serving.statistics is None or not is_ours(self.path):
                return False
            inspector = ServerInspector(serving, self.response_generator, tokenize)
            body = Body(self)
            response = answer(request_of(self, body), inspector)
            if response is not None:
                with suppress(OSError):  # who asked is gone
                    respond(self, response)
                    body.discard()
            return response is not None

    return APIHandler


def request_of(handler: Any, body: Body) -> Request:
    """What upstream's handler has read of a request."""
    address, port, *_ = handler.connection.getsockname()
    flags = getattr(handler.response_generator, "cli_args", None)
    names = {address, str(handler.server.server_address[0]), str(getattr(flags, "host", address))}

    return Request(
        method=handler.command,
        target=handler.path,
        headers=handler.headers,
        peer=handler.client_address[0],
        hosts=frozenset(name.lower() for name in names),
        port=port,
        read=body.read,
        is_garbled=_is_garbled(handler.headers),
    )


def _is_garbled(headers: Message) -> bool:
    """Whether a line among the headers was none, or may have been.

    Some make Python take all that come behind them for the text of a letter, and where that is said
    to have parts for these.
    """
    has_parts = headers.get_content_maintype() in {"message", "multipart"}
    is_dropped = any(isinstance(defect, DROPPED) for defect in headers.defects)
    return has_parts or is_dropped or bool(headers.get_payload())


class Body:
    """The body of a request.

    Args:
        handler: upstream's, which has read everything before it.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._is_left = any(name in handler.headers for name in BODY_HEADERS)

    def read(self, count: int) -> bytes:
        """So many bytes, or fewer where it ends.

        Raises:
            OSError: if it takes too long, or the connection breaks.
        """
        self._is_left = False
        return b"".join(self._parts(count, READ_SECONDS))

    def discard(self) -> None:
        """Read what nobody wanted: a client that is still sending would not see the answer."""
        if self._is_left:
            self._handler.connection.shutdown(socket.SHUT_WR)
            for _ in self._parts(DISCARDED_BYTES, DISCARD_SECONDS):
                pass

    def _parts(self, count: int, seconds: float) -> Iterator[bytes]:
        deadline = time.monotonic() + seconds
        while count:
            self._handler.connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._handler.rfile.read1(min(READ_AT_ONCE, count))
            if not part:
                break
            yield part
            count -= len(part)


def respond(handler: Any, response: Response) -> None:
    """Send an answer. It is no line of the log: a page asks every other second."""
    handler.send_response_only(response.status)
    handler.send_header("Date", handler.date_time_string())
    handler.send_header("Content-Type", response.content_type)
    handler.send_header("Content-Length", str(len(response.body)))
    for name, value in response.headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(response.body)
