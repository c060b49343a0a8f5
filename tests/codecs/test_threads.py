"""Working through pieces: in order, in other threads on a CPU, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from mlx_lm_kvcache_plugin.codecs import threads
from mlx_lm_kvcache_plugin.codecs.threads import in_codec_thread, map_pieces


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways: that of a GPU works on a CPU too."""
    monkeypatch.setattr(threads, "on_cpu", lambda: request.param == "cpu")
    return str(request.param)


def test_results_come_in_order_and_evaluated() -> None:
    """However long each takes; another thread can use them."""

    def work(number: int) -> mx.array:
        time.sleep(0.001 * (7 - number % 7))
        return mx.full((3,), number) * 2

    found = list(map_pieces(work, range(20)))
    with ThreadPoolExecutor(1) as other:
        sums = other.submit(lambda: [sum(array.tolist()) for array in found]).result()
    assert sums == [6 * number for number in range(20)]
    assert list(map_pieces(work, [])) == []


def test_a_failure_comes_out_once_nothing_runs_any_more(device: str) -> None:
    """What the pieces look into belongs to the caller again: a model may write to it."""
    running: list[int] = []

    def work(number: int) -> int:
        running.append(number)
        time.sleep(0.02)
        running.remove(number)
        if number == 1:
            raise ValueError("piece 1")
        return number

    with pytest.raises(ValueError, match="piece 1"):
        list(map_pieces(work, range(100)))
    assert running == []


def test_who_stops_early_waits_for_what_runs() -> None:
    """A generator that is closed has nothing left to do."""
    running: list[int] = []

    def work(number: int) -> int:
        running.append(number)
        time.sleep(0.01)
        running.remove(number)
        return number

    pieces = map_pieces(work, range(100))
    assert next(pieces) == 0
    pieces.close()  # type: ignore[attr-defined]
    assert running == []


def test_its_own_threads_are_told_apart(device: str) -> None:
    """What must not wait for another thread that waits for this one has to know."""
    assert not in_codec_thread()
    assert set(map_pieces(lambda _: in_codec_thread(), range(8))) == {device == "cpu"}


def test_few_jobs_are_ahead() -> None:
    """So that little is needed beside the result."""
    begun: list[int] = []
    pieces = map_pieces(lambda number: begun.append(number) or number, range(100))
    next(pieces)
    assert len(begun) <= threads._thread_count() + 2


AT_EXIT = """
import atexit, threading, time
from mlx_lm_kvcache_plugin.codecs.threads import map_pieces

print(list(map_pieces(abs, range(4))))
atexit.register(lambda: print(list(map_pieces(abs, range(-3, 0)))))

def late():
    time.sleep(0.3)
    print(list(map_pieces(abs, range(-2, 0))))

threading.Thread(target=late).start()
"""


def test_it_works_while_the_interpreter_ends(device: str) -> None:
    """A script may store what it computed in a thread that outlives its last line, or at exit."""
    if device == "gpu":
        pytest.skip("there are no threads")
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split("\n") == ["[0, 1, 2, 3]", "[2, 1]", "[3, 2, 1]", ""]
