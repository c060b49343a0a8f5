"""`mlx_lm.cache_prompt`: its flags, the file that it writes, and `mlx_lm.generate` reading it."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache

from mlx_lm_kvcache_plugin import patches
from mlx_lm_kvcache_plugin.errors import PatchRefused
from mlx_lm_kvcache_plugin.options import ENCODING, OPTIONS
from mlx_lm_kvcache_plugin.patches import cache_prompt
from mlx_lm_kvcache_plugin.patches.prompt_file import is_marked, load
from mlx_lm_kvcache_plugin.plugins import plugins
from tests import models
from tests.families import reason_to_skip
from tests.test_startup import GROUP, RunPython

NAME = "mlx_lm.cache_prompt"

PROMPT = models.prompt("once upon a time", 300)

FLAGS = {option.name: option.flag for option in OPTIONS}

OURS = {
    "--kv-cache-bits": "4",
    "--kv-cache-value-bits": "2",
    "--kv-cache-group-size": "32",
    "--kv-cache-codec": "affine",
    "--kv-cache-quantization": None,
}
"""The flags of the command, each with a value."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(models.llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(autouse=True)
def fresh_plugins() -> Iterator[None]:
    plugins.cache_clear()
    yield
    plugins.cache_clear()


def fresh_module() -> Any:
    """Upstream's module, freshly executed, not patched and not in `sys.modules`."""
    found = importlib.util.find_spec(NAME)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(NAME, found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def write(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs the command in this process, with the plugin; returns its file."""

    def write(*arguments: str, model: str = model, name: str = "ours", **variables: str) -> Path:
        file = tmp_path / f"{name}.safetensors"
        command = ["--model", model, "--prompt", PROMPT, "--prompt-cache-file", str(file)]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [NAME, *command, *arguments])
            for variable, value in variables.items():
                patch.setenv(variable, value)
            module = fresh_module()
            patches.apply(module)
            assert patches.outcomes[NAME] == "patched"
            module.main()
        return file

    return write


@pytest.fixture
def stock(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the command writes without the plugin."""
    file = tmp_path / "stock.safetensors"
    command = ["--model", model, "--prompt", PROMPT, "--prompt-cache-file", str(file)]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [NAME, *command])
        fresh_module().main()
    return file


def same_file(one: Path, other: Path) -> bool:
    """Whether two files hold the same tensors, to the bit, and the same metadata."""
    (tensors, metadata), (others, other_metadata) = (
        mx.load(str(file), return_metadata=True) for file in (one, other)
    )
    return (
        metadata == other_metadata
        and tensors.keys() == others.keys()
        and all(
            tensor.dtype == others[name].dtype and bool(mx.array_equal(tensor, others[name]))
            for name, tensor in tensors.items()
        )
    )


def refusal(
    write: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
    **variables: str,
) -> str:
    """The line that ends the command, with exit code 2 and after no more than the usage."""
    with pytest.raises(SystemExit) as stop:
        write(*arguments, model="no/such/model", **variables)
    assert stop.value.code == 2
    usage, _, last = capsys.readouterr().err.strip().rpartition("\n")
    assert usage.startswith("usage: ") and "Traceback" not in usage and "error" not in usage
    return last


# The file


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kv-cache-bits", "4"], "codec rotated, 4 bits"),
        (["--kv-cache-quantization"], "codec rotated, 8 bits"),
        (["--kv-cache-codec", "affine"], "codec affine, 8 bits"),
        (["--kv-cache-value-bits", "2", "--kv-cache-group-size", "32"], "codec rotated"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_flag_makes_the_file_smaller(
    write: Callable[..., Path],
    stock: Path,
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has our mark, upstream's metadata, and is told in a line of the output."""
    capsys.readouterr()
    file = write(*arguments)
    output = capsys.readouterr()
    (line,) = [line for line in output.out.splitlines() if line.startswith("Saved quantized: ")]
    assert said in line and not output.err
    assert is_marked(str(file)) and not is_marked(str(stock))
    assert file.stat().st_size < 0.45 * stock.stat().st_size
    caches, metadata = load(str(file))
    expected, stocks_metadata = load_prompt_cache(str(stock), return_metadata=True)
    assert metadata == stocks_metadata
    assert [(type(cache), cache.offset) for cache in caches] == [
        (type(cache), cache.offset) for cache in expected
    ]
    after, before = map(
        int, re.findall(r"([\d,]+) bytes instead of ([\d,]+)", line.replace(",", ""))[0]
    )
    assert after < 0.45 * before and before <= sum(cache.nbytes for cache in expected)


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ([], {}),
        (["--kv-cache-codec", "raw"], {}),
        ([], {"MLX_LM_KV_CACHE_QUANTIZATION": "0"}),
    ],
    ids=["nothing", "raw", "a switch turned off"],
)
def test_stocks_file(
    write: Callable[..., Path],
    stock: Path,
    arguments: list[str],
    variables: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without bits it is what upstream writes, and nothing is said of it."""
    capsys.readouterr()
    assert same_file(write(*arguments, **variables), stock)
    output = capsys.readouterr()
    assert "quantized" not in output.out and not output.err


@pytest.mark.parametrize("name", ["MLX_LM_KV_CACHE_BITS", "MLX_LM_CACHE_MEMORY_MB"])
@pytest.mark.parametrize("value", ["4", "junk"])
def test_variables_are_for_others(
    write: Callable[..., Path], stock: Path, name: str, value: str
) -> None:
    """Right or wrong: a script may read the file with upstream's own function."""
    assert same_file(write(**{name: value}), stock)
    by_flag = write("--kv-cache-bits", "8", name="flag")
    assert same_file(write("--kv-cache-bits", "8", name="both", **{name: value}), by_flag)


@pytest.mark.skipif(
    reason_to_skip("deepseek_v41") is not None, reason="a model that this mlx-lm does not have"
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the tokenizer, which does not know it
def test_what_has_no_quantized_form(
    write: Callable[..., Path],
    family_folder: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Is saved as ever, and a line on stderr says so: no work is lost."""
    file = write("--kv-cache-bits", "4", model=str(family_folder("deepseek_v41")))
    output = capsys.readouterr()
    (line,) = [line for line in output.err.splitlines() if "mlx_lm_kvcache_plugin" in line]
    assert line.startswith("mlx_lm_kvcache_plugin: saved in full precision: ")
    assert "Saved quantized" not in output.out
    assert not is_marked(str(file))
    loaded: Any = mx.load(str(file), return_metadata=True)
    assert loaded[0] and loaded[1]["0.model"] == str(family_folder("deepseek_v41"))


def test_upstreams_own_quantization(write: Callable[..., Path]) -> None:
    """Beside ours: what comes back has the precision that its bits left, in plain caches."""
    file = write("--kv-cache-bits", "8", "--kv-bits", "8", "--quantized-kv-start", "0")
    caches, _ = load(str(file))
    assert {type(cache).__name__ for cache in caches} == {"KVCache"}
    assert len({cache.offset for cache in caches}) == 1 and caches[0].offset >= 300


def test_a_window_that_the_command_sets(write: Callable[..., Path], tmp_path: Path) -> None:
    """With `--max-kv-size` the caches rotate, and so do those that come back."""
    model = str(models.minicpm(tmp_path / "minicpm"))
    caches, _ = load(str(write("--kv-cache-bits", "8", "--max-kv-size", "64", model=model)))
    assert {(type(cache).__name__, cache.max_size, cache.keep) for cache in caches} == {
        ("RotatingKVCache", 64, 4)
    }


# The flags


def test_the_help_has_the_flags_that_mean_something(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that say how the file is encoded, and none of a memory that it does not have."""
    with pytest.raises(SystemExit) as stop:
        write("--help")
    assert stop.value.code == 0
    _, group, rest = capsys.readouterr().out.partition(GROUP)
    assert group
    shown = set(re.findall(r"^ +(--[a-z-]+)", rest, re.MULTILINE))
    assert shown == set(OURS) == {FLAGS[name] for name in ENCODING}


@pytest.mark.parametrize("flag", sorted({option.flag for option in OPTIONS} - set(OURS)))
def test_other_flags_are_unknown(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """As they are to stock."""
    assert f"unrecognized arguments: {flag}" in refusal(write, capsys, flag, "100")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--kv-cache-bits", "7"),
        ("--kv-cache-value-bits", "four"),
        ("--kv-cache-group-size", "7"),
        ("--kv-cache-codec", "zip"),
    ],
)
def test_a_wrong_value_is_refused(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    """In one line that names the flag, before a model is loaded."""
    line = refusal(write, capsys, flag, value)
    assert f"{flag}: " in line and value in line


def test_contradictions_are_refused(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(write, capsys, "--kv-cache-codec", "raw", "--kv-cache-bits", "4")
    assert "--kv-cache-codec" in line and "--kv-cache-bits" in line


# The patch


@pytest.mark.parametrize("name", ["save_prompt_cache", "main", "setup_arg_parser", "argparse"])
def test_another_upstream_is_left_alone(name: str) -> None:
    """Where a name is missing that the patch relies on, it changes nothing and says so."""
    module = fresh_module()
    delattr(module, name)
    before = dict(vars(module))
    with pytest.raises(PatchRefused, match=name):
        cache_prompt.apply(module)
    patches.apply(module)
    assert patches.outcomes[NAME].startswith("refused: ")
    assert dict(vars(module)) == before


def test_a_main_that_saves_by_another_name_is_left_alone() -> None:
    """What the command would then write is not ours to say."""
    module = fresh_module()
    module.main = lambda: None
    with pytest.raises(PatchRefused):
        cache_prompt.apply(module)


# The real commands


def run(
    run_python: RunPython, *arguments: str, command: str = NAME, **variables: str
) -> CompletedProcess[str]:
    result = run_python(*arguments, command=command, HF_HUB_OFFLINE="1", **variables)
    assert "Traceback" not in result.stderr, result.stderr
    return result


@pytest.fixture(scope="module")
def file(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "ours.safetensors"


def caching(model: str, file: Path) -> list[str]:
    return ["--model", model, "--prompt", PROMPT, "--prompt-cache-file", str(file)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("start", "command"),
    [
        ([], NAME),
        (["-m", "mlx_lm", "cache_prompt"], ""),
        pytest.param(["-m", NAME], "", marks=pytest.mark.slow),
    ],
    ids=["the command", "python -m mlx_lm", "python -m mlx_lm.cache_prompt"],
)
def test_the_real_command(
    run_python: RunPython,
    model: str,
    tmp_path: Path,
    start: list[str],
    command: str,
    write: Callable[..., Path],
) -> None:
    """However it is started it writes what this process would, and says so."""
    file = tmp_path / "real.safetensors"
    arguments = [*caching(model, file), "--kv-cache-bits", "4"]
    result = run(run_python, *start, *arguments, command=command)
    assert result.returncode == 0
    assert "Saved quantized: codec rotated, 4 bits: " in result.stdout
    assert not result.stderr
    assert same_file(file, write("--kv-cache-bits", "4"))


@pytest.mark.usefixtures("installed")
def test_the_real_command_refuses(run_python: RunPython, tmp_path: Path) -> None:
    """Exit code 2 and one clear line, though the model does not exist."""
    arguments = caching("no/such/model", tmp_path / "none")
    result = run(run_python, *arguments, "--kv-cache-bits", "7")
    assert result.returncode == 2 and not result.stdout
    assert "--kv-cache-bits: 7 is not one of" in result.stderr.splitlines()[-1]


@pytest.mark.usefixtures("installed")
def test_the_real_command_beside_a_variable(
    run_python: RunPython, model: str, tmp_path: Path, write: Callable[..., Path]
) -> None:
    """Which switches on the store that it generates over, and changes nothing in the file."""
    file = tmp_path / "real.safetensors"
    result = run(run_python, *caching(model, file), MLX_LM_KV_CACHE_BITS="4")
    assert result.returncode == 0 and not result.stderr
    assert same_file(file, write())


def answer_of(result: CompletedProcess[str]) -> str:
    """What was generated."""
    assert result.returncode == 0, result.stderr
    _, answer, _ = result.stdout.split("==========\n")
    assert answer.strip()
    return answer


GENERATING = ("--prompt", " and then", "--max-tokens", "16", "--temp", "0")


@pytest.mark.usefixtures("installed")
def test_generate_reads_the_file(
    run_python: RunPython, write: Callable[..., Path], stock: Path
) -> None:
    """Without any flag of ours: the answer is that to stock's file, and so is the model's name."""
    answers = [
        answer_of(
            run(
                run_python, "--prompt-cache-file", str(file), *GENERATING, command="mlx_lm.generate"
            )
        )
        for file in (write("--kv-cache-bits", "8"), stock)
    ]
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("installed")
def test_generate_refuses_a_file_that_was_cut(
    run_python: RunPython, write: Callable[..., Path]
) -> None:
    """In one line that names it, before a model is loaded."""
    file = write("--kv-cache-bits", "8")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    result = run(
        run_python, "--prompt-cache-file", str(file), *GENERATING, command="mlx_lm.generate"
    )
    assert result.returncode == 2
    assert f"--prompt-cache-file: {file}" in result.stderr.splitlines()[-1]
