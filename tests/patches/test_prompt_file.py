"""Quantized prompt caches in files: what comes back, whose file it is, and what is no file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.utils import load_model

from mlx_lm_kvcache_plugin.errors import PromptFileError
from mlx_lm_kvcache_plugin.options import KV_CACHE_BITS
from mlx_lm_kvcache_plugin.patches.layer_kinds import BuiltInLayerKinds
from mlx_lm_kvcache_plugin.patches.prompt_file import MARK, is_marked, load, save
from mlx_lm_kvcache_plugin.plugins import plugins
from mlx_lm_kvcache_plugin.settings import Settings
from tests.families.speed import fast_for_each_layout
from tests.patches.cache_objects import (
    KINDS,
    LayerCache,
    arrays,
    arrays_in,
    filled,
    plain,
    rotating,
    rows,
    same,
    visible,
)
from tests.patches.faces import are_at
from tests.patches.test_every_model import ERRORS, NAMES, PROMPT, logits_after

EIGHT_BITS = Settings(key_bits=8, value_bits=8, codec="rotated")
RAW = Settings()

METADATA = {"model": "some/model", "tokenizer_config": '{"trust_remote_code": null}'}
"""As the command writes it."""

OWN_CLASSES = {"deepseek_v41"}
"""Models whose files define caches of their own, which no file can name."""


@pytest.fixture(autouse=True)
def built_in_kinds() -> Iterator[None]:
    plugins.cache_clear()
    plugins().register(BuiltInLayerKinds(), BuiltInLayerKinds.NAME)
    yield
    plugins.cache_clear()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompt.safetensors"


# What comes back


@pytest.mark.parametrize(
    "name", fast_for_each_layout(name for name in NAMES if name not in OWN_CLASSES)
)
def test_a_model_goes_on_from_its_file(
    name: str, family_folder: Callable[[str], Path], file: Path
) -> None:
    """Its next logits are near those that it would have given, and every layer is at its place."""
    model, _ = load_model(family_folder(name))
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([PROMPT[:-1]]), cache=caches))
    save(str(file), caches, METADATA, EIGHT_BITS)
    assert is_marked(str(file))
    back, metadata = load(str(file))
    assert metadata == METADATA
    assert are_at(back, len(PROMPT) - 1)
    wanted = logits_after(model, PROMPT[-1:], caches)
    errors = logits_after(model, PROMPT[-1:], back) - wanted
    assert np.sqrt(np.mean(errors**2)) <= ERRORS["rotated"] * wanted.std()


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 256, 300])
@pytest.mark.parametrize("bits", KV_CACHE_BITS)
def test_any_length_and_bits(bits: int, tokens: int, file: Path) -> None:
    """Whole blocks, a tail, both, and neither more nor fewer rows than there were."""
    caches = [plain(tokens, dtype=mx.bfloat16), rotating(tokens)]
    save(str(file), caches, {}, Settings(key_bits=bits, value_bits=bits, codec="rotated"))
    back, _ = load(str(file))
    for one, other in zip(caches, back, strict=True):
        assert type(one) is type(other) and one.offset == other.offset == tokens
        _, _, wanted = visible(one)
        _, _, found = visible(other)
        for mine, its in zip(wanted, found, strict=True):
            assert (mine.shape, mine.dtype) == (its.shape, its.dtype)
            difference = mx.abs((mine - its).astype(mx.float32)).max().item()
            assert difference < {2: 3, 3: 1.5, 4: 0.7, 5: 0.4, 6: 0.2, 8: 0.1}[bits]


SHOWN = [kind for kind in KINDS if kind not in ("of a model file", "a subclass of a plain one")]


@pytest.mark.parametrize("kind", SHOWN)
def test_every_kind_of_cache_comes_back(kind: str, file: Path) -> None:
    """Without a loss if nothing is quantized, and evaluated."""
    caches = [KINDS[kind]()]
    save(str(file), caches, {}, RAW)
    (back,), _ = load(str(file))
    assert same(visible(back), visible(KINDS[kind]()))
    mx.eval(list(arrays_in(back)))


def test_states_are_kept_to_the_bit(file: Path) -> None:
    """Whatever the bits: they fold what is past, and have nowhere else to get it from."""
    state = arrays(rows(3), None, rows(4, seed=1)[0], left_padding=None)
    save(str(file), [plain(9), state, KVCache(), ArraysCache(2)], {}, EIGHT_BITS)
    (_, back, unused, empty), _ = load(str(file))
    assert same(back, state)
    assert type(unused) is KVCache and unused.empty() and unused.offset == 0
    assert type(empty) is ArraysCache and same(empty, ArraysCache(2))


def test_a_window_keeps_its_first_tokens(file: Path) -> None:
    """As `--max-kv-size` makes them: size, kept tokens and position are as they were."""
    save(str(file), [filled(RotatingKVCache(16, keep=4), 20, 1, 1)], {}, EIGHT_BITS)
    (back,), _ = load(str(file))
    assert (back.max_size, back.keep, back.offset) == (16, 4, 22)


def test_what_was_done_is_said(file: Path) -> None:
    """How it is encoded, and what that saves: really the bytes of the arrays."""
    caches = [plain(1024, dtype=mx.float16) for _ in range(4)]
    said = save(str(file), caches, METADATA, Settings(key_bits=4, value_bits=4, codec="rotated"))
    before = sum(cache.nbytes for cache in caches)
    assert "codec rotated" in said and "4 bits" in said and said.endswith(f"instead of {before:,}")
    after = int(said.split(": ")[1].split(" bytes")[0].replace(",", ""))
    assert after < file.stat().st_size < after + 30_000
    assert after < 0.35 * before


def test_a_file_is_read_without_the_settings_that_wrote_it(file: Path) -> None:
    """It says itself how it was encoded, keys and values each."""
    settings = Settings(key_bits=8, value_bits=2, group_size=32, codec="affine")
    save(str(file), [plain(256)], {}, settings)
    (back,), _ = load(str(file))
    keys, values = (
        float(mx.abs(one - other).mean())
        for one, other in zip(visible(plain(256))[2], visible(back)[2], strict=True)
    )
    assert keys < 0.02 < 0.1 < values


# Whose file it is


def make_stocks(file: Path) -> None:
    save_prompt_cache(str(file), [plain(9)], METADATA)


def header(**metadata: Any) -> bytes:
    text = json.dumps({"__metadata__": metadata}).encode()
    return len(text).to_bytes(8, "little") + text


def json_header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


NOT_MARKED: dict[str, bytes] = {
    "empty": b"",
    "short": b"abc",
    "no text": b"\x08\0\0\0\0\0\0\0\xff\xfe\xfd\xfc",
    "garbage": bytes(range(256)) * 10,
    "a huge header": (10**8 - 1).to_bytes(8, "little") + b"{}",
    "a header longer than any": b"\xff" * 8 + b"{}",
    "a header of nothing": b"\0" * 8,
    "another's": header(format="mlx"),
    "no metadata": json_header("{}"),
    **{
        f"metadata that is {text}": json_header(f'{{"__metadata__": {text}}}')
        for text in (
            "null",
            "7",
            "[]",
            f'"{MARK}"',
            f'["{MARK}"]',
            '{"a": "mlx_lm_kvcache_plugin"}',
        )
    },
    **{f"a header that is {text}": json_header(text) for text in ("null", "7", "[]", '"x"', "{")},
    "a header too deep": json_header("[" * 100_000),
}


@pytest.mark.parametrize("content", NOT_MARKED.values(), ids=NOT_MARKED)
def test_what_is_not_marked(content: bytes, file: Path) -> None:
    """Is upstream's affair, whatever it is."""
    file.write_bytes(content)
    assert not is_marked(str(file))


