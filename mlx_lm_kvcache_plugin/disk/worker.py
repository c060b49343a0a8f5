"""One thread and its queue: who adds never waits."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Job = Callable[[], None]

_running: set[Worker] = set()
"""Those whose thread has not ended; it holds them anyway."""


class Worker:
    """Does jobs one after the other on a daemon thread.

    Its lock can be taken again by the thread that has it: a signal handler may flush whatever the
    main thread was doing.

    Args:
        jobs: how many may wait.
        load: no further job is taken while those that wait have as much together.

    Attributes:
        is_awaited: whether the end of the process waits for what is queued.
    """

    def __init__(self, name: str, jobs: int, load: int) -> None:
        self._most_jobs = jobs
        self._most_load = load
        self.is_awaited = False
        self._reset()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def _reset(self) -> None:
        self._jobs: deque[tuple[Job, int]] = deque()
        self._load = 0
        self._changed = threading.Condition(threading.RLock())
        self._is_busy = False
        self._is_closed = False
        self._holders = 0

    @property
    def has_room(self) -> bool:
        """Whether a job would be taken now."""
        is_full = len(self._jobs) >= self._most_jobs or self._load >= self._most_load
        return not (self._is_closed or is_full)

    def put(self, job: Job, load: int = 0) -> bool:
        """Queue a job that raises nothing; False if the queue is full or closed."""
        with self._changed:
            if not self.has_room:
                return False
            self._jobs.append((job, load))
            self._load += load
            self._changed.notify_all()
        return True

    def flush(self, seconds: float) -> bool:
        """Wait until all that was queued is done; False if the time was too short."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._is_busy, seconds)

    @contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """Let the present job end, if it does in that time, and begin none inside."""
        with self._changed:
            self._holders += 1
            self._changed.wait_for(lambda: not self._is_busy, seconds)
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Take no more jobs, flush, and stop the thread behind its present job."""
        with self._changed:
            self._is_closed = True
            self.flush(seconds)
            self._jobs.clear()
            self._load = 0
            self._changed.notify_all()

    def retire(self) -> None:
        """Take no more jobs; the thread ends when those that wait are done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """In a forked child, where the thread is missing and the lock may be anybody's."""
        self._reset()
        self._is_closed = True

    def _run(self) -> None:
        try:
            while self._do_one():
                pass
        finally:
            _running.discard(self)

    def _do_one(self) -> bool:
        """Its own frame: a job that is done is not held while waiting for the next."""
        with self._changed:
            self._changed.wait_for(lambda: (self._jobs or self._is_closed) and not self._holders)
            if not self._jobs:
                return False
            job, load = self._jobs.popleft()
            self._load -= load
            self._is_busy = True
        try:
            job()
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
        return True


def awaited() -> list[Worker]:
    """The workers for which the end of the process waits."""
    return [worker for worker in list(_running) if worker.is_awaited]


def _abandon_all() -> None:
    for worker in list(_running):
        worker.abandon()
    _running.clear()


os.register_at_fork(after_in_child=_abandon_all)
