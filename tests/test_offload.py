"""The disk below memory: after a restart a prompt gets what was stored, to the token and the bit.

The codec is raw and blocks have four tokens, so that what is fetched can be held against what was
computed.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_lm_kvcache_plugin.codecs.packing import Payload
from mlx_lm_kvcache_plugin.disk import access
from mlx_lm_kvcache_plugin.disk.files import Record
from mlx_lm_kvcache_plugin.disk.names import BLOCK, CHECKPOINT, Name, layout_digest
from mlx_lm_kvcache_plugin.disk.tier import DiskTier
from mlx_lm_kvcache_plugin.events import Error, Event, Evict, Hit, Insert, Miss, Restore
from mlx_lm_kvcache_plugin.inspection.explanation import explain
from mlx_lm_kvcache_plugin.matching import find_longest
from mlx_lm_kvcache_plugin.naming import Naming
from mlx_lm_kvcache_plugin.stats.history import History
from mlx_lm_kvcache_plugin.store.budget import GIB, Budget
from mlx_lm_kvcache_plugin.store.thinning import GENERATED, PROMPT, SYSTEM, USER
from mlx_lm_kvcache_plugin.writing import Checkpoint
from tests.disk.records import Disk, path_of, temporaries
from tests.events import Events
from tests.store.caches import (
    MIXED,
    MODEL,
    STATES,
    TINY,
    JsonLayers,
    Machine,
    fetch,
    fetched_from,
    insert,
    is_what_was_computed,
    layers_for,
    make_cache,
)

WEIGHTS = b"of these weights"

NEVER = 99
"""A token that is in no sequence."""

ALONE: dict[str, dict[str, Any]] = {
    "states alone": {"layers": 0, "state_bytes": 300},
    "windows alone": {**TINY, "layers": 0, "windows": (4,)},
}
"""Models without any rows for every token, once their windows are full."""

EVERY = {"rows": TINY, "checkpoints": MIXED, **ALONE}

both_shapes = pytest.mark.parametrize("shape", [TINY, MIXED], ids=["rows", "checkpoints"])


class Process:
    """A prefix cache over a folder that knows nothing else of any other one."""

    def __init__(
        self,
        folder: Path,
        *,
        namespaces: Sequence[str] = (MODEL,),
        fingerprint: bytes = WEIGHTS,
        tier: DiskTier | None = None,
        **options: Any,
    ) -> None:
        self.events = Events()
        self.tier = tier or DiskTier(folder, GIB, disk_usage=lambda _: Disk())
        self.cache = make_cache(tier=self.tier, emit=self.events.append, **options)
        for namespace in namespaces:
            self.attach(namespace, fingerprint)

    def attach(self, namespace: str = MODEL, fingerprint: bytes = WEIGHTS) -> None:
        self.cache.attach(namespace, fingerprint, {"model": "of a test"}, JsonLayers())

    def insert(self, tokens: Sequence[int], namespace: str = MODEL, **options: Any) -> None:
        """Store what a model computes for these tokens, on disk too."""
        insert(self.cache, tokens, namespace, **options)
        assert self.tier.flush()

    def hits(self, *prompts: Sequence[int], **shape: Any) -> list[int]:
        """How many tokens of each prompt are a hit, all of it what was computed for them."""
        hits = []
        for prompt in prompts:
            fetched = fetched_from(self.cache, prompt)
            hits.append(fetched.tokens if fetched else 0)
            assert fetched is None or is_what_was_computed(fetched, prompt, **shape)
        return hits

    def of(self, *kinds: type[Event]) -> list[Any]:
        """What it told of these kinds."""
        return self.events.of(*kinds)


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process over the folder of the test."""
    started: list[Process] = []

    def start(**options: Any) -> Process:
        started.append(Process(tmp_path, **options))
        return started[-1]

    yield start
    for process in started:
        assert process.tier.flush()
        process.tier.close()
    assert not temporaries(tmp_path)


def names(folder: Path) -> list[Name]:
    """What lies in a folder, broken files aside."""
    paths = [path for path in folder.rglob("*.safetensors") if path.parent.name != "quarantine"]
    return [name for path in paths if (name := Name.parse(path.name))]


def kinds(folder: Path) -> Counter[tuple[str, int]]:
    """How many records there are of each kind and length."""
    return Counter((name.kind, name.tokens) for name in names(folder))


def paths_of(folder: Path, kind: str, tokens: int) -> list[Path]:
    return [path for path in folder.rglob("*.safetensors") if f"-{tokens}{kind}-" in path.name]


def path_between(folder: Path, process: Process, tokens: Sequence[int]) -> Path:
    """The file of the last node that these tokens lead to, in the memory of a process."""
    offload = process.cache._offload
    assert offload is not None
    attached = offload._attached[MODEL]
    (space,) = process.cache.spaces.of(MODEL)
    text = attached.text(space.layout)
    assert text is not None
    prefix = process.cache.match(MODEL, [*tokens, NEVER])
    assert prefix is not None and prefix.tokens == len(tokens)
    tip = prefix.blocks[-1]
    *_, (_, _, name) = Naming.of(attached.home, text, 4).path(tip.path())
    return path_of(folder, name, attached.home)


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        data[-1] ^= 1
        path.write_bytes(data)


DAMAGES = ("missing", "cut", "empty", "one bit")


# What a hit is


