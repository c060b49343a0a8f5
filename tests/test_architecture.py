"""The house rules, held against the code: who may know whom, what is public, how long is long."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import mlx_lm_kvcache_plugin as plugin

PACKAGE = plugin.__name__
FOLDER = Path(plugin.__file__).parent
FILES = sorted(path for path in FOLDER.rglob("*.py") if "__pycache__" not in path.parts)

LEAVES = {"settings", "options", "errors", "events", "tables"}


@dataclass(frozen=True)
class Room:
    """What a file or folder of the package may import at run time, beside the standard library.

    Attributes:
        ours: other parts of the package.
        others: packages of others.
    """

    ours: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()


def room(ours: set[str] | None = None, others: str = "") -> Room:
    return Room(frozenset(ours or ()), frozenset(others.split()))


HOUSE = {
    "__init__": room({"patches"}),
    "__main__": room({"__init__", "doctor", "disk", "evaluation"}),
    "doctor": room({"__init__", "patches", "plugins"} | LEAVES),
    "evaluation": room(
        {"__init__", "patches", "prefix_cache", "writing", "layers", "store", "codecs", "plugins"}
        | LEAVES,
        "mlx tqdm matplotlib",
    ),
    "patches": room(
        {"prefix_cache", "matching", "spaces", "layers", "store", "codecs", "disk", "fingerprint"}
        | {"stats", "inspection", "web", "plugins", "hookspecs"}
        | LEAVES,
        "mlx mlx_lm numpy",
    ),
    "inspection": room(
        {"__init__", "prefix_cache", "diagnosis", "matching", "stats", "store"} | LEAVES, "numpy"
    ),
    "web": room(others="prometheus_client"),
    "prefix_cache": room(
        {"matching", "spaces", "writing", "offload", "recording", "layers"}
        | {"stats", "store", "codecs", "disk"}
        | LEAVES,
        "numpy",
    ),
    "recording": room({"diagnosis", "matching", "spaces", "stats", "store"} | LEAVES),
    "diagnosis": room({"matching", "spaces", "stats", "store"} | LEAVES, "numpy"),
    "stats": room({"store"} | LEAVES, "numpy"),
    "offload": room(
        {"restoring", "searching", "naming", "spaces", "writing", "layers"}
        | {"store", "codecs", "disk"}
        | LEAVES
    ),
    "restoring": room(
        {"searching", "matching", "spaces", "writing", "layers", "store", "codecs", "disk"}
    ),
    "searching": room({"naming", "layers", "store", "disk"}, "numpy"),
    "naming": room({"store", "disk"}),
    "matching": room({"spaces", "store"}, "numpy"),
    "writing": room({"spaces", "layers", "store", "codecs"}),
    "spaces": room({"layers", "store", "codecs"}),
    "layers": room({"codecs", "errors"}, "mlx"),
    "plugins": room({"hookspecs", "codecs", "layers", "errors"}, "pluggy"),
    "hookspecs": room(others="pluggy"),
    "store": room(LEAVES, "numpy psutil"),
    "codecs": room(LEAVES, "mlx numpy"),
    "fingerprint": room(others="mlx numpy"),
    "disk": room(LEAVES, "numpy safetensors tqdm"),
    "settings": room({"options", "errors"}),
    "options": room({"errors"}),
    "errors": room(),
    "events": room(),
    "tables": room(),
    "startup": room(others="setuptools"),
}
"""By the first part of a module's name. A part that is not here has no place in the house yet."""

KNOW_UPSTREAM_LAYOUTS = {"patches.models_cache", "patches.layer_kinds"}
"""The only modules that may import `mlx_lm.models.cache`."""

LONGEST_FILE, LONGEST_FUNCTION = 300, 40


@dataclass(frozen=True)
class Import:
    """An import statement's module; those that only a type checker sees are left out."""

    name: str
    line: int
    at_import: bool


