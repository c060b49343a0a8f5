"""Writing what is queued before the process ends, also when it is asked to by SIGTERM."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from functools import cache
from types import FrameType
from typing import Protocol

from .worker import Worker, awaited

CLOSING_SECONDS = 5.0
"""For all tiers together: who waits for a process to end waits no longer."""


class Flushable(Protocol):
    """What has something to finish."""

    @property
    def worker(self) -> Worker: ...


def flush_at_exit(tier: Flushable) -> None:
    """Write what a tier has queued when Python ends or SIGTERM comes, even if nobody holds it then.

    SIGTERM is left alone if somebody handles it already, or off the main thread, where no handler
    can be set. The exit status stays that of a process that SIGTERM ended.
    """
    tier.worker.is_awaited = True
    _register()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


@cache
def _register() -> None:
    atexit.register(_close_all)


def _close_all() -> None:
    end = time.monotonic() + CLOSING_SECONDS
    for worker in awaited():
        worker.close(max(0.0, end - time.monotonic()))


def _terminate(number: int, frame: FrameType | None) -> None:
    try:
        _close_all()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
