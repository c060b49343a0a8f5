"""What the demo prints: the table of requests, and the bytes that the prefix cache holds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HELD_LINE = re.compile(r"prefix cache holds (\d+) bytes: (\d+) blocks, (\d+) tokens")
"""Logged by the plugin at level DEBUG after each insert."""

FP16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One request, measured at a server with and at one without a prefix cache."""

    label: str
    prompt_tokens: int
    cached_tokens: int
    with_cache_s: float
    without_cache_s: float
    same_answer: bool

    def cells(self) -> tuple[str, ...]:
        return (
            self.label,
            f"{self.prompt_tokens:,}",
            f"{self.cached_tokens:,}",
            f"{self.with_cache_s:.3f}",
            f"{self.without_cache_s:.3f}",
            f"{self.without_cache_s / self.with_cache_s:.1f}x",
        )


@dataclass(frozen=True, slots=True)
class Held:
    """What the prefix cache holds.

    Attributes:
        nbytes: everything counted.
        blocks: their number, tails included.
        tokens: tokens of all blocks; two chats that part inside a block both count its tokens.
    """

    nbytes: int
    blocks: int
    tokens: int


HEADINGS = (
    ("", "prompt", "cached", "first token", "first token", ""),
    ("request", "tokens", "tokens", "cache on, s", "cache off, s", "faster"),
)


def table(rows: Sequence[Row]) -> str:
    """The rows under their headings: the first column flush left, the others flush right."""
    body = [row.cells() for row in rows]
    widths = [max(map(len, column)) for column in zip(*HEADINGS, *body, strict=True)]
    lines = [_line(cells, widths) for cells in HEADINGS]
    lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines + [_line(cells, widths) for cells in body])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *padded[1:]]).rstrip()


def legend(flags_on: Sequence[str], flags_off: Sequence[str]) -> str:
    """Which column was measured where."""
    return (
        f"cached tokens, cache on: measured at `mlx_lm.server {' '.join(flags_on)}`.\n"
        f"cache off: the same requests at a second server, `mlx_lm.server {' '.join(flags_off)}`,\n"
        "which was started and warmed up alike and prefills every prompt from its first token."
    )


def answers(rows: Sequence[Row]) -> str:
    """How many answers did not depend on the cache."""
    same = sum(row.same_answer for row in rows)
    return f"answers that are the same with and without the cache: {same} of {len(rows)}"


def held_bytes(log_text: str) -> Held | None:
    """What the prefix cache held after its last insert, from the server's log; None if unsaid."""
    found = HELD_LINE.findall(log_text)
    return Held(*map(int, found[-1])) if found else None


def fp16_bytes_per_token(config: Mapping[str, Any]) -> int | None:
    """The KV bytes of one token at 16 bits: layers x KV heads x head_dim, for K and for V.

    None where there is no such figure: a sliding window does not grow with the tokens.
    """
    if config.get("sliding_window"):
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    elements = config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    return 2 * int(elements) * FP16_BYTES


def memory(held: Held | None, per_token_bytes: int | None) -> str:
    """The lines about memory."""
    if held is None:
        return "bytes held: the server's log does not say, so no figure is given"
    counted = f"{held.blocks:,} blocks, {held.tokens:,} tokens, everything counted"
    if per_token_bytes is None:
        return (
            f"bytes held by the prefix cache   {held.nbytes:,}  ({counted})\n"
            "Each checkpoint holds its own windows: there is no figure per token to compare with."
        )
    fp16 = held.tokens * per_token_bytes
    size = len(f"{max(fp16, held.nbytes):,}")
    lines = [
        f"bytes held by the prefix cache   {held.nbytes:>{size},}  ({counted})",
        f"fp16 KV of the same tokens       {fp16:>{size},}  ({per_token_bytes:,} a token)",
    ]
    if fp16:
        lines.append(f"ratio                            {held.nbytes / fp16:>{size}.3f}")
    return "\n".join(lines)
