"""Upstream's prompt caches, translated at the border. Nothing behind it ever sees one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, make_prompt_cache

from ..codecs.tensors import Room, Tensor, TensorSpec
from ..layers import (
    STATEFUL,
    TOKEN_WISE,
    Fetched,
    Layer,
    LayerKind,
    LayerKinds,
    Layers,
    Layout,
)
from .layer_kinds import STATE, UNUSED, is_empty
from .snapshot import Snapshot

LayerCaches = list[Any]
"""Upstream's prompt cache: one cache object for each layer, or a list of them."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """How one cache object is put together again.

    Attributes:
        rows: for each of its tensors in blocks, in turn, None, or what a tensor looks like that
            holds nothing but zeros, and is not stored.
        windows: how many tensors its window has.
    """

    kind: LayerKind
    fixed: Hashable
    rows: tuple[TensorSpec | None, ...]
    windows: int
    has_state: bool


@dataclass(frozen=True, slots=True)
class Nested:
    """A list of cache objects, or upstream's `CacheList`."""

    container: type
    members: tuple[Any, ...]


CONTAINERS: tuple[type, ...] = (CacheList, list, tuple)
"""Which containers a nested one may be."""


def leaves_of(caches: Sequence[Any]) -> Iterator[Any]:
    """All cache objects, those inside of `CacheList`s and lists too."""
    for cache in caches:
        members = _members(cache)
        if members is None:
            yield cache
        else:
            yield from leaves_of(members)


def _members(cache: Any) -> Sequence[Any] | None:
    """The cache objects inside of a nested one; None if it is not nested."""
    if type(cache) is CacheList:
        return tuple(cache.caches)
    return cache if isinstance(cache, list | tuple) else None


def is_trimmable(caches: LayerCaches) -> bool:
    """Whether upstream can take tokens back from all of them."""
    return all(cache.is_trimmable() for cache in leaves_of(caches))


Place = tuple[int, int]
"""A tensor, by the number of its cache object and its own."""

Written = set[Place]
"""Tensors that are known to hold more than zeros."""

Taken = list[tuple[LayerKind, Layer[Any]]]


def take_apart(
    caches: LayerCaches,
    key_tokens: int,
    kinds: LayerKinds,
    *,
    measured: bool = True,
    written: Written | None = None,
) -> Layers | None:
    """Take all layers apart, copying nothing.

    The layers' offsets are to be believed, and not the key: speculative decoding stores its
    caches under a key that is longer than they are, and its draft layers may lag behind.

    Args:
        key_tokens: how long the key is that upstream stores them under.
        measured: whether to look for tensors that hold nothing but zeros.
        written: is told which tensors need no look the next time.

    Returns:
        None if they hold nothing, or nothing but zeros; and if they stand for different numbers of
        tokens and cannot be cut.
    """
    objects = list(leaves_of(caches))
    taken = [_take(cache, kinds) for cache in objects]
    filled = [cache for cache, (kind, _) in zip(objects, taken, strict=True) if kind is not UNUSED]
    offsets = {cache.offset for cache in filled if isinstance(getattr(cache, "offset", None), int)}
    can_be_cut = not any(layer.window or layer.state is not None for _, layer in taken)
    tokens = int(min(offsets, default=key_tokens))
    if can_be_cut:
        tokens = min(tokens, key_tokens)
    if not filled or tokens <= 0 or tokens > key_tokens or (len(offsets) > 1 and not can_be_cut):
        return None
    rows = {(i, j): t for i, (_, layer) in enumerate(taken) for j, t in enumerate(layer.rows)}
    stored = {place: tensor for place, tensor in rows.items() if tensor.spec.dim}
    if measured:
        for place in _all_zeros(stored, tokens, set() if written is None else written):
            del stored[place]
    layers = _layers(caches, taken, tokens, stored)
    return layers if layers.rows or layers.layout.needs_checkpoint else None


def empty_caches(model: Any) -> LayerCaches:
    """A model's cache objects before its first token."""
    caches: LayerCaches = make_prompt_cache(model)
    return caches


def kind_of(cache: Any, kinds: LayerKinds) -> LayerKind:
    """The kind of a cache object, by its class."""
    return kinds.get(type(cache)) or STATE


def needs_checkpoints(caches: LayerCaches, kinds: LayerKinds) -> bool:
    """Whether a model with such caches cannot be resumed at any token, once a prompt is long."""
    return any(kind_of(cache, kinds).name != TOKEN_WISE for cache in leaves_of(caches))


def has_states(caches: LayerCaches, kinds: LayerKinds) -> bool:
    """Whether something in them is neither rows nor a window."""
    return any(kind_of(cache, kinds).name == STATEFUL for cache in leaves_of(caches))


