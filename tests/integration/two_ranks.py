"""The stock command of this environment on two ranks that compute one model together."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from tests.integration.clients import Client
from tests.integration.stock_server import START_SECONDS, clean_environment
from tests.ring import Ring, free_ports

COMMAND = str(Path(sys.executable).with_name("mlx_lm.server"))


class TwoRanks(Client):
    """Two processes of the console command, joined by MLX's ring; rank 0 listens.

    A hang shows as a request that times out. Then, and at any other failure inside of the block,
    what both ranks said is printed.

    Args:
        folder: of its own, for what both print.
        arguments: on both command lines.
        own: further arguments of rank 0 and of rank 1.
        variables: further environment variables of both.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        own: tuple[Sequence[str], Sequence[str]] = ((), ()),
        **variables: str,
    ) -> None:
        super().__init__()
        (self.port,) = free_ports(1)
        command = [COMMAND, *arguments, "--port", str(self.port)]
        self._ring = Ring(
            folder, [[*command, *further] for further in own], clean_environment(**variables)
        )

    def output(self, rank: int) -> str:
        return self._ring.output(rank)

    def sequences(self, rank: int) -> list[int]:
        """How many sequences a rank held, request by request: upstream logs it before each."""
        return [int(n) for n in re.findall(r"Prompt Cache: (\d+) sequences", self.output(rank))]

    def is_running(self) -> bool:
        return self._ring.is_running()

    def __enter__(self) -> TwoRanks:
        try:
            self._wait_until_up()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._ring.__exit__(*exception)

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_up():
            assert self.is_running() and time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)

    def _is_up(self) -> bool:
        try:
            return self.health() == 200
        except OSError:
            return False


def write_index(folder: Path) -> Path:
    """Add to a model's folder the list of its weights: a pipeline looks up in it what to load."""
    weights = "model.safetensors"
    names = mx.load(str(folder / weights))
    index = {"weight_map": dict.fromkeys(names, weights)}
    (folder / f"{weights}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
