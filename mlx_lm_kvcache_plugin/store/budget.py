"""How much the store may hold at this moment."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from .blocks import Block
from .tree import BlockTree, Cause

logger = logging.getLogger("mlx_lm_kvcache_plugin")

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Memory:
    """The machine's memory in bytes: in all, and what is left before it has to swap."""

    total_bytes: int
    available_bytes: int

    @property
    def reserve_bytes(self) -> int:
        """What is left to others whatever the limit says: 1 GiB, or 5% where that is more."""
        return max(GIB, self.total_bytes // 20)

    @property
    def spare_bytes(self) -> int:
        """What is available above the reserve; less than nothing when memory is short."""
        return self.available_bytes - self.reserve_bytes


def probe_memory() -> Memory:
    """Ask the system."""
    memory = psutil.virtual_memory()
    return Memory(memory.total, memory.available)


class Budget:
    """Resolves the limit and follows the machine's memory.

    Args:
        limit_bytes: a fixed limit, or None.
        percent: a share of the available memory as a fraction, if there is no fixed limit.
        ceiling: a further limit in bytes that changes with time, or None for none.
        ceiling_origin: whence that comes, in words.
        probe: asks for the machine's memory.
        relieve: gives back memory that others hold for nothing, before anything is evicted.

    Attributes:
        origin: whence the limit came, in words.
    """

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        percent: float | None = None,
        ceiling: Callable[[], int | None] = lambda: None,
        ceiling_origin: str = "a ceiling",
        probe: Callable[[], Memory] = probe_memory,
        relieve: Callable[[], object] = lambda: None,
    ) -> None:
        self._fixed_bytes = limit_bytes
        self._percent = percent
        self.origin = "a fixed limit"
        self._ceiling = ceiling
        self._ceiling_origin = ceiling_origin
        self._probe = probe
        self._relieve = relieve
        self._limit_bytes = limit_bytes
        self._is_short = False

    @property
    def limit_bytes(self) -> int | None:
        """The limit proper, once `resolve` was called."""
        return self._limit_bytes

    def resolve(self, used_bytes: int) -> int:
        """Settle the limit, for a percentage by the memory that is available now.

        Args:
            used_bytes: what the store holds already: it could be had back.
        """
        self._limit_bytes = self._fixed_bytes
        if self._limit_bytes is None:
            available_bytes = self._probe().available_bytes + used_bytes
            percent = 1.0 if self._percent is None else self._percent
            self._limit_bytes = int(available_bytes * percent)
            self.origin = f"{percent * 100:g}% of the {available_bytes:,} bytes available"
        return self._limit_bytes

    def describe(self, used_bytes: int) -> str:
        """Settle the limit, and tell it and whence it came."""
        limit_bytes, origin = self.resolve(used_bytes), self.origin
        ceiling = self._ceiling()
        if ceiling is not None and ceiling < limit_bytes:
            limit_bytes, origin = ceiling, self._ceiling_origin
        return f"limit {limit_bytes:,} bytes ({origin})"

    def allowed_bytes(self, used_bytes: int) -> int:
        """What the store may hold now: within the limit, and leaving the reserve to others."""
        limit_bytes = self._limit_bytes
        if limit_bytes is None:
            limit_bytes = self.resolve(used_bytes)
        ceiling = self._ceiling()
        if ceiling is not None:
            limit_bytes = min(limit_bytes, ceiling)
        memory = self._probe()
        if memory.spare_bytes < 0:
            self._relieve()
            memory = self._probe()
        spare_bytes = memory.spare_bytes
        self._log_episode(spare_bytes, memory)
        return max(0, min(limit_bytes, used_bytes + spare_bytes))

    @property
    def is_short(self) -> bool:
        """Whether the machine was short of memory when last asked."""
        return self._is_short

    def _log_episode(self, spare_bytes: int, memory: Memory) -> None:
        is_short = spare_bytes < 0
        if is_short and not self._is_short:
            logger.warning(
                "memory is short: %.2f GiB available, less than the reserve of %.2f GiB; "
                "the prefix cache gives way",
                memory.available_bytes / GIB,
                memory.reserve_bytes / GIB,
            )
        self._is_short = is_short


def keep_within(tree: BlockTree, budget: Budget, keep: Block | None = None) -> None:
    """Ask what may be held now, and evict what is more, but not `keep` and its path.

    While the machine is short of memory it is asked again after each eviction, until it is back
    above its reserve or nothing is left.
    """
    while True:
        before = tree.used_bytes
        tree.limit_bytes = budget.allowed_bytes(before)
        evict_to_limit(tree, budget, keep)
        if tree.used_bytes == before or not budget.is_short:
            break


def evict_to_limit(tree: BlockTree, budget: Budget, keep: Block | None = None) -> None:
    """Evict down to the limit that was asked for last."""
    tree.evict_to(tree.limit_bytes, Cause.PRESSURE if budget.is_short else Cause.MEMORY, keep)
