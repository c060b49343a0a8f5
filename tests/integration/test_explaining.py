"""What `POST /v1/cache/explain` says of a request: what the request then gets, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.store.blocks import Block
from tests import models
from tests.integration.clients import MODES, Client
from tests.integration.local_server import LocalServer
from tests.integration.test_restart import slow
from tests.integration.test_switching import adapter
from tests.models import prompt

TEMPLATE = (
    "{% if mood is defined %}<|system|>{{ mood }}<|end|>{% endif %}"
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}" + models.CHAT_TEMPLATE
)
"""One that says what tools there are, and takes an argument."""

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": prompt("You are", 200)}
TEXT = prompt("A text that is known", 300)
Body = dict[str, Any]


def says(text: str, tokens: int = 60) -> dict[str, str]:
    return {"role": "user", "content": prompt(text, tokens)}


REQUESTS: dict[str, Body] = {
    "chat": {"messages": [SYSTEM, says("Hello")]},
    "the same again": {"messages": [SYSTEM, says("Hello")]},
    "another chat": {"messages": [SYSTEM, says("Who is there")]},
    "a longer chat": {
        "messages": [SYSTEM, says("Hello"), {"role": "assistant", "content": "Hi"}, says("Well")]
    },
    "with tools": {"messages": [SYSTEM, says("Look")], "tools": TOOLS},
    "with tools again": {"messages": [SYSTEM, says("Look up")], "tools": TOOLS},
    "with no tools": {"messages": [SYSTEM, says("Look")], "tools": []},
    "in a mood": {"messages": [SYSTEM, says("So")], "chat_template_kwargs": {"mood": "sad"}},
    "in that mood": {"messages": [SYSTEM, says("Oh")], "chat_template_kwargs": {"mood": "sad"}},
    "in another": {"messages": [SYSTEM, says("Oh")], "chat_template_kwargs": {"mood": "sane"}},
    "in parts": {
        "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    },
    "with a call": {
        "messages": [
            SYSTEM,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "look_up", "arguments": '{"a": 1}'}}],
            },
            says("And"),
        ]
    },
    "text": {"prompt": TEXT},
    "the same text": {"prompt": TEXT},
    "left in the middle": {"prompt": TEXT[:150] + "!" * 40},
    "left at a block": {"prompt": TEXT[:128] + "!" * 40},
    "cut short": {"prompt": TEXT[:100]},
    "another text": {"prompt": prompt("What else", 40)},
    "one token": {"prompt": "A"},
    "a text beside messages": {"prompt": "x", "messages": [SYSTEM, says("Hello again")]},
}
"""Each is explained, and then asked; what came before it is stored."""


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LocalServer]:
    """One that takes tools and moods."""
    arguments = ("--kv-cache-codec", "raw", "--chat-template", TEMPLATE)
    with LocalServer("--model", str(model), *arguments) as server:
        yield server


def usage(server: Client, body: Body) -> tuple[int, int]:
    """Ask for an answer: the tokens of the prompt, and those that were cached."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = server.request("POST", path, {"max_tokens": 1, **body})
    assert reply.status == 200
    used = reply.json["usage"]
    return used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"]


def explained(server: Client, body: Body) -> dict[str, Any]:
    reply = server.explain(body)
    assert reply.status == 200
    told: dict[str, Any] = reply.json
    return told


def without_time(value: Any) -> Any:
    """Statistics without what changes by itself."""
    if isinstance(value, dict):
        passing = ("time", "uptime_seconds", "age_seconds", "history", "1m", "5m", "15m")
        return {key: without_time(item) for key, item in value.items() if key not in passing}
    return list(map(without_time, value)) if isinstance(value, list) else value


def order(server: LocalServer) -> list[tuple[Block, float]]:
    """All nodes as they will be evicted, and when they were used."""
    return [(node, node.used_at) for node in server.cache.tree]


# What it says, and what becomes of it


@pytest.mark.parametrize("mode", ["batched", slow("sequential")])
def test_a_request_gets_what_was_explained(server: LocalServer, mode: str) -> None:
    """Chats with a system prompt, with tools, with arguments of the template; and texts."""
    server.delete()
    hits = {}
    for name, body in REQUESTS.items():
        server.settle()
        told = explained(server, body)
        assert (told["prompt_tokens"], told["hit_tokens"]) == usage(server, {**body, **MODES[mode]})
        assert told["on_disk_tokens"] == 0
        hits[name] = told["hit_tokens"]
    assert hits["chat"] == 0
    assert hits["the same text"] == len(TEXT) - 1
    assert (hits["left in the middle"], hits["left at a block"]) == (150, 128)
    assert hits["another chat"] == 203
    assert hits["with tools again"] > 203 > hits["with tools"]
    assert hits["in that mood"] > 203 > hits["in another"]


