"""The tree's second tier: its blocks and checkpoints on disk, in the form that they have in memory.

Files are found by keys that are chained over namespace and tokens, so what a prompt begins with is
found without an index, whoever wrote it.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from .codecs.packing import Payload
from .codecs.records import payload_to, states_to, windows_to
from .disk.files import Record
from .disk.names import Name
from .disk.tier import DiskTier, Home, Offer
from .errors import LayerKindError
from .events import Error, Event, Restore
from .layers import Layout, Portable
from .naming import Naming
from .restoring import Restoration
from .searching import Search
from .settings import Settings
from .spaces import MOST_NAMESPACES, Space, Spaces
from .store.blocks import Block, Tokens
from .store.tree import BlockTree
from .writing import Checkpoint

logger = logging.getLogger("mlx_lm_kvcache_plugin")

FORMAT = 1
"""Of what the files hold: those of another number are never read."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A namespace that has a home on disk.

    Attributes:
        portable: its layouts and states as text and plain data.
        texts: of its layouts; None for one that has no such form.
        layouts: by the digests of their texts; None for one that means nothing here.
    """

    home: Home
    portable: Portable
    texts: dict[Layout, str | None] = field(default_factory=dict)
    layouts: dict[bytes, Layout | None] = field(default_factory=dict)

    def text(self, layout: Layout) -> str | None:
        if layout not in self.texts:
            self.texts[layout] = self.portable.layout_to(layout)
        return self.texts[layout]

    def layout(self, digest: bytes, text: str) -> Layout | None:
        if digest not in self.layouts:
            try:
                self.layouts[digest] = self.portable.layout_from(text)
            except LayerKindError:
                self.layouts[digest] = None
        return self.layouts[digest]


class Offload:
    """Writes what is stored to disk, and reads back what the tree lacks. Owned by one thread.

    Args:
        tier: the files.
        tree, spaces: what is in memory.
        settings: how it is encoded.
        record: is told what was read, and what failed: nothing here raises.
    """

    def __init__(
        self,
        tier: DiskTier,
        tree: BlockTree,
        spaces: Spaces,
        settings: Settings,
        record: Callable[[Event], None],
    ) -> None:
        self._tier = tier
        self._tree = tree
        self._spaces = spaces
        self._encoding = (
            f"{FORMAT} {tree.block_tokens} {settings.codec} {settings.key_bits} "
            f"{settings.value_bits} {settings.group_size}"
        )
        self._record = record
        self._attached: dict[Hashable, Attached] = {}
        self._has_failed = False

    def attach(
        self,
        namespace: Hashable,
        fingerprint: bytes,
        about: Mapping[str, str],
        portable: Portable,
    ) -> None:
        """Give a namespace a home on disk.

        Args:
            fingerprint: of all that its numbers depend on, but for how they are encoded.
            about: words for people who look into the folder.
            portable: its layouts and states as text and plain data.
        """
        digest = blake2b(self._encoding.encode() + fingerprint, digest_size=16).digest()
        self._attached.pop(namespace, None)
        self._attached[namespace] = Attached(Home(digest, about), portable)
        if len(self._attached) > MOST_NAMESPACES:
            del self._attached[next(iter(self._attached))]

    def detach(self, namespace: Hashable) -> None:
        """Have nothing more to do with a namespace on disk: what is there cannot be used."""
        self._attached.pop(namespace, None)

    def store(self, space: Space, tip: Block, needless: Sequence[Block] = ()) -> None:
        """Have the nodes down to this one written; those that are there already count as used.

        Args:
            needless: checkpoints that were taken out because of it: they are deleted, and the
                tails that bore them alone.
        """
        attached = self._attached.get(space.namespace)
        with self._failing_softly("offload"):
            text = attached and attached.text(space.layout)
            if attached and text:
                naming = Naming.of(attached.home, text, self._tree.block_tokens)
                # While nothing is taken it only counts that.
                wanted = _offers(naming, tip, attached.portable) if self._tier.accepts else ()
                self._tier.offer(attached.home, text, list(wanted))
                for node in needless:
                    self._tier.forget(attached.home, self._gone(naming, node))

    def _gone(self, naming: Naming, checkpoint: Block) -> list[Name]:
        """The files of a checkpoint and, if it is gone too, of the tail that bore it."""
        return [
            name
            for node, _, name in list(naming.path(checkpoint.path()))[-2:]
            if node not in self._tree and node.tokens < naming.step
        ]

    def restore(self, namespace: Hashable, ids: Tokens) -> None:
        """Read what is on disk of a prefix of these tokens and not in the tree."""
        attached = self._attached.get(namespace)
        if attached is None:
            return
        begun, tokens = time.perf_counter(), 0
        with self._failing_softly("restore"):
            for layout, text in self._layouts(self._tier, namespace, attached):
                space = self._spaces.open(namespace, layout)
                search = self._search(self._tier, attached, text, space, layout, ids)
                home, portable = attached.home, attached.portable
                tokens += Restoration(self._tier, home, portable, self._tree, space, search).run()
        if tokens:
            self._record(Restore(tokens, time.perf_counter() - begun))

    def reach(self, namespace: Hashable, ids: Tokens) -> tuple[int, bool]:
        """How many of these tokens would be of use after `restore`, if all that is found is sound.

        And whether what is found goes on with others there. Changes nothing, not even a broken
        file's place. Any thread may ask.
        """
        attached = self._attached.get(namespace)
        if attached is None or not len(ids):
            return 0, False
        tier = self._tier.untouched()
        spaces = {space.layout: space for space in self._spaces.of(namespace)}
        return max(
            (
                self._search(tier, attached, text, spaces.get(layout), layout, ids).reach()
                for layout, text in self._layouts(tier, namespace, attached)
            ),
            default=(0, False),
        )

    def _layouts(
        self, tier: DiskTier, namespace: Hashable, attached: Attached
    ) -> Iterator[tuple[Layout, str]]:
        """Those on disk that can be of this model, and their texts."""
        for digest, text in tier.layouts(attached.home).items():
            layout = attached.layout(digest, text)
            if layout is not None and self._spaces.fits(namespace, layout):
                yield layout, text

    def _search(
        self,
        tier: DiskTier,
        attached: Attached,
        text: str,
        space: Hashable,
        layout: Layout,
        ids: Tokens,
    ) -> Search:
        naming = Naming.of(attached.home, text, self._tree.block_tokens)
        return Search(tier, attached.home, self._tree, space, layout, naming, ids)

    @contextmanager
    def _failing_softly(self, operation: str) -> Iterator[None]:
        """Turn a failure into a count, and the first one into a line of the log."""
        try:
            yield
        except Exception as error:  # the cache goes on with what is in memory
            self._record(Error(operation, f"{type(error).__name__}: {error}"))
            if not self._has_failed:
                self._has_failed = True
                logger.warning("prefix cache: %s failed: %s", operation, error, exc_info=error)


def _offers(naming: Naming, tip: Block, portable: Portable) -> Iterator[Offer]:
    for node, tokens, name in naming.path(tip.path()):
        if node.payload is not None:
            payload = weakref.ref(node.payload)  # what is evicted meanwhile is not kept alive
            yield Offer(name, partial(_record, payload, tokens, node.label, portable))


def _record(
    payload: weakref.ref[Any], tokens: bytes, label: str, portable: Portable
) -> Record | None:
    """What a file is to hold; None for what was evicted meanwhile, or has no such form."""
    held = payload()
    if isinstance(held, Payload):
        plain, arrays = payload_to(held)
        return Record(tokens, {"label": label, **plain}, arrays)
    if not isinstance(held, Checkpoint):
        return None
    states = portable.states_to(held.states)
    if states is None:
        return None
    windows, arrays = windows_to(held.windows)
    plain_states, state_arrays = states
    arrays |= states_to(state_arrays)
    return Record(tokens, {"label": label, "windows": windows, "states": plain_states}, arrays)
