"""Forty turns of a chat with a hybrid model, whose thinking never comes back.

The real server, with our cache at 8 bits and with stock's, on a tiny random qwen3_next. As in the
real one, there are three layers of recurrent state beside one of attention, and a state weighs as
much as the keys and values of some five turns. The chat template opens the model's thinking and
leaves all earlier thinking out, so that no request continues what was generated.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer
from tqdm import tqdm

from demo.client import Reply, chat
from tests import models
from tests.families import CONFIGURATIONS
from tests.families.shared import SHARED
from tests.integration.local_server import LocalServer

from .report import Report, Row

TURNS = 40
SYSTEM_TOKENS, TURN_TOKENS, GENERATED_TOKENS = 600, 90, 24
LENGTHS = {"answer": 60, "following": TURN_TOKENS}
BITS = 8

CONFIGURATION: dict[str, Any] = {
    **SHARED,
    **CONFIGURATIONS["qwen3_next"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "mlp_only_layers": [0, 1, 2, 3],  # MLX multiplies experts in 32 bits alone on a CPU
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}

THINKING = ("<think>", "</think>")
OPENED = "<|assistant|><think>\n"
TEMPLATE = models.CHAT_TEMPLATE.replace("<|assistant|>{% endif %}", OPENED + "{% endif %}")
ROLES = {"user": "a user's", "tool": "a tool result"}


@dataclass(frozen=True)
class Chat:
    """What forty turns came to.

    Attributes:
        replies: one for each turn.
        held_bytes: by the prompt cache after the last.
        sequences: as the server counts them.
    """

    replies: list[Reply]
    held_bytes: int
    sequences: int

    @property
    def missed(self) -> float:
        """The share of all prompt tokens that was no hit."""
        return missed(self.replies)


def missed(replies: list[Reply]) -> float:
    """The share of the prompts' tokens that was no hit."""
    hits = sum(reply.cached_tokens for reply in replies)
    return 1 - hits / sum(reply.prompt_tokens for reply in replies)


def build(folder: Path) -> Path:
    """A model that thinks: the tokenizer knows the tags, and the template opens the first."""
    models.build(folder, CONFIGURATION, dtype=mx.bfloat16)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(THINKING))
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def hold(server: LocalServer, role: str, turns: int) -> Chat:
    """Chat for that many turns; all messages behind the first are of that role or answers."""
    messages = [
        {"role": "system", "content": models.prompt(f"system {role}", SYSTEM_TOKENS)},
        {"role": "user", "content": models.prompt("first", TURN_TOKENS)},
    ]
    replies = []
    for turn in tqdm(range(turns), desc=f"last message {ROLES[role]}", leave=False):
        replies.append(chat(server, messages, max_tokens=GENERATED_TOKENS))
        answer, following = (models.prompt(f"{turn} {name}", n) for name, n in LENGTHS.items())
        messages += [
            {"role": "assistant", "content": answer},
            {"role": role, "content": following},
        ]
    server.settle()
    cache = server.prompt_cache
    return Chat(replies, cache.nbytes, len(cache))


def compare(folder: Path, role: str, turns: int) -> Iterator[Row]:
    """Both servers, the same chat."""
    arguments = ("--model", str(folder))
    with LocalServer(*arguments, "--kv-cache-bits", str(BITS)) as server:
        ours = hold(server, role, turns)
        states = [node.payload.states.nbytes for node in server.cache.tree if not node.key]
    with LocalServer(*arguments) as server:
        stock = hold(server, role, turns)
    last, stock_last = ours.replies[-1], stock.replies[-1]
    yield Row(
        f"share of the prompt that missed, turn {turns}, last message {ROLES[role]}",
        missed([last]),
        0.05,
        f"{last.cached_tokens:,} of {last.prompt_tokens:,} hit, of stock's "
        f"{stock_last.cached_tokens:,}; "
        f"all turns together {ours.missed:.3f} and {stock.missed:.3f}",
    )
    yield Row(
        f"bytes held at {BITS} bits to stock's whole copies, last message {ROLES[role]}",
        ours.held_bytes / stock.held_bytes,
        0.25,
        f"{ours.held_bytes:,} to {stock.held_bytes:,} bytes; {len(states)} checkpoints with states "
        f"of {states[0]:,} bytes, {stock.sequences} copies",
    )


def measure(arguments: argparse.Namespace) -> Report:
    """Both kinds of chat; a quick one has a quarter of the turns."""
    turns = TURNS // 4 if arguments.quick else TURNS
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        return Report([row for role in ROLES for row in compare(Path(folder), role, turns)])
