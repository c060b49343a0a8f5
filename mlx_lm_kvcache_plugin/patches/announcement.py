"""The one line that says, once a model is loaded, what the prefix cache will do with it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx

from ..codecs.packing import Packer
from ..codecs.raw import RawCodec
from ..codecs.sequence import TAIL_BITS
from ..codecs.tensors import TensorSpec
from ..layers import STATEFUL, TOKEN_WISE, WINDOW, LayerKinds
from ..prefix_cache import PrefixCache
from ..settings import Settings
from .models_cache import LayerCaches, empty_caches, kind_of, leaves_of, take_apart

RAW = "full precision"


def announcement(
    cache: PrefixCache, kinds: LayerKinds, model: Any, draft_model: Any | None = None
) -> str:
    """Codec, bits, group size, block size, what happens to the layers, and the limits."""
    settings = cache.settings
    codec = f"codec {settings.codec}"
    if settings.codec != RawCodec.name:
        codec += f", {bits_of(settings)}, group size {settings.group_size}"
    try:
        caches = layers_of(model)
        if draft_model is not None:
            caches += layers_of(draft_model)
        layers = describe_layers(cache, caches, kinds)
    except Exception as error:  # a model that wants more than tokens: wait for its first request
        layers = f"its layers cannot be told beforehand ({type(error).__name__}: {error})"
    folder = settings.disk_folder
    disk = "" if folder is None else f"; on disk in {folder}, limit {settings.disk_mb:,} MB"
    return (
        f"prefix cache: {codec}, blocks of {cache.tree.block_tokens} tokens; {layers}; "
        f"{cache.budget.describe(cache.tree.used_bytes)}{disk}"
    )


def bits_of(settings: Settings) -> str:
    """The bits of keys and values, in words."""
    if settings.codec == RawCodec.name:
        return RAW
    if settings.key_bits == settings.value_bits:
        return f"{settings.key_bits} bits"
    return f"keys {settings.key_bits} bits, values {settings.value_bits} bits"


def layers_of(model: Any) -> LayerCaches:
    """A model's cache objects as one token would leave them, with no more known than shapes.

    MLX is lazy: what is called here is never computed.
    """
    caches = empty_caches(model)
    model(mx.array([[0]]), cache=caches)
    return caches


def describe_layers(cache: PrefixCache, caches: LayerCaches, kinds: LayerKinds) -> str:
    """How many layers there are of each kind, how they are kept, and why some stay raw.

    Args:
        caches: as one token left them.
    """
    counts: Counter[str] = Counter()
    specs: list[TensorSpec] = []
    for leaf in leaves_of(caches):
        kind = kind_of(leaf, kinds).name
        layers = take_apart([leaf], 1, kinds, measured=False)
        own = [*layers.layout.rows, *layers.layout.windows] if layers is not None else []
        specs += own
        packer = cache.packers.for_specs(own).blocks
        counts[_words(cache.settings, kind if layers else "unused", packer)] += 1
    told = [f"{count} {words.format(s='s' * (count > 1))}" for words, count in counts.items()]
    text = f"{counts.total()} layer{'s' * (counts.total() > 1)}: {', '.join(told)}"
    sizes = _other_group_sizes(cache.packers.for_specs(specs).blocks, cache.settings.group_size)
    return text + "".join(f", groups of {size} for a width of {dim}" for dim, size in sizes)


def _words(settings: Settings, kind: str, packer: Packer) -> str:
    """How a layer of a kind is kept whose tensors this would pack; {s} is for more than one."""
    if kind == STATEFUL:
        return "state{s} raw"
    if kind not in (TOKEN_WISE, WINDOW):
        return kind
    noun = "token-wise" if kind == TOKEN_WISE else "window{s}"
    if settings.codec == RawCodec.name:
        return f"{noun} in {RAW}"
    bits = bits_of(settings) if kind == TOKEN_WISE else f"{TAIL_BITS} bits"
    wide = [pair for pair in zip(packer.specs, packer.codecs, strict=True) if pair[0].dim]
    raw = [spec for spec, codec in wide if isinstance(codec, RawCodec)]
    if not raw:
        return f"{noun} at {bits}"
    reasons = " and ".join(dict.fromkeys(map(_reason, raw)))
    return f"{noun} {'raw' if len(raw) == len(wide) else f'at {bits}, in part raw'}: {reasons}"


def _other_group_sizes(packer: Packer, asked: int) -> list[tuple[int, int]]:
    """Widths that the asked group size does not divide, and the group sizes used for them."""
    used = {
        (spec.dim, codec.group_size_for(spec.dim))
        for spec, codec in zip(packer.specs, packer.codecs, strict=True)
    }
    return sorted((dim, size) for dim, size in used if size and size != asked)


def _reason(spec: TensorSpec) -> str:
    if not mx.issubdtype(spec.dtype, mx.floating):
        return f"dtype {str(spec.dtype).rpartition('.')[2]}"
    return f"head_dim {spec.dim}"
