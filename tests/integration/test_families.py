"""Layers of every kind on the real server: never wrong, never worse than stock's own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from transformers import PreTrainedTokenizerFast

from mlx_lm_kvcache_plugin.events import Hit
from mlx_lm_kvcache_plugin.patches.models_cache import leaves_of
from tests.families import ALONE_IN_A_BATCH, reason_to_skip
from tests.integration.clients import MODES, Answer, Client, same_answer
from tests.integration.local_server import LocalServer
from tests.models import WINDOW, chat_tokens, prompt

WINDOWS = {
    # Windows beside layers that see all tokens, one with attention sinks, and chunks.
    "gemma3_text": "2 layers: 1 window at 8 bits, 1 token-wise at 4 bits",
    "gpt_oss": "2 layers: 1 window at 8 bits, 1 token-wise at 4 bits",
    "llama4": "4 layers: 3 windows at 8 bits, 1 token-wise at 4 bits",
}
STATES = {
    # Recurrent layers, alone and beside attention.
    "mamba": "2 layers: 2 states raw",
    "lfm2": "2 layers: 1 state raw, 1 token-wise at 4 bits",
}
ROWS = {
    # Latent attention, and with it an indexer: two caches in one.
    "deepseek_v3": "2 layers: 2 token-wise at 4 bits",
    "deepseek_v32": "4 layers: 4 token-wise at 4 bits, groups of 32 for a width of 32",
}
LINES = {**WINDOWS, **STATES, **ROWS}
"""What the line at the start says of a model's layers."""

CLASSES = {
    "gemma3_text": {RotatingKVCache, KVCache},
    "gpt_oss": {RotatingKVCache, KVCache},
    "llama4": {ChunkedKVCache, KVCache},
    "mamba": {ArraysCache},
    "lfm2": {ArraysCache, KVCache},
    "deepseek_v3": {KVCache},
    "deepseek_v32": {KVCache},
}
"""Upstream's classes of cache objects, by the models that have them."""

AVAILABLE = [
    # Caches like those of another one here, and the same models are in test_every_model too.
    pytest.param(name, marks=pytest.mark.slow) if name in ("gpt_oss", "deepseek_v3") else name
    for name in LINES
    if reason_to_skip(name) is None
]

Servers = dict[str, LocalServer]
Folder = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def any_configuration() -> Iterator[None]:
    """Upstream's way to a tokenizer checks the configuration of models that it knows itself."""
    with mock.patch("mlx_lm.tokenizer_utils.AutoTokenizer", PreTrainedTokenizerFast):
        yield


@pytest.fixture(scope="module", params=AVAILABLE)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, family_folder: Folder) -> Path:
    return family_folder(family)


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[Servers]:
    """Ours, in full precision, stock's, and one that keeps nothing."""
    arguments = ("--model", str(folder))
    with (
        LocalServer(*arguments, "--kv-cache-codec", "raw") as ours,
        LocalServer(*arguments) as stock,
        LocalServer(*arguments, "--disable-prefix-cache") as none,
    ):
        yield {"ours": ours, "stock": stock, "none": none}
        assert ours.is_alive() and not ours.recorder.errors


def chats(server: Client, mode: str, length: int) -> list[Answer]:
    """Two chats with the same system prompt, of two turns each, then the first one goes on."""
    system = prompt(f"{mode} {length}", length)
    answers: list[Answer] = []
    turns: dict[str, list[dict[str, str]]] = {"one": [], "two": []}
    for chat in ("one", "one", "two", "two", "one"):
        messages = turns[chat] or [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt(f"{len(messages)} {chat}", length)})
        answers.append(server.chat(messages, **MODES[mode]))
        messages.append({"role": "assistant", "content": answers[-1].text})
        turns[chat] = messages
    return answers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [10, WINDOW + 3, 150])
def test_chats(servers: Servers, mode: str, length: int) -> None:
    """Answers are the cold ones; each hit is at least as long as stock's.

    A turn goes on where the one before it ended.
    """
    ours, stock, cold = (chats(server, mode, length) for server in servers.values())
    assert all(map(same_answer, ours, cold))
    for our_answer, stock_answer in zip(ours, stock, strict=True):
        assert our_answer.cached_tokens >= stock_answer.cached_tokens
    for before, after in ((0, 1), (2, 3), (1, 4)):
        assert ours[after].cached_tokens == ours[after].longest_hit > ours[before].prompt_tokens
    assert len({answer.text for answer in cold}) == 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_an_exact_hit(servers: Servers, mode: str, length: int) -> None:
    """The same text again and again, and with its answer behind it: stock dies of this.

    Shorter than a window, as long and longer.
    """
    text = prompt(f"{mode[0]}{length}"[:length], length)
    first = servers["ours"].text(text, **MODES[mode])
    for again in (text, text + first.text, text, text + first.text + "?"):
        answer = servers["ours"].text(again, **MODES[mode])
        assert same_answer(answer, servers["none"].text(again, **MODES[mode]))
        assert answer.cached_tokens <= answer.longest_hit
    assert answer.cached_tokens == length + 8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shared", [5, WINDOW + 2, 140])
