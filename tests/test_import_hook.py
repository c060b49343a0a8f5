"""The import hook on made-up upstream packages: other hooks, reloads, runpy, refusals."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import pkgutil
import runpy
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mlx_lm_kvcache_plugin as plugin
from mlx_lm_kvcache_plugin import patches
from mlx_lm_kvcache_plugin.errors import PatchRefused
from mlx_lm_kvcache_plugin.patches.loader import PatchingLoader

SOURCE = '''\
"""Upstream."""
runs = globals().get("runs", 0) + 1
flavour = "stock"


def main():
    print(flavour, "main of", __name__)


if __name__ == "__main__":
    print("deprecated", __name__)
    main()
'''

Apply = Callable[[ModuleType], None]


def set_flavour(module: ModuleType) -> None:
    module.flavour = "patched"  # type: ignore[attr-defined]


@pytest.fixture
def patch_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Apply], None]:
    """Make `upstream.probe` a patched module, patched by the given function."""

    def use(apply: Apply) -> None:
        patch = ModuleType("mlx_lm_kvcache_plugin.patches.probe")
        patch.apply = apply  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, patch.__name__, patch)

    monkeypatch.setattr(plugin, "PATCHED_MODULES", ("upstream.probe",))
    use(set_flavour)
    return use


@pytest.fixture(autouse=True)
def upstream(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    patch_with: Callable[[Apply], None],
) -> Iterator[Path]:
    """A package `upstream` with the modules `probe` and `other`, and the hook armed."""
    package = tmp_path / "upstream"
    package.mkdir()
    for name, source in {"__init__": "", "probe": SOURCE, "other": SOURCE}.items():
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    (package / "data.txt").write_text("data", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program"])
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, plugin.PatchFinder)]
    plugin.install()  # in front, also of the hook that pytest brings
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "upstream"]:
        del sys.modules[name]


class ChainedHook:
    """As wrapt's post-import hooks: looks the module up through all finders, wraps its loader."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._in_progress = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if self._in_progress or fullname != "upstream.probe":
            return None
        self._in_progress = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._in_progress = False
        assert spec is not None
        if not isinstance(spec.loader, ChainedLoader):
            spec.loader = ChainedLoader(spec.loader, self.seen)
        return spec


class ChainedLoader:
    def __init__(self, loader: Any, seen: list[str]) -> None:
        self.loader, self.seen = loader, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        self.seen.append(module.flavour)


def load() -> Any:
    return importlib.import_module("upstream.probe")


def test_only_patched_modules_are_touched() -> None:
    other = importlib.import_module("upstream.other")
    assert other.flavour == "stock"
    assert not isinstance(other.__spec__.loader, PatchingLoader)
    assert load().flavour == "patched"
    assert patches.outcomes["upstream.probe"] == "patched"


def test_a_reload_executes_and_patches_again() -> None:
    module = load()
    module.flavour = "changed"
    assert importlib.reload(module) is module
    assert (module.runs, module.flavour) == (2, "patched")


def test_disabled_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may set the variable before it imports mlx-lm."""
    monkeypatch.setenv("MLX_LM_KVCACHE_PLUGIN_DISABLE", "1")
    assert load().flavour == "stock"


@pytest.mark.parametrize("position", [0, 1, -1])
def test_a_hook_that_asks_all_finders(position: int) -> None:
    """Before ours it sees the patched module, after ours the stock one; both do their work."""
    hook = ChainedHook()
    sys.meta_path.insert(len(sys.meta_path) if position < 0 else position, hook)
    assert load().flavour == "patched"
    # As the last finder it is never asked: the path finder has found the module by then.
    assert hook.seen == {0: ["patched"], 1: ["stock"], -1: []}[position]


@pytest.mark.parametrize("position", [0, 1])
def test_reloads_beside_a_hook_that_asks_all_finders(
    patch_with: Callable[[Apply], None], position: int
) -> None:
    """A lookup of a loaded module finds the spec that we wrapped: it is not wrapped once more."""
    applied: list[str] = []
    patch_with(lambda module: applied.append(module.__name__))
    sys.meta_path.insert(position, ChainedHook())
    module = load()
    for _ in range(3):
        importlib.reload(module)
    assert applied == ["upstream.probe"] * 4


def test_an_imported_module_runs_patched(capsys: pytest.CaptureFixture[str]) -> None:
    """runpy takes the loader from the spec of the loaded module."""
    module = load()
    with pytest.warns(RuntimeWarning, match="found in sys.modules"):
        printed = run_as_main(capsys)
    assert printed == ["deprecated __main__", "patched main of upstream.probe"]
    assert module.runs == 1


def test_a_finder_without_find_spec_is_passed_over() -> None:
    """Old hooks have `find_module` only."""
    path = importlib.import_module("upstream").__path__
    sys.meta_path.insert(1, object())  # type: ignore[arg-type]
    spec = sys.meta_path[0].find_spec("upstream.probe", path)
    assert spec is not None and isinstance(spec.loader, PatchingLoader)


def test_a_missing_module_is_missing() -> None:
    assert plugin.PatchFinder().find_spec("upstream.probe", []) is None


def test_the_loader_answers_as_the_original(upstream: Path) -> None:
    """Source, data and the like are upstream's; copies work too."""
    module = load()
    loader = module.__spec__.loader
    assert inspect.getsource(module.main).startswith("def main")
    assert pkgutil.get_data("upstream.probe", "data.txt") == b"data"
    assert copy.copy(loader).get_filename("upstream.probe") == str(upstream / "probe.py")
    assert "PatchingLoader of <" in repr(loader)
    with pytest.raises(AttributeError, match="no_such_name"):
        loader.no_such_name  # noqa: B018


