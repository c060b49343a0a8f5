"""Small records for the tests of the disk tier: a token is a letter, a block two of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlx_lm_kvcache_plugin.disk.files import Record
from mlx_lm_kvcache_plugin.disk.names import (
    BLOCK,
    CHECKPOINT,
    Name,
    child_key,
    layout_digest,
    root_key,
)
from mlx_lm_kvcache_plugin.disk.tier import DiskTier, Home, Offer

MIB = 1 << 20
HOME = Home(b"a fingerprint", {"model": "a model", "codec": "rotated, 8 bits"})
LAYOUT = '{"layers": 2}'


class Disk(NamedTuple):
    """As of `shutil.disk_usage`: a tebibyte, half of it free."""

    total: int = 1 << 40
    free: int = 1 << 39


@contextmanager
def open_tier(folder: Path, limit_bytes: int = 10 * MIB, **options: Any) -> Iterator[DiskTier]:
    """A tier on a disk with room that has looked at its folder already."""
    tier = DiskTier(folder, limit_bytes, **{"disk_usage": lambda _: Disk()} | options)
    assert tier.flush(60)
    yield tier
    tier.close()


def ids(letters: str) -> bytes:
    return np.array([ord(letter) for letter in letters], "<i8").tobytes()


def letters_of(record: Record | None) -> str | None:
    return record and "".join(chr(token) for token in np.frombuffer(record.tokens, "<i8"))


def make_record(letters: str, nbytes: int = 100) -> Record:
    """Numbers that depend on the letters, so that one record is not taken for another."""
    generator = np.random.default_rng(list(letters.encode()))
    arrays = {
        "words": generator.integers(0, 255, nbytes, np.uint8),
        "scales": generator.random((2, 3), np.float32).astype(np.float16),
        "none": np.zeros((0, 4), np.float32),
        "scalar": np.array(7, np.int32),
    }
    return Record(ids(letters), {"letters": letters}, arrays)


def names_of(letters: str, home: Home = HOME, layout: str = LAYOUT) -> list[Name]:
    """The blocks of a sequence, its tail, and a checkpoint where it ends in a "!"."""
    has_checkpoint, letters = letters.endswith("!"), letters.rstrip("!")
    parent, names = root_key(home.namespace), []
    digest = layout_digest(layout)
    for begin in range(0, len(letters), 2):
        tokens = ids(letters[begin : begin + 2])
        own = child_key(parent, tokens)
        names.append(Name(parent, own, len(tokens) // 8, BLOCK, digest))
        parent = own if len(tokens) == 16 else parent
    if has_checkpoint:
        tail = ids(letters[len(letters) // 2 * 2 :])
        names.append(Name(parent, child_key(parent, tail), len(tail) // 8, CHECKPOINT, digest))
    return names


def parts_of(letters: str) -> list[str]:
    """What each of these names stands for."""
    text = letters.rstrip("!")
    parts = [text[begin : begin + 2] for begin in range(0, len(text), 2)]
    return parts + [text[len(text) // 2 * 2 :]] * letters.endswith("!")


def offers_of(letters: str, nbytes: int = 100, home: Home = HOME) -> list[Offer]:
    return [
        Offer(name, lambda part=part: make_record(part, nbytes))
        for name, part in zip(names_of(letters, home), parts_of(letters), strict=True)
    ]


def put(tier: DiskTier, letters: str, nbytes: int = 100, home: Home = HOME) -> bool:
    """Offer a path and wait until it is written; whether it was queued."""
    queued = tier.offer(home, LAYOUT, offers_of(letters, nbytes, home))
    assert tier.flush(60)
    return queued


def stored(tier: DiskTier, letters: str, home: Home = HOME) -> str:
    """The letters of a sequence that are there, "." for those that are not; nothing is read."""
    pairs = zip(names_of(letters, home), parts_of(letters), strict=True)
    return "".join(part if tier.has(home, name) else "." * len(part) for name, part in pairs)


def same(one: Record | None, other: Record) -> bool:
    """Whether two records are equal to the bit."""
    return (
        one is not None
        and (one.tokens, one.meta, list(one.arrays)) == (other.tokens, other.meta, list(one.arrays))
        and one.arrays.keys() == other.arrays.keys()
        and all(
            (array.dtype, array.shape, array.tobytes())
            == (other.arrays[key].dtype, other.arrays[key].shape, other.arrays[key].tobytes())
            for key, array in one.arrays.items()
        )
    )


def path_of(tier_folder: Path, name: Name, home: Home = HOME) -> Path:
    return tier_folder / home.namespace.hex() / name.subfolder / name.filename


def used(folder: Path) -> int:
    """What all files in a folder have."""
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(place, file)).st_size
            except FileNotFoundError:  # another process deleted it
                continue
    return total


def age(folder: Path, names: Sequence[Name], seconds: float, home: Home = HOME) -> None:
    """Make records look as if they had not been used for so long."""
    for name in names:
        path = path_of(folder, name, home)
        when = path.stat().st_mtime - seconds
        os.utime(path, (when, when))


def temporaries(folder: Path) -> list[Path]:
    return list(folder.rglob(".*.tmp"))
