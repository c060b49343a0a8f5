"""The settings that are evaluated: by default ours and its peers', else what the user names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import SettingsError
from ..options import DEFAULT_GROUP_SIZE, OPTIONS
from ..plugins import plugins
from ..settings import Settings

DEFAULT_CODEC, RAW = "rotated", "raw"

DEFAULT_BITS = {DEFAULT_CODEC: ("8", "6", "4", "3"), "affine": ("8", "4")}
"""What is evaluated if nothing is named. Other servers have affine at 8 and at 4 bits."""

_PARSERS = {option.name: option.parse for option in OPTIONS}


def choose(
    codecs: Sequence[str] | None, bits: Sequence[str] | None, group_size: str | None
) -> list[Settings]:
    """All combinations of what the user named; the defaults where nothing was.

    Args:
        codecs: names.
        bits: of keys and values, as "8", or of keys and of values, as "5/4".
        group_size: of all of them.

    Raises:
        SettingsError, CodecError: for what no codec takes.
    """
    chosen = [
        _settings(codec, text, group_size)
        for codec in codecs or DEFAULT_BITS
        for text in bits or DEFAULT_BITS.get(codec, DEFAULT_BITS[DEFAULT_CODEC])
    ]
    registry = plugins().codecs()
    for settings in chosen:
        registry.create_pair(settings)
    return list(dict.fromkeys(chosen))  # raw has no bits: it would come once for each


def _settings(codec: str, bits: str, group_size: str | None) -> Settings:
    if _parsed("--codec", "kv_cache_codec", codec) == RAW:
        return make_settings(RAW)
    key_bits, slash, value_bits = bits.partition("/")
    return make_settings(
        codec.strip(),
        _parsed("--bits", "kv_cache_bits", key_bits),
        _parsed("--bits", "kv_cache_bits", value_bits if slash else key_bits),
        _parsed("--group-size", "kv_cache_group_size", group_size or str(DEFAULT_GROUP_SIZE)),
    )


def make_settings(
    codec: str,
    bits: int | None = None,
    value_bits: int | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
) -> Settings:
    """Settings as the flags of `mlx_lm.server` would give them."""
    if codec == RAW:
        return Settings.resolve({"kv_cache_codec": RAW})
    return Settings.resolve(
        {
            "kv_cache_codec": codec,
            "kv_cache_bits": bits,
            "kv_cache_value_bits": value_bits,
            "kv_cache_group_size": group_size,
        }
    )


def _parsed(flag: str, option: str, text: str) -> Any:
    try:
        return _PARSERS[option](text)
    except SettingsError as error:
        raise SettingsError(f"{flag}: {error}") from None
