"""One thread and its queue: who adds never waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]


class Worker:
    """Does jobs one after the other on a daemon thread.

    Its lock can be taken again by the thread that has it: a signal handler may flush whatever the
    main thread was doing.

    Args:
        jobs: how many may wait.
    """

    def __init__(self, name: str, jobs: int) -> None:
        self._limit = jobs
        self._reset()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _reset(self) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._is_busy = False
        self._is_closed = False

    def put(self, job: Job) -> bool:
        """Queue a job that raises nothing; False if the queue is full or closed."""
        with self._changed:
            if self._is_closed or len(self._jobs) >= self._limit:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
        return True

    def flush(self, seconds: float) -> bool:
        """Wait until all that was queued is done; False if the time was too short."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._is_busy, seconds)

    def close(self, seconds: float) -> None:
        """Take no more jobs, flush, and stop the thread behind its present job."""
        with self._changed:
            self._is_closed = True
            self.flush(seconds)
            self._jobs.clear()
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
        while self._do_one():
            pass

    def _do_one(self) -> bool:
        """Its own frame: a job that is done is not held while waiting for the next."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if not self._jobs:
                return False
            job = self._jobs.popleft()
            self._is_busy = True
        try:
            job()
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
        return True
