"""Works through pieces: on all cores of a CPU, or one after the other on a GPU."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import mlx.core as mx

from .base import on_cpu

Job = TypeVar("Job")
Result = TypeVar("Result")

MOST_THREADS = 8
"""More would wait for memory, and for one another between two calls of numpy."""


def map_pieces(work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
    """Yield what `work` makes of each job, evaluated and in order.

    On a CPU it runs in other threads, ahead of what was taken by a job for each of them: so the
    arrays of MLX in a job have to be evaluated. On a GPU it is one job ahead.
    """
    start, ahead = (_in_thread, _thread_count()) if on_cpu() else (_on_device, 1)
    waiting: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            waiting.append(start(work, job))
            if len(waiting) > ahead:
                yield _evaluated(waiting.popleft())
        while waiting:
            yield _evaluated(waiting.popleft())
    finally:  # whoever goes on without them may change what they look into
        for future in waiting:
            future.cancel()
        wait(waiting)


def in_codec_thread() -> bool:
    """Whether this is one of the threads that work for others, and must not wait for them."""
    return getattr(_local, "is_codec_thread", False)


def _in_thread(work: Callable[[Job], Result], job: Job) -> Future[Result]:
    def evaluated() -> Result:
        result = work(job)
        mx.eval(result)  # here: no other thread has the stream that it waits in
        return result

    try:
        return _threads().submit(evaluated)
    except RuntimeError:  # the interpreter is on its way out, and starts nothing any more
        return _done(evaluated())


def _on_device(work: Callable[[Job], Result], job: Job) -> Future[Result]:
    result = work(job)
    mx.async_eval(result)  # type: ignore[no-untyped-call]
    return _done(result)


def _done(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def _evaluated(future: Future[Result]) -> Result:
    result = future.result()
    mx.eval(result)
    return result


def _thread_count() -> int:
    can_tell = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1
    return min(MOST_THREADS, cores)


_local = threading.local()


def _mark() -> None:
    _local.is_codec_thread = True


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_thread_count(), "kvcache-codec", initializer=_mark)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of the threads
