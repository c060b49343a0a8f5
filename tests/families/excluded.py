"""The files beside upstream's models that no test runs, and why."""

from __future__ import annotations

BUILDING_BLOCK = "no model: a part that models are made of"

EXCLUDED = {
    "__init__": BUILDING_BLOCK,
    "activations": BUILDING_BLOCK,
    "base": BUILDING_BLOCK,
    "bitlinear_layers": BUILDING_BLOCK,
    "cache": BUILDING_BLOCK,
    "gated_delta": BUILDING_BLOCK,
    "mla": BUILDING_BLOCK,
    "pipeline": BUILDING_BLOCK,
    "rope_utils": BUILDING_BLOCK,
    "ssm": BUILDING_BLOCK,
    "switch_layers": BUILDING_BLOCK,
    "bitnet": "its linear layers are a Metal kernel with no other form; caches as llama's",
    "muse_spark": "its attention is a Metal kernel with no other form; caches as muse_glimmer's",
    "olmo": "ends the process on import unless ai2-olmo is installed; caches as olmo2's",
    "phi3small": (
        "writes to the logits of the tokens from 100,256 on, past the end of a small vocabulary; "
        "caches as phi3's"
    ),
}
