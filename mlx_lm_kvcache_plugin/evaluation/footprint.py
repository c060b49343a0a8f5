"""A prefix through the real store: what comes back, as a hit hands it out, and what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..codecs.packing import Payload
from ..codecs.records import payload_to, windows_to
from ..errors import KVCachePluginError
from ..layers import LayerKinds, Layers
from ..patches.models_cache import put_together, take_apart
from ..plugins import plugins
from ..prefix_cache import PrefixCache
from ..settings import Settings
from ..store.budget import Budget, Memory
from ..store.thinning import PROMPT
from ..writing import Checkpoint

_NAMESPACE = "evaluation"

_ROOM = Memory(total_bytes=1 << 50, available_bytes=1 << 50)
"""One prefix is less than the caches that it came from: it is stored however short memory is."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the store holds for a prefix.

    Attributes:
        tokens: of the prefix.
        elements: of its keys, values and windows.
        full_bytes: of those in the model's own precision.
        held_bytes: all that is held, index included.
        state_bytes: what of it is states, which no codec touches.
        codec_bytes: what of it the codec made of the elements, without index and objects.
    """

    tokens: int
    elements: int
    full_bytes: int
    held_bytes: int
    state_bytes: int
    codec_bytes: int


def store_and_fetch(
    caches: list[Any], tokens: Sequence[int], settings: Settings, kinds: LayerKinds
) -> tuple[list[Any], Footprint]:
    """The caches of a prefix as a hit hands them out, and what they took meanwhile.

    Raises:
        KVCachePluginError: if such caches cannot be stored, or come back shorter.
    """
    budget = Budget(limit_bytes=_ROOM.total_bytes // 2, probe=lambda: _ROOM)
    store = PrefixCache(settings, plugins().codecs(), budget)
    layers = take_apart(caches, len(tokens), kinds)
    prompt = [*tokens, 0]
    if layers is not None and layers.tokens == len(tokens):
        store.insert(_NAMESPACE, tokens, layers, PROMPT)
    prefix = store.match(_NAMESPACE, prompt)
    if layers is None or prefix is None or prefix.tokens < len(tokens):
        raise KVCachePluginError("the caches of this model cannot be stored: no prefix ever hits")
    footprint = _measure(store, layers)
    fetched: list[Any] = store.fetch(prompt, prefix, put_together)
    return fetched, footprint


def _measure(store: PrefixCache, layers: Layers) -> Footprint:
    codec_bytes = state_bytes = 0
    for node in store.tree:
        payload = node.payload
        if isinstance(payload, Checkpoint):
            state_bytes += payload.states.nbytes
            _, arrays = windows_to(payload.windows)
        elif isinstance(payload, Payload):
            _, arrays = payload_to(payload)
        else:
            continue
        codec_bytes += sum(array.nbytes for array in arrays.values())
    tensors = [(tensor.spec, layers.tokens) for tensor in layers.rows]
    tensors += [(window.spec, window.length) for window in layers.windows]
    sizes = [(spec.heads * spec.dim * rows, spec.dtype.size) for spec, rows in tensors]
    return Footprint(
        tokens=layers.tokens,
        elements=sum(elements for elements, _ in sizes),
        full_bytes=sum(elements * nbytes for elements, nbytes in sizes),
        held_bytes=store.tree.used_bytes,
        state_bytes=state_bytes,
        codec_bytes=codec_bytes,
    )
