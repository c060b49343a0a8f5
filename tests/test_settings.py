"""Settings: every value that a flag or a variable may have, and what they mean together."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.errors import KVCachePluginError, SettingsError
from mlx_lm_kvcache_plugin.options import KV_CACHE_BITS, OPTIONS
from mlx_lm_kvcache_plugin.settings import Settings

BY_NAME = {option.name: option for option in OPTIONS}

RIGHT: dict[str, dict[str, Any]] = {
    "kv_cache_bits": {"2": 2, "3": 3, "4": 4, "5": 5, "6": 6, "8": 8, " 8 ": 8, "+4": 4, "08": 8},
    "kv_cache_value_bits": {"2": 2, "8": 8},
    "kv_cache_group_size": {"32": 32, "64": 64, "128": 128},
    "kv_cache_codec": {"rotated": "rotated", " raw": "raw", "of-a-plugin": "of-a-plugin"},
    "kv_cache_quantization": {"1": True, "true": True, "Yes": True, " on ": True},
    "kv_cache_checkpoint_tokens": {
        "0": 0,
        "1": 1,
        " 512 ": 512,
        "+2048": 2048,
        "9" * 18: 10**18 - 1,
    },
    "cache_memory_mb": {"1": 1, "4096": 4096, " 8192 ": 8192, str(1 << 40): 1 << 40},
    "cache_memory_percent": {
        "0.2": 0.2,
        "0.20": 0.2,
        "20%": 0.2,
        " 20 % ": 0.2,
        "0.5%": 0.005,
        "1": 1.0,
        "1.0": 1.0,
        "100%": 1.0,
        ".35": 0.35,
        "2e-1": 0.2,
    },
    "kv_cache_dir": {
        "/nowhere/kv": Path("/nowhere/kv"),
        "kv cache": Path("kv cache"),
        "~/kv": Path.home() / "kv",
    },
    "kv_cache_disk_mb": {"1": 1, "10240": 10_240, str(1 << 40): 1 << 40},
    "disable_prefix_cache": {"1": True, "TRUE": True, "yes": True, "on": True},
    "disable_cache_stats": {"1": True, "on": True},
}

NUMBERS_THAT_ARE_NONE = ("four", "", " ", "4.0", "0x4", "4bit", "1e1", "nan", "inf", "--4", "4 8")

WRONG: dict[str, tuple[str, ...]] = {
    "kv_cache_bits": ("1", "7", "16", "0", "-4", "9" * 30, *NUMBERS_THAT_ARE_NONE),
    "kv_cache_value_bits": ("1", "7", "16", "0", *NUMBERS_THAT_ARE_NONE),
    "kv_cache_group_size": ("16", "7", "256", "0", "-64", *NUMBERS_THAT_ARE_NONE),
    "kv_cache_codec": ("", "  "),
    "kv_cache_quantization": ("2", "", "maybe", "-1"),
    "kv_cache_checkpoint_tokens": ("-1", "-2048", "2k", "9" * 30, *NUMBERS_THAT_ARE_NONE),
    "kv_cache_dir": ("", "  ", __file__),
    "kv_cache_disk_mb": ("0", "-5", "1e30", "8GB", "1.5", "9" * 18, *NUMBERS_THAT_ARE_NONE),
    "cache_memory_mb": (
        ("0", "-5", "1e30", "8GB", "8 GB", "1.5", "9" * 18, "9" * 30, *NUMBERS_THAT_ARE_NONE)
    ),
    "cache_memory_percent": (
        ("20", "0", "-1", "1.5", "nan", "", " ", "%", "0%", "-20%", "101%", "150%", "inf", "-inf")
        + ("inf%", "nan%", "half", "20%%", "0,2", "1e-400", "20 percent", "-0.2", "-0")
    ),
    "disable_prefix_cache": ("2", "", "maybe", "-1"),
    "disable_cache_stats": ("2", "", "maybe", "-1"),
}

right_values = pytest.mark.parametrize(
    ("name", "text", "value"),
    [(name, text, value) for name, values in RIGHT.items() for text, value in values.items()],
)
wrong_values = pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts]
)


def test_the_flags_and_their_variables() -> None:
    """Every setting has a flag, and a variable of nearly the same name; the names stay."""
    assert {option.flag: option.variable for option in OPTIONS} == {
        "--kv-cache-bits": "MLX_LM_KV_CACHE_BITS",
        "--kv-cache-value-bits": "MLX_LM_KV_CACHE_VALUE_BITS",
        "--kv-cache-group-size": "MLX_LM_KV_CACHE_GROUP_SIZE",
        "--kv-cache-codec": "MLX_LM_KV_CACHE_CODEC",
        "--kv-cache-quantization": "MLX_LM_KV_CACHE_QUANTIZATION",
        "--kv-cache-checkpoint-tokens": "MLX_LM_KV_CACHE_CHECKPOINT_TOKENS",
        "--cache-memory-mb": "MLX_LM_CACHE_MEMORY_MB",
        "--cache-memory-percent": "MLX_LM_CACHE_MEMORY_PERCENT",
        "--kv-cache-dir": "MLX_LM_KV_CACHE_DIR",
        "--kv-cache-disk-mb": "MLX_LM_KV_CACHE_DISK_MB",
        "--disable-prefix-cache": "MLX_LM_DISABLE_PREFIX_CACHE",
        "--disable-cache-stats": "MLX_LM_DISABLE_CACHE_STATS",
    }
    switches = {option.name for option in OPTIONS if option.metavar is None}
    assert switches == {"kv_cache_quantization", "disable_prefix_cache", "disable_cache_stats"}
    assert RIGHT.keys() == WRONG.keys() == BY_NAME.keys()


# Single values


@right_values
def test_a_right_value_of_a_flag(name: str, text: str, value: Any) -> None:
    """Read as what it says, of the type that it stands for."""
    parsed = BY_NAME[name].parse(text)
    assert parsed == pytest.approx(value) if isinstance(value, float) else parsed == value
    assert type(parsed) is type(value)


@wrong_values
def test_a_wrong_value_of_a_flag(name: str, text: str) -> None:
    """Refused with a message and never guessed at; argparse puts the flag's name before it."""
    with pytest.raises(SettingsError) as caught:
        BY_NAME[name].parse(text)
    assert str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, KVCachePluginError)


