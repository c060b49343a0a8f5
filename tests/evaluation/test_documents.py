"""Texts as tokens: which are taken, how they begin, and which are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mlx_lm_kvcache_plugin.errors import SettingsError
from mlx_lm_kvcache_plugin.evaluation.documents import (
    SAMPLES,
    begin,
    passages,
    read_text,
    sample_texts,
    samples,
)


class Bytes:
    """A tokenizer whose tokens are bytes; one that begins texts, and one that ends them too."""

    def __init__(self, before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        self.bos_token_id = before[0] if before else None
        self._before, self._after = before, after

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        tokens = list(text.encode())
        return [*self._before, *tokens, *self._after] if add_special_tokens else tokens


PLAIN, BOS = Bytes(), Bytes(before=[256], after=[257])


def test_the_samples_are_texts_of_four_kinds() -> None:
    """Long enough for the default, by any tokenizer that makes no more of a token than 4 bytes."""
    texts = sample_texts()
    assert tuple(texts) == SAMPLES
    assert sum(len(text.encode()) for text in texts.values()) < 60_000
    assert all(
        len(text.encode()) > 4 * (1024 + 256 + 1) or kind == "list" for kind, text in texts.items()
    )
    assert texts["list"].count("|") > 100 and "def " in texts["code"] and "User:" in texts["chat"]


@pytest.mark.parametrize(("tokenizer", "first"), [(PLAIN, []), (BOS, [256])], ids=["plain", "bos"])
def test_a_sample_is_a_document_of_its_own(tokenizer: Bytes, first: list[int]) -> None:
    """It begins as its tokenizer begins texts, and has a token beyond those that are scored."""
    assert begin(tokenizer) == first
    for document, text in zip(samples(tokenizer, 100, 20), sample_texts().values(), strict=True):
        assert (len(document.prefix), len(document.rest)) == (100, 21)
        assert document.prefix + document.rest == [*first, *text.encode()][:121]


def test_a_sample_that_is_too_short_goes_on_with_the_next() -> None:
    texts = {kind: text.encode() for kind, text in sample_texts().items()}
    (_, _, _, last) = samples(PLAIN, 10_000, 20)
    assert bytes(last.prefix + last.rest) == (texts["list"] + texts["prose"])[:10_021]
    whole = sum(map(len, texts.values()))
    assert len(samples(PLAIN, whole - 21, 20)[0].rest) == 21
    with pytest.raises(SettingsError, match=f"have {whole:,} tokens, and {whole + 1:,} are needed"):
        samples(PLAIN, whole - 20, 20)


@pytest.mark.parametrize(
    ("tokens", "starts"), [(120, [0]), (363, [0, 121, 242]), (800, [0, 200, 400, 600])]
)
def test_passages_lie_apart_and_share_nothing(tokens: int, starts: list[int]) -> None:
    text = "".join(chr(0x21 + place % 90) for place in range(tokens + 1))
    found = passages(PLAIN, text, "notes", 100, 20)
    wanted = [list(text.encode())[start : start + 121] for start in starts]
    assert [document.prefix + document.rest for document in found] == wanted
    assert found[0].name == ("notes" if len(starts) == 1 else "notes, token 0")


def test_every_passage_begins_as_a_text_does() -> None:
    for document in passages(BOS, "x" * 400, "notes", 100, 20):
        assert document.prefix == [256] + [ord("x")] * 99
        assert document.rest == [ord("x")] * 21


def test_a_text_that_is_one_token_short_is_refused() -> None:
    with pytest.raises(SettingsError, match="has 120 tokens, and 121 are needed"):
        passages(PLAIN, "x" * 120, "notes", 100, 20)
    assert passages(BOS, "x" * 120, "notes", 100, 20)


def test_reading_a_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("größer", "utf-8")
    assert read_text(path, 8) == "größer"
    with pytest.raises(SettingsError, match="with 8 bytes for 9 tokens"):
        read_text(path, 9)