@pytest.mark.parametrize("shared", range(1, 15))
def test_rows_are_a_hit_to_the_token(start: Start, shared: int) -> None:
    """Wherever a request leaves what is on disk: between blocks, inside of one, inside of a tail.

    And nothing is read that it does not need.
    """
    start().insert(range(14), **TINY)
    process = start()
    assert process.hits([*range(shared), NEVER, NEVER], **TINY) == [shared]
    assert process.tier.counters.files_read == -(-shared // 4)


@pytest.mark.parametrize("length", range(1, 18))
@pytest.mark.parametrize("shape", EVERY.values(), ids=EVERY)
def test_a_whole_sequence_comes_back(start: Start, shape: dict[str, Any], length: int) -> None:
    """Of any length, and of the layouts that a model shows at these lengths."""
    start().insert(range(length), **shape)
    assert start().hits([*range(length), NEVER], **shape) == [length]


def test_the_longest_run_among_siblings(start: Start) -> None:
    """Many go on from one block, whole or not: one file of them is read, and it is the best."""
    first = start()
    children = [
        [a, b, c, 7][:length]
        for a in (0, 1)
        for b in (2, 3)
        for c in (4, 5)
        for length in (2, 3, 4)
    ]
    random.Random(1).shuffle(children)
    for child in children:
        first.insert([*range(4), *child], **TINY)
    for rest, run in [([0, 2, 5], 3), ([1, 3, 4, 7, 7], 4), ([1, 3, NEVER], 2), ([1, NEVER], 1)]:
        process = start()
        assert process.hits([*range(4), *rest, NEVER], **TINY) == [4 + run]
        assert process.tier.counters.files_read == 2
    assert start().hits([*range(4), NEVER], **TINY) == [4]


def test_more_of_a_run_than_memory_has(start: Start) -> None:
    """What memory holds of a sequence does not hide the longer one on disk."""
    first = start()
    first.insert([*range(8), 1, 2, 3], **TINY)
    process = start()
    process.insert([*range(8), 1], **TINY)
    assert process.hits([*range(8), 1, 2, 9], **TINY) == [10]
    process = start()
    process.insert([*range(6)], **TINY)
    assert process.hits([*range(8), 1, 2, 3, 9], **TINY) == [11]
    assert [block.tokens for block in process.cache.tree] == [3, 4, 4]


def test_what_memory_has_is_not_read(start: Start) -> None:
    """A hit in memory opens no record, nor does it tell of anything restored."""
    process = start()
    for shape in (TINY, STATES):
        process.insert(range(10), **shape)
        assert process.hits([*range(10), NEVER], [*range(10), NEVER], **shape) == [10, 10]
    assert process.tier.counters.files_read == 0 and not process.of(Restore)


@pytest.mark.parametrize(
    "shape", [STATES, MIXED, *ALONE.values()], ids=["states", "windows too", *ALONE]
)
def test_a_checkpoint_is_for_its_exact_position(start: Start, shape: dict[str, Any]) -> None:
    """Found by what continues it and nothing shorter, the deepest of several, bit for bit."""
    first = start()
    for length in (13, 6, 16, 7):
        first.insert(range(length), label=SYSTEM, **shape)
    expected = {6: 0, 7: 6, 8: 7, 13: 7, 14: 13, 16: 13, 17: 16, 30: 16}
    for length, hit in expected.items():
        assert start().hits(range(length), **shape) == [hit]
    process = start()
    assert process.hits(*map(range, expected), **shape) == list(expected.values())
    assert process.hits([*range(12), NEVER, NEVER], **shape) == [7]


@both_shapes
def test_a_conversation_over_many_restarts(start: Start, shape: dict[str, Any]) -> None:
    """Each turn is of a process that knows nothing but the folder."""
    conversation = list(range(9))
    start().insert(conversation, label=USER, **shape)
    for turn in range(1, 12):
        known = len(conversation)
        conversation += range(turn * 100, turn * 100 + 1 + turn % 7)
        process = start()
        assert process.hits([*conversation, NEVER], **shape) == [known]
        process.insert(conversation, label=USER if turn % 2 else GENERATED, **shape)
        process.tier.close()


@both_shapes
def test_no_hit_ends_inside_of_an_image(start: Start, shape: dict[str, Any]) -> None:
    """An image is embedded whole or not, so a part of its tokens is as good as none."""
    prompt = [1, 2, 3, 4, 5, *[-(2**60)] * 6, *[-9] * 5, 6, 7]
    first = start()
    for end in (5, 8, 11, 13, 16, 18):
        first.insert(prompt[:end], label=SYSTEM, **shape)
    asked = [prompt[:end] for end in range(2, 19)] + [[*prompt[:end], 9] for end in range(1, 19)]
    for one in asked:
        assert start().hits(one, **shape) == first.hits(one, **shape)
    assert start().hits(prompt[:11], [*prompt[:8], -8], **shape) == [5, 8]


def test_an_image_in_memory_hides_nothing_on_disk(start: Start) -> None:
    """A checkpoint inside of an image serves none that goes on with it: one before it has to."""
    prompt = [1, 2, 3, 4, 5, *[-7] * 10]
    process = start()
    process.insert(prompt[:3], label=SYSTEM, **STATES)
    process.cache.trim_to(n_bytes=0)
    process.insert(prompt[:8], label=SYSTEM, **STATES)
    assert process.hits([*prompt, 6], **STATES) == [3]


# What is whose


OTHERS: dict[str, dict[str, Any]] = {
    "other weights": {"fingerprint": b"of other weights"},
    "raw": {"codec": "raw", "bits": None},
    "another codec": {"codec": "affine"},
    "other bits": {"bits": 8},
    "another group size": {"group_size": 32},
    "other blocks": {"block_tokens": 8},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_was_encoded_otherwise_is_no_hit(start: Start, other: dict[str, Any]) -> None:
    """Nor what another model computed; each has its own beside it."""
    same: dict[str, Any] = {"codec": "rotated", "bits": 4}
    start(**same).insert(range(17))
    process = start(**{**same, **other})
    assert fetch(process.cache, range(18)) == 0
    process.insert(range(9))
    assert fetch(start(**{**same, **other}).cache, range(18)) == 9
    assert fetch(start(**same).cache, range(18)) == 17


@pytest.mark.parametrize("changed", [{"heads": 2}, {"dim": 4}, {"layers": 2}, {"state_bytes": 9}])
def test_a_model_that_looks_different_gets_its_own(start: Start, changed: dict[str, Any]) -> None:
    """Under the same fingerprint even: what is on disk does not fit, and the rest goes on."""
    start().insert(range(17), **TINY)
    process = start()
    shape = {**TINY, **changed}
    process.insert(range(3), **shape)
    assert process.hits(range(18), **shape) == [3]
    if "state_bytes" not in changed:
        assert not process.of(Restore)


def test_a_namespace_is_a_name_of_this_process(start: Start) -> None:
    """What counts is the fingerprint: another process may call the same model otherwise."""
    start(namespaces=["one"]).insert(range(10), "one", **TINY)
    process = start(namespaces=["other"])
    fetched = fetched_from(process.cache, range(11), "other")
    assert fetched is not None and is_what_was_computed(fetched, range(11), "one", **TINY)


def test_what_has_no_home_stays_in_memory(start: Start, tmp_path: Path) -> None:
    """A namespace that nobody attached is no error, and no file."""
    process = start(namespaces=[])
    process.insert(range(10), **TINY)
    assert process.hits(range(11), **TINY) == [10]
    assert not names(tmp_path) and not process.of(Error)


@both_shapes
def test_other_weights_under_the_same_name(start: Start, shape: dict[str, Any]) -> None:
    """What memory holds of the old ones goes; both are found on disk again."""
    process = start()
    process.insert(range(10), **shape)
    held = len(process.cache.tree)
    process.attach(fingerprint=WEIGHTS)
    assert len(process.cache.tree) == held
    process.attach(fingerprint=b"of other weights")
    assert len(process.cache.tree) == process.cache.tree.used_bytes == 0
    assert [(event.blocks, event.cause) for event in process.of(Evict)] == [(held, "replaced")]
    assert process.hits(range(11), **shape) == [0]
    process.insert(range(8), **shape)
    process.attach(fingerprint=WEIGHTS)
    assert process.hits(range(11), **shape) == [10]
    process.attach(fingerprint=b"of other weights")
    assert process.hits(range(11), **shape) == [8]


# Memory


@both_shapes
def test_what_memory_evicted_comes_back(start: Start, shape: dict[str, Any]) -> None:
    """Room for two of five prompts, and each is a hit whenever it is asked for."""
    process = start()
    process.insert([0] * 9, **shape)
    process.cache.budget = Budget(
        limit_bytes=int(process.cache.tree.used_bytes * 2.5), probe=Machine().probe
    )
    for prompt in range(1, 5):
        process.insert([prompt] * 9, **shape)
    assert process.of(Evict)
    for prompt in (0, 3, 1, 4, 2, 0):
        assert process.hits([*[prompt] * 9, NEVER], **shape) == [9]
    assert sum(event.tokens for event in process.of(Restore)) and not process.of(Error)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8, 0.99])
