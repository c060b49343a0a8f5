"""Drops what is stored, and gives its memory back to the system."""

from __future__ import annotations

import ctypes
import sys
from contextlib import AbstractContextManager

from ..prefix_cache import PrefixCache


def clear(
    cache: PrefixCache, lock: AbstractContextManager[object], memory_alone: bool
) -> dict[str, int]:
    """Drop everything. Any thread may ask.

    Args:
        lock: held by whoever changes the cache.
        memory_alone: whether to leave what is on disk.

    Returns:
        Bytes of memory that were freed, and how many files were deleted.
    """
    freed_bytes = files = 0

    def clear_memory() -> None:
        nonlocal freed_bytes
        with lock:
            freed_bytes += cache.tree.used_bytes
            cache.clear()

    clear_memory()
    if cache.tier is not None and not memory_alone:
        # Nobody waits for it, so that a request may have restored something meanwhile: that goes
        # too, before it could be written anew.
        files = cache.tier.clear(then=clear_memory).files
    give_back_memory()
    return {"freed_bytes": freed_bytes, "deleted_files": files}


def give_back_memory() -> None:
    """Have malloc return what it keeps, where it can."""
    libc = ctypes.CDLL(None)
    if sys.platform == "darwin":
        libc.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
    elif hasattr(libc, "malloc_trim"):  # of glibc; musl has none, and keeps little
        libc.malloc_trim(ctypes.c_size_t(0))