@right_values
def test_a_right_value_of_a_variable(name: str, text: str, value: Any) -> None:
    """The environment means what the flag means."""
    option = BY_NAME[name]
    environ = {option.variable: text, "MLX_LM_SOMETHING_ELSE": "four"}
    assert Settings.resolve({}, environ) == Settings.resolve({name: option.parse(text)}, {})
    assert Settings.resolve({}, environ).requested == option.asks


@wrong_values
def test_a_wrong_value_of_a_variable(name: str, text: str) -> None:
    """The message names the variable, and says the same as for the flag; an empty one is none."""
    option = BY_NAME[name]
    if not text:
        assert Settings.resolve({}, {option.variable: text}) == Settings()
        return
    with pytest.raises(SettingsError) as from_flag:
        option.parse(text)
    with pytest.raises(SettingsError) as from_variable:
        Settings.resolve({}, {option.variable: text})
    assert str(from_variable.value) == f"environment variable {option.variable}: {from_flag.value}"


@pytest.mark.parametrize(
    ("name", "text", "advice"),
    [
        ("kv_cache_bits", "7", "7 is not one of 2, 3, 4, 5, 6, 8"),
        ("kv_cache_bits", "four", "'four' is not a whole number"),
        ("kv_cache_group_size", "16", "16 is not one of 32, 64, 128"),
        ("kv_cache_checkpoint_tokens", "-1", "-1 is no number of tokens; 0 sets none on the way"),
        ("kv_cache_checkpoint_tokens", "2k", "'2k' is not a whole number"),
        ("cache_memory_mb", "8GB", "it counts MB, so 8 GB is 8192"),
        ("cache_memory_mb", "0", "to keep nothing use --disable-prefix-cache"),
        ("cache_memory_percent", "20", "for 20 percent write 20%"),
        ("cache_memory_percent", "1.5", "for 1.5 percent write 1.5%"),
        ("cache_memory_percent", "", "write 0.20 or 20%"),
    ],
)
def test_a_message_says_what_would_be_right(name: str, text: str, advice: str) -> None:
    """The slip that is meant is named."""
    with pytest.raises(SettingsError) as caught:
        BY_NAME[name].parse(text)
    assert advice in str(caught.value)


@pytest.mark.parametrize("text", ["-1", "150", "nan", "0", "120%"])
def test_a_share_that_was_not_meant_in_percent_gets_no_such_advice(text: str) -> None:
    """Advice that would be refused as well is worse than none."""
    with pytest.raises(SettingsError) as caught:
        BY_NAME["cache_memory_percent"].parse(text)
    assert "percent write" not in str(caught.value)


@pytest.mark.parametrize("name", ["kv_cache_quantization", "disable_prefix_cache"])
@pytest.mark.parametrize("text", ["0", "false", "No", " OFF "])
def test_a_switch_can_be_off(name: str, text: str) -> None:
    """As good as not given: nothing of ours is asked for."""
    option = BY_NAME[name]
    assert option.parse(text) is False
    assert Settings.resolve({}, {option.variable: text}) == Settings()
    assert not Settings.is_requested({option.variable: text})


# All together


