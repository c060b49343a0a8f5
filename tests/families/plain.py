"""Attention over all tokens: a plain `KVCache` in each layer."""

from __future__ import annotations

from tests.families.shared import EXPERTS, LATENT, NARROW, Config, wrapped

DENSE: dict[str, Config] = {
    "apertus": {**NARROW, "post_norm": False, "qk_norm": True},
    "cohere": {**NARROW, "logit_scale": 1.0, "use_qk_norm": False},
    "ernie4_5": {},
    "exaone": {**NARROW, "num_layers": 2},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0},
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt2": {"n_ctx": 4096, "n_embd": 128, "n_head": 2, "n_layer": 2, "n_positions": 4096},
    "gpt_bigcode": {
        "n_embd": 128,
        "n_head": 2,
        "n_inner": 128,
        "n_layer": 2,
        "n_positions": 4096,
        "num_key_value_heads": 1,
    },
    "gpt_neox": {
        **NARROW,
        "num_key_value_heads": 2,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
    },
    "gptj": {"n_embd": 128, "n_head": 2, "n_layer": 2, "n_positions": 4096, "rotary_dim": 32},
    "granite": {
        **NARROW,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
    "helium": NARROW,
    "hunyuan_v1_dense": {},
    "internlm2": {**NARROW, "bias": False},
    "internlm3": NARROW,
    "lille-130m": {
        "block_size": 4096,
        "n_embd": 128,
        "n_head": 2,
        "n_kv_heads": 1,
        "n_layer": 2,
        "tie_word_embeddings": True,
    },
    "llama": {},
    "llama4_text": {"intermediate_size_mlp": 128, "no_rope_layers": [1, 0], "use_qk_norm": False},
    "mimo": NARROW,
    "minicpm": {**NARROW, "dim_model_base": 128, "scale_depth": 1.4, "scale_emb": 1.0},
    "nanochat": {**NARROW, "num_key_value_heads": 2},
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "olmo2": NARROW,
    "openelm": {
        "ffn_dim_divisor": 32,
        "ffn_multipliers": [1.0, 2.0],
        "model_dim": 64,
        "num_kv_heads": [1, 2],
        "num_query_heads": [2, 4],
        "num_transformer_layers": 2,
        "share_input_output_layers": False,
    },
    "phi": {**NARROW, "hidden_size": 160, "num_key_value_heads": 2, "partial_rotary_factor": 0.4},
    "phi3": {**NARROW, "hidden_size": 192, "num_key_value_heads": 2},
    "plamo": {**NARROW, "n_shared_head": 2},
    "qwen": {"hidden_size": 128, "kv_channels": 64, "num_attention_heads": 2},
    "qwen2": NARROW,
    "qwen3": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {**NARROW, "hidden_size": 160, "num_key_value_heads": 2},
    "starcoder2": {**NARROW, "norm_epsilon": 1e-5},
    "talkie": {"hidden_size": 256},
    "telechat3": {},
}

LOOPED: dict[str, Config] = {
    # More caches than layers, or fewer.
    "afm7": {
        "hidden_dim": 128,
        "num_heads": 2,
        "num_kv_heads": 1,
        "num_kv_reuse_layers": 1,
        "num_layers": 3,
    },
    "nanbeige": {"num_loops": 2},
    "nemotron-nas": {
        **NARROW,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 1}, "ffn": {"replace_with_linear": True}},
        ],
        "num_hidden_layers": 4,
    },
}

WITH_EXPERTS: dict[str, Config] = {
    "Klear": {**NARROW, **EXPERTS},
    "bailing_moe": {**NARROW, **EXPERTS},
    "dbrx": {
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 1, "rope_theta": 10000.0},
        "d_model": 128,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "n_heads": 2,
        "n_layers": 2,
    },
    "deepseek": {**NARROW, **EXPERTS},
    "dots1": {**EXPERTS, "scoring_func": "noaux_tc"},
    "ernie4_5_moe": {**EXPERTS, "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1},
    "glm4_moe": EXPERTS,
    "granitemoe": {
        **NARROW,
        **EXPERTS,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
    "hunyuan": {
        **NARROW,
        **EXPERTS,
        "cla_share_factor": 2,
        "moe_topk": 2,
        "num_hidden_layers": 4,
        "num_shared_expert": 1,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
        "use_cla": True,
        "use_mixed_mlp_moe": True,
    },
    "minimax": {**EXPERTS, "rotary_dim": 32, "shared_intermediate_size": 0},
    "mixtral": {**NARROW, **EXPERTS},
    "olmoe": {**NARROW, **EXPERTS},
    "phimoe": {
        **NARROW,
        **EXPERTS,
        "rope_scaling": {
            "long_factor": [1.0] * 32,
            "long_mscale": 1.0,
            "short_factor": [1.0] * 32,
            "short_mscale": 1.0,
            "type": "longrope",
        },
    },
    "phixtral": {
        **EXPERTS,
        "model_dim": 128,
        "num_heads": 2,
        "num_layers": 2,
        "num_vocab": 300,
        "rotary_dim": 32,
    },
    "qwen2_moe": {**NARROW, **EXPERTS},
    "qwen3_moe": EXPERTS,
    "solar_open": EXPERTS,
}

LATENT_ATTENTION: dict[str, Config] = {
    "deepseek_v2": {**LATENT, "rope_scaling": {"factor": 1.0}, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "glm4_moe_lite": LATENT,
    "kimi_k25": wrapped(**LATENT),
    "kimi_vl": wrapped(**LATENT),
    "minicpm3": {
        "dim_model_base": 512,
        "hidden_size": 512,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": {"long_factor": [1.0] * 32, "short_factor": [1.0] * 32},
        "scale_depth": 4.0,
        "scale_emb": 0.1,
    },
    "mistral4": {
        **LATENT,
        "rope_parameters": {
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_type": "default",
        },
    },
    "youtu_llm": LATENT,
}

WRAPPERS: dict[str, Config] = {
    "mistral3": wrapped(model_type="llama"),
    "pixtral": wrapped(model_type="llama"),
    "qwen2_vl": wrapped(**NARROW, model_type="qwen2"),
    "qwen3_vl": wrapped(model_type="qwen3"),
    "qwen3_vl_moe": wrapped(**EXPERTS, model_type="qwen3_moe"),
}

PLAIN = {**DENSE, **LOOPED, **WITH_EXPERTS, **LATENT_ATTENTION, **WRAPPERS}
