"""What the configurations have in common.

Upstream's model files take what they know by name and leave the rest, so one configuration can hold
every name that any of them has for the same thing.
"""

from __future__ import annotations

from typing import Any

from tests.models import COMMON, WINDOW

Config = dict[str, Any]

SLIDING = ["sliding_attention", "full_attention"]
"""A window beside a layer that sees all, for files that name the kind of each layer."""

SHARED: Config = {
    **COMMON,
    "head_dim": 64,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
}

NARROW: Config = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 64 where their width is what the hidden size leaves to each."""

EXPERTS: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

LATENT: Config = {
    **EXPERTS,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}
"""Latent attention: one head, whose keys are 64 wide and whose values are 32."""

WINDOWED: Config = {"sliding_window": WINDOW, "layer_types": SLIDING, "sliding_window_pattern": 2}

GAINS: dict[str, dict[str, float]] = {
    "baichuan_m1": {"model.norm": 8.0},  # its output layer has no size of its own
    "deepseek_v41": {"q_b_proj": 0.5},
    # Its norms start at twice their size, and its embedding is eight times as loud.
    "gemma": {"layernorm": 0.0, "o_proj": 3.0},
    "gemma2": {"layernorm": 0.3},
    "gemma3n": {"q_norm": 0.25, "post_attention_layernorm": 4.0},  # its scores are not scaled
    "gemma4": {"q_norm": 0.1},
    "gemma4_text": {"q_norm": 0.1},
    "mistral4": {"o_proj": 0.7},
    "prism_hadamard_qwen35": {"biases": 0.02, "scales": 0.02},
}
"""What has to be louder or fainter than tests/weights.py has it."""


def wrapped(**text: Any) -> Config:
    """The language model of one that also sees: its settings are in a folder of their own."""
    return {"text_config": {**SHARED, **text}}
