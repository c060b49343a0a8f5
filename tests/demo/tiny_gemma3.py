"""A tiny random Gemma 3, and its GGUF as llama.cpp would write it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text

from demo import gemma3
from demo.gguf_names import TOP_NAMES, hf_name

LAYERS = 7
HIDDEN = 32

CONTROL, USER, BYTE, NORMAL = 3, 4, 6, 1
PIECES: list[tuple[str, int, float]] = [
    ("<pad>", CONTROL, -1000.0),
    ("<eos>", CONTROL, -1000.0),
    ("<bos>", CONTROL, -1000.0),
    ("<unk>", CONTROL, -1000.0),
    ("  ", USER, -1000.0),
    ("<0xC3>", BYTE, -1000.0),
    ("<0xA9>", BYTE, -1000.0),
    ("a", NORMAL, -7.0),
    ("b", NORMAL, -8.0),
    ("▁", NORMAL, -9.0),
    ("ab", NORMAL, -1.0),
    ("▁a", NORMAL, -2.0),
    ("aba", NORMAL, -3.0),
    ("▁ab", NORMAL, -4.0),
]
IDS = {piece: index for index, (piece, _, _) in enumerate(PIECES)}


def weights_of(model: nn.Module) -> dict[str, mx.array]:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))


def tiny_model(vocab_size: int = len(PIECES)) -> gemma3_text.Model:
    """Random, its head tied, its norms off the zeros that they begin with."""
    mx.random.seed(7)
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=16,
        vocab_size=vocab_size,
    )
    model = gemma3_text.Model(args)
    model.sanitize({})  # ties the head
    norms = [
        (name, mx.random.randint(-64, 64, array.shape) / 256)  # steps that survive adding 1
        for name, array in weights_of(model).items()
        if name.endswith("norm.weight")
    ]
    model.load_weights(norms, strict=False)
    return model


def write_gguf(path: Path, model: gemma3_text.Model) -> Path:
    """Write a model as llama.cpp's converter would: its names, 1 added to each norm."""
    from gguf import GGUFWriter

    layers = [f"blk.{layer}.{name}" for layer in range(LAYERS) for name in gemma3.LAYER_NAMES]
    gguf_names = {
        hf_name(f"{stem}.weight", gemma3.LAYER_NAMES): f"{stem}.weight"
        for stem in [*TOP_NAMES, *layers]
    }
    writer = GGUFWriter(path, "gemma3")
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_key_length(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(16)
    writer.add_context_length(128)
    tokens, kinds, scores = zip(*PIECES, strict=True)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    for name, array in weights_of(model).items():
        writer.add_tensor(gguf_names[name], np.array(array + 1 if "norm" in name else array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
