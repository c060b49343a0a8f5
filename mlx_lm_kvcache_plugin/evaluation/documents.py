"""The texts that a model is evaluated on, as tokens: a prefix, and what is scored after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import SettingsError

SAMPLES = ("prose", "code", "chat", "list")
"""The texts that come with the package: texts/KIND.txt."""

MOST_PASSAGES = 4
"""How many documents a text of the user's is cut into; as many as there are sample texts."""


@dataclass(frozen=True, slots=True)
class Document:
    """Consecutive tokens of a text.

    Attributes:
        name: where they come from.
        prefix: what is stored and fetched.
        rest: what comes next. Each of them but the last is given to the model, which is scored on
            what it expects to follow.
    """

    name: str
    prefix: list[int]
    rest: list[int]

    @classmethod
    def of(cls, name: str, tokens: list[int], prefix_tokens: int) -> Document:
        """A document that is so many tokens long."""
        return cls(name, tokens[:prefix_tokens], tokens[prefix_tokens:])


def sample_texts() -> dict[str, str]:
    """The texts that come with the package, by kind."""
    folder = files(__package__) / "texts"
    return {kind: (folder / f"{kind}.txt").read_text("utf-8") for kind in SAMPLES}


def read_text(path: Path, least_tokens: int) -> str:
    """A text of the user's.

    Raises:
        SettingsError: if it cannot be read, is no text, or surely has fewer tokens than that.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise SettingsError(f"--text {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"--text {path}: not UTF-8 at byte {error.start:,}") from None
    if not text.strip():
        raise SettingsError(f"--text {path}: there is no text in it")
    if (nbytes := len(text.encode())) < least_tokens:  # a token is a byte at least
        raise SettingsError(
            f"--text {path}: it is too short, with {nbytes:,} bytes for {least_tokens:,} tokens"
        )
    return text


def samples(tokenizer: Any, prefix_tokens: int, scored_tokens: int) -> list[Document]:
    """A document for each sample text; one that is too short goes on with those after it.

    Raises:
        SettingsError: if all together are too short.
    """
    texts = sample_texts()
    first, needed = begin(tokenizer), prefix_tokens + scored_tokens + 1
    tokens = {name: encode(tokenizer, text) for name, text in texts.items()}
    have = sum(map(len, tokens.values())) + len(first)
    if have < needed:
        raise SettingsError(
            f"the sample texts have {have:,} tokens, and {needed:,} are needed: name a --text, or "
            "fewer --prefix-tokens"
        )
    return [
        Document.of(name, [*first, *_from(name, tokens)][:needed], prefix_tokens) for name in tokens
    ]


def _from(name: str, tokens: Mapping[str, Sequence[int]]) -> list[int]:
    """All tokens, beginning with those of that name."""
    names = list(tokens)
    place = names.index(name)
    return [token for each in names[place:] + names[:place] for token in tokens[each]]


def passages(
    tokenizer: Any, text: str, name: str, prefix_tokens: int, scored_tokens: int
) -> list[Document]:
    """Documents from a text, far from each other and none with tokens of another.

    Raises:
        SettingsError: if the text is too short for one.
    """
    first, tokens = begin(tokenizer), encode(tokenizer, text)
    needed = prefix_tokens + scored_tokens + 1 - len(first)
    count = min(MOST_PASSAGES, len(tokens) // needed)
    if not count:
        raise SettingsError(
            f"--text {name}: it has {len(tokens) + len(first):,} tokens, and "
            f"{needed + len(first):,} are needed: {prefix_tokens:,} of a prefix, "
            f"{scored_tokens:,} after it, and the one that comes next"
        )
    starts = [len(tokens) * place // count for place in range(count)]
    return [
        Document.of(
            name if count == 1 else f"{name}, token {start:,}",
            [*first, *tokens[start : start + needed]],
            prefix_tokens,
        )
        for start in starts
    ]


def begin(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before every text: the token that begins one, if it knows any."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [token for token in tokenizer.encode("") if token == bos][:1]


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without any that begin or end one."""
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
