"""Statistics as servers give them: a busy one, one that was just started, and others."""

from __future__ import annotations

import random
from typing import Any

Stats = dict[str, Any]

MIB, GIB = 1 << 20, 1 << 30

REASONS = (
    "nothing stored",
    "other model",
    "diverged",
    "evicted",
    "below one token",
    "not restorable",
    "disabled",
    "error",
)
SYSTEM = "You are a careful assistant. Answer in plain words, and say so when you are not sure."
LLAMA, QWEN = "mlx-community/Llama-3.3-70B-Instruct-4bit", "mlx-community/Qwen3-8B-4bit"


def node(
    words: str | None, tokens: int, *children: Stats, label: str = "user", **others: Any
) -> Stats:
    """A run of the tree; its children end behind it."""
    below = [_moved(child, tokens) for child in children]
    return {
        "id": f"{label} {words}",
        "tokens": tokens,
        "end": tokens,
        "bytes": tokens * 81_920,
        "age_seconds": 4.2,
        "label": label,
        "kind": "blocks",
        "words": words,
        "children": below,
        **others,
    }


def tree(*nodes: Stats, model: str = LLAMA) -> Stats:
    """The statistics' part of that name, with all sequences below one model."""
    root = {"model": model, "is_loaded": True, "nodes": list(nodes)}
    shown = sum(_leaves(each) for each in nodes)
    return {"total": shown, "shown": shown, "roots": [root]}


def miss(age_seconds: float, prompt_tokens: int, hit_tokens: int, reason: str, text: str) -> Stats:
    """One of the last misses."""
    return {
        "age_seconds": age_seconds,
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "reason": reason,
        "token": hit_tokens,
        "cause": None,
        "text": text,
    }


def busy() -> Stats:
    """Two models, chats and an agent: every part of the page has something to show."""
    chat = node(
        "How do I rename a branch that I have pushed already?\nI use Git 2.51.",
        512,
        node("Rename it here, then push it under its new", 384, label="assistant"),
        node(
            "And how do the others get it?",
            37,
            label="user",
            kind="tail",
            age_seconds=260.0,
        ),
        age_seconds=4.2,
    )
    agents = [
        node(f"Task {n}: read the file and tell me what it does", 128 * n, age_seconds=60.0 * n)
        for n in range(1, 13)
    ]
    llama = node(SYSTEM, 1536, chat, *agents, label="system")
    qwen = node(
        "Übersetze den folgenden Text ins Englische: Die Sonne scheint, und",
        2048,
        node("", 0, kind="checkpoint", bytes=3 * MIB, age_seconds=5400.0),
        label="prompt",
        age_seconds=5400.0,
    )
    roots = [
        {"model": LLAMA, "is_loaded": True, "nodes": [llama]},
        {"model": QWEN, "is_loaded": False, "nodes": [qwen]},
    ]
    return {
        **_store(),
        **_traffic(),
        "sizing": {
            "limit_bytes": 4 * GIB,
            "hit_rate": 0.83,
            "prompt_tokens": 1_834_560,
            "scales": [
                {"scale": 0.5, "limit_bytes": 2 * GIB, "hit_rate": 0.71},
                {"scale": 2, "limit_bytes": 8 * GIB, "hit_rate": 0.91},
                {"scale": 4, "limit_bytes": 16 * GIB, "hit_rate": None},
            ],
            "text": "with 8 GiB instead of 4 GiB, 91% instead of 83%",
        },
        "sequences": {"total": 214, "shown": 100, "roots": roots},
    }


def with_disk() -> Stats:
    """A busy server with a disk tier."""
    disk = {
        "folder": "/Users/ada/Library/Caches/mlx_lm_kvcache_plugin/3f9a",
        "limit_bytes": 20 * GIB,
        "used_bytes": 7 * GIB,
        "restored_tokens": 92_416,
        "files_written": 1310,
        "bytes_written": 9 * GIB,
        "files_read": 240,
        "bytes_read": 1800 * MIB,
        "quarantined": 1,
        "evicted_files": 120,
        "evicted_bytes": 2 * GIB,
        "skipped": 3,
        "errors": 2,
    }
    return {**busy(), "disk": disk}


def without_text() -> Stats:
    """A busy server, as it answers other machines."""
    stats = busy()
    for root in stats["sequences"]["roots"]:
        for each in root["nodes"]:
            _silence(each)
    return {**stats, "shows_text": False}


def empty() -> Stats:
    """A server that was just started."""
    nothing = {"requests": 0, "prompt_tokens": 0, "hit_tokens": 0}
    sizing = {"limit_bytes": 4 * GIB, "hit_rate": None, "prompt_tokens": 0, "text": None}
    scales = [
        {"scale": scale, "limit_bytes": scale * 4 * GIB, "hit_rate": None} for scale in (2, 4)
    ]
    return {
        **_store(),
        **_traffic(),
        "uptime_seconds": 3.1,
        "memory": {**_store()["memory"], **_holding(0, 0, 0, 0, 0), "sequences": 0},
        "models": [],
        "hit_rate": {key: {**nothing, "rate": None} for key in ("1m", "5m", "15m", "start")},
        "history": [{"age_seconds": 10.0 * n, **nothing} for n in reversed(range(90))],
        "misses": {reason: {"requests": 0, "misses": 0, "tokens": 0} for reason in REASONS},
        "last_misses": [],
        "inserts": {"count": 0, "new_tokens": 0, "skipped": {}},
        "evictions": {"memory": {"blocks": 0, "bytes": 0}},
        "timing": {key: {"count": 0, "seconds": 0.0} for key in ("decode", "encode", "restore")},
        "sizing": {**sizing, "scales": scales},
        "sequences": {"total": 0, "shown": 0, "roots": []},
    }