@pytest.mark.parametrize("earlier", [0, 6])
@both_shapes
def test_more_on_disk_than_memory_may_hold(
    start: Start, shape: dict[str, Any], earlier: int, share: float
) -> None:
    """The beginning of what is rows comes; of checkpoints one that has room with all before it."""
    first = start()
    for length in filter(None, (earlier, 40)):
        first.insert(range(length), label=SYSTEM, **shape)
    roomy = start()
    assert roomy.hits(range(41), **shape) == [40]
    limit_bytes = int(roomy.cache.tree.used_bytes * share)
    process = start(limit_bytes=limit_bytes)
    (hit,) = process.hits(range(41), **shape)
    assert process.cache.tree.used_bytes <= limit_bytes
    assert sum(event.tokens for event in process.of(Restore)) == hit
    if shape is TINY:
        assert hit % 4 == 0 and hit < 40
        assert hit / 40 > share - 0.2
    else:
        assert hit == (earlier if share > 0.3 else 0)
        assert (len(process.cache.tree) == 0) == (hit == 0)
    assert not process.of(Error)


def test_nothing_goes_for_a_checkpoint_without_room(start: Start) -> None:
    """One that can never fit costs nobody else what memory holds of theirs."""
    wide = {**STATES, "dim": 64}
    first = start()
    first.insert(range(80), **wide)
    limit_bytes = first.cache.tree.used_bytes * 3 // 4
    process = start(limit_bytes=limit_bytes)
    process.insert([7] * 9, **wide)
    held = set(process.cache.tree)
    assert process.hits(range(81), **wide) == [0]
    assert set(process.cache.tree) == held


def test_nothing_goes_for_a_checkpoint_alone_without_room(start: Start) -> None:
    """Nor where memory has its rows already, on the way to another one that takes less."""
    first = start()
    first.insert(range(8), label=SYSTEM, **{**STATES, "state_bytes": 19_300})
    first.insert(range(12), label=SYSTEM, **STATES)
    process = start(limit_bytes=20_000)
    assert process.hits(range(13), **STATES) == [12]
    process.insert([7] * 9, **STATES)
    held = set(process.cache.tree)
    assert process.hits([*range(8), NEVER, NEVER], **STATES) == [0]
    assert set(process.cache.tree) == held


def test_a_block_may_take_more_than_the_first_one(start: Start) -> None:
    """What has numbers that cannot be quantized does, and comes as long as all have room."""
    options: dict[str, Any] = {"codec": "affine", "bits": 2, "block_tokens": 32}
    first, second = start(**options), start(**options)
    layers = layers_for(range(32 * 5), state_bytes=9)
    layers.rows[0].array[0, 100, 0] = mx.nan  # type: ignore[attr-defined]
    first.cache.insert(MODEL, range(32 * 5), layers, SYSTEM)
    assert first.tier.flush()
    assert fetch(second.cache, range(32 * 5 + 1)) == 32 * 5
    tight = start(limit_bytes=second.cache.tree.used_bytes, **options)
    assert fetch(tight.cache, range(32 * 5 + 1)) == 32 * 5


def payloads_of(process: Process, tokens: Sequence[int]) -> list[Any]:
    """Those of a prompt, from the first block on."""
    prefix = process.cache.match(MODEL, [*tokens, NEVER])
    assert prefix is not None and prefix.tokens == len(tokens)
    nodes = [*prefix.blocks, *([prefix.checkpoint] if prefix.checkpoint else [])]
    return [node.payload for node in nodes]


def parts_of(payload: Any) -> list[Payload]:
    return list(payload.windows.payloads) if isinstance(payload, Checkpoint) else [payload]


