"""The replay of traces: what each store hits is known by hand, and no store beats the optimum."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import hit_rate
from benchmarks.__main__ import main
from benchmarks.hit_rate import STORES, Store, draw
from benchmarks.replay.optimum import Optimum
from benchmarks.replay.ours import Ours
from benchmarks.replay.trace import HASH_TOKENS, Request, TraceError, read_trace
from benchmarks.replay.whole import Stock, VllmMlx
from benchmarks.samples import ModelShape
from benchmarks.stores import MODEL, make_store
from mlx_lm_kvcache_plugin.events import Evict
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from tests.events import Events

SHAPE = ModelShape(layers=1, heads=1, head_dim=64)
RAW = {"kv_cache_codec": "raw"}

Numbers = dict[tuple[str, int], int]


def request(text: str, numbers: Numbers, rest: int = HASH_TOKENS) -> Request:
    """A prompt with a hash id for each letter, the last one for `rest` tokens."""
    ends = [(text[: place + 1], HASH_TOKENS) for place in range(len(text) - 1)] + [(text, rest)]
    hash_ids = tuple(numbers.setdefault(end, len(numbers)) for end in ends)
    return Request(hash_ids, HASH_TOKENS * (len(text) - 1) + rest)


def prompts(*texts: str) -> list[Request]:
    """Prompts of whole hash ids."""
    numbers: Numbers = {}
    return [request(text, numbers) for text in texts]


def hits(store: Store, requests: Sequence[Request]) -> list[int]:
    """The hit tokens of each request."""
    return [store.serve(each) for each in requests]


def vllm_mlx(limit_bytes: int) -> Store:
    """Their store, where it is installed."""
    pytest.importorskip("vllm_mlx")
    return VllmMlx(SHAPE.token_bytes, limit_bytes)


def line(length: Any, hash_ids: Any) -> str:
    """A line of a trace."""
    return json.dumps({"timestamp": 0, "input_length": length, "hash_ids": hash_ids})


def written(folder: Path, *lines: str) -> Path:
    """A trace of these lines."""
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


# By hand

FOUR = 4 * HASH_TOKENS * SHAPE.token_bytes
"""Room for two prompts of two hash ids."""

FOUR_AND_INDEX = FOUR + 16 * 2000
"""The same with the index of their sixteen blocks, but without room for a 17th."""

TEXTS = ("ab", "cd", "ae", "ab", "cd")
"""Room is short when `ae` comes. It uses `ab`, stored first and `cd`, stored last, in part."""


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # ae takes ab's place, as the first one stored, then ab takes cd's.
        (lambda _: Stock(SHAPE.token_bytes, FOUR, 10), [0, 0, 512, 512, 0]),
        # One at a time: of ae, ab can use its beginning.
        (lambda _: Stock(SHAPE.token_bytes, FOUR, 1), [0, 0, 0, 512, 0]),
        # ae has used ab, so cd goes; ab is whole then, but for its last token.
        (lambda _: vllm_mlx(FOUR), [0, 0, 512, 1023, 0]),
        # b goes, as no prompt's beginning; then d does.
        (lambda _: Ours(SHAPE, RAW, FOUR_AND_INDEX), [0, 0, 512, 512, 512]),
        # All have room.
        (lambda _: Ours(SHAPE, {"kv_cache_bits": 8}, FOUR_AND_INDEX), [0, 0, 512, 1023, 1023]),
        # e is never used again.
        (lambda requests: Optimum(requests, 4 * HASH_TOKENS), [0, 0, 512, 1024, 1024]),
        # Half of d, whose use is the last, was given up for good.
        (lambda requests: Optimum(requests, 7 * HASH_TOKENS // 2), [0, 0, 512, 1024, 768]),
    ],
    ids=["stock", "stock-one", "vllm-mlx", "ours-raw", "ours-8", "optimum", "optimum-less"],
)
def test_what_each_store_hits(
    make: Callable[[Sequence[Request]], Store], expected: list[int]
) -> None:
    requests = prompts(*TEXTS)
    assert hits(make(requests), requests) == expected


def test_stock_holds_no_more_than_its_number_of_sequences() -> None:
    """With ten it has lost the first of eleven; without a limit it has not."""
    texts = [*"abcdefghijk", "a"]
    for size, last in ((10, 0), (None, 511)):
        assert hits(Stock(SHAPE.token_bytes, 1 << 40, size), prompts(*texts))[-1] == last


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stock(SHAPE.token_bytes, FOUR, 10),
        lambda: vllm_mlx(FOUR),
        lambda: Ours(SHAPE, RAW, FOUR_AND_INDEX),
    ],
    ids=["stock", "vllm-mlx", "ours"],
)
def test_all_but_the_last_token_is_a_hit_where_a_longer_prompt_is_stored(
    make: Callable[[], Store],
) -> None:
    assert hits(make(), prompts("abc", "ab")) == [0, 1023]


def test_the_whole_path_of_a_hit_counts_as_used() -> None:
    """It is ours that evicts least recently used blocks: `b` was used, `d` was not."""
    ours = Ours(SHAPE, RAW, FOUR_AND_INDEX)
    assert hits(ours, prompts("ab", "cd", "ab", "e", "ab", "cd")) == [0, 0, 1023, 0, 1023, 512]


# The bound

Drawn = list[tuple[str, bool]]
DRAWN: st.SearchStrategy[Drawn] = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=4), st.booleans()), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(DRAWN, st.integers(0, 12 * HASH_TOKENS))
def test_no_store_beats_the_optimum(drawn: Drawn, tokens: int) -> None:
    numbers: Numbers = {}
    requests = [request(text, numbers, 300 if part else HASH_TOKENS) for text, part in drawn]
    most = sum(hits(Optimum(requests, tokens), requests))
    n_bytes = tokens * SHAPE.token_bytes
    ours = Ours(SHAPE, RAW, n_bytes)
    stores: list[Store] = [Stock(SHAPE.token_bytes, n_bytes, size) for size in (2, None)]
    assert all(sum(hits(store, requests)) <= most for store in (*stores, ours))
    ours.cache.tree.check()


@settings(max_examples=60, deadline=None)
@given(DRAWN, st.integers(0, 4))
def test_vllm_mlx_does_not_beat_the_optimum(drawn: Drawn, room: int) -> None:
    requests = prompts(*(text for text, _ in drawn))
    most = sum(hits(Optimum(requests, room * HASH_TOKENS), requests))
    assert sum(hits(vllm_mlx(room * HASH_TOKENS * SHAPE.token_bytes), requests)) <= most


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=6), st.integers(0, 4))
def test_the_optimum_is_the_best_of_all_choices(texts: list[str], room: int) -> None:
    """After each request every choice of what was held or asked for is tried."""
    best = {frozenset[int](): 0}
    requests = prompts(*texts)
    for each in requests:
        following: dict[frozenset[int], int] = {}
        for held, tokens in best.items():
            tokens += HASH_TOKENS * len(held.intersection(each.hash_ids))
            at_hand = held.union(each.hash_ids)
            for count in range(min(room, len(at_hand)) + 1):
                for choice in map(frozenset, combinations(at_hand, count)):
                    following[choice] = max(tokens, following.get(choice, 0))
        best = following
    optimum = Optimum(requests, room * HASH_TOKENS)
    assert sum(hits(optimum, requests)) == max(best.values())


# Sizes and ids


@pytest.mark.parametrize("options", [RAW, {"kv_cache_bits": 8}, {"kv_cache_bits": 4}])
@pytest.mark.parametrize("length", [1, 100, 128, 300, 1025])
def test_what_is_held_counts_as_the_real_thing_does(options: dict[str, Any], length: int) -> None:
    shape = ModelShape(layers=2, heads=2, head_dim=64)
    hashes = -(-length // HASH_TOKENS)
    prompt = Request(tuple(range(hashes)), length)
    ours = Ours(shape, options, 1 << 40)
    ours.serve(prompt)
    face, real = make_store(**options)
    face.insert_cache(MODEL, prompt.token_ids().tolist(), shape.prompt_cache(length))
    assert ours.cache.tree.used_bytes == real.tree.used_bytes
    for node, other in zip(ours.cache.tree, real.tree, strict=True):
        assert (node.tokens, node.nbytes) == (other.tokens, other.nbytes)
        assert node.payload.encodings == other.payload.encodings


def test_the_store_is_sound_after_a_replay_that_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    listening = partial(PrefixCache, emit=events.append)
    monkeypatch.setattr("benchmarks.replay.ours.PrefixCache", listening)
    numbers: Numbers = {}
    texts = ["abc", "abd", "ae", "f", "abc", "gh", "ae"] * 3
    requests = [request(text, numbers, 200) for text in texts]
    ours = Ours(SHAPE, {"kv_cache_bits": 4}, FOUR // 4)
    assert sum(hits(ours, requests)) > 0
    assert events.of(Evict)
    ours.cache.tree.check()


@given(st.text("ab", min_size=1, max_size=4), st.text("ab", min_size=1, max_size=4))
def test_token_ids_agree_as_far_as_hash_ids_do(one: str, other: str) -> None:
    numbers: Numbers = {}
    first, second = request(one, numbers), request(other, numbers, 300)
    pairs = zip(first.hash_ids, second.hash_ids, strict=False)
    same = sum(one == other for one, other in pairs)
    ids = [each.token_ids() for each in (first, second)]
    length = min(map(len, ids))
    agree = ids[0][:length] == ids[1][:length]
    assert [len(each) for each in ids] == [first.tokens, second.tokens]
    assert agree[: same * HASH_TOKENS].all()
    assert not agree[same * HASH_TOKENS :].any()
    assert len(np.unique(ids[0])) == first.tokens


# Traces


def test_a_trace_is_read_in_order_and_as_far_as_asked(tmp_path: Path) -> None:
    path = written(tmp_path, line(600, [7, -9]), line(1024, [7, 10**30]), line(3, [1]))
    assert read_trace(path, 2) == [Request((0, 1), 600), Request((0, 2), 1024)]
    assert len(read_trace(path)) == 3


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("{", "not JSON"),
        ("\xff", "not JSON"),
        ("", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"input_length": 5}', "hash_ids missing"),
        ("{}", "input_length and hash_ids missing"),
        (line(0, []), "input_length is 0"),
        (line("5", [1]), "input_length is '5'"),
        (line(5, "1"), "hash_ids is not a list of numbers"),
        (line(5, ["1"]), "hash_ids is not a list of numbers"),
        (line(513, [1]), "1 hash_ids for 513 tokens, not 2"),
        (line(1024, [8, 2]), "number 2 of its hash_ids stood for another prefix"),
        (line(600, [1, 2]), "number 2 of its hash_ids stood for another prefix"),
        (line(1024, [1, 1]), "number 2 of its hash_ids stood for another prefix"),
    ],
)
def test_a_wrong_line_is_told_in_one(tmp_path: Path, wrong: str, told: str) -> None:
    path = written(tmp_path, line(1024, [1, 2]), wrong)
    with pytest.raises(SystemExit) as stopped:
        main(["hit_rate", str(path)])
    message = str(stopped.value)
    assert f"{path}, line 2: {told}" in message and "\n" not in message


def test_a_trace_of_nothing_and_no_trace_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(written(tmp_path))
    with pytest.raises(SystemExit, match=r"absent\.jsonl") as stopped:
        main(["hit_rate", str(tmp_path / "absent.jsonl")])
    assert "\n" not in str(stopped.value)


# The command


def test_the_table_tells_every_store_and_whether_the_target_is_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what comes is a repetition: more than the target; alone it is none."""
    pytest.importorskip("vllm_mlx")
    monkeypatch.setattr(hit_rate, "SHAPE", SHAPE)
    lines = [line(1000, [1, 2])] * 2
    assert main(["hit_rate", str(written(tmp_path, *lines)), "--quick"]) == 0
    table = capsys.readouterr().out
    assert all(f"tokens, {name} " in table for name in STORES)
    assert "met    hit rate in the bytes of 3,000,000 16-bit tokens, ours, 4 bits" in table
    assert main(["hit_rate", str(written(tmp_path, lines[0])), "--quick"]) == 1


def test_the_figure_has_a_line_for_each_store() -> None:
    pytest.importorskip("matplotlib")
    data = {
        "requests": 9,
        "prompt_tokens": 90,
        "budget_tokens": [10, 100],
        "hit_rates": {name: [0.1, 0.2] for name in STORES},
        "evicting_nothing": 0.3,
    }
    (axes,) = draw(data).axes
    drawn = {each.get_label(): list(each.get_ydata()) for each in axes.get_lines()}
    assert drawn == data["hit_rates"] | {"nothing evicted": [0.3, 0.3]}
