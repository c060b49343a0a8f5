"""Gemma's tokenizer, from a GGUF's list of SentencePiece pieces into Hugging Face's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .gguf_names import TokenKind, added_token

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's sign for a space."""

Metadata = Mapping[str, Any]


def tokenizer_model(meta: Metadata) -> dict[str, Any]:
    """The content of tokenizer.json: BPE on whole texts, with bytes for what no piece covers."""
    tokens, kinds = pieces(meta), meta["tokenizer.ggml.token_type"]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    no_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    scores = {
        token: score
        for token, kind, score in zip(tokens, kinds, meta["tokenizer.ggml.scores"], strict=True)
        if kind == TokenKind.NORMAL
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(index, token, special=kind == TokenKind.CONTROL)
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED)
        ],
        "normalizer": space,
        "pre_tokenizer": None,
        "post_processor": _beginning(_token_of(meta, "bos"), meta["tokenizer.ggml.bos_token_id"]),
        "decoder": {
            "type": "Sequence",
            "decoders": [no_space, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": _bpe(tokens, merges(scores), _token_of(meta, "unknown")),
    }


def tokenizer_config(meta: Metadata) -> dict[str, Any]:
    """The content of tokenizer_config.json; there is no chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _token_of(meta, "bos"),
        "eos_token": _token_of(meta, "eos"),
        "pad_token": _token_of(meta, "padding"),
        "unk_token": _token_of(meta, "unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["gemma3.context_length"],
    }


def pieces(meta: Metadata) -> list[str]:
    """The vocabulary; a GGUF writes user-defined pieces, such as runs of spaces, in plain text."""
    kinds = meta["tokenizer.ggml.token_type"]
    return [
        token.replace(" ", SPACE) if kind == TokenKind.USER_DEFINED else token
        for token, kind in zip(meta["tokenizer.ggml.tokens"], kinds, strict=True)
    ]


def merges(scores: Mapping[str, float]) -> list[list[str]]:
    """SentencePiece merges two pieces if both together are one, the best one first.

    Args:
        scores: of each piece, higher is better.

    Returns:
        Every split of a piece into two pieces, in the order in which they are to be merged.
    """
    return [
        [piece[:cut], piece[cut:]]
        for piece in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]


def _token_of(meta: Metadata, role: str) -> str:
    token: str = meta["tokenizer.ggml.tokens"][meta[f"tokenizer.ggml.{role}_token_id"]]
    return token


def _beginning(token: str, index: int) -> dict[str, Any]:
    """Puts a token before every text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, second_text = ({"Sequence": {"id": id_, "type_id": i}} for i, id_ in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second_text],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]], unknown: str) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": merges,
    }
