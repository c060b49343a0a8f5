"""Prompt caches in files, quantized: what `mlx_lm.cache_prompt` writes and `mlx_lm.generate` reads.

A safetensors file like upstream's, with a mark in its metadata, and with what the store would hold
in place of full-precision arrays. A file without the mark is upstream's affair.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ..codecs.packing import Payload
from ..codecs.records import (
    payload_from,
    payload_to,
    states_from,
    states_to,
    windows_from,
    windows_to,
)
from ..codecs.sequence import SequencePackers
from ..errors import PromptFileError
from ..layers import Fetched, Layers
from ..plugins import plugins
from ..prefix_cache import BLOCK_TOKENS
from ..settings import Settings
from .announcement import bits_of
from .models_cache import LayerCaches, put_together, take_apart
from .portable import PortableLayers

MARK = "mlx_lm_kvcache_plugin"
"""The key of our part of the metadata."""

FORMAT = 1

LONGEST_HEADER = 100_000_000
"""Bytes that safetensors allows for the description of the tensors."""

UNKNOWN = 1 << 30
"""More tokens than any cache holds: its own offsets tell how many there are."""


def is_marked(path: str) -> bool:
    """Whether a file is a quantized prompt cache of ours; False for what is no such file at all."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LONGEST_HEADER:
                return False
            metadata = json.loads(file.read(length)).get("__metadata__")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return isinstance(metadata, dict) and MARK in metadata


def save(
    file_name: str, caches: LayerCaches, metadata: Mapping[str, str], settings: Settings
) -> str:
    """Write a prompt cache quantized.

    Args:
        metadata: upstream's.
        settings: codec, bits and group size.

    Returns:
        What was done, in words.

    Raises:
        PromptFileError: if the caches have something inside that no file can hold.
    """
    kinds = plugins().layer_kinds()
    layers = take_apart(caches, UNKNOWN, kinds)
    portable = PortableLayers(kinds, [])
    layout = portable.layout_to(layers.layout) if layers is not None else None
    states = portable.states_to(layers.freeze()) if layers is not None else None
    if layers is None or layout is None or states is None:
        raise PromptFileError("the caches of this model have no quantized form in a file")
    plain, arrays = _encoded(layers, settings)
    arrays |= states_to(states[1])
    ours = {
        "format": FORMAT,
        "tokens": layers.tokens,
        "codec": settings.codec,
        "key_bits": settings.key_bits,
        "value_bits": settings.value_bits,
        "group_size": settings.group_size,
        "layout": layout,
        "states": states[0],
        **plain,
    }
    tensors = {name: mx.array(array) for name, array in arrays.items()}
    mx.save_safetensors(file_name, tensors, {**metadata, MARK: json.dumps(ours)})
    before = _full_bytes(layers)
    after = sum(array.nbytes for array in arrays.values())
    return f"codec {settings.codec}, {bits_of(settings)}: {after:,} bytes instead of {before:,}"


def _full_bytes(layers: Layers) -> int:
    """What upstream's file would take, about."""
    held = [(spec, layers.tokens) for spec in layers.layout.rows]
    held += [(window.spec, window.length) for window in layers.windows]
    sizes = (spec.heads * rows * spec.dim * spec.dtype.size for spec, rows in held)
    return sum(sizes) + layers.state_bytes


def _encoded(layers: Layers, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain data and arrays of all rows and windows."""
    packers = SequencePackers(settings, plugins().codecs())
    payloads: list[Payload] = []
    if layers.rows:
        packer = packers.for_specs(layers.layout.rows)
        blocks, rest = divmod(layers.tokens, BLOCK_TOKENS)
        if blocks:
            payloads += packer.blocks.encode(layers.rows, 0, BLOCK_TOKENS, blocks)
        if rest:
            payloads += packer.tails.encode(layers.rows, layers.tokens - rest, rest)
    windows = packers.for_windows(layers.layout.windows).encode(layers.windows)
    plain_windows, arrays = windows_to(windows)
    rows = []
    for number, payload in enumerate(payloads):
        plain, its_arrays = payload_to(payload, f"rows.{number}.")
        rows.append(plain)
        arrays |= its_arrays
    return {"rows": rows, "windows": plain_windows}, arrays


def load(file_name: str) -> tuple[LayerCaches, dict[str, str]]:
    """Read a marked file: cache objects in full precision, and upstream's metadata.

    Raises:
        PromptFileError: if the file does not hold what its mark promises.
    """
    try:
        loaded: Any = mx.load(file_name, return_metadata=True)
        tensors, metadata = loaded
        ours = json.loads(metadata.pop(MARK))
        if ours["format"] != FORMAT:
            raise PromptFileError(f"{file_name} has format {ours['format']}, not {FORMAT}")
        arrays = {name: np.array(tensor) for name, tensor in tensors.items()}
        return put_together(_decoded(ours, arrays)), metadata
    except PromptFileError:
        raise
    except Exception as error:
        raise PromptFileError(f"{file_name} cannot be read: {error}") from error


def _decoded(ours: Mapping[str, Any], arrays: Mapping[str, Any]) -> Fetched:
    settings = Settings(
        key_bits=ours["key_bits"],
        value_bits=ours["value_bits"],
        group_size=ours["group_size"],
        codec=ours["codec"],
    )
    portable = PortableLayers(plugins().layer_kinds(), [])
    layout = portable.layout_from(ours["layout"])
    packers = SequencePackers(settings, plugins().codecs())
    rows = [
        payload_from(plain, arrays, f"rows.{number}.") for number, plain in enumerate(ours["rows"])
    ]
    windows = windows_from(ours["windows"], arrays)
    return Fetched(
        layout,
        ours["tokens"],
        packers.for_specs(layout.rows).decode(rows, ours["tokens"]) if rows else [],
        packers.for_windows(layout.windows).decode(windows),
        portable.states_from(ours["states"], states_from(arrays)).restore(),
    )
