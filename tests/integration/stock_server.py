"""The stock command of this environment, in its own process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from tests.integration.clients import HOST, Client

START_SECONDS = 60


class StockServer(Client):
    """The console command of this environment, in its own process.

    Args:
        log: the file that its output goes to.
        arguments: on its command line.
        variables: further environment variables.
    """

    def __init__(self, log: Path, *arguments: str, **variables: str) -> None:
        super().__init__()
        self.log = log
        self.port = _free_port()
        command = [str(Path(sys.executable).with_name("mlx_lm.server")), *arguments]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                cwd=log.parent,
                env=clean_environment(**variables),
                stdout=output,
                stderr=subprocess.STDOUT,
                # Tests that run in the background have it ignored, and children inherit that.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str) -> str:
        """The first line of its output that has this text."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for line in self.output().splitlines():
                if text in line:
                    return line
            time.sleep(0.05)
        raise AssertionError(f"no {text!r} in:\n{self.output()}")

    def __enter__(self) -> StockServer:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end()
                raise AssertionError(f"the server did not start:\n{self.output()}")
            time.sleep(0.05)
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _is_up(self) -> bool:
        try:
            return self.health() == 200
        except OSError:
            return False

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without any setting of ours but those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLX_LM_")}
    return {**kept, "PYTHONWARNINGS": "", "HF_HUB_OFFLINE": "1", **variables}


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])