@pytest.mark.parametrize("shape", [{}, {"windows": (5, 3), "state_bytes": 300}], ids=str)
@pytest.mark.parametrize(("codec", "bits"), [("raw", None), ("affine", 3), ("rotated", 4)])
def test_what_comes_from_files_is_counted_as_what_was_computed(
    start: Start, shape: dict[str, Any], codec: str, bits: int | None
) -> None:
    """To the byte, and each array owns its memory: what is counted is what is held."""
    first, second = start(codec=codec, bits=bits), start(codec=codec, bits=bits)
    layers = layers_for(range(18), **shape)
    layers.rows[1].array[0, 5, 3] = mx.nan  # type: ignore[attr-defined]
    first.cache.insert(MODEL, range(18), layers, SYSTEM)
    assert first.tier.flush()
    computed, restored = payloads_of(first, range(18)), payloads_of(second, range(18))
    assert [type(one) for one in computed] == [type(one) for one in restored]
    assert [one.nbytes for one in computed] == [one.nbytes for one in restored]
    assert first.cache.tree.used_bytes == second.cache.tree.used_bytes
    has_exceptions = False
    for payload in chain.from_iterable(map(parts_of, restored)):
        has_exceptions |= bool(payload.exceptions)
        arrays = [*chain.from_iterable(payload.groups), *payload.exceptions.values()]
        assert all(array.flags.owndata and array.base is None for array in arrays)
        held = [payload.groups, payload.exceptions, *payload.groups, *arrays]
        assert payload.nbytes == object.__sizeof__(payload) + sum(map(sys.getsizeof, held))
    assert has_exceptions == (codec != "raw")
    assert second.cache.tree.bytes_by_label == first.cache.tree.bytes_by_label


@both_shapes
def test_the_queue_keeps_nothing_alive(start: Start, shape: dict[str, Any], tmp_path: Path) -> None:
    """What memory gives up before it was written is gone, and is no file."""
    process = start()
    release = threading.Event()
    assert process.tier._worker.put(lambda: release.wait(60) and None)
    insert(process.cache, range(10), **shape)
    insert(process.cache, [5] * 3, **shape)
    payloads = [weakref.ref(node.payload) for node in process.cache.tree if node.payload]
    assert len(payloads) > 3
    process.cache.trim_to(n_bytes=0)
    gc.collect()
    alive = [payload() for payload in payloads]
    release.set()
    assert alive == [None] * len(payloads)
    assert process.tier.flush()
    assert not names(tmp_path) and not process.of(Error)
    assert process.hits(range(11), **shape) == [0]


def test_what_does_not_fit_in_the_queue_is_written_later(start: Start, tmp_path: Path) -> None:
    """A full queue skips a path; the next insert of the conversation offers it again, whole."""
    tier = DiskTier(tmp_path, GIB, disk_usage=lambda _: Disk(), queued_paths=1)
    assert tier.flush()
    process = start(tier=tier)
    release = threading.Event()
    began = threading.Event()
    assert tier._worker.put(lambda: (began.set(), release.wait(60)) and None)
    assert began.wait(60) and tier._worker.put(lambda: None)
    insert(process.cache, range(10), **TINY)
    release.set()
    assert tier.flush() and not names(tmp_path)
    assert tier.counters.skipped == 1
    process.insert(range(12), **TINY)
    assert start().hits(range(13), **TINY) == [12]


# Files that go


def test_a_tail_on_disk_gives_way(start: Start, tmp_path: Path) -> None:
    """To a longer one, and to the block that completes it, whoever wrote it."""
    for length, expected in [
        (6, {4: 1, 2: 1}),
        (7, {4: 1, 3: 1}),
        (8, {4: 2}),
        (9, {4: 2, 1: 1}),
        (15, {4: 3, 3: 1}),
    ]:
        start().insert(range(length), **TINY)
        found = {tokens: count for (_, tokens), count in kinds(tmp_path).items()}
        assert found == expected
    start().insert([*range(8), 50], **TINY)
    assert kinds(tmp_path)[BLOCK, 1] == 1
    assert start().hits([*range(8), 50, NEVER], **TINY) == [9]


def test_a_tail_gives_way_to_its_own_continuation_alone(start: Start, tmp_path: Path) -> None:
    """Not to a longer one beside it."""
    for rest in ([50], [60, 61], [70, 71, 72], [80, 81, 82, 83], [60, 62]):
        start().insert([*range(4), *rest], **TINY)
    for rest in ([50], [60, 61], [70, 71, 72], [80, 81, 82, 83], [60, 62]):
        prompt = [*range(4), *rest, NEVER]
        assert start().hits(prompt, **TINY) == [len(prompt) - 1]


@pytest.mark.parametrize("lengths", [(14, 18), (18, 14), (14, 15, 16), (15, 14), (13, 20, 14)])
@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("shape", [STATES, MIXED], ids=["states", "windows too"])
def test_a_tail_that_bears_a_checkpoint_stays(
    start: Start, shape: dict[str, Any], restarts: bool, lengths: tuple[int, ...]
) -> None:
    """Beside the block that completes it, whichever comes first: resuming needs it."""
    process = start()
    for length in lengths:
        process.insert(range(length), label=SYSTEM, **shape)
        process = start() if restarts else process
    for length in lengths:
        assert start().hits([*range(length), NEVER, NEVER], **shape) == [length]


def test_thinned_checkpoints_are_deleted(start: Start, tmp_path: Path) -> None:
    """And the tails that bore them: what is left on disk is what is left in memory."""
    process = start()
    conversation: list[int] = []
    for turn in range(40):
        conversation += range(turn * 10, turn * 10 + 3 + turn % 4)
        process.insert(conversation, label=GENERATED if turn % 2 else USER, **STATES)
        nodes = list(process.cache.tree)
        assert kinds(tmp_path) == Counter(
            (BLOCK, node.tokens) if node.tokens else (CHECKPOINT, node.depth_tokens() % 4)
            for node in nodes
        )
    positions = sorted(node.depth_tokens() for node in nodes if not node.tokens)
    assert 3 < len(positions) < 20
    for position in positions:
        assert start().hits([*conversation[:position], NEVER], **STATES) == [position]


# Broken and missing files


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("place", range(4))
def test_the_rows_before_a_broken_file_are_a_hit(
    start: Start, tmp_path: Path, place: int, how: str
) -> None:
    """In the first block, in the middle, and at the end; what is computed anew mends it."""
    first = start()
    first.insert(range(14), **TINY)
    damage(path_between(tmp_path, first, range(14)[: 4 * place + 4]), how)
    process = start()
    assert process.hits(range(15), **TINY) == [4 * place]
    assert not process.of(Error)
    process.insert(range(14), **TINY)
    assert start().hits(range(15), **TINY) == [14]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize(
    ("tokens", "hit"),
    [(4, 0), (8, 6), (12, 6), (16, 6), (18, 6)],
    ids=["first block", "second block", "third block", "last block", "tail"],
)
def test_a_checkpoint_behind_a_broken_file_is_none(
    start: Start, tmp_path: Path, tokens: int, hit: int, how: str
) -> None:
    """An earlier one has to do; nothing of the way stays in memory for nothing."""
    first = start()
    for length in (6, 18):
        first.insert(range(length), label=SYSTEM, **STATES)
    path = broken_node(tmp_path, first, range(18), tokens)
    damage(path, how)
    process = start()
    assert process.hits(range(19), **STATES) == [hit]
    assert process.cache.tree.tokens == hit
    assert not process.of(Error)
    process.insert(range(18), label=SYSTEM, **STATES)
    assert start().hits(range(19), **STATES) == [18]


