"""What every test can rely on: nothing of the user's settings, nothing left of another test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest

from mlx_lm_kvcache_plugin import patches
from mlx_lm_kvcache_plugin.options import OPTIONS

PLUGIN_VARIABLES = ("MLX_LM_KVCACHE_PLUGIN_DISABLE", "MLX_LM_KVCACHE_PLUGINS")

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the variables of ours that are set outside, and undo what imports and patches left."""
    for variable in (*PLUGIN_VARIABLES, *(option.variable for option in OPTIONS)):
        monkeypatch.delenv(variable, raising=False)
    finders, outcomes = list(sys.meta_path), dict(patches.outcomes)
    yield
    sys.meta_path[:] = finders
    patches.outcomes.clear()
    patches.outcomes.update(outcomes)


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run this Python, or a command that lies beside it, in a folder that holds no source."""

    def run(
        *arguments: str, command: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        executable = str(Path(sys.executable).with_name(command)) if command else sys.executable
        return subprocess.run(
            [executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONWARNINGS": "", **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, by the name of its file in mlx-lm: built once for all tests."""
    from tests.families import build

    return cache(lambda name: build(tmp_path_factory.mktemp(name), name))


@pytest.fixture
def installed() -> None:
    """For tests of what the start-up files do: a source folder alone has none."""
    # A build leaves metadata in the source folder, but only an installation has a RECORD.
    found = distributions(name="mlx_lm_kvcache_plugin")
    if not any(each.read_text("RECORD") for each in found):
        pytest.skip("the plugin is not installed here; pip install -e .")
