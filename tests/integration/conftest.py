"""Models and servers for the tests over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from tests import models
from tests.integration.local_server import LocalServer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a plain `KVCache` in all layers: 2,048 bytes a token."""
    return models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def loaded(model: Path) -> Any:
    """The same model for the test's own use."""
    loaded, _ = load_model(model)
    mx.eval(loaded.parameters())
    return loaded


@pytest.fixture(scope="session")
def light_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that takes long prompts in its stride."""
    folder = tmp_path_factory.mktemp("light")
    return models.llama(folder, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[LocalServer]:
    """A server that prefills everything: what it answers is right."""
    with LocalServer("--model", str(model), "--disable-prefix-cache") as server:
        yield server
