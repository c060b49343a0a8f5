"""What is asked for by flags and variables: refused before a model is loaded, or done.

A wrong value is tried with the real `main()` of a fresh copy of the server's module, since each
start of the real command takes seconds; some of each kind go through the real command too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mlx_lm_kvcache_plugin.settings import Settings
from tests.conftest import RunPython
from tests.integration.local_server import fresh_server_module
from tests.integration.stock_server import clean_environment

WRONG = {
    "--kv-cache-bits": ("1", "7", "16", "four", "4.0", "-4", "0"),
    "--kv-cache-value-bits": ("1", "7", "16", "four"),
    "--kv-cache-group-size": ("16", "7", "0", "256", "all"),
    "--kv-cache-codec": ("zip", " "),
    "--kv-cache-checkpoint-tokens": ("-1", "2k", "1.5", "none"),
    "--cache-memory-mb": ("0", "-5", "1e30", "8GB", "1.5", "nan", "9" * 30),
    "--cache-memory-percent": ("20", "0", "-1", "1.5", "nan", "inf", "0%", "101%", "-5%", "half"),
}

RIGHT = {
    "--kv-cache-bits": {"4": {"key_bits": 4, "value_bits": 4, "codec": "rotated"}},
    "--kv-cache-value-bits": {"3": {"key_bits": 8, "value_bits": 3}},
    "--kv-cache-group-size": {"32": {"group_size": 32}, "128": {"group_size": 128}},
    "--kv-cache-codec": {"affine": {"codec": "affine", "key_bits": 8}, "raw": {"key_bits": None}},
    "--kv-cache-checkpoint-tokens": {
        "0": {"checkpoint_tokens": 0, "codec": "raw"},
        "512": {"checkpoint_tokens": 512},
    },
    "--cache-memory-mb": {"8192": {"memory_mb": 8192, "memory_percent": None}},
    "--cache-memory-percent": {
        "20%": {"memory_percent": 0.2},
        "0.2": {"memory_percent": 0.2},
        "1": {"memory_percent": 1.0},
        "100%": {"memory_percent": 1.0},
    },
}

SWITCHES = {
    "--kv-cache-quantization": {"key_bits": 8, "value_bits": 8, "codec": "rotated"},
    "--disable-prefix-cache": {"disabled": True},
}

CONTRADICTIONS = [
    {"--kv-cache-bits": "4", "--disable-prefix-cache": None},
    {"--kv-cache-value-bits": "4", "--disable-prefix-cache": None},
    {"--kv-cache-codec": "affine", "--disable-prefix-cache": None},
    {"--kv-cache-quantization": None, "--disable-prefix-cache": None},
    {"--kv-cache-quantization": None, "--kv-cache-bits": "4"},
    {"--cache-memory-mb": "100", "--cache-memory-percent": "20%"},
    {"--kv-cache-codec": "raw", "--kv-cache-bits": "4"},
]


def variable_of(flag: str) -> str:
    """The environment variable of a flag."""
    return "MLX_LM_" + flag.removeprefix("--").replace("-", "_").upper()


def main(arguments: Sequence[str] = (), **variables: str) -> Settings | None:
    """Run the server's `main()` up to where it would serve; the settings that it got.

    A model is never loaded: none of that name exists.
    """
    runs: list[Any] = []
    with (
        mock.patch.dict(os.environ, clean_environment(**variables), clear=True),
        mock.patch.object(sys, "argv", ["mlx_lm.server", "--model", "no/such/model", *arguments]),
    ):
        module: Any = fresh_server_module()
        module.run = lambda host, port, provider: runs.append(provider.cli_args)
        module.main()
    (arguments_of_run,) = runs
    settings: Settings = arguments_of_run.kv_cache_settings
    return settings if settings.requested else None


def refusal(
    capsys: pytest.CaptureFixture[str], arguments: Sequence[str] = (), **variables: str
) -> str:
    """The line that ends the server, with exit code 2 and after no more than the usage."""
    with pytest.raises(SystemExit) as stop:
        main(arguments, **variables)
    assert stop.value.code == 2
    usage, _, last = capsys.readouterr().err.strip().rpartition("\n")
    assert usage.startswith("usage: ") and "Traceback" not in usage and "Error" not in usage
    assert "mlx_lm.server: error: " in last
    return last


@pytest.mark.parametrize(("flag", "value"), [(f, v) for f, vs in WRONG.items() for v in vs])
def test_a_wrong_value_is_refused(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    """From the command line the message names the flag, from the environment the variable."""
    assert flag in refusal(capsys, [flag, value])
    assert flag in refusal(capsys, [f"{flag}={value}"])
    if value.strip():
        assert variable_of(flag) in refusal(capsys, **{variable_of(flag): value})


@pytest.mark.parametrize("flag", WRONG)
def test_an_empty_value(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    """Is refused as a flag; an empty variable counts as not set."""
    assert flag in refusal(capsys, [flag, ""])
    assert main(**{variable_of(flag): ""}) is None


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [(flag, value, expected) for flag, all in RIGHT.items() for value, expected in all.items()],
)
def test_a_right_value_is_taken(flag: str, value: str, expected: dict[str, Any]) -> None:
    """From either place; a flag goes before its own variable, even a wrong one."""
    for settings in (
        main([flag, value]),
        main(**{variable_of(flag): value}),
        main([flag, value], **{variable_of(flag): "wrong"}),
    ):
        assert settings is not None
        assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize("flag", SWITCHES)
def test_a_switch(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    """A variable turns it on by 1 and leaves it off by 0; anything else is refused."""
    for settings in (main([flag]), main(**{variable_of(flag): "1"})):
        assert settings is not None
        for name, value in SWITCHES[flag].items():
            assert getattr(settings, name) == value
    assert main(**{variable_of(flag): "0"}) is None
    assert variable_of(flag) in refusal(capsys, **{variable_of(flag): "maybe"})


@pytest.mark.parametrize("options", CONTRADICTIONS, ids=" ".join)
def test_contradictions_are_refused(
    capsys: pytest.CaptureFixture[str], options: dict[str, str | None]
) -> None:
    """Wherever each of the two comes from, it is named as it was given."""
    flags = {flag: [flag] if value is None else [flag, value] for flag, value in options.items()}
    variables = {variable_of(flag): value or "1" for flag, value in options.items()}
    first, second = options
    line = refusal(capsys, [*flags[first], *flags[second]])
    assert first in line and second in line
    line = refusal(capsys, **variables)
    assert variable_of(first) in line and variable_of(second) in line
    for one, other in ((first, second), (second, first)):
        line = refusal(capsys, flags[one], **{variable_of(other): variables[variable_of(other)]})
        assert one in line and variable_of(other) in line


def test_quantization_may_say_the_same_twice() -> None:
    """`--kv-cache-quantization` is `--kv-cache-bits 8`, and so may stand beside it."""
    settings = main(["--kv-cache-quantization", "--kv-cache-bits", "8"])
    assert settings is not None and settings.key_bits == 8


def test_an_unknown_codec_is_told_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """Before a model is loaded, as any other wrong value."""
    line = refusal(capsys, ["--kv-cache-codec", "zip"])
    assert all(name in line for name in ("'zip'", "rotated", "affine", "raw"))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["--kv-cache-bits", "7"], {}, "--kv-cache-bits"),
        ([], {"MLX_LM_CACHE_MEMORY_PERCENT": "20"}, "MLX_LM_CACHE_MEMORY_PERCENT"),
        (["--disable-prefix-cache"], {"MLX_LM_KV_CACHE_BITS": "4"}, "MLX_LM_KV_CACHE_BITS"),
    ],
)
def test_the_real_command_refuses(
    run_python: RunPython, arguments: list[str], variables: dict[str, str], named: str
) -> None:
    """Exit code 2 and one clear line, though the model does not exist."""
    command = ["--model", "no/such/model", *arguments]
    result = run_python(*command, command="mlx_lm.server", **variables)
    assert result.returncode == 2
    assert named in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr and not result.stdout


TYPE_OF_CACHE = (
    "import mlx_lm.server as s, mlx_lm.models.cache as m; c = s.LRUPromptCache(10); "
    "print(type(c) is m.LRUPromptCache, type(c).__mro__[-2].__name__, len(c), c.nbytes, "
    "m.LRUPromptCache.__module__)"
)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"MLX_LM_KV_CACHE_BITS": "4"}, "PrefixPromptCache"),
        ({}, "LRUPromptCache"),
        ({"MLX_LM_KV_CACHE_BITS": "4", "MLX_LM_KVCACHE_PLUGIN_DISABLE": "1"}, "LRUPromptCache"),
    ],
)
def test_a_script_gets_our_cache_by_a_variable(
    run_python: RunPython, variables: dict[str, str], name: str
) -> None:
    """`mlx_lm.server.LRUPromptCache(10)` is ours if one is set; upstream's own class stays."""
    result = run_python("-c", TYPE_OF_CACHE, **variables)
    stock = name == "LRUPromptCache"
    assert result.stdout.split() == [str(stock), name, "0", "0", "mlx_lm.models.cache"]
    assert not result.stderr


@pytest.mark.usefixtures("installed")
def test_a_script_with_a_wrong_variable(run_python: RunPython) -> None:
    """The error names it."""
    result = run_python("-c", TYPE_OF_CACHE, MLX_LM_KV_CACHE_BITS="7")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "MLX_LM_KV_CACHE_BITS" in last and "7 is not one of" in last


@pytest.mark.usefixtures("installed")
def test_the_disable_variable_leaves_no_flag(run_python: RunPython, model: Path) -> None:
    """Then ours are as unknown to the server as they are to stock."""
    result = run_python(
        "--model",
        str(model),
        "--kv-cache-bits",
        "4",
        command="mlx_lm.server",
        MLX_LM_KVCACHE_PLUGIN_DISABLE="1",
    )
    assert result.returncode == 2
    assert "unrecognized arguments: --kv-cache-bits 4" in result.stderr
