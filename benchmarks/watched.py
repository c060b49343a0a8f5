"""`mlx_lm.server`, started as its command does it, that tells its memory when it is asked.

    python -m benchmarks.watched FILE [arguments of mlx_lm.server]

With each SIGUSR1 a line of JSON is added to FILE:

- resident: bytes of the process that are in memory
- used: bytes that malloc has handed out, without those that MLX keeps for later; null where the C
  library cannot tell
- python_blocks: the allocations of Python's own allocator, which malloc does not see one by one
- held: bytes that the prompt cache holds, as it counts them
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.server
import psutil

FIGURES = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIGURES]


def used_bytes() -> int | None:
    """What malloc has handed out, without MLX's pool of free buffers."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = MallocInfo
    info: Any = mallinfo()
    return int(info.uordblks + info.hblkhd) - mx.get_cache_memory()


def tell(path: Path, prompt_cache: Any) -> None:
    """Add a line."""
    reading = {
        "resident": psutil.Process().memory_info().rss,
        "used": used_bytes(),
        "python_blocks": sys.getallocatedblocks(),
        "held": prompt_cache.nbytes,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(reading) + "\n")


def main() -> None:
    """Start the server; all that differs is that it listens to the signal."""
    path = Path(sys.argv.pop(1))
    server: Any = mlx_lm.server
    serve = server._run_http_server

    def listening(host: str, port: int, generator: Any) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: tell(path, generator.prompt_cache))
        serve(host, port, generator)

    server._run_http_server = listening
    server.main()


if __name__ == "__main__":
    main()