def test_it_says_why(server: LocalServer) -> None:
    """The reason, and as it is then counted."""
    server.delete()
    usage(server, {"prompt": TEXT})
    server.settle()
    for body, text in (
        ({"prompt": TEXT[:150] + "!" * 300}, "diverged at token 150"),
        ({"prompt": prompt("Else", 200)}, "diverged at token 0"),
        ({"prompt": "A"}, "below one token"),
    ):
        stop = explained(server, body)["stop"]
        assert stop["text"] == text
        usage(server, body)
        server.settle()
        (last, *_) = server.stats()["last_misses"]
        assert {name: last[name] for name in stop} == stop
    assert explained(server, {"prompt": TEXT})["stop"] is None


def test_both_texts_are_shown(server: LocalServer) -> None:
    """What the prompt and the nearest stored sequence share last, and how either goes on."""
    server.delete()
    usage(server, {"prompt": TEXT})
    server.settle()
    nearest = explained(server, {"prompt": TEXT[:150] + "AND SO ON"})["nearest"]
    assert nearest.pop("age_seconds") >= 0
    assert nearest == {
        "common_tokens": 150,
        "before": TEXT[118:150],
        "request": "AND SO ON",
        "stored": TEXT[150:182],
    }
    nearest = explained(server, {"prompt": "Elsewhere"})["nearest"]
    assert (nearest["common_tokens"], nearest["before"]) == (0, "")
    assert (nearest["request"], nearest["stored"]) == ("Elsewhere", TEXT[:32])
    nearest = explained(server, {"prompt": TEXT[:250]})["nearest"]
    assert (nearest["common_tokens"], nearest["request"]) == (250, "")
    assert nearest["stored"].startswith(TEXT[250:282])


def test_the_nearest_is_the_one_used_last(server: LocalServer) -> None:
    """Where several go on in other ways."""
    server.delete()
    for end in ("first", "second", "third"):
        usage(server, {"prompt": TEXT[:256] + prompt(end, 50)})
    usage(server, {"prompt": TEXT[:256] + prompt("second", 50)})
    server.settle()
    nearest = explained(server, {"prompt": TEXT[:256] + "!!"})["nearest"]
    assert (nearest["common_tokens"], nearest["stored"][:6]) == (256, "second")


def test_nothing_is_stored(server: LocalServer) -> None:
    """Then nothing is near."""
    server.delete()
    told = explained(server, {"prompt": ""})
    assert (told["prompt_tokens"], told["hit_tokens"], told["nearest"]) == (0, 0, None)
    assert told["stop"]["reason"] == "below one token"
    assert explained(server, {"prompt": prompt("New", 90)})["nearest"] is None


def test_the_model_may_be_named(model: Path, server: LocalServer) -> None:
    """As requests name it: by default, or by where it is."""
    body = {"prompt": TEXT}
    for name in ("default_model", str(model)):
        assert explained(server, {**body, "model": name})["model"] == str(model)
    assert server.explain({**body, "model": f"{model}/"}).status == 409
    assert str(model) in server.explain({**body, "model": "other"}).json["error"]


def test_the_adapter_of_the_command_line(model: Path, tmp_path: Path) -> None:
    """Is what a request without one gets, in whichever way this mlx-lm gives it to one."""
    path = str(adapter(tmp_path / "adapter", model, seed=1))
    arguments = ("--model", str(model), "--adapter-path", path, "--kv-cache-bits", "4")
    with LocalServer(*arguments) as server:
        for named in ({}, {"adapters": path}):
            usage(server, {"prompt": TEXT, **named})
            server.settle()
            assert explained(server, {"prompt": TEXT, **named})["hit_tokens"] == 299


# What it leaves as it was


def test_explaining_changes_nothing(server: LocalServer) -> None:
    """No figure, no order of eviction, no time of use."""
    server.delete()
    for body in REQUESTS.values():
        usage(server, body)
    server.settle()
    before = without_time(server.stats()), order(server), server.sequences()
    for body in REQUESTS.values():
        explained(server, body)
        explained(server, {**body, "prompt": "!" * 200})
    assert (without_time(server.stats()), order(server), server.sequences()) == before


