"""The queue: who adds never waits, and who flushes does not wait for ever."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlx_lm_kvcache_plugin.disk.files import Record
from mlx_lm_kvcache_plugin.disk.tier import DiskTier, Offer, flush_at_exit
from mlx_lm_kvcache_plugin.disk.worker import Worker, awaited
from tests.disk.records import (
    HOME,
    LAYOUT,
    Disk,
    make_record,
    names_of,
    offers_of,
    open_tier,
    put,
    stored,
)


@contextmanager
def held_up(tier: DiskTier) -> Iterator[None]:
    """A record whose making takes until the block is left."""
    begun, may_go_on = threading.Event(), threading.Event()

    def make() -> Record | None:
        begun.set()
        may_go_on.wait(10)
        return None

    tier.offer(HOME, LAYOUT, [Offer(names_of("..")[0], make)])
    assert begun.wait(10)
    try:
        yield
    finally:
        may_go_on.set()


def test_a_full_queue_skips_and_never_blocks(tmp_path: Path) -> None:
    """Counted; what was queued before is written; afterwards there is room again."""
    with open_tier(tmp_path, queued_paths=3) as tier:
        with held_up(tier):
            begun = time.perf_counter()
            letters = [chr(97 + number) * 2 for number in range(10)]
            queued = [tier.offer(HOME, LAYOUT, offers_of(each)) for each in letters]
            assert time.perf_counter() - begun < 1
        assert queued == [True] * 3 + [False] * 7
        assert tier.counters.skipped == 7
        assert tier.flush(60)
        assert "".join(stored(tier, each) for each in letters) == "aabbcc" + "." * 14
        assert put(tier, "zz")


def test_long_paths_fill_the_queue_too(tmp_path: Path) -> None:
    """By their records; and what need not be offered can be known before."""
    with open_tier(tmp_path, queued_offers=4) as tier:
        with held_up(tier):
            queued = []
            for letters in ("aabbcc", "ddeeff", "gg"):
                assert tier.accepts == (len(queued) < 2)
                queued.append(tier.offer(HOME, LAYOUT, offers_of(letters)))
        assert queued == [True, True, False]
        assert tier.flush(60)
        assert tier.accepts and tier.counters.skipped == 1
        assert stored(tier, "aabbcc") + stored(tier, "ddeeff") == "aabbccddeeff"
    assert not tier.accepts


def test_flushing_takes_no_longer_than_allowed(tmp_path: Path) -> None:
    """False if the time was too short; true when all is written."""
    with open_tier(tmp_path) as tier:
        with held_up(tier):
            tier.offer(HOME, LAYOUT, offers_of("ab"))
            begun = time.perf_counter()
            assert not tier.flush(0.1)
            assert 0.09 < time.perf_counter() - begun < 2
        assert tier.flush(60)
        assert stored(tier, "ab") == "ab"


def test_a_closed_tier_reads_but_does_not_write(tmp_path: Path) -> None:
    """What was queued is written first; closing twice is closing once; its thread is gone."""
    others = set(threading.enumerate())
    with open_tier(tmp_path) as tier:
        tier.offer(HOME, LAYOUT, offers_of("ab"))
        tier.close()
        tier.close()
        assert not tier.offer(HOME, LAYOUT, offers_of("cd"))
        tier.forget(HOME, names_of("ab"))
        assert tier.flush(60)
        assert stored(tier, "ab") == "ab"
        assert tier.read(HOME, names_of("ab")[0])
    assert not threads_beside(others)


def threads_beside(others: set[threading.Thread]) -> set[threading.Thread]:
    """Those that are left once the ones that were told to end have had time to.

    Args:
        others: that ran before: tests of other files may have left some.
    """
    for _ in range(1000):
        if not set(threading.enumerate()) - others:
            break
        time.sleep(0.01)
    return set(threading.enumerate()) - others


@pytest.mark.parametrize("is_awaited", [False, True], ids=["", "awaited"])
def test_a_tier_that_nobody_holds_takes_its_thread_along(tmp_path: Path, is_awaited: bool) -> None:
    """But not before what was queued is written; also one that is to be flushed at the end."""
    others, others_awaited = set(threading.enumerate()), awaited()
    tier = DiskTier(tmp_path, 1 << 20, disk_usage=lambda _: Disk())
    if is_awaited:
        before = signal.getsignal(signal.SIGTERM)
        flush_at_exit(tier)
        signal.signal(signal.SIGTERM, before)
        assert set(awaited()) == {*others_awaited, tier.worker}
    tier.offer(HOME, LAYOUT, offers_of("ab"))
    gone, worker = weakref.ref(tier), tier.worker
    del tier
    gc.collect()
    assert gone() is None
    assert not threads_beside(others)
    assert worker not in awaited()
    with open_tier(tmp_path) as tier:
        assert stored(tier, "ab") == "ab"


def test_the_queue_holds_nothing_that_it_has_done() -> None:
    """Not even while it waits for the next job."""

    class Thing:
        def __call__(self) -> None: ...

    worker = Worker("test", 5, 5)
    thing = Thing()
    gone = weakref.ref(thing)
    worker.put(thing)
    del thing
    assert worker.flush(5)
    for _ in range(1000):  # the thread's frame ends just after the flush
        if gone() is None:
            break
        time.sleep(0.01)
    assert gone() is None
    worker.close(1)


def test_many_threads_may_read_and_offer_at_once(tmp_path: Path) -> None:
    """No error, and nothing but whole records."""
    failures: list[BaseException] = []

    def use(number: int) -> None:
        try:
            for turn in range(15):
                letters = chr(97 + (number + turn) % 5) * 4
                tier.offer(HOME, LAYOUT, offers_of(letters))
                for name in names_of(letters):
                    tokens = tier.tokens_of(HOME, name)
                    assert tokens in (None, make_record(letters[:2]).tokens)
                    tier.read(HOME, name)
                    tier.children(HOME, name.parent)
        except BaseException as error:
            failures.append(error)

    with open_tier(tmp_path) as tier:
        threads = [threading.Thread(target=use, args=[number]) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tier.flush(60)
        assert failures == []
        assert (tier.counters.errors, tier.counters.quarantined) == (0, 0)


def test_nothing_is_begun_while_it_is_held() -> None:
    """What runs is waited for, but not for ever; what comes meanwhile is done afterwards."""
    worker, done = Worker("test", 10, 10), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go_on.wait()
        done.append("slow")

    assert worker.put(slow)
    begun.wait()
    with worker.held(0.01):
        assert worker.put(lambda: done.append("next"))
        go_on.set()
        with worker.held(10):
            assert done == ["slow"]
        assert not worker.flush(0.05) and done == ["slow"]
    assert worker.flush(10) and done == ["slow", "next"]
    worker.close(1)


def test_whoever_holds_it_does_not_keep_it_from_ending() -> None:
    """What waits is lost then, as it is when time is short."""
    worker, done = Worker("test", 10, 10), list[str]()
    with worker.held(1):
        assert worker.put(lambda: done.append("lost"))
        worker.close(0.05)
    worker._thread.join(10)
    assert not worker._thread.is_alive() and not done
