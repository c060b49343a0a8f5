"""Random weights whose answers hang on all of what came before, whatever upstream calls them.

A fresh model would not do: with small weights the last token alone decides on the next, and the
best one leads by too little to tell an error from the noise of another order of summation.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

VOCABULARY = 300
PRINTABLE = range(0x21, 0x7F)
"""The bytes that a model may answer with."""

EMBEDDING_GAIN = 0.1
LOGITS_GAIN = 8.0
BIAS_GAIN = 0.1

# What came before has to have a strong say, or the last token alone would decide on the next.
ATTENTION_GAIN = 2.0
ATTENTION = {
    *("q_proj", "k_proj", "o_proj", "out_proj"),
    *("q_b_proj", "wq_b", "attn_query", "attn_key", "attn_resid", "c_q", "c_k", "wo", "dense"),
    *("qkv_proj", "qkvg_proj", "q_k_v_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "W_pack"),
}
QUERY_NORMS = {
    *("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"),
    *("q_weight", "k_weight"),
}
OUTPUTS = {"lm_head", "output", "embed_out"}
# The steps of a recurrent layer have to be small ones, or it forgets.
DECAYS = ("dt_bias", "dt_proj.bias", "recurrent_param", "w_lora.lora.2.bias")
SLOW_DECAY = -6.0
SKIP_GAIN = 0.1  # of what goes past its state


def random_weights(
    model: nn.Module,
    *,
    dtype: mx.Dtype,
    seed: int,
    gains: Mapping[str, float],
    logits_gain: float,
) -> dict[str, mx.array]:
    """A value for each parameter, which depends on nothing but these arguments.

    Args:
        gains: what to multiply with all parameters that have this in their names.
        logits_gain: the size of the logits; the larger, the further the best one leads.
    """
    generator = np.random.default_rng(seed)
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    is_tied = not any(_is_output(name) for name in parameters)
    weights = {}
    for name, parameter in parameters.items():
        weight = _weight(name, parameter, generator)
        if _is_output(name) and weight.ndim > 1:
            weight *= logits_gain / np.sqrt(parameter.shape[1])
        elif is_tied and _is_last_norm(name, parameter):
            weight = mx.full(parameter.shape, logits_gain)
        if weight.dtype != mx.uint32:
            gain = next((gain for part, gain in gains.items() if part in name), 1)
            weight = (gain * weight).astype(dtype)
        weights[name] = weight
    return weights


def _is_output(name: str) -> bool:
    return not OUTPUTS.isdisjoint(name.split("."))


def _is_last_norm(name: str, parameter: mx.array) -> bool:
    """Whether it is the one before the logits, rather than one of a numbered layer."""
    is_in_a_layer = any(part.isdigit() or "per_layer" in part for part in name.split("."))
    return parameter.ndim == 1 and name.endswith("weight") and not is_in_a_layer


def _weight(name: str, parameter: mx.array, generator: np.random.Generator) -> mx.array:
    *path, last = name.split(".")
    module = path[-1] if path and last in ("weight", "bias") else last
    if parameter.dtype == mx.uint32:  # packed weights of two bits each
        return mx.array(generator.integers(0, 2**32, parameter.shape, np.uint32))
    if last in ("A_log", "signs"):
        return parameter
    if name.endswith(DECAYS):
        return mx.full(parameter.shape, SLOW_DECAY)
    if module in QUERY_NORMS and last != "bias":
        return parameter + (ATTENTION_GAIN - 1)
    if last == "D":
        return SKIP_GAIN * parameter
    values = generator.standard_normal(parameter.shape)
    if last.endswith("bias"):
        values *= BIAS_GAIN
    elif parameter.ndim < 2:
        return parameter
    elif len(parameter) == VOCABULARY:
        values *= _gains_of_tokens(is_output=_is_output(name))
    elif "norm" not in module:
        inputs = parameter[0].size if "conv" in name else parameter.shape[-1]
        values *= (ATTENTION_GAIN if module in ATTENTION else 1) / np.sqrt(inputs)
    return mx.array(values.astype(np.float32))


def _gains_of_tokens(*, is_output: bool) -> np.ndarray:
    """For each token: only what is printable shall be answered."""
    is_printable = np.isin(np.arange(VOCABULARY), PRINTABLE)[:, None]
    if is_output:
        return np.where(is_printable, 1.0, 0.0)
    # Tied or not, it has to tell the silent ones from each other.
    return np.where(is_printable, 1.0, 0.1) * EMBEDDING_GAIN