def test_a_lazily_loaded_module_is_patched_when_it_is_used() -> None:
    spec = importlib.util.find_spec("upstream.probe")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert "upstream.probe" not in patches.outcomes
    assert module.flavour == "patched"


def test_a_module_in_a_zip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "upstream.zip"
    with zipfile.ZipFile(archive, "w") as target:
        target.writestr("upstream/__init__.py", "")
        target.writestr("upstream/probe.py", SOURCE)
    monkeypatch.syspath_prepend(archive)
    assert load().flavour == "patched"
    assert str(archive) in load().__file__


def refuse(module: Any) -> None:
    module.flavour = "half"
    module.extra = 1
    raise PatchRefused("main() has\nanother shape")


def crash(module: Any) -> None:
    del module.main
    raise KeyError("surprise")


@pytest.mark.parametrize(
    ("apply", "reason"),
    [(refuse, "main() has\nanother shape"), (crash, "KeyError('surprise')")],
)
def test_a_refused_patch_leaves_the_stock_module(
    patch_with: Callable[[Apply], None],
    capsys: pytest.CaptureFixture[str],
    apply: Apply,
    reason: str,
) -> None:
    """Nothing half-done, no exception, and nobody who asked for nothing is told."""
    patch_with(apply)
    module = load()
    assert module.flavour == "stock" and module.main and not hasattr(module, "extra")
    assert patches.outcomes["upstream.probe"] == f"refused: {reason}"
    assert capsys.readouterr() == ("", "")


def test_a_module_that_has_no_patch_stays_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlx_lm_kvcache_plugin.patches.probe")
    assert load().flavour == "stock"
    assert patches.outcomes["upstream.probe"].startswith("refused: ModuleNotFoundError")


@pytest.mark.parametrize(
    ("argv", "variables", "told"),
    [
        (["--kv-cache-bits", "4"], {}, True),
        (["--model", "m", "--kv-cache-bits=4"], {}, True),
        (["--disable-prefix-cache"], {}, True),
        ([], {"MLX_LM_CACHE_MEMORY_MB": "64"}, True),
        ([], {"MLX_LM_CACHE_MEMORY_MB": ""}, False),
        (["--kv-bits", "4", "--kv-cache-bits-x"], {"MLX_LM_OTHER": "1"}, False),
    ],
)
def test_a_refusal_is_told_to_who_asked(
    patch_with: Callable[[Apply], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    variables: dict[str, str],
    told: bool,
) -> None:
    """One line on stderr, if one of our flags is typed or one of our variables has a value."""
    patch_with(refuse)
    monkeypatch.setattr(sys, "argv", ["program", *argv])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    load()
    line = "mlx_lm_kvcache_plugin: upstream.probe was not patched: main() has another shape\n"
    assert capsys.readouterr().err == (line if told else "")


def test_a_broken_installation_leaves_upstream_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm_kvcache_plugin.patches.loader", None)
    assert load().flavour == "stock"
    assert capsys.readouterr().err.startswith("mlx_lm_kvcache_plugin: not active: ")


def run_as_main(capsys: pytest.CaptureFixture[str], name: str = "upstream.probe") -> list[str]:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return capsys.readouterr().out.splitlines()


def test_run_as_main(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m`: upstream's own block, on the real and patched module, executed once."""
    assert run_as_main(capsys) == ["deprecated __main__", "patched main of upstream.probe"]
    assert sys.modules["upstream.probe"].runs == 1  # type: ignore[attr-defined]


def test_run_as_main_without_a_block(upstream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = SOURCE.partition("if __name__")[0]
    (upstream / "probe.py").write_text(source, encoding="utf-8")
    assert run_as_main(capsys) == ["patched main of upstream.probe"]


def test_run_as_main_when_the_patch_is_refused(
    patch_with: Callable[[Apply], None], capsys: pytest.CaptureFixture[str]
) -> None:
    patch_with(refuse)
    assert run_as_main(capsys) == ["deprecated __main__", "stock main of upstream.probe"]


def test_run_under_another_name() -> None:
    """runpy hands back the module's names; its block does not run."""
    names = runpy.run_module("upstream.probe", run_name="elsewhere")
    assert (names["flavour"], names["__name__"]) == ("patched", "elsewhere")
    assert "names_of" not in names


def test_a_traceback_of_the_block_shows_its_line(upstream: Path) -> None:
    (upstream / "probe.py").write_text(SOURCE.replace("    main()\n", "    1 / 0\n"))
    with pytest.raises(ZeroDivisionError) as caught:
        runpy.run_module("upstream.probe", run_name="__main__")
    last = caught.traceback[-1]
    assert (Path(last.path).name, str(last.statement).strip()) == ("probe.py", "1 / 0")


def test_a_module_that_does_not_compile(upstream: Path) -> None:
    (upstream / "probe.py").write_text("if")
    with pytest.raises(SyntaxError):
        runpy.run_module("upstream.probe", run_name="__main__")
