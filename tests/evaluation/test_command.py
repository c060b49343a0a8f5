"""`mlx_lm.kvcache evaluate`: what it prints and writes, and how it refuses what is of no use."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.__main__ import main
from mlx_lm_kvcache_plugin.evaluation import choices, command, engine, footprint
from mlx_lm_kvcache_plugin.evaluation.recommendation import CLOSE_KL, SMALL_KL
from mlx_lm_kvcache_plugin.evaluation.report import HEADINGS
from mlx_lm_kvcache_plugin.patches import models as patches_models
from mlx_lm_kvcache_plugin.plugins import Plugins

from .. import example_plugin

SHORT = ("--prefix-tokens", "256", "--scored-tokens", "16")


def evaluate(model: Path | str, *arguments: object) -> int:
    return main(["evaluate", "--model", str(model), *map(str, arguments)])


@pytest.fixture
def llama(model_folder) -> Path:
    return model_folder("llama")


@pytest.fixture
def passage(tmp_path: Path) -> Path:
    """A text that is long enough for one document."""
    path = tmp_path / "notes.txt"
    path.write_text("Something to read, again and again. " * 8, "utf-8")
    return path


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be loaded in this test."""
    monkeypatch.setattr(patches_models, "load", lambda name: pytest.fail("a model was loaded"))


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that was said."""
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == "" and line.startswith("mlx_lm.kvcache evaluate: ")
    return line.removeprefix("mlx_lm.kvcache evaluate: ")


def test_the_table_and_the_advice(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each default setting and one for rounding; a bar on stderr; flags to use."""
    assert evaluate(llama, *SHORT) == 0
    printed = capsys.readouterr()
    lines = [line.split("  ") for line in printed.out.splitlines()]
    table = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert table[0] == list(HEADINGS)
    assert [line[:2] for line in table[1:7]] == [
        *(["8", "rotated"], ["6", "rotated"], ["4", "rotated"], ["3", "rotated"]),
        *(["8", "affine"], ["4", "affine"]),
    ]
    assert table[7][:2] == ["-", "rounding"] and len(table[7]) == 6
    assert all(len(line) == len(HEADINGS) for line in table[:7])
    advice = [line for line in printed.out.splitlines() if line.startswith("For ")]
    assert len(advice) == 3
    assert "list: affine 4" in printed.err and "32/32" in printed.err


