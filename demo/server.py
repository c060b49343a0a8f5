"""The stock `mlx_lm.server` as a child process, and the BLAS that makes it quick on Linux."""

from __future__ import annotations

import ctypes.util
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from . import DemoError

HOST = "127.0.0.1"

START_LIMIT_S = 120.0
STOP_LIMIT_S = 10.0
POLL_S = 0.1

LOG_TAIL_LINES = 12

OWN_VARIABLES = ("MLX_LM_KV_CACHE_", "MLX_LM_CACHE_MEMORY_", "MLX_LM_DISABLE_")
"""The plugin's own settings: the demo's flags alone decide, or the table would lie."""

OPENBLAS_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


def free_ports(count: int) -> list[int]:
    """Different ports that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:  # all are held until all are chosen: no port comes twice
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def find_openblas() -> str | None:
    """The OpenBLAS library for LD_PRELOAD; None where there is none, or where it is not needed.

    Needed on Linux only: the BLAS that mlx-cpu bundles there is the slow reference.
    """
    if not sys.platform.startswith("linux"):
        return None
    if name := ctypes.util.find_library("openblas"):
        return name
    for pattern in OPENBLAS_FOLDERS:
        for path in sorted(Path("/").glob(f"{pattern[1:]}/libopenblas.so.0")):
            return str(path)
    return None


def child_environment(environ: Mapping[str, str], preload: str | None) -> dict[str, str]:
    """The server's environment: none of the plugin's variables, no model hub, OpenBLAS first."""
    child = {k: v for k, v in environ.items() if not k.startswith(OWN_VARIABLES)}
    child["HF_HUB_OFFLINE"] = "1"
    child["PYTHONUNBUFFERED"] = "1"
    if preload:
        child["LD_PRELOAD"] = " ".join(filter(None, (preload, environ.get("LD_PRELOAD"))))
    return child


class Server:
    """One `mlx_lm.server`; a context manager that starts it and always ends it.

    Owned by the thread that made it. The process lives exactly as long as the `with` block.
    """

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        *,
        port: int,
        log: Path,
        preload: str | None = None,
    ) -> None:
        # beside the interpreter, so that it is the one with the plugin
        script = Path(sys.executable).with_name("mlx_lm.server")
        self.command = [str(script), "--model", str(model), "--host", HOST, "--port", str(port)]
        self.command += ["--log-level", "DEBUG", *flags]
        self.port = port
        self._log = log
        self._environment = child_environment(os.environ, preload)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The number of the process while it lives."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                )
        except FileNotFoundError:
            raise DemoError(
                f"there is no {self.command[0]}: install mlx-lm into this environment"
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_until_healthy(self) -> None:
        """Wait for /health to answer.

        Raises:
            DemoError: with the end of the server's log, if the server ends or takes too long.
        """
        deadline = time.monotonic() + START_LIMIT_S
        while not _is_healthy(self.port):
            self.check_alive()
            if time.monotonic() > deadline:
                raise self.failure(f"the server did not answer within {START_LIMIT_S:.0f} s")
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise a DemoError if the process has ended."""
        if self._process is not None and (status := self._process.poll()) is not None:
            raise self.failure(f"the server ended with exit status {status}")

    def failure(self, what: str) -> DemoError:
        """An error that says what happened and shows the end of the server's log."""
        return DemoError(f"{what}; the end of its log:\n{log_tail(self.log_text())}")

    def log_text(self) -> str:
        """All that the server has logged so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def quiet_log_text(self, *, quiet_s: float = 1.0, limit_s: float = 10.0) -> str:
        """The log, once nothing was added for a while: the last insert comes after the answer."""
        deadline = time.monotonic() + limit_s
        text = self.log_text()
        while time.monotonic() < deadline:
            time.sleep(quiet_s)
            before, text = text, self.log_text()
            if text == before:
                break
        return text


def log_tail(text: str, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, indented."""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (empty)"


def _is_healthy(port: int) -> bool:
    # not urllib: it would ask a proxy that the user has set
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