def disabled() -> Stats:
    """A server with --disable-prefix-cache."""
    memory = {**empty()["memory"], "limit_bytes": 0}
    return {**empty(), "enabled": False, "memory": memory}


def trouble() -> Stats:
    """What differs where a server is short of memory, and has failed."""
    return {
        "memory": {**_store()["memory"], "is_short": True},
        "errors": {"fetch": 2, "insert": 1},
        "last_error": "fetch: CodecError: the record is of another shape: (8, 128), not (8, 64)",
    }


def _store() -> Stats:
    used = _holding(1_331_000_000, 9_820, 23, 0, 1_258_400)
    llama, qwen = (
        _holding(1_100_000_000, 8_100, 20, 0, 1_038_000),
        _holding(231 * 10**6, 1_720, 3, 1, 220_400),
    )
    return {
        "version": "0.1.0",
        "time": 1764560000.0,
        "uptime_seconds": 9_400.5,
        "enabled": True,
        "shows_text": True,
        "settings": {
            "codec": "rotated",
            "key_bits": 4,
            "value_bits": 4,
            "group_size": 64,
            "block_tokens": 128,
        },
        "memory": {
            "limit_bytes": 4 * GIB,
            "origin": "a fixed limit",
            "is_short": False,
            "sequences": 214,
            **used,
        },
        "models": [
            {"model": LLAMA, "is_loaded": True, **llama},
            {"model": QWEN, "is_loaded": False, **qwen},
        ],
        "disk": None,
        "errors": {},
        "last_error": None,
    }


def _traffic() -> Stats:
    misses = {reason: {"requests": 0, "misses": 0, "tokens": 0} for reason in REASONS}
    misses["diverged"] = {"requests": 164, "misses": 0, "tokens": 188_416}
    misses["nothing stored"] = {"requests": 41, "misses": 41, "tokens": 88_320}
    misses["evicted"] = {"requests": 9, "misses": 2, "tokens": 34_944}
    misses["below one token"] = {"requests": 122, "misses": 0, "tokens": 122}
    return {
        "hit_rate": {
            "1m": _rate(7, 21_504, 19_968),
            "5m": _rate(31, 118_016, 103_424),
            "15m": _rate(88, 402_688, 340_992),
            "start": _rate(336, 1_834_560, 1_522_758),
        },
        "history": _history(),
        "misses": misses,
        "last_misses": [
            miss(3.2, 4_310, 1_536, "diverged", "diverged at token 1,536"),
            miss(48.0, 19_344, 0, "nothing stored", "nothing stored"),
            miss(262.0, 6_144, 4_096, "evicted", "evicted at token 4,096, over the memory limit"),
            *[
                miss(300.0 * n, 2_000 + 37 * n, 128 * n, "diverged", f"diverged at token {128 * n}")
                for n in range(2, 12)
            ],
        ],
        "inserts": {
            "count": 334,
            "new_tokens": 1_620_992,
            "skipped": {"no room": 2, "draft model": 0, "unknown layers": 0, "error": 0},
        },
        "evictions": {
            "memory": {"blocks": 2_410, "bytes": 326 * MIB},
            "count": {"blocks": 0, "bytes": 0},
            "pressure": {"blocks": 64, "bytes": 9 * MIB},
            "trim": {"blocks": 0, "bytes": 0},
            "replaced": {"blocks": 0, "bytes": 0},
            "cleared": {"blocks": 0, "bytes": 0},
        },
        "timing": {
            "decode": {"count": 295, "seconds": 11.8},
            "encode": {"count": 334, "seconds": 25.1},
            "restore": {"count": 31, "seconds": 4.4},
        },
    }


def _history() -> list[Stats]:
    chance = random.Random(7)
    history = []
    for place in range(90):
        requests = chance.choice([0, 0, 1, 1, 1, 2, 3]) if place % 30 > 4 else 0
        prompt_tokens = sum(chance.randrange(800, 6_000) for _ in range(requests))
        hit_tokens = int(prompt_tokens * chance.choice([0.0, 0.7, 0.85, 0.9, 0.95, 0.97]))
        history.append(
            {
                "age_seconds": 895.0 - 10 * place,
                "requests": requests,
                "prompt_tokens": prompt_tokens,
                "hit_tokens": hit_tokens,
            }
        )
    return history


def _rate(requests: int, prompt_tokens: int, hit_tokens: int) -> Stats:
    return {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "rate": hit_tokens / prompt_tokens,
    }


def _holding(used_bytes: int, blocks: int, tails: int, checkpoints: int, tokens: int) -> Stats:
    return {
        "used_bytes": used_bytes,
        "blocks": blocks,
        "tails": tails,
        "checkpoints": checkpoints,
        "tokens": tokens,
    }


def _moved(node: Stats, tokens: int) -> Stats:
    children = [_moved(child, tokens) for child in node["children"]]
    return {**node, "end": node["end"] + tokens, "children": children}


def _leaves(node: Stats) -> int:
    return sum(map(_leaves, node["children"])) or 1


def _silence(node: Stats) -> None:
    node["words"] = None
    for child in node["children"]:
        _silence(child)
