"""Ranks that compute one model together, of which one can keep half as much as the other."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.server import ResponseGenerator

from tests import families, models
from tests.integration.clients import Answer, Client, same_answer
from tests.integration.local_server import LocalServer
from tests.integration.stock_server import StockServer
from tests.integration.two_ranks import TwoRanks, write_index
from tests.models import prompt

CLIENTS = 3

STORE = ("--kv-cache-codec", "raw")
SMALL, SMALLER = ("--cache-memory-mb", "2"), ("--cache-memory-mb", "1")

# mlx-lm 0.31 computes a request that has a seed on another stream than the one that its ranks talk
# on. Without a GPU both carry collectives, and these can overtake each other: stock hangs as well.
HAS_ONE_STREAM = "stream" in inspect.signature(ResponseGenerator._serve_single).parameters

SPREAD_WRONGLY_BEFORE_0_32 = {"qwen3_5"}
"""Which stock answers wrongly from more than one rank."""


@dataclass(frozen=True)
class Case:
    """A model, and how it is spread.

    Attributes:
        family: a configuration of tests/families; "" for the model of most tests here.
        options: of upstream's command.
    """

    ranks: int = 2
    family: str = ""
    options: tuple[str, ...] = ()

    @property
    def is_possible(self) -> bool:
        """Whether this mlx-lm can spread the model so."""
        if self.family in SPREAD_WRONGLY_BEFORE_0_32 and mlx_lm.__version__.startswith("0.31."):
            return False
        module = vars(import_module(f"mlx_lm.models.{self.family or 'llama'}"))
        return "--pipeline" not in self.options or "PipelineMixin" in module

    def build(self, folder: Path) -> Path:
        if not self.family:
            return models.llama(folder)
        return write_index(families.build(folder, self.family))


CASES = {
    "one rank": Case(ranks=1),
    "tensors": Case(),
    "tensors, windows": Case(family="ministral3"),
    "tensors, states": Case(family="qwen3_5"),
    "pipeline": Case(family="deepseek_v3", options=("--pipeline",)),
    "pipeline, windows": Case(family="ministral3", options=("--pipeline",)),
    "pipeline, states": Case(family="qwen3_5", options=("--pipeline",)),
}


@dataclass(frozen=True)
class Request:
    """What is asked for, a text or a chat's messages, and what is right."""

    asked: Any
    options: dict[str, Any]
    right: Answer


def ask(client: Client, asked: Any, options: dict[str, Any]) -> Answer:
    return (
        client.text(asked, **options) if isinstance(asked, str) else client.chat(asked, **options)
    )


def requests(cold: Client, chance: random.Random, count: int, seeds: bool) -> Iterator[Request]:
    """Chats that begin alike and grow, and texts that continue, leave or repeat others.

    Args:
        cold: knows what is right, since it keeps nothing.
        seeds: whether some have one, so that they are served one after the other.
    """
    chats = [[message("system", prompt(name, 150))] for name in "SSTT"]
    texts = [prompt(name, 300) for name in "abc"]
    for number in range(count):
        if chance.random() < 0.5:
            chat = chance.choice(chats)
            chat.append(message("user", prompt(f"{number}?", chance.choice([10, 200]))))
            asked: Any = list(chat)
        else:
            text = chance.choice(texts)
            asked = text[: chance.choice([len(text), chance.randint(1, len(text)), 128])]
            if chance.random() < 0.7:
                asked += prompt(f"{number}!", chance.randint(5, 200))
            texts.append(asked)
        options: dict[str, Any] = {"max_tokens": chance.choice([1, 8, 30])}
        if chance.random() < 0.3:
            options["stream"] = True
        right = ask(cold, asked, {**options, "seed": 1})
        if seeds and chance.random() < 0.3:
            options["seed"] = 1
        yield Request(asked, options, right)
        if not isinstance(asked, str):
            chat.append(message("assistant", right.text))
            if len(chat) > 6:
                del chat[1:]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def serve(case: Case, model: Path, folder: Path) -> AbstractContextManager[Client]:
    arguments = ("--model", str(model), *STORE, *case.options)
    if case.ranks == 1:
        return StockServer(folder / "log", *arguments, *SMALL)
    return TwoRanks(folder, *arguments, own=(SMALL, SMALLER))


@pytest.mark.filterwarnings("ignore:.*rope_scaling:FutureWarning")  # transformers on our settings
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 12) for name in ("one rank", "tensors", "tensors, windows", "pipeline, states")),
        *(pytest.param(name, 100, marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_every_answer_is_right(tmp_path: Path, installed: None, name: str, count: int) -> None:
    """All are answered, with the tokens of a server that keeps nothing.

    What the two ranks hold differs, and yet there are hits.
    """
    case, chance = CASES[name], random.Random(name)
    if not case.is_possible:
        pytest.skip("this mlx-lm cannot spread the model so")
    model = case.build(tmp_path / "model")
    seeds = case.ranks == 1 or HAS_ONE_STREAM
    with LocalServer("--model", str(model), "--disable-prefix-cache") as cold:
        script = list(requests(cold, chance, count, seeds))
    with serve(case, model, tmp_path) as server, ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda each: ask(server, each.asked, each.options), script))
        for answer, request in zip(answers, script, strict=True):
            assert same_answer(answer, request.right)
        assert sum(answer.cached_tokens or 0 for answer in answers) > 5 * count
        if isinstance(server, TwoRanks):
            assert server.is_running()
            assert server.sequences(0) != server.sequences(1)
            for rank in range(2):
                assert "prefix cache: codec raw" in server.output(rank)
                assert "Traceback" not in server.output(rank)