def test_json_and_the_table_tell_the_same(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To stdout it comes alone, and reads back; a file has the same beside the table."""
    chosen = (*SHORT, "--codec", "raw", "rotated", "--bits", "8", "5/4")
    assert evaluate(llama, *chosen, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    path = tmp_path / "found.json"
    assert evaluate(llama, *chosen, "--json", path) == 0
    assert json.loads(path.read_text("utf-8")) == found
    table = capsys.readouterr().out.splitlines()
    named = [(each["codec"], each["bits"], each["value_bits"]) for each in found["settings"]]
    assert named == [("raw", None, None), ("rotated", 8, 8), ("rotated", 5, 4)]
    for line, each in zip(table[1:4], found["settings"], strict=True):
        assert f"{each['kl']:.6f}" in line and f"{each['top1']:.1%}" in line
        assert f"{int((1 << 33) / each['bytes_per_token']):,}" in line
    for each in found["recommendations"]:
        assert f"For {each['purpose']}: {each['flags'] or 'no quantization'}" in table
    assert found["documents"][0] == {"name": "prose", "prefix_tokens": 256, "scored_tokens": 16}
    assert found["settings"][0]["kl"] == 0 and found["rounding"]["documents"] == 4


def test_a_text_of_the_users(llama: Path, tmp_path: Path, capsys) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("Something to read, again and again. " * 20, "utf-8")
    assert evaluate(llama, *SHORT, "--codec", "raw", "--text", path, "--json") == 0
    names = [each["name"] for each in json.loads(capsys.readouterr().out)["documents"]]
    assert names == ["notes.txt, token 0", "notes.txt, token 360"]


def test_a_codec_of_a_plugin(
    llama: Path, passage: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """By its name, like the built-in ones."""
    plugins = Plugins({})
    plugins.register(example_plugin, "example")
    for module in (choices, footprint):
        monkeypatch.setattr(module, "plugins", lambda: plugins)
    chosen = (*SHORT, "--text", passage, "--codec", "float8", "--bits", "8")
    assert evaluate(llama, *chosen, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["settings"]
    assert found["codec"] == "float8" and found["codec_bits_per_element"] == 8
    assert found["kl"] > 0


def test_a_figure(llama: Path, passage: Path, tmp_path: Path, capsys) -> None:
    """Drawn anew from the JSON it is the same; what is exact has no place on its scale."""
    pytest.importorskip("matplotlib")
    from mlx_lm_kvcache_plugin.evaluation.figure import draw

    path, saved = tmp_path / "figure.png", tmp_path / "found.json"
    chosen = (*SHORT, "--text", passage, "--codec", "raw", "rotated", "--bits", "8", "3")
    assert evaluate(llama, *chosen, "--plot", path, "--json", saved) == 0
    found = json.loads(saved.read_text("utf-8"))
    again = tmp_path / "again.png"
    draw(found).savefig(again)
    assert path.read_bytes() == again.read_bytes()
    labelled = [line.get_label() for line in draw(found).axes[0].lines if line.get_marker() == "o"]
    assert labelled == ["rotated"]
    draw(found | {"settings": found["settings"][:1]}).savefig(again)
    assert path.read_bytes() != again.read_bytes()


def test_a_figure_without_matplotlib(
    no_model: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert evaluate("model", "--plot", tmp_path / "x.svg") == 2
    assert refusal(capsys).endswith("pip install 'mlx-lm-kvcache-plugin[plot]'")


def test_a_figure_of_no_known_format(no_model: None, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    for name in ("x.txt", "x"):
        assert evaluate("model", "--plot", tmp_path / name) == 2
        assert "no such format; there are" in refusal(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bits", "7"], "--bits: 7 is not one of 2, 3, 4, 5, 6, 8"),
        (["--bits", "8", "5/7"], "--bits: 7 is not one of"),
        (["--bits", "8/"], "--bits: '' is not a whole number"),
        (["--codec", "rotated", "none"], "there is no codec named 'none'; there are rotated,"),
        (["--codec", " "], "--codec: the name of a codec is missing"),
        (["--group-size", "48"], "--group-size: 48 is not one of 32, 64, 128"),
        (["--prefix-tokens", "0"], "--prefix-tokens: 0 is not enough"),
        (["--prefix-tokens", "many"], "--prefix-tokens: 'many' is not a whole number"),
        (["--scored-tokens", "-1"], "--scored-tokens: -1 is not enough"),
        (["--text", "missing"], "--text missing: No such file or directory"),
        (["--text", "folder"], "--text folder: Is a directory"),
        (["--text", "empty"], "--text empty: there is no text in it"),
        (["--text", "latin"], "--text latin: not UTF-8 at byte 2"),
        (["--text", "short"], "--text short: it is too short, with 5 bytes for 1,280 tokens"),
        (["--json", "folder"], "--json folder: it is a folder"),
        (["--json", "missing/x.json"], "--json missing/x.json: there is no folder missing"),
        (["--plot", "missing/x.svg"], "--plot missing/x.svg: there is no folder missing"),
        (["--model", "./missing"], "--model ./missing: there is no such folder"),
        (["--model", "a/b/c"], "--model a/b/c: there is no such folder"),
        (["--model", "empty"], "--model empty: it is a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_of_no_use_is_told_before_a_model_is_loaded(
    arguments: list[str],
    words: str,
    no_model: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line, with exit status 2."""
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name, content in (("empty", b" \n"), ("latin", b"gr\xf6\xdfer"), ("short", b"short")):
        Path(name).write_bytes(content)
    assert evaluate("model", *arguments) == 2
    assert refusal(capsys).startswith(words)


def test_a_file_that_cannot_be_written(no_model: None, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert evaluate("model", "--json", tmp_path / "x.json") == 2
    assert refusal(capsys).endswith("x.json: it cannot be written")


def test_a_file_that_cannot_be_written_in_the_end(
    llama: Path, passage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The table is there by then."""

    def fill_the_disk(self: Path, *arguments: Any) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    chosen = (*SHORT, "--text", passage, "--bits", "8")
    assert evaluate(llama, *chosen, "--json", tmp_path / "x.json") == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("bits  codec")
    assert printed.err.splitlines()[-1].endswith("x.json: No space left on device")


def test_a_text_of_too_few_tokens(llama: Path, tmp_path: Path, capsys) -> None:
    """Which its bytes did not tell."""
    path = tmp_path / "text"
    path.write_text("<|end|>" * 200)
    assert evaluate(llama, *SHORT, "--text", path) == 2
    assert "it has 200 tokens, and 273 are needed: 256 of a prefix" in refusal(capsys)


def test_a_model_that_cannot_be_loaded(tmp_path: Path, capsys) -> None:
    """Whatever mlx-lm says of it comes to one line."""
    tmp_path.joinpath("config.json").write_text('{"model_type": "none"}')
    assert evaluate(tmp_path) == 2
    assert refusal(capsys).startswith(f"--model {tmp_path}: ")


def test_a_repository_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def load(name: str) -> None:
        raise RuntimeError(f"no repository {name}\n\nCheck your spelling.")

    monkeypatch.setattr(patches_models, "load", load)
    assert evaluate("nobody/nothing-4bit") == 2
    assert refusal(capsys) == (
        "--model nobody/nothing-4bit: no repository nobody/nothing-4bit Check your spelling."
    )


def test_an_interrupt_ends_it_cleanly(llama: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "score", interrupt)
    assert evaluate(llama, *SHORT) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "mlx_lm.kvcache evaluate: interrupted"


def test_the_users_variables_do_not_matter(
    llama: Path, passage: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """They are for the commands that use the cache."""
    monkeypatch.setenv("MLX_LM_KV_CACHE_BITS", "7")
    monkeypatch.setenv("MLX_LM_KV_CACHE_DIR", "/nowhere")
    assert evaluate(llama, *SHORT, "--text", passage, "--codec", "raw", "--json") == 0
    assert json.loads(capsys.readouterr().out)["settings"][0]["kl"] == 0


def test_help_tells_the_limits() -> None:
    assert f"at most {CLOSE_KL:g}" in " ".join(command.DESCRIPTION.split())
    assert f"at most {SMALL_KL:g}" in " ".join(command.DESCRIPTION.split())