def test_explaining_changes_nothing_on_disk(model: Path, tmp_path: Path) -> None:
    """No file is made, read or counted as used; nor is a broken one set aside, or counted."""
    arguments = ("--model", str(model), "--kv-cache-codec", "raw", "--kv-cache-dir", str(tmp_path))

    def files() -> dict[Path, tuple[int, int]]:
        found = [path for path in tmp_path.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}

    with LocalServer(*arguments) as server:
        usage(server, {"prompt": TEXT})
        server.settle()
    (tail,) = (path for path in tmp_path.rglob("*.safetensors") if "-128b-" not in path.name)
    tail.write_bytes(b"")
    with LocalServer(*arguments) as server:
        server.text("!")
        server.settle()
        assert server.tier.flush()
        before = without_time(server.stats()), order(server), files()
        for text in (TEXT, TEXT[:200], TEXT[:200] + "!", "!" * 300):
            explained(server, {"prompt": text})
        hit_tokens = explained(server, {"prompt": TEXT})["hit_tokens"]
        assert (without_time(server.stats()), order(server), files()) == before
        assert usage(server, {"prompt": TEXT}) == (300, hit_tokens)
        assert server.stats()["disk"]["quarantined"] == 1


def test_explaining_while_others_ask(server: LocalServer) -> None:
    """From several threads, beside requests: nobody is the worse for it."""
    server.delete()
    over = threading.Event()

    def explain_on() -> int:
        count = 0
        while not over.is_set():
            count += server.explain({"prompt": TEXT[: 50 + count % 200]}).status == 200
            count += server.explain({"messages": [SYSTEM, says("Hello")]}).status == 200
        return count

    explaining = [server._threads.submit(explain_on) for _ in range(2)]
    try:
        for turn in range(2):
            with server.held():
                asked = [server.start(f"{turn} {TEXT}{n}") for n in range(4)]
            assert all(len(each.result().text) == 8 for each in asked)
    finally:
        over.set()
    assert all(each.result() for each in explaining)
    assert server.is_alive() and server.stats()["errors"] == {}


# What is on disk


@pytest.mark.parametrize("family", ["llama", "gemma", slow("lfm")])
def test_what_would_be_read_from_disk(tmp_path: Path, family: str) -> None:
    """After a restart: found without being read, and read by the request that comes then."""
    folder = models.FAMILIES[family](tmp_path / "model")
    arguments = ("--model", str(folder), "--kv-cache-codec", "raw")
    disk = ("--kv-cache-dir", str(tmp_path / "disk"))
    chat = {"messages": [SYSTEM, says("Hello")]}
    wanted: list[Body] = [
        {"prompt": TEXT},
        chat,
        {"messages": [SYSTEM, says("Else")]},
        {"prompt": TEXT[:280] + "!!"},
        {"prompt": prompt("New", 90)},
    ]
    with LocalServer(*arguments, *disk) as server:
        for body in (chat, {"prompt": TEXT}):
            usage(server, body)
        server.settle()
    read = 0
    with LocalServer(*arguments, *disk) as server:
        server.wait_until(lambda: server.generator.model_provider.model_key is not None)
        server.settle()
        for body in wanted:
            told = explained(server, body)
            assert server.stats()["disk"]["restored_tokens"] == read
            assert (told["prompt_tokens"], told["hit_tokens"]) == usage(server, body)
            server.settle()
            before, read = read, server.stats()["disk"]["restored_tokens"]
            assert (read > before) == (told["on_disk_tokens"] > 0)
            assert explained(server, body)["on_disk_tokens"] == 0
        assert read >= 299


def test_half_of_it_is_in_memory(model: Path, tmp_path: Path) -> None:
    """What is on disk alone is told apart, to the token."""
    arguments = ("--model", str(model), "--kv-cache-codec", "raw", "--kv-cache-dir", str(tmp_path))
    with LocalServer(*arguments) as server:
        usage(server, {"prompt": TEXT})
        server.settle()
    with LocalServer(*arguments) as server:
        usage(server, {"prompt": TEXT[:128] + "!" * 10})
        server.settle()
        held = max(map(len, server.sequences()))
        told = explained(server, {"prompt": TEXT})
        assert held < 150
        assert (told["hit_tokens"], told["on_disk_tokens"]) == (299, 299 - 128)
        assert usage(server, {"prompt": TEXT}) == (300, 299)


@pytest.mark.parametrize("family", [slow("gemma"), "mamba"])
def test_a_layer_that_cannot_be_cut(tmp_path: Path, family: str) -> None:
    """More is in common than can be used, and that is said; up to a checkpoint all is a hit."""
    folder = models.FAMILIES[family](tmp_path)
    with LocalServer("--model", str(folder), "--kv-cache-codec", "raw") as server:
        usage(server, {"prompt": TEXT, "seed": 1})
        server.settle()
        for text, hit_tokens in ((TEXT, 299), (TEXT + "!", 299), (TEXT[:200] + "!" * 9, 0)):
            told = explained(server, {"prompt": text})
            assert told["hit_tokens"] == hit_tokens
            assert usage(server, {"prompt": text, "seed": 1})[1] == hit_tokens
        assert told["stop"]["text"] == "a layer is not restorable before token 200"
        assert told["nearest"]["common_tokens"] == 200
