"""Tiny models, each built once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests import models

ModelFolder = Callable[[str], Path]

WIDER = {"lfm": {"hidden_size": 256, "block_dim": 256}}
"""Changes that make a model's heads so wide that codecs take them."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The folder of a tiny model, by its name in `tests.models`."""

    def build(name: str) -> Path:
        return models.FAMILIES[name](tmp_path_factory.mktemp(name), **WIDER.get(name, {}))

    return cache(build)
