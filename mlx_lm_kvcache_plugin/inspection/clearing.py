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
    freed_bytes, files = _clear_memory(cache, lock), 0
    if cache.tier is not None and not memory_alone:
        files = cache.tier.clear().files
        # Which takes a while without the lock: a request may have restored some of it.
        freed_bytes += _clear_memory(cache, lock)
    give_back_memory()
    return {"freed_bytes": freed_bytes, "deleted_files": files}


def _clear_memory(cache: PrefixCache, lock: AbstractContextManager[object]) -> int:
    """Drop what is in memory; returns the bytes that it held."""
    with lock:
        freed_bytes = cache.tree.used_bytes
        cache.clear()
    return freed_bytes


def give_back_memory() -> None:
    """Have malloc return what it keeps, where it can."""
    libc = ctypes.CDLL(None)
    if sys.platform == "darwin":
        libc.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
    elif hasattr(libc, "malloc_trim"):  # of glibc; musl has none, and keeps little
        libc.malloc_trim(ctypes.c_size_t(0))
