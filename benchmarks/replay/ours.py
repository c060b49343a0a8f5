"""Our prefix cache for a replay: the real one, but for payloads that weigh and hold nothing."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm_kvcache_plugin.codecs.packing import Packer, Payload
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.codecs.sequence import SequencePacker, SequencePackers
from mlx_lm_kvcache_plugin.codecs.tensors import Tensor
from mlx_lm_kvcache_plugin.layers import Layers, Layout
from mlx_lm_kvcache_plugin.patches.models_cache import take_apart
from mlx_lm_kvcache_plugin.plugins import plugins
from mlx_lm_kvcache_plugin.prefix_cache import BLOCK_TOKENS, PrefixCache
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.stats.history import History
from mlx_lm_kvcache_plugin.store.budget import Budget, Memory
from mlx_lm_kvcache_plugin.store.thinning import GENERATED

from ..samples import ModelShape
from ..stores import MODEL, upstream_kinds
from .trace import Request

ENDLESS = Memory(total_bytes=1 << 62, available_bytes=1 << 62)
"""A machine that is never short of memory: what this one has is no matter of a replay."""

LAYOUT = Layout(rows=(), windows=(), states=0, form=None, look=())
"""Of a model that can be resumed at any token; of no tensors, so that nothing is decoded."""


class Ours:
    """`PrefixCache` with the settings, tree, budget and order of work that the server gives it.

    Args:
        shape: of the model whose keys and values would be stored.
        options: as flags give them.
        limit_bytes: what may be held, index included.
        history: is told what is asked for and stored.
    """

    def __init__(
        self,
        shape: ModelShape,
        options: Mapping[str, Any],
        limit_bytes: int,
        history: History | None = None,
    ) -> None:
        settings = Settings.resolve(options)
        budget = Budget(limit_bytes=limit_bytes, probe=lambda: ENDLESS)
        self.cache = PrefixCache(settings, plugins().codecs(), budget, history=history)
        packer = sized_packer(shape, settings)
        # Whatever is encoded asks it for a packer; nobody but a replay needs another one.
        self.cache.packers.for_specs = lambda specs: packer  # type: ignore[method-assign]

    def serve(self, request: Request) -> int:
        """Fetch for the prompt, then insert it; returns how many of its tokens were a hit."""
        ids: Any = request.token_ids()
        prefix = self.cache.match(MODEL, ids)
        self.cache.fetch(ids, prefix, namespace=MODEL)
        self.cache.insert(MODEL, ids, _layers(request.tokens), GENERATED)
        return prefix.tokens if prefix is not None else 0


@functools.cache
def sized_packer(shape: ModelShape, settings: Settings) -> SequencePacker:
    """Packs payloads of the size that this model's have under these settings."""
    layers = take_apart(shape.prompt_cache(2 * BLOCK_TOKENS), 2 * BLOCK_TOKENS, upstream_kinds())
    assert layers is not None
    real = SequencePackers(settings, plugins().codecs()).for_specs(layers.layout.rows)
    return SequencePacker(*(SizedPacker(each, layers.rows) for each in (real.blocks, real.tails)))


def block_bytes(shape: ModelShape, options: Mapping[str, Any]) -> int:
    """What the payload of a block takes that is not the first of its sequence."""
    packer = sized_packer(shape, Settings.resolve(options)).blocks
    (payload,) = packer.encode((), BLOCK_TOKENS, BLOCK_TOKENS)
    return payload.nbytes


class SizedPacker(Packer):
    """Makes payloads that hold nothing and count as many bytes as a real packer's.

    Args:
        packer: the real one; it encodes once for each length that is asked for.
        sample: two blocks of what it encodes.
    """

    def __init__(self, packer: Packer, sample: Sequence[Tensor]) -> None:
        super().__init__((), RawCodec(), RawCodec(), packer.is_near_exact)
        self._real = packer
        self._sample = sample
        self._known_bytes: dict[tuple[int, int], int] = {}

    def encode(
        self,
        tensors: Sequence[Tensor],
        start: int,
        tokens: int,
        blocks: int = 1,
        encodings: int = 0,
    ) -> list[Payload]:
        near_exact = self.is_near_exact
        encodings += not near_exact
        payloads = [
            Payload((), {}, tokens, is_near_exact=near_exact, encodings=encodings)
            for _ in range(blocks)
        ]
        for place, payload in enumerate(payloads):
            payload.nbytes = self._nbytes(start + place * tokens, tokens)
        return payloads

    def _nbytes(self, start: int, tokens: int) -> int:
        """What a payload takes; the first tokens of a sequence may be kept in another way."""
        key = (min(start, BLOCK_TOKENS), tokens)
        if key not in self._known_bytes:
            (payload,) = self._real.encode(self._sample, *key)
            self._known_bytes[key] = payload.nbytes
        return self._known_bytes[key]


def _layers(tokens: int) -> Layers:
    """Layers of so many tokens; `rows` has to hold something, or nothing would be encoded."""

    def freeze() -> Any:
        raise AssertionError("there is no state")

    rows: Any = (None,)
    return Layers(LAYOUT, tokens, rows, windows=(), state_bytes=0, freeze=freeze)
