"""The endpoints that the plugin adds to a server: by path, who may ask, and the answer.

No answer ever carries a header of CORS: a page of another origin is to read none of them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from . import access, page
from .messages import SAFETY, Refusal, Request, Response

logger = logging.getLogger("mlx_lm_kvcache_plugin")

LONGEST_BODY_BYTES = 2 << 20
"""A prompt of half a million tokens; it is made into tokens while others wait for Python's lock."""

_LENGTH = re.compile(r"[0-9]{1,18}")
_LONGEST_LINE = 300
"""Characters: what a client sent may be part of an error, and is not sent back at length."""


class Inspector(Protocol):
    """What the endpoints ask. Any method may raise `Refusal`."""

    def stats(self, shows_text: bool) -> dict[str, Any]:
        """The statistics, with or without text of prompts."""

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The statistics for Prometheus, and their content type. Args: accept: the header."""

    def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """What of a chat or completion request would be a hit, and why no more."""

    def clear(self, memory_alone: bool) -> dict[str, int]:
        """Drop all that is stored, or all but what is on disk; what that was."""


def is_ours(target: str) -> bool:
    """Whether the path of a request is one of ours."""
    return target.partition("?")[0] in _ROUTES


def answer(request: Request, inspector: Inspector) -> Response | None:
    """Answer a request; None if its path is none of ours."""
    route = _ROUTES.get(request.path)
    if route is None:
        return None
    try:
        refused = access.refusal(request)
        if refused is not None:
            return _error(*refused)
        if request.method != route.method:
            return _error(405, f"only {route.method} is answered here", {"Allow": route.method})
        return route.serve(request, inspector)
    except Refusal as refusal:
        return _error(refusal.status, refusal.line)
    except Exception as error:  # whatever it is, the server must go on
        line = f"{route.method} {request.path} failed: {type(error).__name__}"
        logger.warning("prefix cache: %s", line, exc_info=error)
        return _error(500, line)


def _stats(request: Request, inspector: Inspector) -> Response:
    return _json(200, inspector.stats(access.shows_text(request)))


def _metrics(request: Request, inspector: Inspector) -> Response:
    body, content_type = inspector.metrics(", ".join(request.values("Accept")))
    return Response(200, content_type, body)


def _page(request: Request, inspector: Inspector) -> Response:
    return Response(200, "text/html; charset=utf-8", page.body(), page.headers())


def _explain(request: Request, inspector: Inspector) -> Response:
    _check_is_local(request)
    return _json(200, inspector.explain(_read_object(request)))


def _clear(request: Request, inspector: Inspector) -> Response:
    _check_is_local(request)
    if request.query not in {"", "tier=memory"}:
        raise Refusal(400, "the only query that is understood is tier=memory")
    return _json(200, inspector.clear(memory_alone=bool(request.query)))


@dataclass(frozen=True, slots=True)
class _Route:
    """What a path is asked with, and what then answers."""

    method: str
    serve: Callable[[Request, Inspector], Response]


_ROUTES = {
    "/v1/cache": _Route("DELETE", _clear),
    "/v1/cache/stats": _Route("GET", _stats),
    "/v1/cache/explain": _Route("POST", _explain),
    "/metrics": _Route("GET", _metrics),
    access.PAGE: _Route("GET", _page),
}


def _check_is_local(request: Request) -> None:
    if not access.shows_text(request):
        raise Refusal(403, "only from the machine that the server runs on, and through no proxy")


def _read_object(request: Request) -> dict[str, Any]:
    """The body of a request, which must be a JSON object."""
    body = _read(request, _body_bytes(request))
    try:
        value = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    except ValueError:
        raise Refusal(400, "the body is not JSON") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body is not a JSON object")
    return value


def _body_bytes(request: Request) -> int:
    """The length of a body, by its headers."""
    lengths = request.values("Content-Length")
    if not lengths or request.values("Transfer-Encoding"):
        raise Refusal(411, "a Content-Length is needed, and no Transfer-Encoding")
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise Refusal(400, "the Content-Length is not a number of bytes")
    if int(lengths[0]) > LONGEST_BODY_BYTES:
        raise Refusal(413, f"the body is longer than {LONGEST_BODY_BYTES >> 20} MiB")
    return int(lengths[0])


def _read(request: Request, nbytes: int) -> bytes:
    try:
        body = request.read(nbytes)
    except TimeoutError:
        raise Refusal(408, "the body did not come in time") from None
    except OSError:
        raise Refusal(400, "the body broke off") from None
    if len(body) != nbytes:
        raise Refusal(400, "the body broke off")
    return body


def _json(status: int, value: object, headers: Mapping[str, str] | None = None) -> Response:
    body = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    return Response(status, "application/json", body, {**SAFETY, **(headers or {})})


def _error(status: int, line: str, headers: Mapping[str, str] | None = None) -> Response:
    words = " ".join(line.split())
    is_long = len(words) > _LONGEST_LINE
    return _json(status, {"error": f"{words[:_LONGEST_LINE]} ..." if is_long else words}, headers)
