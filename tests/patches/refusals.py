"""Upstream modules of another shape: refused as they are."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_lm_kvcache_plugin import patches


def check_refusal(
    module: Any,
    change: tuple[str, Any, str],
    asked_for: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Apply the patch to a module that differs: the reason is told, and nothing is changed.

    Args:
        change: a name, what it is bound to (None: it is missing), and a part of the reason.
        asked_for: whether a variable of ours is set: only then stderr has a line.
    """
    name, value, reason = change
    if value is None:
        delattr(module, name)
    else:
        setattr(module, name, value)
    if asked_for:
        monkeypatch.setenv("MLX_LM_KV_CACHE_BITS", "4")
    before = dict(vars(module))
    patches.apply(module)
    assert vars(module) == before
    outcome, upstream = patches.outcomes[module.__name__], module.__name__
    assert outcome.startswith("refused: ") and reason in outcome
    told = outcome.removeprefix("refused: ")
    expected = f"mlx_lm_kvcache_plugin: {upstream} was not patched: {told}\n"
    assert capsys.readouterr().err == (expected if asked_for else "")
