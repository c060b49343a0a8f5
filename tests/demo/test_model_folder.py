"""Where the folders of converted models lie."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from demo import model_folder


def test_the_cache_folder_is_the_platforms_unless_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    own = Path("mlx_lm_kvcache_plugin", "demo")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert model_folder.default_cache_dir({}) == tmp_path / "Library" / "Caches" / own
    monkeypatch.setattr(sys, "platform", "linux")
    assert model_folder.default_cache_dir({}) == tmp_path / ".cache" / own
    assert model_folder.default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x") / own
    assert model_folder.default_cache_dir({"MLX_LM_KVCACHE_DEMO_DIR": "/y"}) == Path("/y")
