"""What an environment that has the plugin does at every start of Python, and what it gains."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import mlx_lm_kvcache_plugin as plugin

RunPython = Callable[..., CompletedProcess[str]]

ROOT = Path(__file__).parents[1]

STARTUP = ROOT / "mlx_lm_kvcache_plugin" / "startup"

GROUP = "KV cache (mlx_lm_kvcache_plugin):"

COMMANDS = {
    "mlx_lm.server": ("mlx_lm.server", ()),
    "mlx_lm server": ("mlx_lm", ("server",)),
    "python -m mlx_lm server": ("", ("-m", "mlx_lm", "server")),
    "python -m mlx_lm.server": ("", ("-m", "mlx_lm.server")),
}


def finders() -> list[object]:
    return [finder for finder in sys.meta_path if isinstance(finder, plugin.PatchFinder)]


@pytest.fixture
def not_installed() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders()]


def test_start_up_loads_nothing_but_os_sys_and_the_package(run_python: RunPython) -> None:
    """A start of Python pays for one small file: without `site`, all that is new is the package."""
    code = (
        "import os, sys; before = set(sys.modules); "
        "import mlx_lm_kvcache_plugin; mlx_lm_kvcache_plugin.install(); "
        "print(*sorted(set(sys.modules) - before))"
    )
    folder = str(Path(plugin.__file__).parents[1])
    assert run_python("-S", "-c", code, PYTHONPATH=folder).stdout.split() == [plugin.__name__]


@pytest.mark.usefixtures("installed")
def test_the_start_up_file_arms_the_hook(run_python: RunPython) -> None:
    """Every Python of the environment has the hook in front, and none of the heavy modules."""
    code = "import sys; print(type(sys.meta_path[0]).__name__, *sys.modules)"
    first, *modules = run_python("-c", code).stdout.split()
    assert first == "PatchFinder"
    heavy = ("mlx", "mlx_lm", "numpy", "pluggy", "argparse", "mlx_lm_kvcache_plugin.patches")
    assert not set(heavy) & set(modules)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("value", ["1", "true", "Yes", "ON"])
def test_the_disable_variable_keeps_the_hook_out(run_python: RunPython, value: str) -> None:
    code = "import sys; print(*(type(finder).__name__ for finder in sys.meta_path))"
    finders = run_python("-c", code, MLX_LM_KVCACHE_PLUGIN_DISABLE=value).stdout
    assert finders and "PatchFinder" not in finders


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize("value", ["", "0", "no"])
def test_install_puts_one_finder_in_front(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """`install` runs twice in a virtual environment."""
    monkeypatch.setenv("MLX_LM_KVCACHE_PLUGIN_DISABLE", value)
    assert not plugin.is_installed()
    plugin.install()
    plugin.install()
    assert finders() == sys.meta_path[:1]
    assert plugin.is_installed()


@pytest.mark.parametrize("file", ["mlx_lm_kvcache_plugin.pth", "mlx_lm_kvcache_plugin.start"])
def test_a_start_up_file_is_one_line(file: str) -> None:
    assert (STARTUP / file).read_bytes().count(b"\n") == 1


def test_the_start_file_names_install() -> None:
    """Python 3.15 resolves the line as `pkgutil.resolve_name` does."""
    line = (STARTUP / "mlx_lm_kvcache_plugin.start").read_text(encoding="utf-8").strip()
    assert pkgutil.resolve_name(line) is plugin.install


@pytest.mark.usefixtures("not_installed")
def test_the_pth_file_installs() -> None:
    exec((STARTUP / "mlx_lm_kvcache_plugin.pth").read_text(encoding="utf-8"))
    assert plugin.is_installed()


def test_public_names() -> None:
    """Every name in `__all__` can be had, and `dir` knows it; others are errors."""
    for name in plugin.__all__:
        assert getattr(plugin, name) is not None
        assert name in dir(plugin)
    assert set(plugin._PUBLIC) < set(plugin.__all__)
    with pytest.raises(AttributeError, match="'no_such_name'"):
        plugin.no_such_name  # noqa: B018


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", COMMANDS)
def test_each_stock_command_shows_our_group_at_the_end(run_python: RunPython, name: str) -> None:
    """Whichever way the server is started: stock's help and prints as they are, then ours."""
    command, arguments = COMMANDS[name]
    ours = run_python(*arguments, "--help", command=command)
    stock = run_python(*arguments, "--help", command=command, MLX_LM_KVCACHE_PLUGIN_DISABLE="1")
    assert (ours.returncode, ours.stderr) == (0, stock.stderr)
    printed, _, stock_options = stock.stdout.partition("usage:")
    assert ours.stdout.startswith(printed + "usage:")
    assert bool(printed) == (name == "python -m mlx_lm.server")  # that it is deprecated
    before, group, _ = ours.stdout.partition(GROUP)
    assert group and GROUP not in stock.stdout
    assert before.rstrip().endswith(stock_options.partition("options:")[2].rstrip())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-bits", "7"], "argument --kv-cache-bits: 7 is not one of 2, 3, 4, 5, 6, 8"),
        (["--kv-cache-b", "4"], "unrecognized arguments: --kv-cache-b 4"),
    ],
)
def test_a_wrong_flag_ends_the_server(
    run_python: RunPython, arguments: list[str], message: str
) -> None:
    """With exit code 2 and one clear line, before a model is looked for."""
    result = run_python("-m", "mlx_lm", "server", "--model", "no/such/model", *arguments)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith(f"error: {message}")
