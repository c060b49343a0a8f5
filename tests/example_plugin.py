"""A plugin with a codec of its own: 8-bit floats (E5M2), half the bytes and no groups."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_lm_kvcache_plugin import hookimpl
from mlx_lm_kvcache_plugin.codecs.base import CodecOptions, Parts, join_rows


class Float8Codec:
    """Keeps the upper byte of a float16: sign, 5 bits of exponent, 2 of mantissa."""

    name = "float8"

    def __init__(self, options: CodecOptions) -> None:
        pass  # neither bits nor group size change anything here

    def group_size_for(self, dim: int) -> int | None:
        return 0  # takes any width

    def encode(self, x: mx.array, *, first: bool) -> tuple[mx.array, ...]:
        bits = x.astype(mx.float16).view(mx.uint16)
        return (((bits + 0x80) >> 8).astype(mx.uint8),)

    def decode(self, blocks: Sequence[Parts], rows: int, dtype: mx.Dtype) -> mx.array:
        upper = join_rows(blocks, 0, rows).astype(mx.uint16)
        return (upper << 8).view(mx.float16).astype(dtype)


@hookimpl
def kvcache_register_codecs(register):
    register("float8", Float8Codec)


@hookimpl
def kvcache_event(event):
    print(event)
