"""The options of the plugin: one table of flags and variables, and how their text is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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

DEFAULT_DISK_MB = 10_240

_LARGEST_MB = 1 << 40
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


def _size_mb(to_keep_nothing: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = _whole_number(text)
        except SettingsError as error:
            raise SettingsError(f"{error}; it counts MB, so 8 GB is 8192") from None
        if value < 1:
            raise SettingsError(f"{value} MB is no budget; to keep nothing {to_keep_nothing}")
        if value > _LARGEST_MB:
            raise SettingsError(f"{value} MB is more than any machine has")
        return value

    return parse


parse_memory_mb = _size_mb("use --disable-prefix-cache")
"""Reads a size in MB of 2^20 bytes."""


def _folder(text: str) -> Path:
    if not text.strip():
        raise SettingsError("the name of a folder is missing")
    folder = Path(text).expanduser()
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"{text!r} is a file; it takes a folder")
    return folder


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

    Attributes:
        asks: whether it asks for the plugin; else it says something about one that is on.
    """

    name: str
    parse: Callable[[str], Any]
    metavar: str | None
    help: str
    asks: bool = True

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
        "kv_cache_dir",
        _folder,
        "DIR",
        "Keep the prefix cache in this folder too, so that the next start is warm; who can read it "
        "can read the prompts",
    ),
    Option(
        "kv_cache_disk_mb",
        _size_mb("leave out --kv-cache-dir"),
        "N",
        "Limit of --kv-cache-dir in MB (2^20 bytes), whoever writes to it "
        f"(default: {DEFAULT_DISK_MB})",
    ),
    Option(
        "disable_prefix_cache",
        _switch,
        None,
        "Keep no prefix: every request is prefilled from its first token",
    ),
    Option(
        "disable_cache_stats",
        _switch,
        None,
        "Keep no statistics of the prefix cache, and add no endpoints or page to the server",
        asks=False,
    ),
)

QUANTIZING = ("kv_cache_bits", "kv_cache_quantization", "kv_cache_value_bits")
ENCODING = (*QUANTIZING, "kv_cache_group_size", "kv_cache_codec")
"""The names of the options that say how everything is encoded."""


def has_variables(command: str) -> bool:
    """Whether the environment speaks to one of mlx-lm's commands, and not its flags alone.

    It does not where a command writes a file that others are to read.
    """
    return command != "cache_prompt"


def options_of(command: str) -> tuple[Option, ...]:
    """The options that mean something to one of mlx-lm's commands ("server", ...)."""
    if command == "cache_prompt":
        return tuple(option for option in OPTIONS if option.name in ENCODING)
    if command != "server":
        return tuple(option for option in OPTIONS if option.name != "disable_cache_stats")
    return OPTIONS