def _take(cache: Any, kinds: LayerKinds) -> tuple[LayerKind, Layer[Any]]:
    if is_empty(cache):
        return UNUSED, UNUSED.take(cache)
    kind = kind_of(cache, kinds)
    layer = kind.take(cache)
    return (STATE, STATE.take(cache)) if layer is None else (kind, layer)


def _layers(
    caches: LayerCaches, taken: Taken, tokens: int, stored: Mapping[Place, Tensor]
) -> Layers:
    leaves = [
        Leaf(
            kind,
            layer.fixed,
            tuple(None if (number, j) in stored else t.spec for j, t in enumerate(layer.rows)),
            len(layer.window),
            layer.state is not None,
        )
        for number, (kind, layer) in enumerate(taken)
    ]
    windows = [tensor for _, layer in taken for tensor in layer.window]
    states = [layer.state for _, layer in taken if layer.state is not None]
    layout = Layout(
        rows=tuple(tensor.spec for tensor in stored.values()),
        windows=tuple(tensor.spec for tensor in windows),
        states=len(states),
        form=_form(caches, iter(leaves)),
        look=tuple(tuple(t.spec for t in (*layer.rows, *layer.window)) for _, layer in taken),
    )
    state_bytes = sum(map(_nbytes, states))
    rows = list(stored.values())
    return Layers(layout, tokens, rows, windows, state_bytes, lambda: Snapshot.of(states))


def _nbytes(cache: Any) -> int:
    """About what a state takes, as far as it tells."""
    try:
        return int(cache.nbytes)
    except (AttributeError, NotImplementedError):
        return 0


def _form(caches: Sequence[Any], leaves: Iterator[Leaf]) -> tuple[Any, ...]:
    """The nesting of the caches, with leaves for cache objects."""
    return tuple(
        next(leaves)
        if (inner := _members(cache)) is None
        else Nested(type(cache), _form(inner, leaves))
        for cache in caches
    )


def _all_zeros(tensors: Mapping[Place, Tensor], tokens: int, written: Written) -> set[Place]:
    """Which tensors hold nothing but zeros, like the values of an indexer that has only keys.

    Nearly all tell by their first row that they do not, and are not looked at again: that would
    compute a cache object that upstream took out of a batch, perhaps for nothing.
    """
    first = {
        place: mx.any(tensor.rows(0, 1))
        for place, tensor in tensors.items()
        if place not in written
    }
    mx.eval(list(first.values()))
    zeros = {
        place
        for place, has_any in first.items()
        if not has_any.item() and not mx.any(tensors[place].rows(0, tokens)).item()
    }
    written.update(first.keys() - zeros)
    return zeros


def room_in(layout: Layout, rows: int) -> Room:
    """Room for so many rows where upstream's arrays may be longer than what is in them."""
    form: Any = layout.form
    takers = [_takes_room(leaf) for leaf in _leaves(form) for blank in leaf.rows if blank is None]
    return Room(rows, tuple(takers))


def _takes_room(leaf: Leaf) -> bool:
    return getattr(leaf.kind, "takes_room", False)


def _leaves(form: Sequence[Any]) -> Iterator[Leaf]:
    for entry in form:
        if isinstance(entry, Nested):
            yield from _leaves(entry.members)
        else:
            yield entry


def put_together(fetched: Fetched) -> LayerCaches:
    """Upstream's cache objects for what was fetched."""
    parts = _Parts(fetched)
    caches = [parts.build(entry) for entry in fetched.layout.form]  # type: ignore[attr-defined]
    mx.eval(parts.arrays)  # a lazy array could not be evaluated on another thread
    return caches


class _Parts:
    """What was fetched, handed out layer by layer."""

    def __init__(self, fetched: Fetched) -> None:
        self.arrays: list[mx.array] = []
        self._tokens = fetched.tokens
        self._room_rows = fetched.room.rows if fetched.room else 0
        self._rows = iter(fetched.rows)
        self._windows = iter(fetched.windows)
        self._states = iter(fetched.states)

    def build(self, entry: Leaf | Nested) -> Any:
        if isinstance(entry, Nested):
            members = map(self.build, entry.members)
            if entry.container is CacheList:
                return CacheList(*members)  # type: ignore[no-untyped-call]
            return entry.container(members)
        length = self._tokens + self._room_rows * _takes_room(entry)
        rows = tuple(
            next(self._rows)
            if blank is None
            else mx.zeros((blank.heads, length, blank.dim), blank.dtype)
            for blank in entry.rows
        )
        window = tuple(next(self._windows) for _ in range(entry.windows))
        state = next(self._states) if entry.has_state else None
        cache = entry.kind.restore(Layer(entry.fixed, rows, window, state), self._tokens)
        self.arrays += [
            value
            for value in getattr(cache, "__dict__", {}).values()
            if isinstance(value, mx.array)
        ]
        return cache