def test_whose_file_it_is(file: Path) -> None:
    """Ours says so; stock's, a folder, and nothing at all are not ours."""
    assert not is_marked(str(file))
    assert not is_marked(str(file.parent))
    assert not is_marked("\0")
    make_stocks(file)
    assert not is_marked(str(file))
    save(str(file), [plain(9)], METADATA, EIGHT_BITS)
    assert is_marked(str(file))


def test_a_mark_is_told_without_reading_the_rest(file: Path) -> None:
    """The tensors may be gigabytes: the head is enough."""
    save(str(file), [plain(9)], METADATA, EIGHT_BITS)
    data = file.read_bytes()
    file.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    assert is_marked(str(file))


# What cannot be read or written


def refusal(file: Path) -> str:
    with pytest.raises(PromptFileError) as caught:
        load(str(file))
    message = str(caught.value)
    assert str(file) in message and "\n" not in message
    return message


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut(share: float, file: Path) -> None:
    """Is refused in one line that names it."""
    save(str(file), [plain(300), arrays(rows(3))], METADATA, EIGHT_BITS)
    data = file.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[: head + int((len(data) - head) * share)])
    assert is_marked(str(file))
    refusal(file)


def rewritten(file: Path, **changes: Any) -> None:
    """Our part of the metadata, changed; None takes something out."""
    loaded: Any = mx.load(str(file), return_metadata=True)
    tensors, metadata = loaded
    mx.eval(list(tensors.values()))
    ours = {**json.loads(metadata[MARK]), **changes}
    ours = {key: value for key, value in ours.items() if value is not None}
    mx.save_safetensors(str(file), tensors, {**metadata, MARK: json.dumps(ours)})


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": None},
        {"layout": None},
        {"layout": "{}"},
        {"layout": "[" * 100_000},
        {"states": None},
        {"states": {"list": [{"object": ["os.system", {"dict": []}]}]}},
        {"codec": "of a plugin that is not here"},
        {"key_bits": 7},
        {"group_size": 0},
        {"tokens": 10**6},
        {"tokens": "many"},
        {"tokens": -1},
        {"rows": None},
        {"rows": []},
        {"rows": [{}]},
        {"rows": 7},
        {"windows": None},
        {"windows": {"lengths": [1], "payloads": []}},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_a_file_that_does_not_hold_what_it_says(changes: dict[str, Any], file: Path) -> None:
    """Is refused, and never read as something else."""
    save(str(file), [plain(300), rotating(300), arrays(rows(3))], METADATA, EIGHT_BITS)
    rewritten(file)
    assert load(str(file))[1] == METADATA
    rewritten(file, **changes)
    refusal(file)


def test_a_file_that_is_not_there(file: Path) -> None:
    """Between the look at its mark and the reading it may go."""
    refusal(file)


@pytest.mark.parametrize("content", NOT_MARKED.values(), ids=NOT_MARKED)
def test_what_is_no_file_of_ours_cannot_be_read(content: bytes, file: Path) -> None:
    """Nor does it bring the process down."""
    file.write_bytes(content)
    refusal(file)


@pytest.mark.parametrize("cache", [filled(LayerCache(), 3), [plain(2), filled(LayerCache(), 2)]])
def test_a_class_that_no_file_can_name(cache: Any, file: Path) -> None:
    """Is refused before anything is written."""
    with pytest.raises(PromptFileError, match="no quantized form"):
        save(str(file), cache if isinstance(cache, list) else [cache], METADATA, EIGHT_BITS)
    assert not file.exists()


@pytest.mark.parametrize("caches", [[], [KVCache()], [ArraysCache(2), RotatingKVCache(8)]], ids=len)
def test_nothing_computed_has_no_such_file(caches: list[Any], file: Path) -> None:
    with pytest.raises(PromptFileError, match="no quantized form"):
        save(str(file), caches, METADATA, EIGHT_BITS)
    assert not file.exists()
