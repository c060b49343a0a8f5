"""The composer: from a model's tokens and layers to blocks in the store, and back.

It knows no upstream class. Rows, one for each token, live in blocks; where a model has layers with
windows or states too, those live at checkpoints, and it can be resumed there alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from .codecs.packing import Payload
from .codecs.registry import CodecRegistry
from .codecs.sequence import SequencePackers
from .codecs.tensors import Room
from .disk.tier import DiskTier
from .errors import CodecError
from .events import Event, Insert, Skip, SkipReason
from .layers import Fetched, Layers, Portable
from .matching import Prefix, find_longest
from .offload import Offload
from .recording import Recorder
from .settings import Settings
from .spaces import Space, Spaces
from .stats.history import History
from .store.blocks import Block, Tokens, before_image
from .store.budget import Budget, evict_to_limit, keep_within
from .store.eviction import Cause
from .store.prompt import TokenIds
from .store.thinning import SYSTEM, thin
from .store.tree import BlockTree
from .writing import Checkpoint, Writer

BLOCK_TOKENS = 128
"""Settled by bytes, fidelity and speed together: docs/decisions/0001-block-size.md."""

UNUSABLE = (CodecError, ValueError, TypeError, LookupError)
"""What says that stored numbers are not what they should be, and not that memory is short."""


class PrefixCache:
    """Past prefixes, encoded, shared block by block, within a budget. Owned by one thread.

    Others may read its tree and its spaces while they hold the tree's lock.

    An insert that raises while it writes has stored nothing.

    Args:
        settings: codec, bits and group size.
        registry: where the codec is found.
        budget: what may be held.
        tier: where everything is kept on disk too; None for memory alone.
        emit: is told of every event.
        max_sequences: how many sequences may be held; None for any number.
        block_tokens: tokens of a block.
        history: is told what is asked for and stored; None if nobody wants to know.

    Attributes:
        tree: what is stored.
        spaces: by what its models' layers look like.
        tier, history: as they were given.
        packers: how the tensors of a model are encoded.
    """

    def __init__(
        self,
        settings: Settings,
        registry: CodecRegistry,
        budget: Budget,
        *,
        tier: DiskTier | None = None,
        emit: Callable[[Event], None] = lambda event: None,
        max_sequences: int | None = None,
        block_tokens: int = BLOCK_TOKENS,
        history: History | None = None,
    ) -> None:
        self.settings = settings
        self.budget = budget
        self.max_sequences = max_sequences
        self.tree = BlockTree(block_tokens, limit_bytes=0)
        self.packers = SequencePackers(settings, registry)
        self.spaces = Spaces(self.tree, self.packers)
        self.tier = tier
        self.history = history
        self._recorder = Recorder(self.tree, self.spaces, budget, emit, history)
        self._offload: Offload | None = None
        if tier is not None:
            self._offload = Offload(tier, self.tree, self.spaces, settings, self.record)

    def record(self, event: Event) -> None:
        """Take note of an event and pass it on."""
        self._recorder.record(event)

    def attach(
        self,
        namespace: Hashable,
        fingerprint: bytes,
        about: Mapping[str, str],
        portable: Portable,
    ) -> None:
        """Say which model a namespace stands for. Without it, it has no place on disk.

        Args:
            fingerprint: of all that its numbers depend on. If it is another than before, what is
                stored of the namespace goes.
            about: words for people who look into the folder.
            portable: the model's layouts and states, as files can hold them.
        """
        with self._recorder.evictions():
            self.spaces.identify(namespace, fingerprint)
        if self._offload is not None:
            self._offload.attach(namespace, fingerprint, about, portable)

    # Fetching

    def match(
        self, namespace: Hashable, tokens: TokenIds, most: int | None = None
    ) -> Prefix | None:
        """The longest stored prefix of `tokens`, short of the last one: that has to be computed.

        Args:
            namespace: sequences of different namespaces never meet.
            tokens: of the prompt.
            most: how many tokens it may have.
        """
        self._recorder.begin()
        longest = len(tokens) - 1 if most is None else min(most, len(tokens) - 1)
        if self._offload is not None:
            tokens = np.asarray(tokens[:], np.int64)
            wanted = tokens[: before_image(tokens, longest)]
            if len(wanted):
                with self._recorder.evictions():
                    keep_within(self.tree, self.budget)
                    self._offload.restore(namespace, wanted)
        return find_longest(self.tree, self.spaces.of(namespace), tokens, longest)

    def reach_on_disk(self, namespace: Hashable, tokens: TokenIds) -> tuple[int, bool]:
        """What `Offload.reach` says of the tokens that `match` would find."""
        if self._offload is None:
            return 0, False
        ids = np.asarray(tokens[:], np.int64)
        return self._offload.reach(namespace, ids[: before_image(ids, len(ids) - 1)])

    def fetch(
        self,
        tokens: TokenIds,
        prefix: Prefix | None,
        translate: Callable[[Fetched], Any] = lambda fetched: fetched,
        room: Room | None = None,
        namespace: Hashable | None = None,
    ) -> Any:
        """Decode what was matched.

        Args:
            tokens: of the prompt.
            prefix: what `match` found for it, with no call in between.
            translate: makes of a `Fetched` what the caller wants; a failure of it is no hit.
            room: what is wanted of it behind the rows.
            namespace: whose prompt it is, so that it can be told why no more of it was found.

        Returns:
            What `translate` made of it; None if nothing was found.
        """
        begun = time.perf_counter()
        result = None
        if prefix is not None:
            try:
                result = translate(self._decode(prefix, room))
            except UNUSABLE:
                self._distrust(prefix.space.namespace)
                raise
            self._touch(prefix, tokens)
        stop = self._recorder.diagnose(namespace, tokens, prefix)
        # Only now: what was just used is what should be left, if little may be.
        self.keep_within_budget()
        seconds = time.perf_counter() - begun
        self._recorder.fetched(namespace, tokens, prefix, seconds, stop)
        return result

    def _decode(self, prefix: Prefix, room: Room | None) -> Fetched:
        space = prefix.space
        rows, windows, states = [], [], []
        if space.layout.rows:
            payloads = [cast(Payload, block.payload) for block in prefix.blocks]
            rows = space.rows.decode(payloads, prefix.tokens, room)
        if prefix.checkpoint is not None:
            checkpoint = cast(Checkpoint, prefix.checkpoint.payload)
            windows = space.windows.decode(checkpoint.windows)
            states = checkpoint.states.restore()
        return Fetched(space.layout, prefix.tokens, rows, windows, states, room)

    def _distrust(self, namespace: Hashable) -> None:
        """Give up what is stored of a namespace: else its prompts would fail for ever."""
        with self._recorder.evictions():
            self.spaces.drop(namespace)
        if self._offload is not None:
            self._offload.detach(namespace)

    def _touch(self, prefix: Prefix, tokens: TokenIds) -> None:
        """Mark what was used; and the system prompt's end, where the next chat will resume."""
        if prefix.checkpoint is None:
            self.tree.touch(prefix.blocks[-1])
            return
        ids = np.asarray(tokens[: prefix.tokens], np.int64)
        for node, _ in self.tree.checkpoints(prefix.space, ids):
            if node.label == SYSTEM:
                self._use(prefix.space, node)
        self._use(prefix.space, prefix.checkpoint)

    def _use(self, space: Space, node: Block) -> None:
        """Mark a node that nothing is added to, on disk as well."""
        self.tree.touch(node)
        if self._offload is not None:
            self._offload.store(space, node)

    # Inserting

    def insert(
        self, namespace: Hashable, tokens: Sequence[int], layers: Layers, label: str
    ) -> None:
        """Store a sequence.

        Args:
            namespace: sequences of different namespaces never meet.
            tokens: as many as the layers stand for.
            layers: what was computed for them.
            label: the kind of sequence: upstream's word, or one of `store.thinning`.
        """
        begun = time.perf_counter()
        ids = np.array(tokens, np.int64)
        with self._recorder.evictions():
            keep_within(self.tree, self.budget)
            space = self.spaces.open(namespace, layers.layout)
            if layers.layout.needs_checkpoint:
                if self._has_checkpoint(space, ids):
                    return
                if layers.state_bytes > self.tree.limit_bytes:
                    self.record(Skip(len(ids), SkipReason.NO_ROOM))
                    return
            others = [other for other in self.spaces.of(namespace) if other is not space]
            insertion = Writer(self.tree, self.budget, space, others, layers).write(ids, label)
            needless = []
            if self._is_checkpoint(insertion.tip):
                needless = thin(self.tree, space, ids, insertion.tip)
            self._settle()
        if self._offload is not None:
            self._offload.store(space, insertion.tip, needless)
        stored_tokens = insertion.stored_tokens
        if layers.layout.needs_checkpoint and not self._is_checkpoint(insertion.tip):
            stored_tokens = 0  # the way to another checkpoint is not this one's
        seconds = time.perf_counter() - begun
        insert = Insert(len(ids), stored_tokens, insertion.added_tokens, seconds)
        self._recorder.inserted(space, ids, insertion.tip, needless, insert)

    def _is_checkpoint(self, node: Block) -> bool:
        return node in self.tree and not node.tokens

    def _has_checkpoint(self, space: Space, ids: Tokens) -> bool:
        """Whether there is one at the very end, which uses it; or it would be of no tokens."""
        node, position = self.tree.find_checkpoint(space, ids)
        if node is not None and position == len(ids):
            self._use(space, node)
        return position == len(ids)

    def _settle(self) -> None:
        """Evict what was spared while it was added to, and whole sequences beyond their number."""
        evict_to_limit(self.tree, self.budget)
        if self.max_sequences is not None:
            self.tree.evict_sequences(max(0, self.max_sequences), Cause.COUNT)

    def keep_within_budget(self) -> None:
        """Evict what is more than may be held now."""
        with self._recorder.evictions():
            keep_within(self.tree, self.budget)

    def trim_to(self, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict at once until no more than this is held."""
        with self._recorder.evictions():
            if n_bytes is not None:
                self.tree.evict_to(max(0, n_bytes), Cause.TRIM)
            if n_sequences is not None:
                self.tree.evict_sequences(max(0, n_sequences), Cause.TRIM)

    def prefer(self, namespace: Hashable) -> None:
        """Let everything of other namespaces be evicted before anything of this one."""
        self.tree.renew(self.spaces.of(namespace))

    def clear(self) -> None:
        """Give up everything in memory."""
        with self._recorder.evictions():
            self.spaces.clear()
