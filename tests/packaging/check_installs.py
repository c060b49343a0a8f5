"""Install the plugin in every way that users do, in fresh environments, and uninstall it again.

Run from anywhere, with the standard library alone: `python tests/packaging/check_installs.py`. Each
way must put both start-up files at the root of site-packages and into RECORD, give `mlx_lm.server`
our flags, and leave no file behind. Last comes what a start of Python costs more with the plugin.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "mlx_lm_kvcache_plugin"
STARTUP_FILES = (f"{NAME}.pth", f"{NAME}.start")
GROUP = f"KV cache ({NAME}):"
EXTRA = "[cpu]" if sys.platform == "linux" else ""

LIMIT_MS = 1.0
PAIRS = 200
ROUNDS = 3
"""Other work on the machine only ever adds time, so the lowest of a few rounds is the best word."""

NOT_COPIED = shutil.ignore_patterns(
    ".git", ".tox", ".*_cache", ".venv", "venv", "build", "dist", "*.egg-info", "__pycache__"
)


class Failure(Exception):
    """A check that did not hold."""


def check(condition: object, complaint: str) -> None:
    if not condition:
        raise Failure(complaint)


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout, and show what it printed if it fails."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_LM_", "PYTHON"))}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=tempfile.gettempdir(),
        env={**environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        print(result.stdout, result.stderr, sep="\n", file=sys.stderr)
        raise Failure(f"{' '.join(map(str, command))} ended with {result.returncode}")
    return result


class Environment:
    """A virtual environment."""

    def __init__(self, folder: Path, *options: str) -> None:
        run(sys.executable, "-m", "venv", *options, folder)
        self.folder = folder
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site_packages = Path(run(self.python, "-c", code).stdout.strip())

    def pip(self, *arguments: str | Path) -> None:
        run(self.python, "-m", "pip", *arguments)

    def server_help(self, **variables: str) -> str:
        result = run(self.bin / "mlx_lm.server", "--help", **variables)
        check(not result.stderr, f"mlx_lm.server --help complains: {result.stderr}")
        return result.stdout

    def files_of_ours(self) -> list[str]:
        found = (path.relative_to(self.folder) for path in self.folder.rglob("*"))
        return sorted(str(path) for path in found if is_ours(path))


def is_ours(path: Path) -> bool:
    text = str(path).lower().replace("-", "_")
    return NAME in text or "mlx_lm.kvcache" in text


@dataclass(frozen=True)
class Kind:
    """One way to install, and the way to uninstall that goes with it."""

    name: str
    install: Callable[[], object]
    uninstall: Callable[[], object]


def kinds(work: Path, tools: Environment, target: Environment) -> Iterator[Kind]:
    source = work / "source"
    shutil.copytree(ROOT, source, ignore=NOT_COPIED)
    run(tools.python, "-m", "build", "--outdir", work / "dist", source)
    (wheel,), (sdist,) = (list((work / "dist").glob(what)) for what in ("*.whl", "*.tar.gz"))

    def pip(name: str, *arguments: str | Path) -> Kind:
        return Kind(
            name,
            lambda: target.pip("install", *arguments),
            lambda: target.pip("uninstall", "--yes", NAME),
        )

    def uv(name: str, *arguments: str | Path) -> Kind:
        command = (tools.bin / "uv", "pip")
        return Kind(
            name,
            lambda: run(*command, "install", "--python", target.python, *arguments),
            lambda: run(*command, "uninstall", "--python", target.python, NAME),
        )

    strict = ("--config-settings", "editable_mode=strict")
    yield pip("wheel, with all it needs", f"{wheel}{EXTRA}")
    yield pip("sdist", "--no-deps", sdist)
    yield pip("pip install .", "--no-deps", source)
    yield pip("pip install -e .", "--no-deps", "-e", source)
    yield pip("pip install -e ., strict", "--no-deps", *strict, "-e", source)
    yield uv("uv pip install, wheel", "--no-deps", wheel)
    yield uv("uv pip install -e .", "--no-deps", "-e", source)


def check_kind(kind: Kind, target: Environment) -> None:
    kind.install()
    check_start_up_files(target.site_packages)
    text = target.server_help()
    check(GROUP in text, "mlx_lm.server --help lacks our group")
    ours = text.partition(GROUP)[2].splitlines()[1:]
    titles = [line for line in ours if line and not line.startswith(" ")]
    check(not titles, f"our group is not the last one, there follows {titles}")
    check(any(line.startswith("  --kv-cache-bits") for line in ours), "our group lacks its flags")
    check(GROUP not in target.server_help(MLX_LM_KVCACHE_PLUGIN_DISABLE="1"), "it stays when off")
    kind.uninstall()
    left = target.files_of_ours()
    check(not left, f"left behind: {', '.join(left)}")
    check(GROUP not in target.server_help(), "the group is still there after uninstalling")


def check_start_up_files(site_packages: Path) -> None:
    (record,) = site_packages.glob(f"{NAME}-*.dist-info/RECORD")
    recorded = {line.partition(",")[0] for line in record.read_text("utf-8").splitlines()}
    for name in STARTUP_FILES:
        shipped = (ROOT / NAME / "startup" / name).read_bytes()
        installed = site_packages / name
        check(installed.is_file(), f"{name} is not at the root of site-packages")
        check(installed.read_bytes() == shipped, f"{name} is not as shipped")
        check(name in recorded, f"{name} is not in RECORD")


def startup_cost_ms(bare: Path, plugged: Path) -> tuple[float, float]:
    """What `python -c pass` takes without the plugin, and what it takes more with it."""
    pairs = []
    for turn in range(PAIRS):
        # The two take turns at going first, so that whatever drifts hits both alike.
        order = (bare, plugged) if turn % 2 else (plugged, bare)
        taken = {python: start_ms(python) for python in order}
        pairs.append((taken[bare], taken[plugged]))
    alone = statistics.median(without for without, _ in pairs)
    return alone, statistics.median(with_it - without for without, with_it in pairs)


def start_ms(python: Path) -> float:
    begin = time.perf_counter()
    subprocess.run([str(python), "-c", "pass"], check=True)
    return (time.perf_counter() - begin) * 1000


def check_startup_cost(work: Path, tools: Environment) -> None:
    bare = Environment(work / "bare", "--without-pip")
    plugged = Environment(work / "plugged", "--without-pip")
    (wheel,) = (work / "dist").glob("*.whl")
    tools.pip("--python", plugged.python, "install", "--no-deps", wheel)
    rounds = [startup_cost_ms(bare.python, plugged.python) for _ in range(ROUNDS)]
    alone, cost = min(rounds, key=lambda each: each[1])
    print(
        f"python -c pass: {alone:.2f} ms, with the plugin {cost:+.3f} ms "
        f"(medians of {PAIRS} alternating pairs, best of {ROUNDS} rounds)"
    )
    check(cost <= LIMIT_MS, f"that is more than {LIMIT_MS} ms")


def main() -> int:
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tools = Environment(work / "tools")
        tools.pip("install", "--upgrade", "pip", "build", "uv")
        target = Environment(work / "target")
        for kind in kinds(work, tools, target):
            failures += report(kind.name, check_kind, kind, target)
        failures += report("start-up cost", check_startup_cost, work, tools)
    return 1 if failures else 0


def report(name: str, run_check: Callable[..., None], *arguments: object) -> int:
    """Run a check, say how it ended, and return the number of failures."""
    try:
        run_check(*arguments)
    except Failure as failure:
        print(f"FAILED  {name}: {failure}", flush=True)
        return 1
    print(f"ok      {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
