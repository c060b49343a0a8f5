"""Prompt caches that went through files: every layout and state, and what no file can hold."""

from __future__ import annotations

import builtins
import enum
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlx_lm_kvcache_plugin.disk import files
from mlx_lm_kvcache_plugin.disk.names import CHECKPOINT, Name, child_key
from mlx_lm_kvcache_plugin.disk.tier import DiskTier
from mlx_lm_kvcache_plugin.errors import LayerKindError
from mlx_lm_kvcache_plugin.events import Error, Restore
from mlx_lm_kvcache_plugin.layers import STATEFUL, Frozen, Layer, LayerKinds, Layout
from mlx_lm_kvcache_plugin.patches.layer_kinds import Empty
from mlx_lm_kvcache_plugin.patches.models_cache import Leaf, Nested
from mlx_lm_kvcache_plugin.patches.opening import attach, identify
from mlx_lm_kvcache_plugin.patches.portable import PortableLayers
from mlx_lm_kvcache_plugin.patches.snapshot import HostArray, Snapshot
from mlx_lm_kvcache_plugin.prefix_cache import BLOCK_TOKENS
from tests.events import Events
from tests.families.speed import fast_for_each_layout
from tests.patches.cache_objects import (
    KINDS,
    LayerCache,
    OwnKVCache,
    arrays,
    filled,
    integers,
    known_kinds,
    plain,
    rows,
    same,
    taken,
)
from tests.patches.faces import make_face
from tests.patches.test_every_model import CUT, MODEL, NAMES, PROMPT, logits_after


def face_on(
    folder: Path, model: Any, codec: str, bits: int | None, events: Events
) -> tuple[Any, DiskTier]:
    """A prompt cache that knows nothing yet but its folder."""
    tier = DiskTier(folder, 1 << 30)
    face = make_face(codec, bits=bits, block_tokens=BLOCK_TOKENS, tier=tier, emit=events.append)
    attach(face.cache, MODEL, identify(model), [model], face.kinds)
    return face, tier


@pytest.mark.parametrize(("codec", "bits"), [("raw", None), ("rotated", 4)])
@pytest.mark.parametrize("name", fast_for_each_layout(NAMES))
def test_a_restart_goes_on_where_it_was(
    name: str, codec: str, bits: int | None, family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """What comes from disk is, to the bit, what memory would have given; and as much of it."""
    model, _ = load_model(family_folder(name))
    model(mx.array([PROMPT[:1]]))  # plamo3 keeps what it computes of its weights at first
    caches = make_prompt_cache(model)
    told = Events(), Events()
    before, tier = face_on(tmp_path, model, codec, bits, told[0])
    for start, stop in ((0, 150), (150, len(PROMPT) - 1)):
        mx.eval(model(mx.array([PROMPT[start:stop]]), cache=caches))
        before.insert_cache(MODEL, PROMPT[:stop], caches)
    assert tier.flush()
    after, _ = face_on(tmp_path, model, codec, bits, told[1])
    for tokens in (CUT, PROMPT):
        expected, rest = before.fetch_nearest_cache(MODEL, tokens)
        fetched, rest_after = after.fetch_nearest_cache(MODEL, tokens)
        assert rest_after == rest
        assert (fetched is None) == (expected is None)
        if fetched is not None:
            assert np.array_equal(
                logits_after(model, rest, fetched), logits_after(model, rest, expected)
            )
    assert not told[0].of(Error) and not told[1].of(Error)
    assert sum(event.tokens for event in told[1].of(Restore))
    after.cache.tree.check()


# Layouts


def leaves(form: Sequence[Any]) -> list[Leaf]:
    found: list[Leaf] = []
    for entry in form:
        found += leaves(entry.members) if isinstance(entry, Nested) else [entry]
    return found


def assert_layout_comes_back(layout: Layout, here: PortableLayers, there: PortableLayers) -> None:
    """Equal, with the same text, and with the same empty cache objects."""
    text = here.layout_to(layout)
    assert text is not None
    back = there.layout_from(text)
    assert back == layout and hash(back) == hash(layout)
    assert there.layout_to(back) == text
    form: Any = layout.form
    back_form: Any = back.form
    for one, other in zip(leaves(form), leaves(back_form), strict=True):
        assert one.kind is other.kind
        assert isinstance(one.fixed, Empty) == isinstance(other.fixed, Empty)
        if isinstance(one.fixed, Empty) and isinstance(other.fixed, Empty):
            assert same(one.fixed.snapshot.restore(), other.fixed.snapshot.restore())


def assert_states_come_back(states: Frozen, here: PortableLayers, there: PortableLayers) -> None:
    """To the bit, by way of a file, and counted as before."""
    pair = here.states_to(states)
    assert pair is not None
    plain, arrays = pair
    tokens = np.arange(2, dtype="<i8").tobytes()
    name = Name(b"p" * 16, child_key(b"p" * 16, tokens), 2, CHECKPOINT, b"l" * 8)
    named = {str(number): array for number, array in enumerate(arrays)}
    record = files.decode(name, files.encode(name, files.Record(tokens, {"": plain}, named)))
    read = [record.arrays[str(number)] for number in range(len(arrays))]
    back = there.states_from(record.meta[""], read)
    assert same(back.restore(), states.restore())
    assert back.nbytes == states.nbytes


@pytest.mark.parametrize("name", fast_for_each_layout(NAMES))
def test_a_model_s_layouts_and_states_come_back(
    name: str, family_folder: Callable[[str], Path]
) -> None:
    """Of a short prompt, a longer one, and in a process that has seen nothing but empty caches."""
    model, _ = load_model(family_folder(name))
    portables = [PortableLayers(known_kinds(), make_prompt_cache(model)) for _ in range(2)]
    texts = set()
    for length in (1, 7, 150):
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([PROMPT[:length]]), cache=caches))
        layers = taken(caches)
        assert_layout_comes_back(layers.layout, *portables)
        assert_states_come_back(layers.freeze(), *portables)
        texts.add(portables[0].layout_to(layers.layout))
    assert len(texts) <= 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache_comes_back(kind: str) -> None:
    """Its layout and its state; classes of model files too, if the model shows them."""
    layers = taken([KINDS[kind]()])
    portables = [PortableLayers(known_kinds(), [KINDS[kind]()]) for _ in range(2)]
    assert_layout_comes_back(layers.layout, *portables)
    assert_states_come_back(layers.freeze(), *portables)


