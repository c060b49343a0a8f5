"""The plugin's settings: what the flags and the environment ask for, checked and complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SettingsError
from .options import (
    DEFAULT_CHECKPOINT_TOKENS,
    DEFAULT_DISK_MB,
    DEFAULT_GROUP_SIZE,
    DEFAULT_MEMORY_PERCENT,
    ENCODING,
    OFF,
    OPTIONS,
    QUANTIZING,
    RECOMMENDED_BITS,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for, checked and complete.

    Attributes:
        key_bits, value_bits: bits per element, None for full precision.
        group_size: elements that share a scale and a bias.
        codec: name of the codec for whole blocks.
        checkpoint_tokens: a long prompt gets a checkpoint every so many tokens; 0 for none.
        memory_mb: hard limit in MB of 2^20 bytes, or None.
        memory_percent: share of the available memory as a fraction, or None; one of both is set.
        disk_folder: where to keep everything on disk too, or None.
        disk_mb: limit of that folder in MB of 2^20 bytes.
        disabled: keep nothing.
        has_stats: whether a server tells what its cache does.
        requested: whether any flag or variable was given that asks for the plugin.
    """

    key_bits: int | None = None
    value_bits: int | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    codec: str = "raw"
    checkpoint_tokens: int = DEFAULT_CHECKPOINT_TOKENS
    memory_mb: int | None = None
    memory_percent: float | None = DEFAULT_MEMORY_PERCENT
    disk_folder: Path | None = None
    disk_mb: int = DEFAULT_DISK_MB
    disabled: bool = False
    has_stats: bool = True
    requested: bool = False

    @staticmethod
    def is_requested(environ: Mapping[str, str]) -> bool:
        """Whether a variable asks for the plugin, right or wrong; a switch turned off does not."""
        return any(
            option.asks
            and environ.get(option.variable)
            and (option.metavar is not None or environ[option.variable].strip().lower() not in OFF)
            for option in OPTIONS
        )

    @classmethod
    def resolve(
        cls, given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
    ) -> Settings:
        """Complete the given option values with the environment's, and check them together.

        Args:
            given: values by option name, already parsed; None and False mean "not given".
            environ: environment variables; an empty one counts as not set.

        Raises:
            SettingsError: for a wrong variable, or for options that contradict each other. The
                message names the flag or the variable that is to be changed.
        """
        values, sources = _collect(given or {}, environ or {})
        _refuse_contradictions(values, sources)
        bits = values.get("kv_cache_bits")
        codec = values.get("kv_cache_codec")
        if bits is None and codec != "raw" and not values.keys().isdisjoint(ENCODING):
            bits = RECOMMENDED_BITS
        memory_mb = values.get("cache_memory_mb")
        default_percent = DEFAULT_MEMORY_PERCENT if memory_mb is None else None
        return cls(
            key_bits=bits,
            value_bits=values.get("kv_cache_value_bits", bits),
            group_size=values.get("kv_cache_group_size", DEFAULT_GROUP_SIZE),
            codec=codec or ("raw" if bits is None else "rotated"),
            checkpoint_tokens=values.get("kv_cache_checkpoint_tokens", DEFAULT_CHECKPOINT_TOKENS),
            memory_mb=memory_mb,
            memory_percent=values.get("cache_memory_percent", default_percent),
            disk_folder=values.get("kv_cache_dir"),
            disk_mb=values.get("kv_cache_disk_mb", DEFAULT_DISK_MB),
            disabled="disable_prefix_cache" in values,
            has_stats="disable_cache_stats" not in values,
            requested=any(option.asks and option.name in values for option in OPTIONS),
        )


def _collect(
    given: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Every value that was given, and by which flag or variable; a flag beats its own variable."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in OPTIONS:
        value = given.get(option.name)
        source = option.flag
        if (value is None or value is False) and environ.get(option.variable):
            source = option.variable
            try:
                value = option.parse(environ[option.variable])
            except SettingsError as error:
                raise SettingsError(f"environment variable {source}: {error}") from None
        if value is not None and value is not False:
            values[option.name], sources[option.name] = value, source
    return values, sources


def _refuse_contradictions(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    def both(one: str, other: str) -> bool:
        return one in values and other in values

    def refuse(one: str, other: str, why: str) -> None:
        raise SettingsError(f"{sources[one]} and {sources[other]} {why}")

    for name in (*ENCODING, "kv_cache_dir"):
        if both(name, "disable_prefix_cache"):
            refuse(name, "disable_prefix_cache", "contradict each other: use one of them")
    if both("cache_memory_mb", "cache_memory_percent"):
        refuse("cache_memory_mb", "cache_memory_percent", "are two budgets: use one of them")
    if both("kv_cache_quantization", "kv_cache_bits") and values["kv_cache_bits"] != 8:
        refuse("kv_cache_quantization", "kv_cache_bits", "ask for different bits: use one of them")
    if values.get("kv_cache_codec") == "raw":
        for name in QUANTIZING:
            if name in values:
                refuse(name, "kv_cache_codec", "contradict each other: raw keeps full precision")
