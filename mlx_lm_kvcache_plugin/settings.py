"""The plugin's settings: one table of options, read from flags and from the environment."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import SettingsError

KV_CACHE_BITS = (2, 3, 4, 5, 6, 8)
"""Widths that `mx.quantize` packs."""

KV_CACHE_GROUP_SIZES = (32, 64, 128)
"""Group sizes that `mx.quantize` has kernels for."""

MIB = 1 << 20

DEFAULT_MEMORY_PERCENT = 0.20
DEFAULT_GROUP_SIZE = 64
RECOMMENDED_BITS = 8
DEFAULT_CHECKPOINT_TOKENS = 2048

_LARGEST_MEMORY_MB = 1 << 40
"""An exbibyte: more is a slip of the pen, and the product with 2^20 must stay an honest size."""


def _whole_number(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,18}", text.strip()):
        raise SettingsError(f"{text!r} is not a whole number")
    return int(text)


def _one_of(choices: tuple[int, ...]) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = _whole_number(text)
        if value not in choices:
            raise SettingsError(f"{value} is not one of {', '.join(map(str, choices))}")
        return value

    return parse


def parse_memory_mb(text: str) -> int:
    """Read a size in MB of 2^20 bytes."""
    try:
        value = _whole_number(text)
    except SettingsError as error:
        raise SettingsError(f"{error}; it counts MB, so 8 GB is 8192") from None
    if value < 1:
        raise SettingsError(f"{value} MB is no budget; to keep nothing use --disable-prefix-cache")
    if value > _LARGEST_MEMORY_MB:
        raise SettingsError(f"{value} MB is more than any machine has")
    return value


def _checkpoint_tokens(text: str) -> int:
    value = _whole_number(text)
    if value < 0:
        raise SettingsError(f"{value} is no number of tokens; 0 sets none on the way")
    return value


def parse_memory_percent(text: str) -> float:
    """Read a share of memory, `0.20` or `20%`, as a fraction in (0, 1]."""
    number, is_percent = text.strip(), False
    if number.endswith("%"):
        number, is_percent = number[:-1], True
    try:
        value = float(number)
    except ValueError:
        raise SettingsError(f"{text!r} is not a share of memory; write 0.20 or 20%") from None
    fraction = value / 100 if is_percent else value
    if not math.isfinite(fraction) or not 0 < fraction <= 1:
        hint = f"; for {number} percent write {number}%" if 1 < value <= 100 else ""
        raise SettingsError(f"{text!r} is not between 0 and 1, nor between 0% and 100%{hint}")
    return fraction


def _codec_name(text: str) -> str:
    name = text.strip()
    if not name:
        raise SettingsError("the name of a codec is missing")
    return name


ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off")


def _switch(text: str) -> bool:
    value = text.strip().lower()
    if value in ON:
        return True
    if value in OFF:
        return False
    raise SettingsError(f"{text!r} is neither 1 nor 0")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: its flag, its environment variable, and how its text is read.

    A `metavar` of None marks a switch, which takes no value as a flag.
    """

    name: str
    parse: Callable[[str], Any]
    metavar: str | None
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "MLX_LM_" + self.name.upper()


def _braces(choices: tuple[int, ...]) -> str:
    return "{" + ",".join(map(str, choices)) + "}"


OPTIONS = (
    Option(
        "kv_cache_bits",
        _one_of(KV_CACHE_BITS),
        _braces(KV_CACHE_BITS),
        "Keep the prefix cache quantized with this many bits; 8 is recommended, 4 gives the most "
        "room at a small loss of fidelity",
    ),
    Option(
        "kv_cache_value_bits",
        _one_of(KV_CACHE_BITS),
        _braces(KV_CACHE_BITS),
        "Other bits for the values (default: the same as for the keys)",
    ),
    Option(
        "kv_cache_group_size",
        _one_of(KV_CACHE_GROUP_SIZES),
        _braces(KV_CACHE_GROUP_SIZES),
        f"Elements that share a scale (default: {DEFAULT_GROUP_SIZE})",
    ),
    Option(
        "kv_cache_codec",
        _codec_name,
        "NAME",
        "How the prefix cache is encoded: rotated (default with bits), affine, raw (full "
        "precision), or one that a plugin registered",
    ),
    Option(
        "kv_cache_quantization",
        _switch,
        None,
        f"The same as --kv-cache-bits {RECOMMENDED_BITS}",
    ),
    Option(
        "kv_cache_checkpoint_tokens",
        _checkpoint_tokens,
        "N",
        "For models that can be resumed at checkpoints alone (sliding windows, recurrent layers): "
        f"set one every N tokens of a long prompt (default: {DEFAULT_CHECKPOINT_TOKENS}; 0: only "
        "where turns end)",
    ),
    Option(
        "cache_memory_mb",
        parse_memory_mb,
        "N",
        "Hard limit of the prefix cache in MB (2^20 bytes)",
    ),
    Option(
        "cache_memory_percent",
        parse_memory_percent,
        "F",
        "Limit of the prefix cache as a share of the RAM that is available once the model is "
        f"loaded, as 0.20 or 20%% (default: {DEFAULT_MEMORY_PERCENT:.2f})",
    ),
    Option(
        "disable_prefix_cache",
        _switch,
        None,
        "Keep no prefix: every request is prefilled from its first token",
    ),
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
        disabled: keep nothing.
        requested: whether any flag or variable of ours was given at all.
    """

    key_bits: int | None = None
    value_bits: int | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    codec: str = "raw"
    checkpoint_tokens: int = DEFAULT_CHECKPOINT_TOKENS
    memory_mb: int | None = None
    memory_percent: float | None = DEFAULT_MEMORY_PERCENT
    disabled: bool = False
    requested: bool = False

    @staticmethod
    def is_requested(environ: Mapping[str, str]) -> bool:
        """Whether a variable asks for the plugin, right or wrong; a switch turned off does not."""
        return any(
            environ.get(option.variable)
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
        if bits is None and codec != "raw" and not values.keys().isdisjoint(_ENCODING):
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
            disabled="disable_prefix_cache" in values,
            requested=bool(values),
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


_QUANTIZING = ("kv_cache_bits", "kv_cache_quantization", "kv_cache_value_bits")
_ENCODING = (*_QUANTIZING, "kv_cache_group_size", "kv_cache_codec")


def _refuse_contradictions(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    def both(one: str, other: str) -> bool:
        return one in values and other in values

    def refuse(one: str, other: str, why: str) -> None:
        raise SettingsError(f"{sources[one]} and {sources[other]} {why}")

    for name in _ENCODING:
        if both(name, "disable_prefix_cache"):
            refuse(name, "disable_prefix_cache", "contradict each other: use one of them")
    if both("cache_memory_mb", "cache_memory_percent"):
        refuse("cache_memory_mb", "cache_memory_percent", "are two budgets: use one of them")
    if both("kv_cache_quantization", "kv_cache_bits") and values["kv_cache_bits"] != 8:
        refuse("kv_cache_quantization", "kv_cache_bits", "ask for different bits: use one of them")
    if values.get("kv_cache_codec") == "raw":
        for name in _QUANTIZING:
            if name in values:
                refuse(name, "kv_cache_codec", "contradict each other: raw keeps full precision")
