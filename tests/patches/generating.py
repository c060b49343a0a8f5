"""Scripts that generate: upstream's module as it is, and with our patch over a store of its own."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx_lm  # noqa: F401  # whose `generate` is the function; the module is in `sys.modules`
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model, load_tokenizer

from mlx_lm_kvcache_plugin import patches
from mlx_lm_kvcache_plugin.events import Event, Hit, Insert
from mlx_lm_kvcache_plugin.patches import scripts
from mlx_lm_kvcache_plugin.plugins import hookimpl, plugins
from tests import models

NAME = "mlx_lm.generate"

PROMPT = list(models.prompt("once upon", 200).encode())

Step = tuple[int, np.ndarray]

LAYOUTS = ("llama", "gemma", "mamba", "lfm")
"""Plain, with windows, with states, and with both rows and states."""


@cache
def folder_of(name: str, root: Path) -> Path:
    return models.FAMILIES[name](root / name)


@cache
def tokenizer_of(folder: Path) -> Any:
    return load_tokenizer(folder)


def load(folder: Path) -> Any:
    model, _ = load_model(folder)
    return model


def fresh_module() -> Any:
    """`mlx_lm.generate`, freshly executed, not patched and not in `sys.modules`."""
    file = sys.modules[NAME].__file__
    assert file is not None
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Script:
    """A process of its own, as far as the plugin can tell.

    Attributes:
        module: upstream's, patched, the plugin switched on by variables.
        scripts: what the store is opened by; None without variables.
        events: of the store, in turn.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
        made: list[scripts.Scripts] = []

        class Scripts(scripts.Scripts):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                made.append(self)

        monkeypatch.setattr(sys, "argv", ["script.py"])
        with monkeypatch.context() as patch:
            patch.setattr(scripts, "Scripts", Scripts)
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            self.module = fresh_module()
            self.stock = {n: v for n, v in vars(self.module).items() if callable(v)}
            patches.apply(self.module)
        self.made = made
        self.events: list[Event] = []
        plugins().register(self, "recorder")

    @hookimpl
    def kvcache_event(self, event: Event) -> None:
        self.events.append(event)

    @property
    def scripts(self) -> scripts.Scripts:
        return self.made[-1]

    @property
    def hits(self) -> list[int]:
        """How many tokens each hit had."""
        return [event.hit_tokens for event in self.events if isinstance(event, Hit)]

    @property
    def inserts(self) -> list[int]:
        return [event.tokens for event in self.events if isinstance(event, Insert)]

    @property
    def last_hit(self) -> int:
        """How many tokens of the last prompt were a hit."""
        fetched = [event for event in self.events if not isinstance(event, Insert)]
        return fetched[-1].hit_tokens if isinstance(fetched[-1], Hit) else 0

    def check(self) -> None:
        """Audit the store."""
        face = self.scripts.face
        if face is not None and face.cache is not None:
            face.cache.tree.check()


def steps(module: Any, model: Any, prompt: Sequence[int], **options: Any) -> list[Step]:
    """What `generate_step` yields."""
    options = {"max_tokens": 12, **options}
    return [
        (int(token), np.array(logprobs.astype(mx.float32)))
        for token, logprobs in module.generate_step(mx.array(prompt), model, **options)
    ]


def assert_same(found: Sequence[Step], expected: Sequence[Step], error: float = 2e-3) -> None:
    """The same tokens, and the same logprobs but for the order of summation."""
    assert [token for token, *_ in found] == [token for token, *_ in expected]
    for mine, stocks in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine[1], stocks[1], atol=error)


@pytest.fixture
def interrupted() -> Iterator[Callable[[int, bool], None]]:
    """Makes the n-th call of a plain cache object from now on raise, before or after it.

    From outside: a method that was replaced would be another model in the eyes of the plugin.
    """

    def interrupt(place: int, after: bool) -> None:
        code, calls = KVCache.update_and_fetch.__code__, itertools.count(1)

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            if frame.f_code is code and event == ("return" if after else "call"):
                if next(calls) == place:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(profile)

    yield interrupt
    sys.setprofile(None)
