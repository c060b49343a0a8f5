"""`mlx_lm.kvcache doctor`: says whether the flags would work, and exits accordingly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_lm_kvcache_plugin
from mlx_lm_kvcache_plugin.__main__ import main


def doctor(**variables: str) -> subprocess.CompletedProcess[str]:
    """Run it in an interpreter that was started as the user's would be."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MLX_LM_")} | variables
    command = [sys.executable, "-m", "mlx_lm_kvcache_plugin", "doctor"]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def test_a_sound_installation_is_said_to_be_sound() -> None:
    """Versions, start-up files, hook, each patched module and the plugins; exit 0."""
    result = doctor()
    assert result.returncode == 0, result.stdout + result.stderr
    for line in (
        f"ok   mlx_lm_kvcache_plugin: {mlx_lm_kvcache_plugin.__version__}",
        "ok   mlx-lm: ",
        "ok   start-up files: ",
        "ok   import hook: armed",
        "ok   mlx_lm.generate: patched",
        "ok   mlx_lm.server: patched",
        "ok   plugins: built-in codecs, built-in flags, built-in layer kinds",
    ):
        assert line in result.stdout
    assert "BAD" not in result.stdout


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("MLX_LM_KVCACHE_PLUGIN_DISABLE", "1", "MLX_LM_KVCACHE_PLUGIN_DISABLE switches"),
        ("MLX_LM_KV_CACHE_BITS", "7", "MLX_LM_KV_CACHE_BITS: 7 is not one of"),
        ("MLX_LM_KV_CACHE_CODEC", "none", "there is no codec named 'none'"),
    ],
)
def test_what_would_keep_the_flags_from_working_is_named(variable, value, line) -> None:
    """Each such finding is one line, and the exit status is 1."""
    result = doctor(**{variable: value})
    assert result.returncode == 1
    (bad,) = {text for text in result.stdout.splitlines() if line in text}
    assert bad.startswith("BAD")
    assert "Traceback" not in result.stderr


def test_an_interpreter_without_start_up_files_is_found_out() -> None:
    """-S skips the start-up files: the hook is not armed and the server not patched."""
    packages = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-S", "-m", "mlx_lm_kvcache_plugin", "doctor"]
    environ = {**os.environ, "PYTHONPATH": packages}
    result = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert result.returncode == 1
    assert "BAD  import hook: not armed at start-up" in result.stdout
    assert "BAD  mlx_lm.server: not patched" in result.stdout


def test_a_wrong_command_ends_with_one_line_and_exit_2(capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["nonsense"])
    assert exit_.value.code == 2
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err


def test_the_version_is_shown(capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.strip() == mlx_lm_kvcache_plugin.__version__


@pytest.mark.parametrize("package", ["mlx", "numpy", "pluggy", "psutil"])
def test_a_package_that_cannot_be_imported_is_a_finding(package: str, tmp_path: Path) -> None:
    """The other findings are told all the same, and nothing ends in a traceback."""
    (tmp_path / f"{package}.py").write_text("raise ImportError('cannot open it')")
    result = doctor(PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "cannot open it" in result.stdout and "Traceback" not in result.stderr
    assert "ok   import hook: armed" in result.stdout
