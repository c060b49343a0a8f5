"""Processes on this machine that MLX joins to a ring, as `mlx.launch --backend ring` does."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HOST = "127.0.0.1"


class Ring:
    """One process for each command; all of them are ended with the block.

    Not `mlx.launch`: that gives every rank the same command and one output.

    Args:
        folder: for the list of hosts, and for what each of them prints.
        commands: of the ranks, in their order.
        environment: of all of them.
    """

    def __init__(
        self, folder: Path, commands: Sequence[Sequence[str]], environment: Mapping[str, str]
    ) -> None:
        hosts = folder / "hosts.json"
        addresses = [[f"{HOST}:{port}"] for port in free_ports(len(commands))]
        hosts.write_text(json.dumps(addresses), encoding="utf-8")
        self._logs = [folder / f"rank{rank}.log" for rank in range(len(commands))]
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank, command in enumerate(commands):
            variables = {**environment, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
            with self._logs[rank].open("wb") as log:
                process = subprocess.Popen(
                    command, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT
                )
            self._processes.append(process)

    def output(self, rank: int) -> str:
        """What one of them printed so far."""
        return self._logs[rank].read_text(encoding="utf-8", errors="replace")

    def is_running(self) -> bool:
        """Whether all of them are."""
        return all(process.poll() is None for process in self._processes)

    def wait(self, seconds: float) -> list[int]:
        """How each of them ended.

        Raises:
            subprocess.TimeoutExpired: if one has not by then.
        """
        deadline = time.monotonic() + seconds
        return [process.wait(deadline - time.monotonic()) for process in self._processes]

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()  # one that waits for another rank hears nothing else
        for process in self._processes:
            process.wait()
        if exception[0] is not None:
            for rank in range(len(self._processes)):  # pytest shows it with the failure
                print(f"rank {rank} said:\n{self.output(rank)}")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at: distinct, since all are held until the last is found."""
    probes = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
