"""Attention over a window of the last tokens, or over a chunk: in some layers, or in all."""

from __future__ import annotations

from tests.families.shared import EXPERTS, NARROW, WINDOWED, Config, wrapped
from tests.models import WINDOW

ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
ROPES = {"full_attention": ROPE, "sliding_attention": ROPE}

GEMMA_3: Config = {**WINDOWED, "query_pre_attn_scalar": 64}

GEMMA_3N: Config = {
    **WINDOWED,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_num_inputs": 2,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "rope_local_base_freq": 10000.0,
    "vocab_size_per_layer_input": 300,
}

GEMMA_4: Config = {
    **WINDOWED,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 128,
    "hidden_size_per_layer_input": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 300,
}

LLAMA_4: Config = {
    **EXPERTS,
    "attention_chunk_size": WINDOW,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 128,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "use_qk_norm": False,
}

MUSE: Config = {
    **EXPERTS,
    **WINDOWED,
    "final_logit_softcapping": 20.0,
    "layer_rope_theta": [10000.0, 0],
    "moe_hidden_size": 64,
    "output_multiplier": 1.0,
    "post_norm_eps": 1e-8,
    "rope_parameters": ROPE,
}

WINDOWS: dict[str, Config] = {
    "afmoe": {**EXPERTS, **WINDOWED, "num_dense_layers": 1},
    "cohere2": {**NARROW, **WINDOWED, "logit_scale": 1.0},
    "exaone4": {**WINDOWED, "sliding_window_pattern": "LG"},
    "exaone_moe": {**EXPERTS, **WINDOWED, "is_moe_layer": [False, True]},
    "gemma3": {**wrapped(model_type="gemma3_text", **GEMMA_3)},
    "gemma3_text": GEMMA_3,
    "gemma3n": wrapped(model_type="gemma3n_text", **GEMMA_3N),
    "gemma4": wrapped(**GEMMA_4),
    "gemma4_text": GEMMA_4,
    "gpt_oss": {**EXPERTS, **WINDOWED},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "laguna": {
        **EXPERTS,
        **WINDOWED,
        "num_attention_heads_per_layer": [2, 4],
        "rope_parameters": ROPES,
    },
    "llama4": wrapped(**LLAMA_4),
    "mellum": {**EXPERTS, **WINDOWED, "rope_parameters": ROPES},
    "mimo_v2_flash": {
        **EXPERTS,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [1, 0],
        "layernorm_epsilon": 1e-5,
        "moe_layer_freq": [0, 1],
        "partial_rotary_factor": 0.5,
        "scoring_func": "sigmoid",
        "sliding_window_size": WINDOW,
        "swa_head_dim": 64,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_rope_theta": 10000.0,
        "swa_v_head_dim": 32,
        "topk_method": "noaux_tc",
        "v_head_dim": 32,
    },
    "ministral3": {
        **WINDOWED,
        "rope_parameters": {
            **ROPE,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 4096,
        },
    },
    "muse_glimmer": MUSE,
    "olmo3": {**NARROW, **WINDOWED},
    "plamo3": WINDOWED,
    "spark2_5": {**WINDOWED, "rope_parameters": ROPES},
    "step3p5": {
        **WINDOWED,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "num_attention_groups": 2,
        "share_expert_dim": 64,
        "moe_intermediate_size": 64,
    },
}
