"""The one line that says, once a model is loaded, what the prefix cache will do with it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..codecs.packing import Packer, TensorSpec
from ..codecs.raw import RawCodec
from ..prefix_cache import PrefixCache
from .models_cache import LayerCaches, leaves_of, tensors_of


def announcement(cache: PrefixCache, model: Any, draft_model: Any | None = None) -> str:
    """Codec, bits, group size, block size, what happens to the layers, and the limit."""
    settings = cache.settings
    codec = f"codec {settings.codec}"
    if settings.codec != RawCodec.name:
        codec += (
            f", keys {settings.key_bits} bits, values {settings.value_bits} bits, "
            f"group size {settings.group_size}"
        )
    try:
        caches = layers_of(model)
        if draft_model is not None:
            caches += layers_of(draft_model)
        layers = describe_layers(cache, caches)
    except Exception as error:  # a model that wants more than tokens: wait for its first request
        layers = f"its layers cannot be told beforehand ({type(error).__name__}: {error})"
    return (
        f"prefix cache: {codec}, blocks of {cache.tree.block_tokens} tokens; {layers}; "
        f"{cache.budget.describe(cache.tree.used_bytes)}"
    )


def layers_of(model: Any) -> LayerCaches:
    """A model's cache objects as one token would leave them, with no more known than shapes.

    MLX is lazy: what is called here is never computed.
    """
    caches: LayerCaches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    return caches


def describe_layers(cache: PrefixCache, caches: LayerCaches) -> str:
    """How many layers are quantized, and why others are not."""
    tensors = tensors_of(caches)
    if tensors is None:
        kinds = sorted({type(layer).__name__ for layer in leaves_of(caches)})
        return f"all {len(caches)} layers kept whole and raw as checkpoints ({', '.join(kinds)})"
    if cache.settings.codec == RawCodec.name:
        return f"all {len(caches)} layers in full precision"
    packer = cache.packers.for_specs([tensor.spec for tensor in tensors]).blocks
    reasons = raw_reasons(packer)
    quantized = len(caches) - len({index // 2 for index in reasons})
    text = f"{quantized} of {len(caches)} layers quantized"
    for reason, count in Counter(reasons.values()).items():
        text += f", {count} tensors raw: {reason}"
    for dim, group_size in sorted(other_group_sizes(packer, cache.settings.group_size).items()):
        text += f", groups of {group_size} for a width of {dim}"
    return text


def raw_reasons(packer: Packer) -> dict[int, str]:
    """Why tensors, by index, are stored raw though another codec was asked for."""
    return {
        index: _reason(spec)
        for index, (spec, codec) in enumerate(zip(packer.specs, packer.codecs, strict=True))
        if isinstance(codec, RawCodec) and spec.dim
    }


def other_group_sizes(packer: Packer, asked: int) -> dict[int, int]:
    """The group sizes that are used where the one that was asked for does not divide the width."""
    used = {
        spec.dim: codec.group_size_for(spec.dim)
        for spec, codec in zip(packer.specs, packer.codecs, strict=True)
    }
    return {dim: size for dim, size in used.items() if size and size != asked}


def _reason(spec: TensorSpec) -> str:
    if not mx.issubdtype(spec.dtype, mx.floating):
        return f"they hold {str(spec.dtype).rpartition('.')[2]}"
    return f"no group size divides their width of {spec.dim}"
