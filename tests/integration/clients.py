"""A small HTTP client of the server, which knows what each answer could have been spared."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.models import chat_tokens

HOST = "127.0.0.1"
ANSWER_SECONDS = 60

MODES: dict[str, dict[str, Any]] = {"batched": {}, "sequential": {"seed": 1}}
"""The two paths of the server: a request with a seed is never batched."""


@dataclass(frozen=True)
class Answer:
    """What a request got.

    Attributes:
        text: each character is one generated token, see tests/models.py.
        logprobs: of those tokens, where they can be asked for.
        prompt_tokens, cached_tokens: what the server counted.
        longest_hit: the most that could have been cached, had all earlier sequences been kept.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int | None
    longest_hit: int
    logprobs: tuple[float, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return list(self.text.encode())


@dataclass(frozen=True)
class Reply:
    """What came back from a path, whole.

    Attributes:
        headers: by their names in lower case; none that we look at comes twice.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Client:
    """Talks to a server on this machine. Every answer is greedy, eight tokens long by default."""

    def __init__(self) -> None:
        self.port = 0
        self._sequences: list[list[int]] = []

    def text(self, prompt: str, **options: Any) -> Answer:
        body = {"prompt": prompt, **options}
        return self._ask("/v1/completions", body, list(prompt.encode()))

    def chat(self, messages: Sequence[dict[str, str]], **options: Any) -> Answer:
        body = {"messages": list(messages), **options}
        return self._ask("/v1/chat/completions", body, chat_tokens(messages))

    def health(self) -> int:
        return self.get("/health").status

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, **headers)

    def stats(self) -> dict[str, Any]:
        """What `GET /v1/cache/stats` tells."""
        told: dict[str, Any] = self.get("/v1/cache/stats").json
        return told

    def explain(self, body: Any, **headers: str) -> Reply:
        """What would become of a chat or a text; anything but bytes is sent as JSON."""
        return self.request("POST", "/v1/cache/explain", body, **headers)

    def delete(self, path: str = "/v1/cache", **headers: str) -> Reply:
        return self.request("DELETE", path, **headers)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """Send anything at all; `Sec_Fetch_Site` is how to name a header."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with self._connected() as connection:
            connection.request(method, path, data, named)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())

    def disconnect(self, path: str, body: dict[str, Any], after: int) -> None:
        """Ask for a stream, and hang up after some of its chunks."""
        with self._send(path, {**body, "stream": True}) as response:
            for _ in range(after):
                next(_chunks(response))

    def _ask(self, path: str, body: dict[str, Any], tokens: list[int]) -> Answer:
        body = {"max_tokens": 8, **body}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        else:
            body["logprobs"] = True
        shared = max((common_prefix(tokens, other) for other in self._sequences), default=0)
        hit = min(len(tokens) - 1, shared)  # the last token is always computed
        with self._send(path, body) as response:
            if response.status != 200:
                raise AssertionError(f"{response.status}: {response.read().decode()}")
            if body.get("stream"):
                answer = _answer_of_stream(_chunks(response), hit)
            else:
                answer = _answer(json.load(response), hit)
        assert answer.prompt_tokens == len(tokens)
        self._sequences.append([*tokens, *answer.tokens])
        return answer

    @contextmanager
    def _send(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        with self._connected() as connection:
            connection.request("POST", path, json.dumps(body))
            yield connection.getresponse()

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            yield connection
        finally:
            connection.close()


def same_answer(one: Answer, other: Answer) -> bool:
    """Tokens are equal; logprobs up to the noise of another order of summation."""
    return (
        (one.text, one.finish_reason) == (other.text, other.finish_reason)
        and len(one.logprobs) == len(other.logprobs)
        and np.allclose(one.logprobs, other.logprobs, atol=1e-3)
    )


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        kind, _, data = line.decode().strip().partition(": ")
        if kind == "data" and data != "[DONE]":
            yield json.loads(data)


def _content(choice: dict[str, Any]) -> str:
    return choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""


def _answer(body: dict[str, Any], longest_hit: int) -> Answer:
    (choice,) = body["choices"]
    usage = body["usage"]
    logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
    answer = Answer(
        _content(choice),
        choice["finish_reason"],
        usage["prompt_tokens"],
        usage.get("prompt_tokens_details", {}).get("cached_tokens"),
        longest_hit,
        logprobs,
    )
    assert [entry["id"] for entry in choice["logprobs"]["content"]] == answer.tokens
    return answer


def _answer_of_stream(chunks: Iterator[dict[str, Any]], longest_hit: int) -> Answer:
    text, finish_reason, usage = "", "", {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += _content(choice)
            finish_reason = choice.get("finish_reason") or finish_reason
    cached_tokens = usage.get("prompt_tokens_details", {}).get("cached_tokens")
    return Answer(text, finish_reason, usage["prompt_tokens"], cached_tokens, longest_hit)
