"""Prompt caches taken apart: what passes between the composer and the border to upstream.

A layer's cache object comes apart into rows, one for each token, which live in blocks and can be
cut anywhere; a window, the rows of the last tokens; and a state, which is anything else. Windows
and states belong to one exact position: they live at checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx

from .codecs.base import Array as HostArray
from .codecs.tensors import Room, Tensor, TensorSpec
from .codecs.windows import WindowTensor
from .errors import LayerKindError

Array = TypeVar("Array")

TOKEN_WISE, WINDOW, STATEFUL = "token-wise", "window", "state"
"""What a long prompt makes of a layer."""


@dataclass(frozen=True, slots=True)
class Layer(Generic[Array]):
    """One cache object, taken apart, or about to be put together again.

    Attributes:
        fixed: what it takes to put it together and is the same for every prompt of a model.
        rows: tensors with one row for each token, [heads, tokens, dim].
        window: tensors with the rows of the last tokens, [heads, held tokens, dim].
        state: anything else, objects and arrays inside of it; None for nothing.
    """

    fixed: Hashable = None
    rows: tuple[Array, ...] = ()
    window: tuple[Array, ...] = ()
    state: Any = None


class LayerKind(Protocol):
    """How the cache objects of a class are taken apart and put together again."""

    @property
    def name(self) -> str:
        """`TOKEN_WISE`, `WINDOW` or `STATEFUL`: what a long prompt makes of it."""

    def take(self, cache: Any) -> Layer[Any] | None:
        """Take a cache object apart, copying nothing.

        Returns:
            Its rows as `Tensor`s and its window as `WindowTensor`s; None where it holds something
            that this kind does not know: it is kept whole then, as a state.
        """

    def restore(self, layer: Layer[mx.array], tokens: int) -> Any:
        """A new cache object after `tokens` tokens, of evaluated arrays that are its own.

        Rows come as they were taken, or the first `tokens` of them; window and state come as they
        were at exactly this position. A kind that has an attribute `takes_room`, and it is true,
        may get rows that go on with zeros, for what the model will add.
        """


class LayerKinds:
    """The kinds of layers by the class of their cache objects."""

    def __init__(self) -> None:
        self._kinds: dict[type, LayerKind] = {}

    def register(self, cache_class: type, kind: LayerKind) -> None:
        """Say how the cache objects of exactly this class are taken apart.

        Raises:
            LayerKindError: if the class has a kind already, or it is no class, or the kind is none.
        """
        is_kind = not isinstance(kind, type) and all(
            hasattr(kind, name) for name in ("name", "take", "restore")
        )
        if not isinstance(cache_class, type) or not is_kind:
            raise LayerKindError(f"{cache_class!r} and {kind!r} are not a class and a layer kind")
        if cache_class in self._kinds:
            raise LayerKindError(f"{cache_class.__name__} has a layer kind already")
        self._kinds[cache_class] = kind

    def get(self, cache_class: type) -> LayerKind | None:
        """The kind of a class; None for one that nobody knows."""
        return self._kinds.get(cache_class)

    def classes(self) -> list[type]:
        """All classes that have a kind, in the order of registration."""
        return list(self._kinds)


@dataclass(frozen=True, slots=True)
class Layout:
    """What the layers of a model look like, apart from their numbers.

    A model may show more than one: a window that is not yet full is all rows.

    Attributes:
        rows: what each tensor in blocks looks like.
        windows: what each tensor of a window looks like.
        states: how many layers have a state.
        form: how it is all put together again; the border's affair.
        look: by layer, what its tensors look like wherever they live; empty if it has none.
    """

    rows: tuple[TensorSpec, ...]
    windows: tuple[TensorSpec, ...]
    states: int
    form: Hashable
    look: tuple[tuple[TensorSpec, ...], ...]

    @property
    def needs_checkpoint(self) -> bool:
        """Whether it can be restored at exact positions alone."""
        return bool(self.windows or self.states)

    def is_of_same_model(self, other: Layout) -> bool:
        """Whether one model can show both."""
        return len(self.look) == len(other.look) and all(
            one == two or not one or not two for one, two in zip(self.look, other.look, strict=True)
        )


class Frozen(Protocol):
    """States in host memory."""

    @property
    def nbytes(self) -> int: ...

    def restore(self) -> list[Any]:
        """The states as new objects, evaluated."""


class Portable(Protocol):
    """What of a model's layers is no array, as text and plain data, for files."""

    def layout_to(self, layout: Layout) -> str | None:
        """A layout as text, the same for the same layout; None if it has no such form."""

    def layout_from(self, text: str) -> Layout:
        """Undo `layout_to`; raises LayerKindError for what nobody here knows."""

    def states_to(self, states: Frozen) -> tuple[Any, list[HostArray]] | None:
        """States as what JSON holds, and the arrays in it; None if they have no such form."""

    def states_from(self, plain: Any, arrays: Sequence[HostArray]) -> Frozen:
        """Undo `states_to`; raises LayerKindError for what nobody here knows."""


@dataclass(frozen=True, slots=True)
class Layers:
    """All layers of a prompt cache, taken apart.

    Attributes:
        tokens: how many tokens they stand for.
        rows, windows: in the order of the layout.
        state_bytes: about what the states take.
        freeze: copies the states to host memory.
    """

    layout: Layout
    tokens: int
    rows: Sequence[Tensor]
    windows: Sequence[WindowTensor]
    state_bytes: int
    freeze: Callable[[], Frozen]


@dataclass(frozen=True, slots=True)
class Fetched:
    """All layers after a prompt's first tokens.

    Attributes:
        tokens: how many.
        rows: [heads, tokens, dim] each, evaluated; longer by `room` where that is taken.
        windows: [heads, held tokens, dim] each, evaluated.
        states: in the order of the layers that have one.
        room: what there is of it.
    """

    layout: Layout
    tokens: int
    rows: list[mx.array]
    windows: list[mx.array]
    states: list[Any]
    room: Room | None = None