def test_the_defaults() -> None:
    """Nothing given: full precision, a fifth of the memory, and nothing requested."""
    assert Settings.resolve() == Settings.resolve({}, {}) == Settings()
    assert dataclasses.asdict(Settings()) == {
        "key_bits": None,
        "value_bits": None,
        "group_size": 64,
        "codec": "raw",
        "checkpoint_tokens": 2048,
        "memory_mb": None,
        "memory_percent": 0.20,
        "disk_folder": None,
        "disk_mb": 10_240,
        "disabled": False,
        "has_stats": True,
        "requested": False,
    }


def test_settings_do_not_change() -> None:
    """They are a value."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().key_bits = 4  # type: ignore[misc]


@pytest.mark.parametrize("bits", KV_CACHE_BITS)
def test_bits_turn_the_default_codec_on(bits: int) -> None:
    """Keys and values alike, rotated, in groups of 64, in the default budget."""
    settings = Settings.resolve({"kv_cache_bits": bits})
    assert settings == Settings(key_bits=bits, value_bits=bits, codec="rotated", requested=True)


@pytest.mark.parametrize(
    ("given", "key_bits", "value_bits", "codec"),
    [
        ({"kv_cache_quantization": True}, 8, 8, "rotated"),
        ({"kv_cache_quantization": True, "kv_cache_bits": 8}, 8, 8, "rotated"),
        ({"kv_cache_bits": 5, "kv_cache_value_bits": 4}, 5, 4, "rotated"),
        ({"kv_cache_value_bits": 4}, 8, 4, "rotated"),
        ({"kv_cache_quantization": True, "kv_cache_value_bits": 6}, 8, 6, "rotated"),
        ({"kv_cache_group_size": 32}, 8, 8, "rotated"),
        ({"kv_cache_codec": "affine"}, 8, 8, "affine"),
        ({"kv_cache_codec": "affine", "kv_cache_bits": 4}, 4, 4, "affine"),
        ({"kv_cache_codec": "of-a-plugin"}, 8, 8, "of-a-plugin"),
        ({"kv_cache_codec": "raw"}, None, None, "raw"),
        ({"kv_cache_codec": "raw", "kv_cache_group_size": 32}, None, None, "raw"),
        ({"kv_cache_checkpoint_tokens": 512}, None, None, "raw"),
        ({"kv_cache_checkpoint_tokens": 512, "kv_cache_bits": 4}, 4, 4, "rotated"),
        ({"cache_memory_mb": 100}, None, None, "raw"),
        ({"cache_memory_percent": 0.5}, None, None, "raw"),
        ({"disable_prefix_cache": True}, None, None, "raw"),
    ],
)
def test_what_is_not_given_follows_from_what_is(
    given: dict[str, Any], key_bits: int | None, value_bits: int | None, codec: str
) -> None:
    """8 bits where anything of the quantization is asked for, full precision elsewhere."""
    settings = Settings.resolve(given)
    assert (settings.key_bits, settings.value_bits, settings.codec) == (key_bits, value_bits, codec)
    assert settings.group_size == given.get("kv_cache_group_size", 64)
    assert settings.checkpoint_tokens == given.get("kv_cache_checkpoint_tokens", 2048)
    assert settings.disabled == ("disable_prefix_cache" in given)
    assert settings.requested


def test_one_budget_at_a_time() -> None:
    """The default share gives way to a fixed limit, and to another share."""
    fixed = Settings.resolve({"cache_memory_mb": 100})
    assert (fixed.memory_mb, fixed.memory_percent) == (100, None)
    share = Settings.resolve({"cache_memory_percent": 0.5})
    assert (share.memory_mb, share.memory_percent) == (None, 0.5)


CONTRADICTIONS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    *(
        ({name: value, "disable_prefix_cache": True}, (name, "disable_prefix_cache"))
        for name, value in {
            "kv_cache_bits": 8,
            "kv_cache_quantization": True,
            "kv_cache_value_bits": 4,
            "kv_cache_group_size": 64,
            "kv_cache_codec": "raw",
        }.items()
    ),
    (
        {"cache_memory_mb": 100, "cache_memory_percent": 0.2},
        ("cache_memory_mb", "cache_memory_percent"),
    ),
    *(
        (
            {"kv_cache_quantization": True, "kv_cache_bits": bits},
            ("kv_cache_quantization", "kv_cache_bits"),
        )
        for bits in KV_CACHE_BITS
        if bits != 8
    ),
    *(
        ({"kv_cache_codec": "raw", name: value}, ("kv_cache_codec", name))
        for name, value in {
            "kv_cache_bits": 8,
            "kv_cache_quantization": True,
            "kv_cache_value_bits": 8,
        }.items()
    ),
]


def as_text(value: Any) -> str:
    return "1" if value is True else str(value)


@pytest.mark.parametrize(("given", "named"), CONTRADICTIONS)
@pytest.mark.parametrize("by_variable", [(), (0,), (1,), (0, 1)])
def test_contradictions_are_refused(
    given: dict[str, Any], named: tuple[str, str], by_variable: tuple[int, ...]
) -> None:
    """Whether by flags, by variables, or one of each: the message names both as they were given."""
    variables = [named[index] for index in by_variable]
    flags = {name: value for name, value in given.items() if name not in variables}
    environ = {BY_NAME[name].variable: as_text(given[name]) for name in variables}
    with pytest.raises(SettingsError) as caught:
        Settings.resolve(flags, environ)
    for name in named:
        option = BY_NAME[name]
        source, other = option.flag, option.variable
        if name in variables:
            source, other = other, source
        assert source in str(caught.value).split()
        assert other not in str(caught.value).split()


@pytest.mark.parametrize(
    "given",
    [
        {"disable_prefix_cache": True, "cache_memory_mb": 100},
        {"disable_prefix_cache": True, "cache_memory_percent": 0.2},
        {"kv_cache_bits": 4, "cache_memory_mb": 100, "kv_cache_value_bits": 3},
        {"kv_cache_codec": "raw", "cache_memory_mb": 100},
        {"kv_cache_checkpoint_tokens": 0, "disable_prefix_cache": True},
        {"kv_cache_checkpoint_tokens": 64, "kv_cache_codec": "raw"},
    ],
)
def test_what_can_stand_together(given: dict[str, Any]) -> None:
    """A limit for nothing is no contradiction, nor is one for full precision."""
    assert Settings.resolve(given).requested


def test_no_checkpoints_on_the_way_is_a_wish_like_any_other() -> None:
    """A zero is a value that was given, by flag and by variable; a flag of 0 beats a variable."""
    for given, environ in (
        ({"kv_cache_checkpoint_tokens": 0}, {}),
        ({}, {"MLX_LM_KV_CACHE_CHECKPOINT_TOKENS": "0"}),
        ({"kv_cache_checkpoint_tokens": 0}, {"MLX_LM_KV_CACHE_CHECKPOINT_TOKENS": "64"}),
    ):
        settings = Settings.resolve(given, environ)
        assert settings.checkpoint_tokens == 0 and settings.requested
    assert Settings.is_requested({"MLX_LM_KV_CACHE_CHECKPOINT_TOKENS": "0"})


def test_a_flag_beats_its_variable() -> None:
    """Whatever the variable says, right or wrong, it is not looked at."""
    for text in ("2", "four"):
        settings = Settings.resolve({"kv_cache_bits": 8}, {"MLX_LM_KV_CACHE_BITS": text})
        assert settings.key_bits == 8


@pytest.mark.parametrize("nothing", [None, False])
def test_a_flag_that_was_not_given_leaves_its_variable(nothing: bool | None) -> None:
    """argparse has None, or False for a switch, where there was no flag."""
    given = {option.name: nothing for option in OPTIONS}
    environ = {"MLX_LM_KV_CACHE_BITS": "5", "MLX_LM_CACHE_MEMORY_MB": "7"}
    settings = Settings.resolve({**given, "port": 8080, "model": "a-model"}, environ)
    assert (settings.key_bits, settings.memory_mb) == (5, 7)


# Whether anything is asked for


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
@pytest.mark.parametrize("text", ["1", "0.5", "rubbish", " "])
def test_any_variable_asks_for_the_plugin(option: Any, text: str) -> None:
    """Right or wrong: a wrong one is to be complained about, not passed over. Not so one that only
    says something about a plugin that is on.
    """
    assert Settings.is_requested({option.variable: text}) == option.asks


def test_no_statistics_is_no_request() -> None:
    """With that alone, from either place, stock goes on untouched."""
    by_flag = Settings.resolve({"disable_cache_stats": True})
    by_variable = Settings.resolve({}, {"MLX_LM_DISABLE_CACHE_STATS": "1"})
    assert by_flag == by_variable == Settings(has_stats=False, requested=False)
    with_bits = Settings.resolve({"disable_cache_stats": True, "kv_cache_bits": 4})
    assert with_bits.requested and not with_bits.has_stats


@pytest.mark.parametrize(
    "environ",
    [{}, {"MLX_LM_KV_CACHE_BITS": ""}, {"MLX_LM_DISABLE_PREFIX_CACHE": ""}, {"KV_CACHE_BITS": "4"}],
)
def test_nothing_asks_for_nothing(environ: dict[str, str]) -> None:
    """An empty variable is one that is not set; those of others are not ours."""
    assert not Settings.is_requested(environ)
    assert Settings.resolve({}, environ) == Settings()


def test_a_share_is_a_number() -> None:
    """Whatever is accepted lies above 0 and up to 1."""
    for text in RIGHT["cache_memory_percent"]:
        value = Settings.resolve({}, {"MLX_LM_CACHE_MEMORY_PERCENT": text}).memory_percent
        assert value is not None and math.isfinite(value) and 0 < value <= 1
