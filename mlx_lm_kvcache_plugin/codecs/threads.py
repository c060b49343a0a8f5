"""Works through pieces: on all cores of a CPU, or one after the other on a GPU."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import mlx.core as mx

Job = TypeVar("Job")
Result = TypeVar("Result")

MOST_THREADS = 8
"""More would wait for memory, and for one another between two calls of numpy."""


def on_cpu() -> bool:
    """Whether MLX computes on a CPU here."""
    return bool(mx.default_device() == mx.Device(mx.cpu))


def map_pieces(work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
    """Yield what `work` makes of each job, evaluated and in order.

    On a CPU it runs in other threads, ahead of what was taken by a job for each of them: so the
    arrays of MLX in a job have to be evaluated. On a GPU it is one job ahead.
    """
    waiting: deque[Callable[[], Result]] = deque()
    start, ahead = (_in_thread, _thread_count()) if on_cpu() else (_on_device, 1)
    for job in jobs:
        waiting.append(start(work, job))
        if len(waiting) > ahead:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def _in_thread(work: Callable[[Job], Result], job: Job) -> Callable[[], Result]:
    def evaluated() -> Result:
        result = work(job)
        mx.eval(result)  # here: no other thread has the stream that it waits in
        return result

    return _threads().submit(evaluated).result


def _on_device(work: Callable[[Job], Result], job: Job) -> Callable[[], Result]:
    result = work(job)
    mx.async_eval(result)  # type: ignore[no-untyped-call]

    def evaluated() -> Result:
        mx.eval(result)
        return result

    return evaluated


def _thread_count() -> int:
    return min(MOST_THREADS, os.cpu_count() or 1)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_thread_count(), thread_name_prefix="kvcache-codec")
