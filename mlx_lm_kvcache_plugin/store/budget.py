"""How much the store may hold at this moment."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from .blocks import Block
from .eviction import Cause
from .tree import BlockTree

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
        last_bytes: what `nominal_bytes` said last; any thread may read it.
        origin: whence that came, in words.
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
        self._share = 1.0 if percent is None else percent
        self._limit_origin = "a fixed limit"
        if limit_bytes is None:
            self._limit_origin = f"{self._share:.0%} of what is available once a model is loaded"
        self.origin = self._limit_origin
        self._ceiling = ceiling
        self._ceiling_origin = ceiling_origin
        self._probe = probe
        self._relieve = relieve
        self._limit_bytes = limit_bytes
        self._is_short = False
        self.last_bytes = limit_bytes or 0

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
            self._limit_bytes = int(available_bytes * self._share)
            share = f"{self._share * 100:g}%"
            self._limit_origin = f"{share} of the {available_bytes:,} bytes available"
        self.origin = self._limit_origin
        return self._limit_bytes

    def describe(self, used_bytes: int) -> str:
        """Settle the limit, and tell it and whence it came."""
        self.resolve(used_bytes)
        return f"limit {self.nominal_bytes(used_bytes):,} bytes ({self.origin})"

    def nominal_bytes(self, used_bytes: int) -> int:
        """What the store may hold now, if others leave enough memory."""
        limit_bytes = self._limit_bytes
        if limit_bytes is None:
            limit_bytes = self.resolve(used_bytes)
        ceiling = self._ceiling()
        is_lower = ceiling is not None and ceiling < limit_bytes
        self.origin = self._ceiling_origin if is_lower else self._limit_origin
        self.last_bytes = limit_bytes if ceiling is None else max(0, min(limit_bytes, ceiling))
        return self.last_bytes

    def allowed_bytes(self, used_bytes: int) -> int:
        """What the store may hold now: within the limit, and leaving the reserve to others."""
        limit_bytes = self.nominal_bytes(used_bytes)
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
