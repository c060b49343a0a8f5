"""Small prefix caches for tests, and layers that depend on all tokens before them."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_lm_kvcache_plugin.codecs.registry import BUILT_IN, CodecRegistry
from mlx_lm_kvcache_plugin.codecs.tensors import TensorSpec
from mlx_lm_kvcache_plugin.errors import LayerKindError
from mlx_lm_kvcache_plugin.events import Event
from mlx_lm_kvcache_plugin.layers import Fetched, Layers, Layout
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.spaces import Space
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget, Memory
from tests.tensors import Rows, Window

MODEL = "model"

TINY: dict[str, Any] = {"layers": 1, "heads": 1, "dim": 2}
"""For what is about tokens and not about numbers."""

STATES: dict[str, Any] = {**TINY, "state_bytes": 300}
"""Rows beside a state: resumed at checkpoints alone, however short."""

WINDOWS: dict[str, Any] = {**TINY, "windows": (6,)}
"""Rows alone while there are no more than six tokens, and checkpoints beyond."""

MIXED: dict[str, Any] = {**TINY, "windows": (5, 3), "state_bytes": 300}
"""A layer with rows, two with windows of different lengths, and a state."""


@dataclass(frozen=True)
class State:
    """What a recurrent layer is after these tokens, if there is one: the tokens themselves."""

    tokens: tuple[int, ...]
    nbytes: int

    def restore(self) -> list[Any]:
        return [list(self.tokens)] if self.nbytes else []


class JsonLayers:
    """The layouts and states of these tests as text and plain data."""

    def layout_to(self, layout: Layout) -> str:
        def plain(specs: Sequence[TensorSpec]) -> list[Any]:
            return [[spec.heads, spec.dim, str(spec.dtype)] for spec in specs]

        sides = [plain(layout.rows), plain(layout.windows), list(map(plain, layout.look))]
        return json.dumps([*sides, layout.states, layout.form])

    def layout_from(self, text: str) -> Layout:
        def specs(plain: Sequence[Any]) -> tuple[TensorSpec, ...]:
            return tuple(TensorSpec(h, d, getattr(mx, dtype[9:])) for h, d, dtype in plain)

        try:
            rows, windows, look, states, form = json.loads(text)
        except ValueError as error:
            raise LayerKindError(str(error)) from error
        form = form if isinstance(form, str) else (tuple(form[0]), form[1])
        return Layout(specs(rows), specs(windows), states, form, tuple(map(specs, look)))

    def states_to(self, states: State) -> tuple[Any, list[np.ndarray]]:
        return {"nbytes": states.nbytes}, [np.array(states.tokens, np.int64)]

    def states_from(self, plain: Any, arrays: Sequence[np.ndarray]) -> State:
        (tokens,) = arrays
        return State(tuple(tokens.tolist()), plain["nbytes"])


@dataclass
class Machine:
    """Memory that a test takes away and gives back, and a probe that may fail.

    Attributes:
        is_short_at: whether there is none left at its next probe but so many.
        probes: how many there were since that was set.
    """

    available_bytes: int = 10 * GIB
    before_probing: Callable[[], None] = field(default=lambda: None)
    is_short_at: Callable[[int], bool] = field(default=lambda probe: False)
    probes: int = 0

    def run_short(self, at: Callable[[int], bool]) -> None:
        """From now on have no memory at those probes, the first of which is 1."""
        self.is_short_at, self.probes = at, 0

    def probe(self) -> Memory:
        self.before_probing()
        self.probes += 1
        return Memory(16 * GIB, 0 if self.is_short_at(self.probes) else self.available_bytes)


def make_cache(
    codec: str = "raw",
    bits: int | None = None,
    *,
    group_size: int = 64,
    limit_bytes: int = GIB,
    budget: Budget | None = None,
    block_tokens: int = 4,
    emit: Callable[[Event], None] = lambda event: None,
    **more: Any,
) -> PrefixCache:
    registry = CodecRegistry()
    for name, factory in BUILT_IN.items():
        registry.register(name, factory)
    return PrefixCache(
        Settings(key_bits=bits, value_bits=bits, codec=codec, group_size=group_size),
        registry,
        budget or Budget(limit_bytes=limit_bytes, probe=Machine().probe),
        emit=emit,
        block_tokens=block_tokens,
        **more,
    )


def tensors_for(
    tokens: Sequence[int],
    namespace: Hashable = MODEL,
    *,
    layers: int = 2,
    heads: int = 2,
    dim: int = 64,
    dtype: mx.Dtype = mx.float32,
) -> list[Rows]:
    """Keys and values as a model gives them: a row is told by its token and all before it."""
    states, state = [], sum(map(ord, str(namespace)))
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % 2**64
        states.append(state)
    tensors = []
    for index in range(2 * layers):
        columns = np.arange(index * heads * dim, (index + 1) * heads * dim, dtype=np.uint64)
        mixed = np.array(states, np.uint64)[:, None] ^ (columns * np.uint64(0x9E3779B97F4A7C15))
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (mixed >> np.uint64(40)).astype(np.float32) / 2**22 - 2
        rows = values.reshape(len(tokens), heads, dim).swapaxes(0, 1)
        tensors.append(Rows(mx.array(rows).astype(dtype)))
    return tensors


def layers_for(
    tokens: Sequence[int],
    namespace: Hashable = MODEL,
    *,
    layers: int = 2,
    windows: Sequence[int] = (),
    state_bytes: int = 0,
    **shape: Any,
) -> Layers:
    """What a model's layers hold after these tokens, taken apart.

    Args:
        layers: how many have a row for each token.
        windows: for each further layer, of how many tokens its window holds the rows; while there
            are no more tokens than that they are rows like others.
        state_bytes: what the state of one more layer takes; 0 if there is none.
        shape: of the tensors.
    """
    tensors = tensors_for(tokens, namespace, layers=layers + len(windows), **shape)
    lengths = [len(tokens)] * layers + [min(window, len(tokens)) for window in windows]
    are_full = [length < len(tokens) for length in lengths]
    rows, slid = [], []
    for index, tensor in enumerate(tensors):
        if are_full[index // 2]:
            slid.append(Window(tensor.array[:, -lengths[index // 2] :]))
        else:
            rows.append(tensor)
    has_state = state_bytes > 0
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    layout = Layout(
        rows=tuple(tensor.spec for tensor in rows),
        windows=tuple(tensor.spec for tensor in slid),
        states=int(has_state),
        form=(tuple(are_full), has_state) if slid or has_state else "rows",
        look=(*((keys.spec, values.spec) for keys, values in pairs), *[()] * has_state),
    )
    return Layers(
        layout, len(tokens), rows, slid, state_bytes, lambda: State(tuple(tokens), state_bytes)
    )


def row_layers(tensors: Sequence[Rows], tokens: int) -> Layers:
    """A model with attention alone, of which this is the first `tokens` rows."""
    specs = tuple(tensor.spec for tensor in tensors)
    look = tuple(zip(specs[::2], specs[1::2], strict=True))
    layout = Layout(rows=specs, windows=(), states=0, form="rows", look=look)
    return Layers(layout, tokens, tensors, [], 0, lambda: State((), 0))


def insert(
    cache: PrefixCache,
    tokens: Sequence[int],
    namespace: Hashable = MODEL,
    label: str = "assistant",
    **shape: Any,
) -> None:
    """Store what a model computes for these tokens."""
    cache.insert(namespace, tokens, layers_for(tokens, namespace, **shape), label)
    cache.tree.check()


def fetched_from(
    cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = MODEL
) -> Fetched | None:
    """What a prompt gets."""
    fetched: Fetched | None = cache.fetch(tokens, cache.match(namespace, tokens))
    cache.tree.check()
    return fetched


def fetch(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = MODEL) -> int:
    """How many tokens are a hit."""
    fetched = fetched_from(cache, tokens, namespace)
    return fetched.tokens if fetched else 0


def is_what_was_computed(
    fetched: Fetched, tokens: Sequence[int], namespace: Hashable = MODEL, **shape: Any
) -> bool:
    """Whether all of it is, bit for bit, what the model computes for the tokens of the hit.

    Where the hit is a part of what was stored, with windows that were not full in the whole either.
    """
    wanted = layers_for(tokens[: fetched.tokens], namespace, **shape)
    states = wanted.freeze().restore() if wanted.layout.states else []
    return (
        fetched.layout == wanted.layout
        and fetched.states == states
        and are_same(fetched.rows, wanted.rows)
        and are_same(fetched.windows, wanted.windows)
    )


def are_same(arrays: Sequence[mx.array], tensors: Sequence[Rows]) -> bool:
    """Whether arrays are, bit for bit and in their dtype, the rows of tensors."""
    return len(arrays) == len(tensors) and all(
        array.dtype == tensor.array.dtype and bool(mx.array_equal(array, tensor.array))
        for array, tensor in zip(arrays, tensors, strict=True)
    )


def space_of(cache: PrefixCache, namespace: Hashable = MODEL) -> Space:
    """Where a namespace of one layout is stored."""
    (space,) = cache.spaces.of(namespace)
    return space


def state_of(cache: PrefixCache) -> tuple[Any, ...]:
    """All that a failed operation must leave as it was."""
    tree = cache.tree
    return set(tree), tree.used_bytes, tree.tokens, +tree.sequences, +tree.bytes_by_label


class Crash(Exception):
    """What the tests make fail."""


def fail_on_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for one call that raises `Crash`."""
    calls = 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Crash
        return function(*args, **options)

    return failing
