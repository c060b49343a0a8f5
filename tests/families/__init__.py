"""A tiny random configuration for every model file of mlx-lm that a CPU can run.

`CONFIGURATIONS` has them by the name of the file, `EXCLUDED` has all other files, each with the
reason. tests/test_families.py holds both against the mlx-lm that is installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx_lm

from tests import models
from tests.families.excluded import EXCLUDED
from tests.families.nested import NESTED
from tests.families.plain import PLAIN
from tests.families.shared import GAINS, SHARED, Config
from tests.families.states import STATES
from tests.families.windows import WINDOWS

__all__ = [
    "ALONE_IN_A_BATCH",
    "CONFIGURATIONS",
    "EXCLUDED",
    "NEVER_IN_A_BATCH",
    "SPLIT_SENSITIVE",
    "bears_company",
    "build",
    "reason_to_skip",
]

LOGITS_GAIN = 3.0  # small enough for logprobs to show what differs

CONFIGURATIONS: dict[str, Config] = {**PLAIN, **WINDOWS, **STATES, **NESTED}

SPLIT_SENSITIVE = {
    "plamo3": "its mask lets a token see one more of those before than its cache keeps",
}
"""Whose logits depend on where a prompt is split: no cache can give those of another split."""

PADDING = "it takes the padding of a batch for tokens"
ALONE_IN_A_BATCH = {
    "afm7": "layers that share keys do not know of the padding of a batch",
    "baichuan_m1": PADDING,
    "bailing_moe_linear": PADDING,
    "gemma2": "the mask of a batch does not fit its grouped queries, which ends the server",
    "gpt_bigcode": "it wants its position as one number, which ends the server",
    "jamba": PADDING,
    "longcat_flash_ngram": PADDING,
    "mamba": PADDING,
    "minimax_m3_vl": "it picks its blocks of keys by their place behind the padding of a batch",
    "nemotron_h": PADDING,
    "olmo_hybrid": PADDING,
    "recurrent_gemma": PADDING,
    "rwkv7": PADDING,
}
"""Which upstream computes wrongly beside a request of another length, with no cache of any kind."""

NEVER_IN_A_BATCH = {
    "nemotron-nas": (
        "a cache that the model does not use cannot be taken out of a batch, which ends the server"
    ),
}

IS_BEFORE_0_32 = mlx_lm.__version__.startswith("0.31.")

BROKEN_BEFORE_0_32 = {
    "afm7": "a batch cannot hand its cache to the layers that share it, which ends the server",
    "gemma3n": "layers that share keys take a position that has moved on already",
    "llama4": "its cache cannot take a prompt in pieces",
    "nemotron-nas": "a cache that the model does not use ends every prefill",
}


def reason_to_skip(name: str) -> str | None:
    """Why the mlx-lm of this environment cannot run that model, if it cannot."""
    if find_spec(f"mlx_lm.models.{name}") is None:
        return "not in this mlx-lm"
    return BROKEN_BEFORE_0_32.get(name) if IS_BEFORE_0_32 else None


def bears_company(name: str) -> bool:
    """Whether upstream computes that model rightly beside a request of another length."""
    return name not in ALONE_IN_A_BATCH and not IS_BEFORE_0_32  # which fails at many more


def build(folder: Path, name: str, **options: Any) -> Path:
    """Make a folder of that model, as tests/models.py does."""
    config = {**SHARED, **CONFIGURATIONS[name], "model_type": name}
    gains = GAINS.get(name, {})
    return models.build(folder, config, gains=gains, logits_gain=LOGITS_GAIN, **options)
