"""What of a prompt cache is no array, as text and plain data, so that files can hold it.

No pickle: classes go by name, and only those can be named that the model at hand shows by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..codecs.base import Array
from ..codecs.tensors import TensorSpec
from ..errors import LayerKindError
from ..fingerprint.code import name_of
from ..layers import Frozen, LayerKind, LayerKinds, Layout
from .layer_kinds import STATE, UNUSED, Empty
from .models_cache import CONTAINERS, Leaf, Nested
from .snapshot import HostArray, HostObject, Snapshot

KIND_NAMES: dict[str, LayerKind] = {"state": STATE, "unused": UNUSED}
"""The kinds that are no class's own."""

PLAIN = (bool, int, float, str, type(None))

NONSENSE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What comes of reading data that nobody here wrote."""


class PortableLayers:
    """The layouts and states of one model as text and plain data.

    Args:
        kinds: of layers.
        caches: the model's cache objects before its first token: their classes can be named.
    """

    def __init__(self, kinds: LayerKinds, caches: Sequence[Any]) -> None:
        self._kinds = kinds
        self._classes = {name_of(each): each for each in (*kinds.classes(), *_classes_in(caches))}

    def layout_to(self, layout: Layout) -> str | None:
        """A layout as text, the same for the same layout; None if it has no such form."""
        try:
            plain = {
                "rows": list(map(_spec_to, layout.rows)),
                "windows": list(map(_spec_to, layout.windows)),
                "states": layout.states,
                "form": [self._entry_to(entry) for entry in layout.form],  # type: ignore[attr-defined]
                "look": [list(map(_spec_to, specs)) for specs in layout.look],
            }
        except LayerKindError:
            return None
        return json.dumps(plain, sort_keys=True)

    def layout_from(self, text: str) -> Layout:
        """Undo `layout_to`."""
        try:
            plain = json.loads(text)
            return Layout(
                rows=tuple(map(_spec_from, plain["rows"])),
                windows=tuple(map(_spec_from, plain["windows"])),
                states=plain["states"],
                form=tuple(map(self._entry_from, plain["form"])),
                look=tuple(tuple(map(_spec_from, specs)) for specs in plain["look"]),
            )
        except NONSENSE as error:
            raise LayerKindError(f"this is no layout: {error!r}") from error

    def _entry_to(self, entry: Leaf | Nested) -> Any:
        if isinstance(entry, Nested):
            container = CONTAINERS.index(entry.container)
            return {"container": container, "members": list(map(self._entry_to, entry.members))}
        fixed: Any = entry.fixed
        if isinstance(fixed, Empty):
            fixed = {"empty": self._packed([name_of(fixed.cache_class), fixed.snapshot.frozen])}
        else:
            fixed = {"fixed": self._packed(fixed)}
        return {
            **fixed,
            "kind": self._kind_to(entry.kind),
            "rows": [None if spec is None else _spec_to(spec) for spec in entry.rows],
            "windows": entry.windows,
            "has_state": entry.has_state,
        }

    def _entry_from(self, plain: Any) -> Leaf | Nested:
        if "members" in plain:
            members = tuple(map(self._entry_from, plain["members"]))
            return Nested(CONTAINERS[plain["container"]], members)
        if "empty" in plain:
            name, frozen = _Unpacking(self._class_from, []).unpack(plain["empty"])
            fixed: Any = Empty(self._class_from(name), Snapshot(frozen))
        else:
            fixed = _Unpacking(self._class_from, []).unpack(plain["fixed"])
        return Leaf(
            self._kind_from(plain["kind"]),
            fixed,
            tuple(None if spec is None else _spec_from(spec) for spec in plain["rows"]),
            plain["windows"],
            plain["has_state"],
        )

    def _packed(self, value: Any) -> Any:
        """Plain data of what holds no arrays."""
        packing = _Packing(self._classes)
        plain = packing.pack(value)
        if packing.arrays:
            raise LayerKindError("a layout holds no arrays")
        return plain

    def _kind_to(self, kind: LayerKind) -> str:
        named = {id(known): name for name, known in KIND_NAMES.items()}
        for each in self._kinds.classes():
            named.setdefault(id(self._kinds.get(each)), name_of(each))
        if id(kind) not in named:
            raise LayerKindError(f"{kind!r} belongs to no class")
        return named[id(kind)]

    def _kind_from(self, name: str) -> LayerKind:
        kind = KIND_NAMES.get(name) or self._kinds.get(self._class_from(name))
        if kind is None:
            raise LayerKindError(f"{name} has no layer kind here")
        return kind

    def _class_from(self, name: str) -> type:
        if name not in self._classes:
            raise LayerKindError(f"{name} is no class of this model's caches")
        return self._classes[name]

    def states_to(self, states: Frozen) -> tuple[Any, list[Array]] | None:
        """States as what JSON holds, and the arrays in it; None if they have no such form."""
        if not isinstance(states, Snapshot):
            return None
        packing = _Packing(self._classes)
        try:
            return packing.pack(states.frozen), packing.arrays
        except LayerKindError:
            return None

    def states_from(self, plain: Any, arrays: Sequence[Array]) -> Frozen:
        """Undo `states_to`."""
        try:
            return Snapshot(_Unpacking(self._class_from, arrays).unpack(plain))
        except NONSENSE as error:
            raise LayerKindError(f"these are no states: {error!r}") from error


class _Packing:
    """Makes plain data of a frozen value. Whatever is not a plain value becomes {what: of what}.

    Attributes:
        arrays: those in it, in turn; the plain data holds their numbers.
    """

    def __init__(self, classes: Mapping[str, type]) -> None:
        self._classes = classes
        self.arrays: list[Array] = []

    def pack(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return value
        if isinstance(value, HostArray):
            self.arrays.append(value.array)
            return {"array": [len(self.arrays) - 1, _dtype_to(value.dtype)]}
        if isinstance(value, mx.Dtype):
            return {"dtype": _dtype_to(value)}
        if isinstance(value, HostObject) and self._classes.get(name_of(value.kind)) is value.kind:
            return {"object": [name_of(value.kind), self.pack(value.attributes)]}
        if type(value) in (list, tuple):
            return {type(value).__name__: list(map(self.pack, value))}
        if type(value) is dict:
            return {"dict": [[self.pack(key), self.pack(item)] for key, item in value.items()]}
        raise LayerKindError(f"{type(value).__name__} has no form outside of this process")


class _Unpacking:
    """Undoes `_Packing`."""

    def __init__(self, class_from: Callable[[str], type], arrays: Sequence[Array]) -> None:
        self._class_from = class_from
        self._arrays = arrays

    def unpack(self, plain: Any) -> Any:
        if not isinstance(plain, dict):
            return plain
        ((what, content),) = plain.items()
        if what == "array":
            number, dtype = content
            return HostArray(self._arrays[number], _dtype_from(dtype))
        if what == "dtype":
            return _dtype_from(content)
        if what == "object":
            name, attributes = content
            return HostObject(self._class_from(name), self.unpack(attributes))
        if what == "dict":
            return {self.unpack(key): self.unpack(item) for key, item in content}
        return {"list": list, "tuple": tuple}[what](map(self.unpack, content))


def _classes_in(caches: Sequence[Any]) -> Iterator[type]:
    """The classes of the objects in a model's empty prompt cache."""
    waiting: list[Any] = [caches]
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that no other one gets its id
        if isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            yield type(value)
            waiting.append(vars(value))


def _dtype_to(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


DTYPES = {_dtype_to(each): each for each in vars(mx).values() if isinstance(each, mx.Dtype)}
"""By what they call themselves: `mx.bool_` has another name than its attribute."""


def _dtype_from(name: str) -> mx.Dtype:
    if name not in DTYPES:
        raise LayerKindError(f"{name} is no dtype")
    return DTYPES[name]


def _spec_to(spec: TensorSpec) -> list[Any]:
    return [spec.heads, spec.dim, _dtype_to(spec.dtype)]


def _spec_from(plain: Sequence[Any]) -> TensorSpec:
    heads, dim, dtype = plain
    return TensorSpec(heads, dim, _dtype_from(dtype))
