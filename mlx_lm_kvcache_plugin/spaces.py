"""What is stored of each namespace, by what its model's layers look like."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from .codecs.sequence import SequencePacker, SequencePackers
from .codecs.windows import WindowPacker
from .layers import Layout
from .store.eviction import Cause
from .store.tree import BlockTree

MOST_NAMESPACES = 64
"""More models are not remembered: a script that trains one shows a new one at every step."""


@dataclass(frozen=True, eq=False, slots=True)
class Space:
    """The sequences of one namespace that have one layout; the tree keeps them below one root.

    Its hash is that of what it stands for, so that what it held is known again after it was
    forgotten and opened anew.

    Attributes:
        namespace: whose they are.
        rows: encodes what lives in blocks.
        windows: encodes what lives at checkpoints.
    """

    namespace: Hashable
    layout: Layout
    rows: SequencePacker
    windows: WindowPacker
    value_hash: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_hash", hash((self.namespace, self.layout)))

    def __hash__(self) -> int:
        return self.value_hash


class Spaces:
    """The spaces of all namespaces.

    Args:
        tree: where their sequences are kept.
        packers: makes the packers of a layout.
    """

    def __init__(self, tree: BlockTree, packers: SequencePackers) -> None:
        self._tree = tree
        self._packers = packers
        self._spaces: dict[Hashable, list[Space]] = {}
        self._fingerprints: dict[Hashable, bytes] = {}

    def of(self, namespace: Hashable) -> list[Space]:
        """The spaces of a namespace."""
        return self._spaces.get(namespace, [])

    def open(self, namespace: Hashable, layout: Layout) -> Space:
        """The space for a layout.

        What is stored of a model that looks different now can never be used again: it goes.
        """
        known = self._spaces.get(namespace, [])
        found = next((space for space in known if space.layout == layout), None)
        if found is not None:
            return found
        if not self.fits(namespace, layout):
            self.drop(namespace)
        self._forget_the_empty()
        found = Space(
            namespace,
            layout,
            self._packers.for_specs(layout.rows),
            self._packers.for_windows(layout.windows),
        )
        self._spaces.setdefault(namespace, []).append(found)
        return found

    def fits(self, namespace: Hashable, layout: Layout) -> bool:
        """Whether a layout is of the same model as what is stored of a namespace."""
        return all(space.layout.is_of_same_model(layout) for space in self.of(namespace))

    def identify(self, namespace: Hashable, fingerprint: bytes) -> None:
        """Say what a namespace stands for; what is stored of it goes if it was something else."""
        if self._fingerprints.pop(namespace, fingerprint) != fingerprint:
            self.drop(namespace)
        self._fingerprints[namespace] = fingerprint  # as the last one
        if len(self._fingerprints) > MOST_NAMESPACES:
            oldest = next(iter(self._fingerprints))
            del self._fingerprints[oldest]
            self.drop(oldest)

    def drop(self, namespace: Hashable, cause: Cause = Cause.REPLACED) -> None:
        """Give up all that is stored of a namespace."""
        for space in self.of(namespace):
            self._tree.drop(space, cause)
        self._spaces.pop(namespace, None)  # only now: others may be asking what is stored of it

    def clear(self) -> None:
        """Give up all that is stored."""
        for namespace in list(self._spaces):
            self.drop(namespace, Cause.CLEARED)

    def others_hold(self, namespace: Hashable) -> bool:
        """Whether anything is stored of other namespaces."""
        own = self.of(namespace)
        return any(root.namespace not in own for root in self._tree.roots())

    def _forget_the_empty(self) -> None:
        for namespace, spaces in list(self._spaces.items()):
            self._spaces[namespace] = [space for space in spaces if self._tree.has(space)]
            if not self._spaces[namespace]:
                del self._spaces[namespace]
