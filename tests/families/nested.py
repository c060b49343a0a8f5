"""Layers with several caches each, one inside the other."""

from __future__ import annotations

from tests.families.shared import EXPERTS, LATENT, Config, wrapped

INDEXED: Config = {
    **LATENT,
    "index_head_dim": 64,
    "index_n_heads": 2,
    "index_topk": 64,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
LONGCAT: Config = {
    **LATENT,
    "attention_method": "MLA",
    "emb_neighbor_num": 3,
    "emb_split_num": 2,
    "expert_ffn_hidden_size": 64,
    "ffn_hidden_size": 128,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "moe_topk": 2,
    "ngram_vocab_size_ratio": 3,
    "num_layers": 2,
    "zero_expert_num": 1,
    "zero_expert_type": "identity",
}

NESTED: dict[str, Config] = {
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": INDEXED,
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "minimax_m3_vl": wrapped(
        **EXPERTS,
        dense_intermediate_size=128,
        shared_intermediate_size=64,
        mlp_layer_types=["dense", "sparse"],
        sparse_attention_config={
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 64,
            "sparse_block_size": 16,
            "sparse_topk_blocks": 3,
            "sparse_attention_freq": [0, 1],
        },
    ),
}