def broken_node(folder: Path, process: Process, sequence: Sequence[int], tokens: int) -> Path:
    """The file of the block or tail of a sequence that ends after so many tokens."""
    prefix = process.cache.match(MODEL, [*sequence, NEVER])
    offload = process.cache._offload
    assert prefix is not None and prefix.checkpoint is not None and offload is not None
    attached = offload._attached[MODEL]
    text = attached.text(prefix.space.layout)
    assert text is not None
    (name,) = [
        name
        for node, _, name in Naming.of(attached.home, text, 4).path(prefix.checkpoint.path())
        if node.tokens and node.depth_tokens() == tokens
    ]
    return path_of(folder, name, attached.home)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_broken_checkpoint_is_none(start: Start, tmp_path: Path, how: str) -> None:
    """The one before it has to do."""
    first = start()
    for length in (6, 18):
        first.insert(range(length), label=SYSTEM, **MIXED)
    *_, newest = sorted(
        tmp_path.rglob("*c-*.safetensors"), key=lambda path: path.stat().st_mtime_ns
    )
    damage(newest, how)
    process = start()
    assert process.hits(range(19), **MIXED) == [6]
    assert process.cache.tree.tokens == 6


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "one bit", "nonsense"])
def test_a_layout_that_cannot_be_read(start: Start, tmp_path: Path, how: str) -> None:
    """Is a miss, and what is stored from then on is found again."""
    start().insert(range(10), **TINY)
    (path,) = tmp_path.rglob("layout-*.json")
    if how == "nonsense":  # a text that has the digest of its name, but means nothing here
        path.with_name(f"layout-{layout_digest('?').hex()}.json").write_text("?")
    else:
        damage(path, how)
    process = start()
    assert process.hits(range(11), **TINY) == [10 if how == "nonsense" else 0]
    process.insert(range(10), **TINY)
    assert start().hits(range(11), **TINY) == [10]
    assert not process.of(Error)


# A tier that fails


METHODS = ("layouts", "children", "has", "tokens_of", "read", "offer", "forget")

GARBAGE: dict[str, tuple[Any, ...]] = {
    "layouts": (None, {}, {b"x": "?"}, {b"": ""}, {b"x": "[]"}, {b"x": "[[], [], [], 0, []]"}, [7]),
    "children": (None, [], [None], [7, "a name"]),
    "has": (None, True, False),
    "tokens_of": (None, b"", b"123", b"\0" * 32, "text", 7),
    "read": (None, 7, Record(b"", {}, {}), Record(b"", {"label": "x", "tokens": 4}, {})),
    "offer": (None, False, True),
    "forget": (None,),
}
"""What each method may return that is of no use."""


def raising(*args: Any, **options: Any) -> Any:
    raise RuntimeError("the disk is on fire")


