"""Which of the models are tested at once, and which in the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

ONE_OF_EACH_LAYOUT = {
    *("llama", "phi", "phi3", "minicpm3", "deepseek_v3", "deepseek_v32", "minimax_m3_vl"),
    *("nemotron-nas", "afm7", "gemma3_text", "gpt_oss", "gemma3n", "llama4", "iquestloopcoder"),
    *("mamba", "rwkv7", "qwen3_next", "kimi_linear", "lfm2", "falcon_h1", "nemotron_h", "gear"),
    *("baichuan_m1", "recurrent_gemma", "longcat_flash_ngram", "deepseek_v41"),
}
"""Enough to meet every kind of cache, and every odd width and value in one."""


def fast_for_each_layout(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: all of these models, but those like others are slow."""
    return [
        name if name in ONE_OF_EACH_LAYOUT else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]
