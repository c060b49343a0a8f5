"""A streaming client of the server: one request, its answer, and when its first token came."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import DemoError
from .server import HOST, Server

ANSWER_LIMIT_S = 300.0
"""Silence that counts as failure. Prefill is silent, and slow without a good BLAS."""

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        text: the whole answer.
        prompt_tokens: the prompt's length, as the server counts it.
        cached_tokens: hit tokens, as the server counts them.
        first_token_s: from sending the request until the first piece of the answer arrived.
        last_token_s: the same for the last piece.
        generated_tokens: the answer's length, as the server counts it.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    last_token_s: float
    generated_tokens: int


def chat(server: Server, messages: Sequence[Message], *, max_tokens: int) -> Reply:
    """Send a chat and read the streamed answer, greedily decoded."""
    body = {"messages": list(messages), "max_tokens": max_tokens}
    return _post(server, "/v1/chat/completions", body)


def complete(
    server: Server,
    prompt: str,
    *,
    max_tokens: int,
    on_first_token: Callable[[], object] = lambda: None,
) -> Reply:
    """Send a bare prompt, which shares no prefix with any chat."""
    body = {"prompt": prompt, "max_tokens": max_tokens}
    return _post(server, "/v1/completions", body, on_first_token)


def read_stream(
    lines: Iterable[bytes],
    now: Callable[[], float],
    on_first_token: Callable[[], object] = lambda: None,
) -> Reply:
    """Read a stream of server-sent events up to its end.

    Args:
        lines: raw lines; comments (`: keepalive`) and blank lines are skipped.
        now: seconds since the request was sent.
        on_first_token: called when the first piece of the answer is there.

    Raises:
        DemoError: if the stream ends before the server has reported its usage.
    """
    pieces: list[str] = []
    usage: Mapping[str, Any] | None = None
    first_token_s = last_token_s = None
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            break
        if first_token_s is None:
            first_token_s = now()
            on_first_token()
        event = json.loads(data)
        usage = event.get("usage") or usage
        pieces += [_text(choice) for choice in event["choices"]]
        if event["choices"]:
            last_token_s = now()
    if usage is None or first_token_s is None or last_token_s is None:
        raise DemoError("the server broke off its answer")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Reply(
        "".join(pieces),
        usage["prompt_tokens"],
        cached,
        first_token_s,
        last_token_s,
        usage["completion_tokens"],
    )


def _text(choice: Mapping[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def _post(
    server: Server,
    path: str,
    body: Mapping[str, Any],
    on_first_token: Callable[[], object] = lambda: None,
) -> Reply:
    stream = {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps({**body, **stream})
    connection = http.client.HTTPConnection(HOST, server.port, timeout=ANSWER_LIMIT_S)
    start = time.perf_counter()
    try:
        connection.request("POST", path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise server.failure(f"the server answered {response.status}: {response.read()!r}")
        return read_stream(response, lambda: time.perf_counter() - start, on_first_token)
    except (OSError, http.client.HTTPException) as error:
        server.check_alive()
        raise server.failure(f"the server did not answer ({error!r})") from error
    finally:
        connection.close()