@pytest.mark.parametrize(
    "state",
    [
        arrays(mx.array(3.5), None, mx.array(True)),
        arrays(mx.array(1.5, mx.bfloat16), mx.zeros((0, 4), mx.bfloat16)),
        arrays(None, rows(2, dtype=mx.float16), left_padding=[3, 0]),
        arrays(integers(2, 3), mx.array([1, 2**62], mx.int64), mx.array([255], mx.uint8)),
        arrays(mx.array([1 + 2j]), mx.array([float("nan"), -0.0, float("inf")])),
        arrays(rows(1000)[:, :, -3:]),
    ],
    ids=["0-d", "bfloat16", "padded", "integers", "odd numbers", "a view"],
)
def test_any_state_comes_back(state: Any) -> None:
    """To the bit: slots that are empty, numbers without a dimension, and what numpy lacks."""
    portable = PortableLayers(known_kinds(), [])
    assert_states_come_back(Snapshot.of([state, ArraysCache(2)]), portable, portable)


@pytest.mark.parametrize(
    "dtype", [each for each in vars(mx).values() if isinstance(each, mx.Dtype)], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_any_dtype_comes_back(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    """Of arrays, and as what a layout is made of."""
    portable = PortableLayers(known_kinds(), [])
    with mx.stream(mx.cpu):
        state = mx.array(np.arange(np.prod(shape, dtype=int)).reshape(shape)).astype(dtype)
        assert_states_come_back(Snapshot.of([arrays(state), [dtype]]), portable, portable)
    layout = with_fixed(taken([plain(3)]).layout, (dtype,))
    assert_layout_comes_back(layout, portable, portable)


PLAIN: dict[str, Any] = {
    "nothing": None,
    "empty ones": ([], (), {}, ""),
    "keys": {1: "one", None: (2,), (3, "x"): {"array": [0, "float32"]}, 2.5: -0.0},
    "our own notation": [{"object": ["os.system", "true"]}, {"dict": []}, {"tuple": [1]}],
    "dtypes": (mx.float16, [mx.bfloat16]),
    "objects": {"inner": filled(LayerCache(), 2), "caches": [plain(3), (arrays(rows(1)),)]},
    "odd words": "\ud800 \x00 \u2028 \\u0041",
    "odd numbers": [2**200, True, 1, 1.0, float("inf"), 1e-320],
}


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
def test_whatever_is_plain_comes_back(value: Any) -> None:
    """Beside arrays: also what looks like our own notation, and objects inside of objects."""
    cache = LayerCache()
    cache.pending = value
    portable = PortableLayers(known_kinds(), [LayerCache()])
    pair = portable.states_to(Snapshot.of([cache]))
    assert pair is not None
    plain_data = json.loads(json.dumps(pair[0]))
    assert same(portable.states_from(plain_data, pair[1]).restore(), [cache])


class Colour(enum.IntEnum):
    RED = 1


class Word(str):
    """Plain, but of a class of its own."""


def function() -> None:
    """Nothing to be called from a file."""


FOREIGN: dict[str, Any] = {
    "a function": function,
    "a lambda": lambda: None,
    "a method": [].append,
    "a class": LayerCache,
    "a frozenset": frozenset({1}),
    "a set": {1},
    "bytes": b"bytes",
    "a complex number": 1j,
    "numpy's": np.arange(3),
    "a number of numpy's": np.float64(1.5),
    "an enum": Colour.RED,
    "a subclass of str": Word("word"),
    "an object of another class": OwnKVCache(),
}


@pytest.mark.parametrize("depth", range(3))
@pytest.mark.parametrize("value", FOREIGN.values(), ids=FOREIGN)
def test_what_no_file_can_hold(value: Any, depth: int) -> None:
    """Has no such form, wherever it is: in an object, in a list, as what is the same always."""
    for _ in range(depth):
        value = [1, {"key": (value,)}]
    cache = filled(LayerCache(), 2)
    cache.pending = {"value": value}
    portable = PortableLayers(known_kinds(), [LayerCache()])
    assert portable.states_to(Snapshot.of([cache])) is None
    layout = taken([plain(3)]).layout
    assert portable.layout_to(with_fixed(layout, value)) is None
    assert portable.layout_to(layout) is not None


class Pair(NamedTuple):
    """A tuple that is more than one."""

    one: int
    two: int


@pytest.mark.parametrize(
    "fixed", [HostArray(np.zeros(2, np.float32), mx.float32), Pair(1, 2), [Pair(1, 2)]], ids=repr
)
def test_what_no_layout_can_hold(fixed: Any) -> None:
    """An array is no part of a text, and a tuple with names would lose them."""
    layout = with_fixed(taken([plain(3)]).layout, fixed)
    assert PortableLayers(known_kinds(), []).layout_to(layout) is None


def with_fixed(layout: Layout, fixed: Any) -> Layout:
    form: Any = layout.form
    return replace(layout, form=tuple(replace(leaf, fixed=fixed) for leaf in form))


def test_a_class_that_the_model_does_not_show() -> None:
    """Is not named, used or unused; nor is another one of the same name."""

    def make() -> Any:
        class Local(OwnKVCache):
            pass

        return Local

    shown, other = make(), make()
    portable = PortableLayers(known_kinds(), [shown()])
    for cache_class, is_known in [(shown, True), (other, False), (OwnKVCache, False)]:
        for cache in (filled(cache_class(), 4), [plain(2), cache_class()]):
            layers = taken(cache if isinstance(cache, list) else [cache])
            layout, states = portable.layout_to(layers.layout), portable.states_to(layers.freeze())
            assert (layout is not None and states is not None) == is_known
    assert portable.states_to(Foreign()) is None


class Foreign:
    """Frozen states of somebody else."""

    nbytes = 0

    def restore(self) -> list[Any]:
        return []


def test_a_kind_of_its_own() -> None:
    """What it keeps fixed goes along, if it is plain; and it needs a class that has it."""
    own = OwnKind(("a", 1, 2.5, None, True, (mx.float16, [])))
    kinds = known_kinds()
    kinds.register(OwnKVCache, own)
    layout = taken_by(kinds, own)
    assert_layout_comes_back(layout, *(PortableLayers(kinds, []) for _ in range(2)))
    assert PortableLayers(known_kinds(), []).layout_to(layout) is None
    text = PortableLayers(kinds, []).layout_to(layout)
    assert text is not None
    with pytest.raises(LayerKindError, match="OwnKVCache is no class"):
        PortableLayers(known_kinds(), []).layout_from(text)
    with pytest.raises(LayerKindError, match="OwnKVCache has no layer kind"):
        PortableLayers(known_kinds(), [OwnKVCache()]).layout_from(text)


class OwnKind:
    name = STATEFUL

    def __init__(self, fixed: Any) -> None:
        self.fixed = fixed

    def take(self, cache: Any) -> Layer[Any]:
        return Layer(self.fixed, state=cache)

    def restore(self, layer: Layer[mx.array], tokens: int) -> Any:
        return layer.state


def taken_by(kinds: LayerKinds, own: OwnKind) -> Layout:
    (leaf,) = taken([arrays(rows(2))]).layout.form  # type: ignore[attr-defined]
    # A list is what cannot be hashed, and so cannot be fixed.
    fixed = (*own.fixed[:-1], (mx.float16, ()))
    layout = taken([arrays(rows(2))]).layout
    assert kinds.get(OwnKVCache) is own
    return replace(layout, form=(replace(leaf, kind=own, fixed=fixed),))


def test_an_object_that_holds_itself() -> None:
    """Is no reason not to open the cache of a model."""
    cache = LayerCache()
    cache.pending["self"] = cache
    cache.pending["list"] = [cache]
    layout = taken([plain(3)]).layout
    assert PortableLayers(known_kinds(), [cache]).layout_to(layout) is not None


# What is not to be believed


class Trap:
    """Tells if anybody makes, unpickles or calls one."""

    sprung: list[str] = []

    def __init__(self) -> None:
        self.sprung.append("made")

    def __call__(self) -> None:
        self.sprung.append("called")


TRAP = f"{__name__}.Trap"

HOSTILE_NAMES = (
    "os.system",
    "builtins.eval",
    "builtins.object",
    "subprocess.Popen",
    "antigravity.fly",
    TRAP,
    "mlx_lm.models.cache.CacheList",
    "mlx_lm.models.cache.make_prompt_cache",
    "mlx_lm.models.cache.KVCache.__init__",
    "..KVCache",
    "",
)


def text_with(**changes: Any) -> str:
    """The text of a layout with windows, states and an unused cache, but for some of it."""
    layout = taken([plain(9), filled(RotatingKVCache(4), 9), arrays(rows(2)), KVCache()]).layout
    text = PortableLayers(known_kinds(), []).layout_to(layout)
    assert text is not None
    return json.dumps({**json.loads(text), **changes})


def entry_with(**changes: Any) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(text_with())["form"][0]
    return {**entry, **changes}


def deep(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


HOSTILE_TEXTS = [
    *("", "{}", "[]", "null", "7", '"text"', "{", "\x00", "NaN", deep(3), deep(100_000)),
    deep(100_000, '{"a":', "}"),
    *(text_with(rows=value) for value in (None, 7, "x", [7], [[1, 2]], [[1, 2, "float99"]])),
    *(text_with(rows=[[1, 2, name]]) for name in ("array", "eval", "__loader__", 7, None, [])),
    *(text_with(windows=value) for value in (None, 7, {"a": 1})),
    *(text_with(look=value) for value in (None, [7], [[7]], [["x"]])),
    *(text_with(form=value) for value in (None, 7, "x", [None], [7], ["x"], [[]], [{}])),
    *(text_with(form=[entry_with(kind=name)]) for name in (*HOSTILE_NAMES, None, 7, [], {})),
    *(text_with(form=[entry_with(rows=value)]) for value in (None, 7, [7], ["xyz"])),
    *(
        text_with(form=[{"container": number, "members": []}])
        for number in (3, 99, -4, "0", None, 0.5)
    ),
    text_with(form=[{"container": 0, "members": 7}]),
    text_with(form=[{"container": 0, "members": [{"container": 0}]}]),
    *(
        text_with(form=[entry_with(fixed=value)])
        for value in (
            *({"object": [name, {"dict": []}]} for name in HOSTILE_NAMES),
            *({"object": value} for value in (None, 7, [], ["x"])),
            *({"array": value} for value in (None, [0, "float32"], [0], "x")),
            *({"dict": value} for value in (None, 7, [7], [[[], 1]])),
            *({"dict": [[{"list": []}, 1]]}, {"eval": "1"}, {}, {"list": 1, "tuple": 2}),
            *({"dtype": name} for name in ("eval", "array", 7, None)),
        )
    ),
    *(
        text_with(form=[{**entry_with(), "empty": value}])
        for value in (
            None,
            7,
            {"list": []},
            *({"list": [name, {"list": []}]} for name in (*HOSTILE_NAMES, 7, None)),
            {"list": ["mlx_lm.models.cache.KVCache", {"object": ["os.system", None]}]},
        )
    ),
]


@pytest.fixture
def nothing_happens(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fails if anything is imported, evaluated, or called that no text may call."""
    import_module = builtins.__import__

    def guarded(name: str, *args: Any, **options: Any) -> Any:
        # The parser's own error has its module imported when it is first raised.
        assert name in sys.modules or name.startswith("json"), f"{name} was imported"
        return import_module(name, *args, **options)

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("evaluated")

    Trap.sprung.clear()
    before = set(sys.modules)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", guarded)
        patch.setattr(builtins, "eval", refuse)
        patch.setattr("os.system", refuse)
        yield
    assert set(sys.modules) == before and not Trap.sprung


def refusal_of(text: str) -> LayerKindError | None:
    portable = PortableLayers(known_kinds(), [])
    try:
        portable.layout_from(text)
    except LayerKindError as error:
        return error
    return None


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=lambda text: text[-60:])
def test_a_hostile_layout_is_refused(text: str) -> None:
    """By the one error that means nothing but: nobody here knows it."""
    assert refusal_of(text) is not None


def test_the_text_that_the_others_are_made_of_is_sound() -> None:
    assert refusal_of(text_with()) is None
    assert refusal_of(text_with(form=[entry_with()])) is None


HOSTILE_STATES: list[Any] = [
    *({"list": [{"object": [name, {"dict": []}]}]} for name in HOSTILE_NAMES),
    *({"list": [{"object": value}]} for value in (None, 7, [], ["x"], [[], []])),
    *({"list": [{"array": value}]} for value in (None, [9, "float32"], ["0", "float32"], [0, "x"])),
    *({"list": value} for value in (None, 7)),
    *({"dict": value} for value in (None, 7, [7], [[{"list": []}, 1]])),
    *({"eval": "1"}, {}, {"list": [], "tuple": []}),
]


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("plain", HOSTILE_STATES, ids=repr)
def test_hostile_states_are_refused(plain: Any) -> None:
    """By the same error, before there is an object."""
    with pytest.raises(LayerKindError):
        PortableLayers(known_kinds(), []).states_from(plain, [np.zeros(2, np.float32)])


def test_states_that_are_too_deep_are_refused() -> None:
    """Deeper than anybody's, and than Python's stack."""
    value: Any = 1
    for _ in range(50_000):
        value = {"list": [value]}
    with pytest.raises(LayerKindError):
        PortableLayers(known_kinds(), []).states_from(value, [])


jsons = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False)
    | st.sampled_from(
        ["", "x", "float32", "list", "array", "state", "unused", "mlx_lm.models.cache.KVCache"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["array", "dtype", "object", "list", "tuple", "dict", "fixed", "empty", "members"]
                + ["kind", "rows", "windows", "has_state", "container", "states", "form", "look"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(value=jsons, place=st.sampled_from(["all", "form", "entry", "fixed", "empty", "rows"]))
def test_any_json_is_a_layout_or_refused(value: Any, place: str) -> None:
    """Whatever it says and wherever: never another error."""
    texts = {
        "all": lambda: json.dumps(value),
        "form": lambda: text_with(form=value),
        "entry": lambda: text_with(form=[value]),
        "fixed": lambda: text_with(form=[entry_with(fixed=value)]),
        "empty": lambda: text_with(form=[{**entry_with(), "empty": value}]),
        "rows": lambda: text_with(rows=value),
    }
    refusal_of(texts[place]())
    try:
        PortableLayers(known_kinds(), []).states_from(value, [np.zeros(2, np.float32)])
    except LayerKindError:
        pass
