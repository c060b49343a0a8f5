"""What passes between a server and the endpoints: requests, answers, and why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

SAFETY = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of all answers: kept by nobody, and taken for nothing else than they are."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of which the body was not read yet.

    Attributes:
        target: path and query, as in its first line.
        headers: by name in any case; `items()` has all of a name that comes more than once.
        peer: the client's IP address.
        hosts: names and addresses that the server goes by, beside loopback; without port and
            brackets.
        port: that the server listens on.
        read: reads so many bytes of the body, fewer where it ends.
        is_garbled: whether more headers may have come than could be read.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    peer: str
    hosts: frozenset[str]
    port: int
    read: Callable[[int], bytes]
    is_garbled: bool = False

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        """What follows the question mark."""
        return self.target.partition("?")[2]

    def values(self, name: str) -> list[str]:
        """All headers of a name."""
        return [value for key, value in self.headers.items() if key.lower() == name.lower()]


@dataclass(frozen=True, slots=True)
class Response:
    """What to send back.

    Attributes:
        headers: others than those of the content's type and length.
    """

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: dict(SAFETY))


class Refusal(Exception):
    """A request is not answered; says with which status, and why in one line."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status
        self.line = line
