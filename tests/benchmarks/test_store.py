"""The benchmark of the stores: all are asked the same, and told of as what they did."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from benchmarks import store
from benchmarks.peers import Peer, evaluate, ours, stock, vllm_mlx
from benchmarks.samples import TINY
from benchmarks.stores import sequence

TOKENS = 300


def peers(make: Callable[..., Peer], *arguments: int) -> Peer:
    if make is vllm_mlx:
        pytest.importorskip("vllm_mlx")
    return make(*arguments)


@pytest.fixture(params=[(stock,), (ours, 8), (vllm_mlx, 8)], ids=lambda made: made[0].__name__)
def peer(request: pytest.FixtureRequest) -> Peer:
    """Each store, with one sequence in it."""
    filled = peers(*request.param)
    filled.insert(sequence(TOKENS), TINY.prompt_cache(TOKENS))
    return filled


@pytest.mark.parametrize("shared", [100, TOKENS])
def test_a_peer_hands_out_the_tokens_that_a_request_shares(peer: Peer, shared: int) -> None:
    """Within what 8 bits cost, and without a limit below which it hands out nothing."""
    caches, hit_tokens = peer.fetch(store.sharing(sequence(TOKENS), shared))
    evaluate(caches)
    (cache,), (original,) = caches, TINY.prompt_cache(TOKENS)
    assert hit_tokens == cache.offset == shared
    difference = mx.abs(cache.keys[..., :shared, :] - original.keys[..., :shared, :]).max()
    assert difference.item() < 0.1
    assert peer.nbytes > TOKENS * TINY.token_bytes // 2


def test_a_peer_that_hits_something_else_spoils_the_run(peer: Peer) -> None:
    with pytest.raises(AssertionError, match=f"{peer.name}: 100 tokens hit, of 200"):
        store.fetched(peer, store.sharing(sequence(TOKENS), 100), 200)


def test_a_ratio_is_that_of_each_round() -> None:
    """Not that of the medians: a slow moment of the machine slows down both."""
    row = store.ratio("what", {"a": [1, 20, 3], "b": [2, 80, 3]}, ("a", "b"), limit=0.4)
    assert (row.value, row.low, row.high, row.met) == (0.5, 0.25, 1, False)


def test_the_next_step_is_part_of_what_a_fetch_takes() -> None:
    """Upstream's caches make a copy of themselves to append to, stock's among them."""
    peer = stock()
    peer.insert(sequence(TOKENS), TINY.prompt_cache(TOKENS))
    case = store.Case(TINY, TOKENS)
    alone = store.extra_bytes(peer, case, None)
    assert store.extra_bytes(peer, case, store.next_step(TINY)) > alone + TOKENS * TINY.token_bytes


def test_the_figure_is_drawn_from_json() -> None:
    pytest.importorskip("matplotlib")
    milliseconds = {operation: dict.fromkeys(store.LINES, 1.5) for operation in ("insert", "fetch")}
    data = {"sizes": [{"tokens": n, "milliseconds": milliseconds} for n in (1024, 4096)]}
    figure = store.draw(data)
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == list(store.LINES)
        assert all(list(line.get_xdata()) == [1024, 4096] for line in axes.lines)
