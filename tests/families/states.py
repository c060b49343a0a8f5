"""Layers that fold what they have seen into a state, alone or beside attention."""

from __future__ import annotations

from tests.families.shared import EXPERTS, LATENT, NARROW, Config, wrapped
from tests.models import WINDOW

MAMBA: Config = {
    "conv_kernel": 4,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_head_dim": 32,
    "mamba_n_groups": 1,
    "mamba_n_heads": 2,
    "mamba_num_heads": 2,
    "mamba_proj_bias": False,
    "n_groups": 1,
    "ssm_state_size": 16,
    "state_size": 16,
    "time_step_limit": [0.0, 100.0],
    "time_step_rank": 4,
    "use_conv_bias": True,
}

DELTA: Config = {
    **EXPERTS,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "partial_rotary_factor": 0.25,
}

QWEN_3_5: Config = {
    **DELTA,
    "num_experts": 0,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
}

KIMI: Config = {
    **LATENT,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "gate_lower_bound": -5.0,
        "head_dim": 32,
        "kda_layers": [1],
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 4096,
    "num_experts_per_token": 2,
}

LFM: Config = {
    **NARROW,
    "block_auto_adjust_ff_dim": False,
    "block_dim": 128,
    "block_ff_dim": 128,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 32,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [1],
}

STATES: dict[str, Config] = {
    "baichuan_m1": {
        **NARROW,
        "conv_window": 2,
        "sliding_window": WINDOW,
        "sliding_window_layers": [0],
    },
    "bailing_hybrid": {**LATENT, "group_norm_size": 4, "layer_group_size": 2},
    "bailing_moe_linear": {**NARROW, **EXPERTS, "group_norm_size": 2, "layer_group_size": 2},
    "bailing_moe_v3": {**LATENT, "layer_group_size": 2},
    "deepseek_v41": {
        **EXPERTS,
        "candidate_block_size": 4,
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 4,
        "compress_ratios": [0, 4, 4],
        "hc_mult": 2,
        "index_head_dim": 64,
        "index_n_heads": 2,
        "index_source_layer_ids": [1, 2],
        "index_topk": 8,
        "kv_source_layer_ids": [1, 2],
        "num_hidden_layers": 3,
        "o_groups": 2,
        "o_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "sliding_window": WINDOW,
    },
    "falcon_h1": MAMBA,
    "gear": {
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
    },
    "granitemoehybrid": {
        **NARROW,
        **MAMBA,
        **EXPERTS,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 1.0,
        "layer_types": ["mamba", "attention"],
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "shared_intermediate_size": 64,
    },
    "jamba": {
        **NARROW,
        **MAMBA,
        **EXPERTS,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": wrapped(**KIMI),
    "kimi_linear": KIMI,
    "lfm2": LFM,
    "lfm2-vl": wrapped(**LFM, model_type="lfm2"),
    "lfm2_moe": {**LFM, **EXPERTS, "num_dense_layers": 1, "use_expert_bias": True},
    "mamba": {**MAMBA, "state_size": 8},
    "mamba2": {**MAMBA, "head_dim": 32, "intermediate_size": 64, "num_heads": 2},
    "nemotron_h": {**MAMBA, **EXPERTS, "hybrid_override_pattern": ["M", "-", "*", "E"]},
    "olmo_hybrid": {
        **DELTA,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_allow_neg_eigval": True,
    },
    "plamo2": {**MAMBA, "hidden_size_per_head": 64, "mamba_num_heads": 2},
    "prism_hadamard_qwen35": {
        **wrapped(**{**QWEN_3_5, "intermediate_size": 512}),
        "modules": [
            {
                "block": 512,
                "dtype": "float16",
                "embedding": False,
                "path": "model.layers.0.mlp.down_proj",
            }
        ],
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "tensor_namespace": "mlx-vlm-qwen3_5",
    },
    "qwen3_5": wrapped(**QWEN_3_5),
    "qwen3_5_moe": wrapped(**{**QWEN_3_5, "num_experts": 4}),
    "qwen3_next": DELTA,
    "recurrent_gemma": {
        **NARROW,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
    },
    "rwkv7": {
        "a_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "head_dim": 32,
        "v_low_rank_dim": 16,
    },
}