@pytest.mark.parametrize("shape", [TINY, STATES], ids=["rows", "checkpoints"])
def test_a_tier_that_raises(
    start: Start,
    shape: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Memory serves on; each failure is told, and the first one has a line in the log."""
    start().insert(range(20), **shape)
    process = start()
    for method in METHODS:
        monkeypatch.setattr(process.tier, method, raising)
    assert process.hits(range(11), **shape) == [0]
    for _ in range(2):
        process.insert(range(10), **shape)
        assert process.hits(range(11), **shape) == [10]
    operations = Counter(event.operation for event in process.of(Error))
    assert operations["restore"] == 3 and 1 <= operations["offload"] <= 4
    assert all("on fire" in event.cause for event in process.of(Error))
    assert len([r for r in caplog.records if r.name == "mlx_lm_kvcache_plugin"]) == 1


@pytest.mark.parametrize("shape", [TINY, STATES], ids=["rows", "checkpoints"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_raises(
    start: Start, shape: dict[str, Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step it is: a hit is less than it could be, and nothing is half restored."""
    first = start()
    for length in (6, 20):
        first.insert(range(length), label=SYSTEM, **shape)
    process = start()
    monkeypatch.setattr(process.tier, method, raising)
    (hit,) = process.hits(range(19), **shape)
    assert hit in (0, 6, 16, 18)
    process.insert(range(18), label=SYSTEM, **shape)
    assert process.hits(range(19), **shape) == [18]


@pytest.mark.parametrize("shape", [TINY, STATES], ids=["rows", "checkpoints"])
@pytest.mark.parametrize(
    ("method", "garbage"), [(method, each) for method, all in GARBAGE.items() for each in all]
)
def test_a_method_that_returns_garbage(
    start: Start, shape: dict[str, Any], method: str, garbage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a miss, or a hit that is right; memory serves on."""
    first = start()
    for length in (6, 20):
        first.insert(range(length), label=SYSTEM, **shape)
    process = start()
    monkeypatch.setattr(process.tier, method, lambda *args, **options: garbage)
    (hit,) = process.hits(range(20), **shape)
    assert hit in (0, 4, 6, 16, 19)
    process.insert(range(19), label=SYSTEM, **shape)
    assert process.hits(range(20), **shape) == [19]


# Events


@both_shapes
def test_a_restore_is_told_before_its_hit(start: Start, shape: dict[str, Any]) -> None:
    """Once for each request that read anything."""
    first = start()
    first.insert(range(10), **shape)
    assert not first.of(Restore)
    process = start()
    for prompt in ([50, 51, 52], range(11), range(11)):
        fetch(process.cache, prompt)
    kinds = [type(event) for event in process.events]
    assert kinds == [Miss, Restore, Hit, Hit]
    (restored,) = process.of(Restore)
    assert restored.tokens == 10 and 0 < restored.seconds < 10
    assert [event.hit_tokens for event in process.of(Hit)] == [10, 10]


# All of it, under anything that may happen


Tokens = tuple[int, ...]

IMAGE = -(2**60)
RUNS = ((0,), (1,), (0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 0), (IMAGE,) * 3, (-5, 0))

sequences = st.lists(st.sampled_from(RUNS), max_size=6).map(lambda runs: tuple(chain(*runs)))
"""Of so few runs that any two of them are likely to begin alike."""

numbers = st.sampled_from([0, 1])
labels = st.sampled_from([SYSTEM, USER, PROMPT, GENERATED])

ROWS, WINDOWS, MIXTURE, CHATS = "rows", "windows", "mixture", "chats"

SHAPES: dict[str, dict[str, Any]] = {
    ROWS: {},
    WINDOWS: {"windows": (2, 6)},  # rows alone until the first of them is full
    MIXTURE: {"windows": (3,), "state_bytes": 200},
    CHATS: {"windows": (3,), "state_bytes": 200},
}

SMALL: dict[str, Any] = {"layers": 1, "heads": 1, "dim": 16}

LIMIT_BYTES = 1 << 20


def naive_before_image(prompt: Tokens, tokens: int) -> int:
    """The longest run of no more tokens that ends where no image goes on."""
    while 0 < tokens < len(prompt) and prompt[tokens - 1] == prompt[tokens] < 0:
        tokens -= 1
    return tokens


def common(one: Tokens, other: Tokens) -> int:
    same = (a == b for a, b in zip(one, other, strict=False))
    return next(
        (place for place, is_same in enumerate(same) if not is_same), min(len(one), len(other))
    )


class OffloadMachine(RuleBasedStateMachine):
    """Two processes over one folder, restarted at any time, and a list of all that was stored.

    The list bounds every hit. While nothing was damaged, a process that starts with the folder
    alone and has room hits as much as the list says; where checkpoints are given up for later
    ones, as much as the process that ended. What is fetched is always what was computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        # That bytes survive a power cut is not what this is about, and takes most of the time.
        self.no_sync = patch.object(access.os, "fsync", lambda descriptor: None)
        self.no_sync.start()
        self.ceilings: list[int | None] = [None, None]
        self.processes = [self.start(0), self.start(1)]
        self.stored: set[tuple[str, Tokens]] = set()
        self.is_sound = True

    def start(self, number: int | None = None) -> Process:
        ceiling = (lambda: None) if number is None else (lambda: self.ceilings[number])
        budget = Budget(limit_bytes=LIMIT_BYTES, ceiling=ceiling, probe=Machine().probe)
        process = Process(self.folder, namespaces=[], budget=budget)
        for namespace in SHAPES:
            process.attach(namespace, namespace.encode())
        return process

    def teardown(self) -> None:
        for process in self.processes:
            process.tier.close()
        self.no_sync.stop()
        shutil.rmtree(self.folder)

    def shape(self, namespace: str) -> dict[str, Any]:
        return {**SMALL, **SHAPES[namespace]}

    def needs_checkpoint(self, tokens: Tokens, namespace: str) -> bool:
        return bool(layers_for(tokens, namespace, **self.shape(namespace)).layout.needs_checkpoint)

    @rule(
        number=numbers,
        namespace=st.sampled_from([ROWS, WINDOWS]),
        told=st.lists(sequences, min_size=1, max_size=5),
    )
    def insert_short_windows(self, number: int, namespace: str, told: list[Tokens]) -> None:
        for tokens in told:
            self.insert_one(number, tokens, namespace, SYSTEM)

    @rule(number=numbers, told=st.lists(sequences, min_size=1, max_size=5))
    def insert_checkpoints(self, number: int, told: list[Tokens]) -> None:
        for tokens in told:
            self.insert_one(number, tokens, MIXTURE, SYSTEM)

    @rule(told=st.lists(st.tuples(sequences, labels), min_size=1, max_size=8))
    def insert_a_conversation(self, told: list[tuple[Tokens, str]]) -> None:
        """By one process alone: what it gives up on disk the other may still have."""
        conversation: Tokens = ()
        for tokens, label in told:
            conversation += tokens
            self.insert_one(0, conversation, CHATS, label)

    def insert_one(self, number: int, tokens: Tokens, namespace: str, label: str) -> None:
        process = self.processes[number]
        process.events.forget()
        process.insert(tokens, namespace, label=label, **self.shape(namespace))
        told = process.of(Insert)
        if not told:  # it was there already, or its states alone are too large
            return
        stored = tokens[: told[0].stored_tokens]
        self.stored.add((namespace, stored))

    @rule(
        number=numbers,
        tokens=sequences,
        namespace=st.sampled_from(list(SHAPES)),
    )
    def fetch(self, number: int, tokens: Tokens, namespace: str) -> None:
        self.hit(self.processes[number], tokens, namespace)

    def hit(self, process: Process, tokens: Tokens, namespace: str) -> int:
        """What a prompt gets, which is never more than was stored, nor anything else."""
        process.events.forget()
        expected = explain(process.cache, namespace, tokens).hit_tokens
        fetched = fetched_from(process.cache, tokens, namespace)
        hit = fetched.tokens if fetched else 0
        assert hit <= self.longest(tokens, namespace)
        if self.is_sound:
            assert hit <= expected
            assert hit == expected or any(ceiling is not None for ceiling in self.ceilings)
        if fetched is not None:
            assert is_what_was_computed(fetched, tokens, namespace, **self.shape(namespace))
        answers = [type(event) for event in process.of(Restore, Hit, Miss)]
        assert answers in ([Hit], [Restore, Hit], [Miss], [Restore, Miss])
        assert (answers[-1] is Hit) == (hit > 0)
        return hit

    def longest(self, prompt: Tokens, namespace: str) -> int:
        """The best hit that anything ever stored could give."""
        wanted = prompt[: naive_before_image(prompt, len(prompt) - 1)] if prompt else ()
        best = 0
        for name, tokens in self.stored:
            if name != namespace:
                continue
            run = common(tokens, wanted)
            if not self.needs_checkpoint(tokens, namespace):
                best = max(best, naive_before_image(wanted, run))
            elif run == len(tokens) == naive_before_image(wanted, run):
                best = max(best, run)
        return best

    @precondition(lambda self: len(self.stored) > 2)
    @rule(number=numbers)
    def restart(self, number: int) -> None:
        """The process ends, and its successor has nothing but the folder."""
        ending = self.processes[number]
        prompts = [
            (namespace, (*tokens[:cut], NEVER))
            for namespace, tokens in sorted(self.stored)
            for cut in (len(tokens), len(tokens) - 1)
            if cut > 0
        ]
        before = [self.hit(ending, tokens, namespace) for namespace, tokens in prompts]
        assert ending.tier.flush()
        ending.tier.close()
        fresh = self.start()
        for (namespace, tokens), was in zip(prompts, before, strict=True):
            hit = self.hit(fresh, tokens, namespace)
            if not self.is_sound:
                continue
            if namespace != CHATS:
                assert hit == self.longest(tokens, namespace)
            elif number == 0:
                assert hit >= was
        fresh.cache.tree.check()
        fresh.tier.close()
        self.ceilings[number] = None
        self.processes[number] = self.start(number)

    @rule(number=numbers, ceiling=st.one_of(st.none(), st.integers(0, 12_000)))
    def move_the_ceiling(self, number: int, ceiling: int | None) -> None:
        self.ceilings[number] = ceiling
        self.processes[number].cache.keep_within_budget()

    @rule(number=numbers)
    def forget_what_is_in_memory(self, number: int) -> None:
        self.processes[number].cache.trim_to(n_bytes=0)

    @precondition(lambda self: len(self.stored) > 6)
    @rule()
    def clear_the_folder(self) -> None:
        """What is in memory is offered anew only when its conversation goes on."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.is_sound = False

    @precondition(lambda self: len(self.stored) > 6)
    @rule(seed=st.integers(0, 2**16), how=st.sampled_from(DAMAGES))
    def damage_a_file(self, seed: int, how: str) -> None:
        paths = sorted(
            path for path in self.folder.rglob("*") if path.is_file() and path.suffix != ".lock"
        )
        if paths:
            path = paths[seed % len(paths)]
            if path.stat().st_size:
                damage(path, how)
            self.is_sound = False

    @precondition(lambda self: not self.is_sound)
    @rule()
    def begin_anew(self) -> None:
        """So that what follows is held against a sound folder again."""
        self.clear_the_folder()
        for number, process in enumerate(self.processes):
            process.tier.close()
            self.ceilings[number] = None
            self.processes[number] = self.start(number)
        self.stored.clear()
        self.is_sound = True

    @invariant()
    def everything_adds_up(self) -> None:
        for process, ceiling in zip(self.processes, self.ceilings, strict=True):
            process.cache.tree.check()
            assert process.cache.tree.used_bytes <= LIMIT_BYTES
            assert ceiling is None or process.cache.tree.used_bytes <= ceiling
            assert not process.of(Error)
            assert process.tier.flush()  # a hit has what is lost on disk written anew
        assert not temporaries(self.folder)


class LongOffloadMachine(OffloadMachine):
    """The same for many more of them."""


TestOffload = OffloadMachine.TestCase
TestOffloadAtLength = pytest.mark.slow(LongOffloadMachine.TestCase)
for case, examples in ((TestOffload, 15), (TestOffloadAtLength, 150)):
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,  # a failure is a change's doing, and not the day's
    )
del case  # or it is collected once more


# What is used, and what cannot be


def age(folder: Path) -> None:
    """As if nothing had been used for an hour."""
    for path in folder.rglob("*.safetensors"):
        os.utime(path, (time.time() - 3600,) * 2)


def is_fresh(path: Path) -> bool:
    return path.stat().st_mtime > time.time() - 60


def test_a_checkpoint_that_is_hit_or_computed_again_counts_as_used(
    start: Start, tmp_path: Path
) -> None:
    """On disk as in memory: the system prompt's end, where every chat begins, is the last to go."""
    process = start()
    process.insert(range(6), label=SYSTEM, **MIXED)
    process.insert([*range(6), 7, 7, 7], label=USER, **MIXED)
    for use in (
        lambda: process.insert(range(6), label=SYSTEM, **MIXED),
        lambda: process.hits([*range(6), NEVER], **MIXED),
        lambda: process.hits([*range(6), 7, 7, 7, NEVER], **MIXED),
    ):
        age(tmp_path)
        use()
        assert process.tier.flush()
        assert all(map(is_fresh, paths_of(tmp_path, CHECKPOINT, 2)))
        assert all(map(is_fresh, paths_of(tmp_path, BLOCK, 2)))


def test_what_found_no_place_in_the_queue_is_offered_when_it_is_used(
    start: Start, tmp_path: Path
) -> None:
    process = start()
    with patch.object(process.tier, "offer", return_value=False):
        process.insert(range(6), **MIXED)
    assert not names(tmp_path)
    process.insert(range(6), **MIXED)
    assert kinds(tmp_path)[CHECKPOINT, 2] == 1


@contextmanager
def reading(process: Process, change: Callable[[Record], Record]) -> Iterator[None]:
    """Sound records that say something else."""
    stock = process.tier.read

    def read(home: Any, name: Name) -> Record | None:
        record = stock(home, name)
        assert record is not None
        return change(record)

    with patch.object(process.tier, "read", read):
        yield


@both_shapes
def test_a_record_that_means_nothing_is_no_obstacle(start: Start, shape: dict[str, Any]) -> None:
    """Sound files whose numbers are of another shape: one miss, and then memory goes on alone."""
    start().insert(range(9), **shape)
    process = start()

    def narrowed(record: Record) -> Record:
        arrays = {key: array[..., :1, :] for key, array in record.arrays.items() if array.ndim > 2}
        return Record(record.tokens, record.meta, record.arrays | arrays)

    with reading(process, narrowed):
        with pytest.raises(Exception, match=r"."):
            process.hits([*range(9), NEVER], **shape)
        process.insert(range(9), **shape)
        assert process.hits([*range(9), NEVER], **shape) == [9]
    process.cache.tree.check()


@pytest.mark.parametrize("label", [None, ["a", "list"], {}, 3, "unheard of"])
@both_shapes
def test_a_label_is_one_that_is_known(start: Start, shape: dict[str, Any], label: Any) -> None:
    """Whatever a file says: it ends up in counts by label."""
    start().insert(range(9), **shape)
    process = start()

    def labelled(record: Record) -> Record:
        return Record(record.tokens, {**record.meta, "label": label}, record.arrays)

    with reading(process, labelled):
        assert process.hits([*range(9), NEVER], **shape) == [9]
    assert set(process.cache.tree.sequences) <= {"", SYSTEM, USER, PROMPT, GENERATED}
    process.cache.tree.check()


# What would be read


def reach(process: Process, tokens: Sequence[int]) -> int:
    """How many tokens would be a hit, by what is in memory and the names of what is on disk."""
    prefix = find_longest(
        process.cache.tree, process.cache.spaces.of(MODEL), tokens, len(tokens) - 1
    )
    on_disk, _ = process.cache.reach_on_disk(MODEL, tokens)
    return max(prefix.tokens if prefix else 0, on_disk)


@pytest.mark.parametrize("held", [0, 3, 4, 6, 9, 14])
@pytest.mark.parametrize("shape", EVERY.values(), ids=EVERY)
def test_what_would_be_read_is_what_is_found(
    start: Start, shape: dict[str, Any], held: int
) -> None:
    """Wherever a prompt leaves it, and whatever of it memory has."""
    first = start()
    for sequence in (range(6), range(14), [*range(4), 7, 7, 7], range(10)):
        first.insert(sequence, label=SYSTEM, **shape)
    places = (0, 1, 3, 4, 5, 6, 7, 10, 12, 13, 14)
    prompts = [[*range(place), NEVER, NEVER] for place in places]
    prompts += [list(range(place)) for place in places] + [[*range(4), 7, 7, 8, 8]]
    for prompt in prompts:
        process = start()
        if held:
            process.insert(range(held), label=SYSTEM, **shape)
        assert [reach(process, prompt)] == process.hits(prompt, **shape)
        assert [reach(process, prompt)] == process.hits(prompt, **shape)


@both_shapes
def test_no_part_of_an_image_would_be_read(start: Start, shape: dict[str, Any]) -> None:
    """It is of no use, though it is there."""
    prompt = [1, 2, 3, 4, 5, *[-(2**60)] * 6, *[-9] * 5, 6, 7]
    first = start()
    for end in (5, 8, 11, 13, 16, 18):
        first.insert(prompt[:end], label=SYSTEM, **shape)
    asked = [prompt[:end] for end in range(2, 19)] + [[*prompt[:end], 9] for end in range(1, 19)]
    asked += [[*prompt[:11], -(2**60), 3], [*prompt[:16], -9, -9, -9, 3]]
    for one in asked:
        process = start()
        assert [reach(process, one)] == process.hits(one, **shape)


def test_more_of_a_run_is_on_disk_than_a_prompt_shares(start: Start) -> None:
    """It is told where the prompt leaves a file, and not what other files follow a whole one."""
    start().insert(range(14), **TINY)
    on_disk = {
        place: start().cache.reach_on_disk(MODEL, [*range(place), NEVER, NEVER])
        for place in (0, 1, 4, 6, 8, 13, 14)
    }
    assert on_disk == {place: (place, place in (1, 6, 13)) for place in (0, 1, 4, 6, 8, 13, 14)}


@pytest.mark.parametrize("shape", EVERY.values(), ids=EVERY)
def test_nothing_is_touched_to_know_it(start: Start, shape: dict[str, Any], tmp_path: Path) -> None:
    """No file is used by it, no figure changes, nothing is queued and nobody is told."""
    first = start()
    for length in (6, 14):
        first.insert(range(length), label=SYSTEM, **shape)
    process = start()
    process.insert(range(4), label=SYSTEM, **shape)
    age(tmp_path)

    def everything() -> Any:
        files = {
            path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")
        }
        tree, cache = process.cache.tree, process.cache
        nodes = [(node, node.used_at) for node in tree]
        figures = asdict(process.tier.counters), tree.used_bytes
        return files, nodes, figures, list(process.events), cache.spaces.of(MODEL)[:]

    before = everything()
    for prompt in (range(15), [*range(9), NEVER], [NEVER, NEVER], range(4), [], [1]):
        process.cache.reach_on_disk(MODEL, prompt)
        process.cache.reach_on_disk("nobody's", prompt)
        explain(process.cache, MODEL, prompt)
        assert process.tier.flush()
        assert everything() == before
    assert process.tier.counters.files_read == 0


BROKEN: dict[str, tuple[str, dict[str, Any], int]] = {
    "the last tail": ("*-2b-*.safetensors", TINY, 12),
    **{f"the layout of {of}": ("layout-*.json", shape, 0) for of, shape in EVERY.items()},
}
"""What is read to know it, and what is a hit without it."""


@pytest.mark.parametrize(("pattern", "shape", "hit"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_left_to_a_request(
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    pattern: str,
    shape: dict[str, Any],
    hit: int,
) -> None:
    """To know it, broken files are read past; the request that comes then sets them aside."""
    start().insert(range(14), label=SYSTEM, **shape)
    (path,) = tmp_path.rglob(pattern)
    damage(path, "empty")
    process = start()

    def everything() -> Any:
        files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        return files, asdict(process.tier.counters), list(process.events), list(caplog.records)

    assert process.tier.flush()  # which has looked at its folder then
    before = everything()
    for _ in range(2):
        assert explain(process.cache, MODEL, range(15)).hit_tokens == hit
        assert process.tier.flush()
        assert everything() == before
    assert process.hits(range(15), **shape) == [hit]
    assert process.tier.counters.quarantined == 1 and not path.exists()


def test_what_has_no_home_would_not_be_read(start: Start) -> None:
    """Nor is there anything without a tier."""
    process = start(namespaces=[])
    process.insert(range(10), **TINY)
    assert process.cache.reach_on_disk(MODEL, range(11)) == (0, False)
    assert make_cache().reach_on_disk(MODEL, range(11)) == (0, False)


def test_what_was_read_is_no_hit_in_memory(start: Start) -> None:
    """A store of another size is not told to have held it; later on it is."""
    start().insert(range(9), **TINY)
    history = History(4)
    process = start(history=history)
    for expected in (0, 8, 16):
        prompt = [*range(8), NEVER, NEVER]
        process.cache.fetch(prompt, process.cache.match(MODEL, prompt), namespace=MODEL)
        assert history.predicted.hit_tokens == expected
        assert history.predicted.at == {0.5: expected, 2.0: expected, 4.0: expected}
