"""Tiny model folders with random weights: real architectures, real tokenizers, no download.

A token is a byte, so that the length of a prompt can be told from its text, and what is generated
is printable and never a space: the text of an answer names its tokens. The weights are scaled so
that the next token hangs on all of what comes before, and the best one leads by far: a wrong row
in a cache shows in the text, while the noise of another order of summation does not.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.weights import LOGITS_GAIN, VOCABULARY, random_weights

ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = ("<|end|>", *(f"<|{role}|>" for role in ROLES))
END_TOKEN = 256
ROLE_TOKENS = {role: END_TOKEN + 1 + place for place, role in enumerate(ROLES)}
WINDOW = 32

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}


def llama(folder: Path, *, head_dim: int = 64, **options: Any) -> Path:
    """Plain `KVCache` in all layers."""
    return build(folder, {**COMMON, "model_type": "llama", "head_dim": head_dim}, **options)


def gemma(folder: Path, **options: Any) -> Path:
    """A sliding window of `WINDOW` tokens in the first of each two layers, all tokens in the other.

    So a `RotatingKVCache` beside a `KVCache`.
    """
    config = {
        **COMMON,
        "model_type": "gemma3_text",
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    }
    return build(folder, config, **options)


def mamba(folder: Path, **options: Any) -> Path:
    """Recurrent state alone: an `ArraysCache`, which cannot be cut."""
    config = {
        **COMMON,
        "model_type": "mamba",
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": False,
        "time_step_rank": 4,
    }
    return build(folder, config, **options)


def lfm(folder: Path, **options: Any) -> Path:
    """A hybrid: an `ArraysCache` beside a `KVCache`."""
    config = {
        **COMMON,
        "model_type": "lfm2",
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    }
    return build(folder, config, **options)


def deepseek(folder: Path, **options: Any) -> Path:
    """Latent attention: plain `KVCache`, keys 512 and values 64 wide."""
    config = {
        **COMMON,
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 2,
    }
    return build(folder, config, **options)


def minicpm(folder: Path, **options: Any) -> Path:
    """Plain `KVCache`, keys 192 and values 128 wide."""
    config = {
        **COMMON,
        "model_type": "minicpm3",
        "hidden_size": 512,
        "dim_model_base": 512,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "kv_lora_rank": 64,
        "scale_depth": 4.0,
        "scale_emb": 0.1,
        "max_position_embeddings": 4096,
        "rope_scaling": {"short_factor": [1.0] * 32, "long_factor": [1.0] * 32},
    }
    return build(folder, config, **options)


def prompt(name: str, tokens: int) -> str:
    """A text of that many tokens; two whose names begin differently share none at the start."""
    letters = random.Random(name).choices(string.ascii_lowercase + " ", k=tokens - len(name))
    return name + "".join(letters)


def chat_tokens(messages: Sequence[Mapping[str, str]]) -> list[int]:
    """What the chat template and the tokenizer make of a chat, ready for an answer."""
    tokens: list[int] = []
    for message in messages:
        tokens += [ROLE_TOKENS[message["role"]], *message["content"].encode(), END_TOKEN]
    return [*tokens, ROLE_TOKENS["assistant"]]


FAMILIES: dict[str, Callable[..., Path]] = {
    build.__name__: build for build in (llama, gemma, mamba, lfm, deepseek, minicpm)
}


def build(
    folder: Path,
    config: dict[str, Any],
    *,
    dtype: mx.Dtype = mx.float32,
    seed: int = 0,
    gains: Mapping[str, float] | None = None,
    logits_gain: float = LOGITS_GAIN,
    **changes: Any,
) -> Path:
    """Make the folder; `changes` are those to the configuration, the rest is for the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config, **changes, "eos_token_id": END_TOKEN}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model_class, arguments_class = _get_classes(config)
    mx.random.seed(seed)  # of what upstream draws itself and we leave
    model = model_class(arguments_class.from_dict(config))
    weights = random_weights(
        model, dtype=dtype, seed=seed, gains=gains or {}, logits_gain=logits_gain
    )
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _build_tokenizer(folder)
    return folder


def _build_tokenizer(folder: Path) -> None:
    # What stands for each byte in a byte-level vocabulary.
    letters = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    others = [byte for byte in range(256) if chr(byte) not in letters]
    symbol = {ord(letter): letter for letter in letters}
    symbol |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({symbol[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
