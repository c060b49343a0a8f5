"""What llama.cpp's GGUF files call things, and what mlx-lm calls them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""Tensors outside the layers."""


class TokenKind(IntEnum):
    """The GGUF token types that are told apart here (gguf-py `TokenType`)."""

    NORMAL = 1
    CONTROL = 3
    """Special tokens such as <|im_end|>."""
    USER_DEFINED = 4


def layer_of(name: str) -> int | None:
    """The layer that a GGUF tensor belongs to, None for the tensors outside the layers."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else None


def hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    """Translate a tensor's name: blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight.

    Args:
        name: in the GGUF.
        layer_names: mlx-lm's name for each of the GGUF's tensors in a layer.
    """
    stem, leaf = name.rsplit(".", 1)
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    base = f"model.layers.{match[1]}.{layer_names[match[2]]}" if match else TOP_NAMES[stem]
    return f"{base}.{leaf}"


def added_token(index: int, content: str, *, special: bool) -> dict[str, Any]:
    """An entry of tokenizer.json's `added_tokens`: matched before anything else.

    What is not special is matched in the normalized text, and is kept when text is decoded.
    """
    never = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {
        "id": index,
        "content": content,
        **never,
        "normalized": not special,
        "special": special,
    }
