"""The codec that changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .base import CodecOptions, Parts, for_numpy, from_host, rows_of


class RawCodec:
    """Keeps every bit of a tensor, whatever its dtype."""

    name = "raw"

    def __init__(self, options: CodecOptions | None = None) -> None:
        del options  # full precision leaves nothing to choose

    def group_size_for(self, dim: int) -> int | None:
        return 0

    def encode(self, x: mx.array, *, first: bool) -> tuple[mx.array, ...]:
        return (for_numpy(x),)

    def decode(self, blocks: Sequence[Parts], rows: int, dtype: mx.Dtype) -> mx.array:
        return from_host(rows_of(blocks, 0, rows), dtype)