def module_of(path: Path) -> str:
    """The name below the package: "store.tree"; a folder goes by its own name."""
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    return module.split(".")[0]


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def statements(node: ast.AST, at_import: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """All import statements that run, and whether they do so when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_import
        elif is_for_type_checkers(child):
            assert isinstance(child, ast.If) and not child.orelse
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from statements(child, at_import and not is_function)


def imports(path: Path) -> Iterator[Import]:
    """What a file imports, by absolute names; of the package's own, the modules."""
    for node, at_import in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield Import(str(node.module), node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom):
            above = path.parents[node.level - 1]
            for target in {target_of(above, node.module, alias.name) for alias in node.names}:
                yield Import(f"{PACKAGE}.{target}", node.lineno, at_import)


def target_of(folder: Path, module: str | None, name: str) -> str:
    """The module that `from .module import name` takes `name` from, or that `name` is."""
    base = folder.joinpath(*module.split(".")) if module else folder
    if (base / name).is_dir() or (base / f"{name}.py").is_file():
        return module_of(base / f"{name}.py")
    return module_of(base / "__init__.py" if base.is_dir() else base.with_suffix(".py"))


every_file = pytest.mark.parametrize("path", FILES, ids=[module_of(path) for path in FILES])


def test_the_whole_package_is_looked_at() -> None:
    """The walk finds the files, and the reading finds what they import in whichever form."""
    modules = {module_of(path) for path in FILES}
    assert {"__init__", "settings", "store", "store.tree", "codecs.raw", "patches"} <= modules
    found = {item.name for item in imports(FOLDER / "plugins.py")}
    assert {f"{PACKAGE}.hookspecs", f"{PACKAGE}.codecs.registry", "pluggy", "os"} <= found
    found = {item.name for item in imports(FOLDER / "patches" / "arguments.py")}
    assert {f"{PACKAGE}.patches", f"{PACKAGE}.errors", f"{PACKAGE}.options"} <= found


@every_file
def test_a_part_knows_only_what_it_may(path: Path) -> None:
    """The table of the house: arrows point down, and nothing points back."""
    part = part_of(module_of(path))
    assert part in HOUSE, f"{part} has no place in the house: give it one here and in the docs"
    for item in imports(path):
        top, _, below = item.name.partition(".")
        where = f"{module_of(path)}, line {item.line}, imports {item.name}"
        if top == PACKAGE:
            assert part_of(below) in HOUSE[part].ours | {part}, where
        else:
            assert top in HOUSE[part].others | sys.stdlib_module_names, where


def test_nothing_points_back() -> None:
    """The table itself has no circle: every part can be understood after those that it knows."""
    left = {part: set(room.ours) for part, room in HOUSE.items() if part != "__init__"}
    while left:
        done = {part for part, known in left.items() if not known - {"__init__"} & left.keys()}
        assert done, f"a circle among {sorted(left)}"
        left = {part: known for part, known in left.items() if part not in done}


def test_the_package_itself_imports_os_and_sys_only() -> None:
    """It is loaded at every start of Python; all else waits for mlx-lm."""
    found = list(imports(FOLDER / "__init__.py"))
    assert {item.name for item in found if item.at_import} == {"os", "sys"}
    later = {item.name for item in found if not item.at_import}
    assert later == {"_thread", "importlib", f"{PACKAGE}.patches.loader"}


@every_file
def test_only_two_modules_know_upstream_layouts(path: Path) -> None:
    """Whatever upstream changes about its caches is met in one place, and told in another."""
    knows = any(item.name.startswith("mlx_lm.models.cache") for item in imports(path))
    assert knows == (module_of(path) in KNOW_UPSTREAM_LAYOUTS)


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("store.insertion", ["mlx", "mlx_lm", f"{PACKAGE}.codecs", f"{PACKAGE}.prefix_cache"]),
        ("store.budget", ["mlx", "mlx_lm", f"{PACKAGE}.codecs"]),
        ("codecs.registry", ["mlx_lm", f"{PACKAGE}.store", "pluggy"]),
        ("prefix_cache", ["mlx_lm", f"{PACKAGE}.patches"]),
        ("settings", ["mlx", "mlx_lm", "numpy", "pluggy", "argparse"]),
        ("events", ["mlx", "mlx_lm", "numpy", "pluggy", "logging"]),
        ("errors", ["mlx", "mlx_lm", "numpy", "pluggy", "logging"]),
        ("hookspecs", ["mlx", "mlx_lm", "numpy", "argparse"]),
        ("evaluation.command", ["mlx", "mlx_lm", "numpy", "pluggy", "tqdm", "matplotlib"]),
    ],
)
def test_what_an_import_really_loads(module: str, unwanted: list[str]) -> None:
    """The same by trying it: nothing that it may not know comes in through others.

    Without `site`, so that what start-up files of other packages load is not there.
    """
    code = (
        f"import sys; sys.path[:0] = {[str(FOLDER.parent), *sys.path]!r}; "
        f"before = set(sys.modules); import {PACKAGE}.{module}; "
        f"print(*set({unwanted!r}) & (set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()) == (0, []), run.stderr


@every_file
def test_a_file_is_one_idea(path: Path) -> None:
    """At most 300 lines."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


@every_file
def test_a_function_is_one_step(path: Path) -> None:
    """At most 40 lines, its docstring counted."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1 if node.end_lineno else 0
            assert 0 < lines <= LONGEST_FUNCTION, node.name


def test_the_public_names() -> None:
    """These are promised, and every one of them is there; whatever else there is may change."""
    assert plugin.__all__ == [
        "Codec",
        "KVCachePluginError",
        "PrefixCache",
        "Settings",
        "__version__",
        "hookimpl",
        "install",
    ]
    for name in plugin.__all__:
        assert getattr(plugin, name) is not None
        assert name in dir(plugin)
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        plugin.Missing  # noqa: B018
