"""The keys or values of one layer, as the package's packers and caches take them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest

from mlx_lm_kvcache_plugin.codecs.tensors import TensorSpec


@dataclass
class Rows:
    """[heads, tokens, dim]; there may be more rows than are used."""

    array: mx.array

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.array.shape[0], self.array.shape[2], self.array.dtype)

    def rows(self, start: int, stop: int) -> mx.array:
        return self.array[:, start:stop]


class Window(Rows):
    """The same for a layer that holds the last tokens alone."""

    @property
    def length(self) -> int:
        return int(self.array.shape[1])


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Which rows are asked for from now on, in full precision, of any tensor."""
    asked: list[tuple[int, int]] = []
    rows = Rows.rows

    def spy(self: Rows, start: int, stop: int) -> mx.array:
        asked.append((start, stop))
        return rows(self, start, stop)

    monkeypatch.setattr(Rows, "rows", spy)
    return asked


def runs(asked: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of them that were encoded; a look at one row has a tensor evaluated."""
    return {(start, stop) for start, stop in asked if stop - start > 1}