def test_a_prompt_that_leaves_a_stored_one(
    servers: Servers, family: str, mode: str, shared: int
) -> None:
    """At a position that no state was kept for: right, whatever is reused.

    Where a window has been full, or a chunk was dropped, what it forgot cannot come back: a miss,
    and never a cache that was trimmed by less than it said. Rows are reused to the token.
    """
    text = prompt(f"{mode[0]}{shared} leaves", 200)
    for server in servers.values():
        server.text(text, **MODES[mode])
    other = text[:shared] + prompt("!", 30)
    ours, stock, cold = (server.text(other, **MODES[mode]) for server in servers.values())
    assert same_answer(ours, cold)
    assert ours.cached_tokens >= stock.cached_tokens
    if family in ROWS:
        assert ours.cached_tokens == shared
    elif RotatingKVCache in CLASSES[family]:
        assert ours.cached_tokens < 5  # of another prompt, short enough for the window


def test_another_message_resumes_where_the_system_prompt_ends(
    servers: Servers, family: str
) -> None:
    """What was stored at the end of the chat is of no use to it; at the system prompt's end it is.

    A batch stores one there: rows are shared to the token, and all else is of that position.
    """
    system = {"role": "system", "content": prompt("Be brief", 100)}
    one, two = ([system, {"role": "user", "content": prompt(name, 60)}] for name in ("I", "You"))
    for server in servers.values():
        server.chat(one)
    ours, _, cold = (server.chat(two) for server in servers.values())
    assert same_answer(ours, cold)
    assert ours.cached_tokens == len(chat_tokens([system]))  # the next turn is opened


def test_what_is_handed_back_is_upstreams_own(servers: Servers, family: str) -> None:
    """Cache objects of the very classes that the model makes, at the end of the hit."""
    server = servers["ours"]
    text = prompt("whose is it", 150)
    server.text(text)
    server.settle()
    provider = server.generator.model_provider
    tokens = [*text.encode(), 1]
    caches, rest = server.prompt_cache.fetch_nearest_cache(provider.model_key, tokens)
    leaves = [*leaves_of(caches)]
    hit = len(tokens) - len(rest)
    # A batch stores a prompt without its last token, and then with all of the answer.
    assert hit == (150 if family in ROWS else 149)
    assert all(leaf.offset == hit for leaf in leaves if not isinstance(leaf, ArraysCache))
    made = make_prompt_cache(provider.model)
    assert [type(cache) for cache in caches] == [type(cache) for cache in made]
    assert {type(leaf) for leaf in leaves} == CLASSES[family]
    assert (family == "deepseek_v32") is (type(caches[0]) is CacheList)


def test_how_it_is_kept(folder: Path, family: str) -> None:
    """The start line says it for each kind of layer, and hits are as long as in full precision.

    Rows are quantized as was asked for, windows at 8 bits, states not at all.
    """
    text = prompt("a", 600)
    nbytes = {}
    for codec in ("raw", "rotated"):
        arguments = ("--kv-cache-bits", "4") if codec == "rotated" else ("--kv-cache-codec", codec)
        with LocalServer("--model", str(folder), *arguments) as server:
            server.settle()
            (line,) = server.messages()
            assert f"; {LINES[family]}; " in line or codec == "raw"
            first = server.text(text, seed=1)
            answer = server.text(text + first.text + "?", seed=1)
            assert answer.cached_tokens == 608
            server.settle()
            nbytes[codec] = server.prompt_cache.nbytes
            assert not server.recorder.errors
    share = nbytes["rotated"] / nbytes["raw"]
    assert share == 1 if family == "mamba" else share < 0.6


def test_the_rows_of_a_long_prompt_are_shared(folder: Path, family: str) -> None:
    """Two prompts that part behind a checkpoint: what lies before it is stored once."""
    arguments = ("--model", str(folder), "--kv-cache-codec", "raw")
    with LocalServer(*arguments, "--kv-cache-checkpoint-tokens", "512") as server:
        held = []
        for name in "ab":
            server.text(prompt("shared", 512) + prompt(name, 20))
            server.settle()
            held.append(server.prompt_cache.nbytes)
        assert [hit.hit_tokens for hit in server.recorder.events.of(Hit)] == [512]
        assert family == "mamba" or held[1] - held[0] < held[0] / 2


def test_the_budget_holds_for_all_kinds(folder: Path) -> None:
    """Prompt after prompt, none of which fits beside many others."""
    arguments = ("--model", str(folder), "--prompt-cache-bytes", "800000")
    with LocalServer(*arguments, "--kv-cache-codec", "raw") as server:
        for name in "abcdefghijklmnop":
            server.text(prompt(name, 90), seed=1)
        server.settle()
        held = [insertion.held_bytes for insertion in server.watch.insertions]
        assert len(held) >= 16 and 0 < max(held) <= 800_000
        assert server.text(prompt("p", 90) + "?" * 10, seed=1).cached_tokens <= 98
        assert server.is_alive() and not server.recorder.errors


def test_requests_of_many_lengths_in_one_batch(servers: Servers, family: str) -> None:
    """Hits and misses side by side, shorter and longer than any window: each answer is its own."""
    if family in ALONE_IN_A_BATCH:
        pytest.skip(ALONE_IN_A_BATCH[family])
    texts = [prompt(f"batch {n}", n) for n in (8, WINDOW, 3 * WINDOW, 200)]
    server = servers["ours"]
    for text in texts[::2]:
        server.text(text)
    with server.held():
        asked = [server.start(text + "?", max_tokens=20) for text in texts]
        server.wait_until(lambda: server.generator.requests.qsize() == len(texts))
    for text, future in zip(texts, asked, strict=True):
        answer: Answer = future.result()
        assert same_answer(answer, servers["none"].text(text + "?", max_tokens=20))
