"""The stock command and scripts of users, each in a process of its own, by flags and variables."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests import models
from tests.conftest import RunPython

pytestmark = pytest.mark.usefixtures("installed")

COMMANDS = {
    "mlx_lm.generate": ("mlx_lm.generate", ()),
    "mlx_lm generate": ("mlx_lm", ("generate",)),
    "python -m mlx_lm generate": ("", ("-m", "mlx_lm", "generate")),
    "python -m mlx_lm.generate": ("", ("-m", "mlx_lm.generate")),
}

GROUP = "KV cache (mlx_lm_kvcache_plugin):"

PROMPT = models.prompt("tell me", 150)

ARGUMENTS = ("--prompt", PROMPT, "--max-tokens", "12")

TOKENS = len(models.chat_tokens([{"role": "user", "content": PROMPT}]))

REUSED = f"Prefix cache: 0 of {TOKENS} prompt tokens reused"


@pytest.fixture
def run(run_python: RunPython) -> RunPython:
    """Run this Python, or a command that lies beside it, with nothing of ours but what is given."""
    return partial(run_python, HF_HUB_OFFLINE="1")


def answer_of(output: str) -> str:
    """What stands between upstream's two rulers."""
    return output.split("=" * 10)[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_way_to_generate_has_our_flags(run: RunPython, model: Path, name: str) -> None:
    """The same answer, and the line among the statistics."""
    command, arguments = COMMANDS[name]
    common = (*arguments, "--model", str(model), *ARGUMENTS)
    stock = run(*common, command=command)
    ours = run(*common, "--kv-cache-bits", "8", command=command)
    assert (stock.returncode, ours.returncode) == (0, 0), ours.stderr
    assert answer_of(ours.stdout) == answer_of(stock.stdout)
    assert ours.stdout.splitlines()[-1] == REUSED
    assert "Prefix cache" not in stock.stdout and stock.stderr == ours.stderr


def test_a_variable_does_the_same(run: RunPython, model: Path) -> None:
    """Unless a flag switches it off."""
    common = ("--model", str(model), *ARGUMENTS)
    options = {"command": "mlx_lm.generate", "MLX_LM_KV_CACHE_CODEC": "affine"}
    assert run(*common, **options).stdout.splitlines()[-1] == REUSED
    options = {"command": "mlx_lm.generate", "MLX_LM_CACHE_MEMORY_MB": "64"}
    off = run(*common, "--disable-prefix-cache", **options)
    assert off.returncode == 0 and "Prefix cache" not in off.stdout


@pytest.mark.parametrize("name", ["mlx_lm.generate", "python -m mlx_lm.generate"])
def test_each_help_shows_our_group_at_the_end(run: RunPython, name: str) -> None:
    command, arguments = COMMANDS[name]
    ours = run(*arguments, "--help", command=command)
    stock = run(*arguments, "--help", command=command, MLX_LM_KVCACHE_PLUGIN_DISABLE="1")
    before, group, options = ours.stdout.partition(GROUP)
    assert group and GROUP not in stock.stdout
    assert before.rstrip().endswith(stock.stdout.partition("options:")[2].rstrip())
    assert "--kv-cache-bits" in options and "[env: MLX_LM_KV_CACHE_BITS]" in options


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        ((), {"MLX_LM_KV_CACHE_BITS": "7"}, "environment variable MLX_LM_KV_CACHE_BITS: 7 is not"),
        (("--kv-cache-codec", "none"), {}, "--kv-cache-codec: there is no codec named 'none'"),
        (
            ("--kv-cache-bits", "8", "--disable-prefix-cache"),
            {},
            "--kv-cache-bits and --disable-prefix-cache contradict each other",
        ),
    ],
)
def test_a_wrong_flag_ends_the_command(
    run: RunPython, flags: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    """With exit code 2 and one clear line, before a model is looked for."""
    result = run("--model", "no/such/model", *flags, command="mlx_lm.generate", **variables)
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert "error: " in last and message in last and "Traceback" not in result.stderr


def test_a_prompt_cache_file_is_the_users(run: RunPython, model: Path, tmp_path: Path) -> None:
    """It is read as ever, nothing is looked up, and the file stays as it is."""
    file = tmp_path / "cache.safetensors"
    made = run(
        *("--model", str(model), "--prompt", PROMPT, "--prompt-cache-file", str(file)),
        command="mlx_lm.cache_prompt",
    )
    assert made.returncode == 0, made.stderr
    before = file.read_bytes()
    common = ("--prompt-cache-file", str(file), "--prompt", "and then?", "--max-tokens", "12")
    stock = run(*common, command="mlx_lm.generate")
    ours = run(*common, "--kv-cache-bits", "8", command="mlx_lm.generate")
    assert (stock.returncode, ours.returncode) == (0, 0), ours.stderr
    assert answer_of(ours.stdout) == answer_of(stock.stdout)
    assert "Prefix cache" not in ours.stdout and file.read_bytes() == before


SCRIPT = """
import sys
import mlx.core as mx
from mlx_lm import batch_generate, generate, load, stream_generate

model, tokenizer = load(sys.argv[1])
prompt = sys.argv[2]
for _ in range(2):
    for place, response in enumerate(stream_generate(model, tokenizer, prompt)):
        if place == 2:
            break
answers = [generate(model, tokenizer, prompt, verbose=True, max_tokens=12) for _ in range(2)]
tokens = tokenizer.encode(prompt)
answers += batch_generate(model, tokenizer, [tokens, tokens[:50]], max_tokens=12).texts
print("ANSWERS", answers)
"""


def test_a_script_that_knows_nothing_of_us(run: RunPython, model: Path, tmp_path: Path) -> None:
    """It answers as without the plugin, from what it computed before."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    arguments = (str(script), str(model), PROMPT)
    stock, ours = run(*arguments), run(*arguments, MLX_LM_KV_CACHE_CODEC="raw")
    assert (stock.returncode, ours.returncode) == (0, 0), ours.stderr
    assert ours.stdout.splitlines()[-1] == stock.stdout.splitlines()[-1]
    line = f"Prefix cache: {len(PROMPT) - 1} of {len(PROMPT)} prompt tokens reused"
    assert ours.stdout.splitlines().count(line) == 2
    assert "Prefix cache" not in stock.stdout and stock.stderr == ours.stderr


def test_a_wrong_variable_does_not_end_a_script(
    run: RunPython, model: Path, tmp_path: Path
) -> None:
    """One line on stderr, and it goes on without a store."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    result = run(str(script), str(model), PROMPT, MLX_LM_KV_CACHE_BITS="7")
    assert result.returncode == 0 and "Prefix cache" not in result.stdout
    assert result.stderr.splitlines() == [
        "mlx_lm_kvcache_plugin: nothing is reused: environment variable MLX_LM_KV_CACHE_BITS: "
        "7 is not one of 2, 3, 4, 5, 6, 8"
    ]


IDENTITY = """
import sys, mlx_lm, mlx_lm.server
module = sys.modules["mlx_lm.generate"]
names = ("generate_step", "speculative_generate_step", "generate", "batch_generate",
         "stream_generate", "BatchGenerator")
files = {getattr(module, name).__code__.co_filename for name in names if name != "BatchGenerator"}
print(files == {module.__file__}, module.BatchGenerator.__module__,
      mlx_lm.generate is module.generate, mlx_lm.server.BatchGenerator is module.BatchGenerator,
      *(name for name in sys.modules if name.startswith("mlx_lm_kvcache_plugin.patches.s")))
"""


def test_without_flags_and_variables_the_functions_are_upstreams(run: RunPython) -> None:
    """And what they would be replaced by is not even loaded by it; nor is the server's own name."""
    code = IDENTITY.replace(", mlx_lm.server\n", "\n").replace(
        "mlx_lm.server.BatchGenerator is module.BatchGenerator", "True"
    )
    result = run("-c", code)
    assert result.stdout.split()[:4] == ["True", "mlx_lm.generate", "True", "True"], result.stderr
    loaded = {name.rpartition(".")[2] for name in result.stdout.split()[4:]}
    assert not loaded & {"scripts", "steps"}


def test_with_a_variable_the_generator_of_batches_stays_upstreams(run: RunPython) -> None:
    """The server and others import it from there."""
    result = run("-c", IDENTITY, MLX_LM_KV_CACHE_BITS="8")
    assert result.stdout.split()[:3] == ["False", "mlx_lm.generate", "True"], result.stderr
