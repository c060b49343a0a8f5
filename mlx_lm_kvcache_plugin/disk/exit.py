"""Writing what is queued before the process ends, also when it is asked to by SIGTERM."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from types import FrameType
from typing import Protocol


class Closable(Protocol):
    """What has something to finish; `close` may be called twice, and takes a bounded time."""

    def close(self) -> None: ...


_open: set[Closable] = set()
"""Held on to: the cache may be gone before what it left to be written is."""


def flush_at_exit(tier: Closable) -> None:
    """Close a tier when Python ends or SIGTERM comes.

    SIGTERM is left alone if somebody handles it already, or off the main thread, where no handler
    can be set. The exit status stays that of a process that SIGTERM ended.
    """
    if not _open:
        atexit.register(_close_all)
    _open.add(tier)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _close_all() -> None:
    for tier in list(_open):
        tier.close()
    _open.clear()


def _terminate(number: int, frame: FrameType | None) -> None:
    try:
        _close_all()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
