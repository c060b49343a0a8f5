"""Reads traces in Mooncake's format: a JSON line for each request, a hash for each 512 tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mlx_lm_kvcache_plugin.store.blocks import Tokens

HASH_TOKENS = 512
"""Tokens that a hash id of the format stands for; the last one of a prompt may stand for fewer."""


class TraceError(ValueError):
    """A line that is no request; the message is one line that says which and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """The prompt of one request.

    Attributes:
        hash_ids: one for each 512 tokens; equal ones mean an equal prefix up to and with them.
        tokens: of the prompt.
    """

    hash_ids: tuple[int, ...]
    tokens: int

    def lengths(self) -> list[int]:
        """How many tokens each hash id stands for."""
        whole, rest = divmod(self.tokens, HASH_TOKENS)
        return [HASH_TOKENS] * whole + [rest] * (rest > 0)

    def hit_tokens(self, hashes: int) -> int:
        """Tokens of that many first hash ids, short of the prompt's last: that is computed."""
        return min(hashes * HASH_TOKENS, self.tokens - 1)

    def token_ids(self) -> Tokens:
        """Token ids that agree with another request's as far as its hash ids do, and no further."""
        firsts = np.array(self.hash_ids, np.int64)[:, None] * HASH_TOKENS
        return (firsts + np.arange(HASH_TOKENS)).ravel()[: self.tokens]


def read_trace(path: Path, most: int | None = None) -> list[Request]:
    """The requests of a trace, in the order of its lines.

    Args:
        most: how many lines are read; None for all.

    Raises:
        TraceError: for a line that is no request of the format, and where there is none.
        OSError: if the file cannot be read.
    """
    with path.open("rb") as lines:
        requests = _requests(islice(lines, most), path)
    if not requests:
        raise TraceError(f"{path} holds no request")
    return requests


def _requests(lines: Iterable[bytes], path: Path) -> list[Request]:
    """Parse all lines; hash ids are numbered anew, from 0 in the order in which they come."""
    requests: list[Request] = []
    numbers: dict[int, int] = {}
    meanings: dict[int, tuple[int | None, int]] = {}
    for place, line in enumerate(lines, 1):
        try:
            length, hash_ids = _fields(line)
            known = [numbers.setdefault(hash_id, len(numbers)) for hash_id in hash_ids]
            requests.append(Request(tuple(known), length))
            _check_prefixes(requests[-1], meanings)
        except ValueError as error:
            raise TraceError(f"{path}, line {place}: {error}") from None
    return requests


def _fields(line: bytes) -> tuple[int, list[int]]:
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    missing = [key for key in ("input_length", "hash_ids") if key not in fields]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing")
    length, hash_ids = fields["input_length"], fields["hash_ids"]
    if type(length) is not int or length < 1:
        raise ValueError(f"input_length is {length!r}, not a number of tokens")
    if not isinstance(hash_ids, list) or any(type(hash_id) is not int for hash_id in hash_ids):
        raise ValueError("hash_ids is not a list of numbers")
    wanted = -(-length // HASH_TOKENS)
    if len(hash_ids) != wanted:
        raise ValueError(f"{len(hash_ids)} hash_ids for {length} tokens, not {wanted}")
    return length, hash_ids


def _check_prefixes(request: Request, meanings: dict[int, tuple[int | None, int]]) -> None:
    """Hold an id against what it stood for before: the id in front of it, and its tokens."""
    before: int | None = None
    for place, (hash_id, tokens) in enumerate(
        zip(request.hash_ids, request.lengths(), strict=True)
    ):
        if meanings.setdefault(hash_id, (before, tokens)) != (before, tokens):
            raise ValueError(f"number {place + 1} of its hash_ids stood for another prefix before")
        before = hash_id
