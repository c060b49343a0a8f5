"""Reading takes no more memory than what is read, and none for what a file only claims to be."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_lm_kvcache_plugin.disk.names import FORMAT
from tests.disk.records import HOME, make_record, names_of, open_tier, path_of, put, same

GIB = 1 << 30


def grown(path: Path) -> None:
    """Its head tells of less."""
    os.truncate(path, 60 * GIB)


def with_a_head_that_agrees(path: Path) -> None:
    """All is as it should be, but for the size."""
    tensor = {"dtype": "U8", "shape": [60 * GIB], "data_offsets": [0, 60 * GIB]}
    head = json.dumps({"__metadata__": {"format": FORMAT, "checksum": ""}, "words": tensor})
    path.write_bytes(len(head).to_bytes(8, "little") + head.encode())
    os.truncate(path, 8 + len(head) + 60 * GIB)


@pytest.mark.parametrize("fault", [grown, with_a_head_that_agrees])
def test_a_file_of_any_size_is_not_read_into_memory(
    tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    """Files with holes cost nothing to make: the head is asked first, and the limit."""
    with open_tier(tmp_path) as tier:
        put(tier, "ab")
        (name,) = names_of("ab")
        fault(path_of(tmp_path, name))
        tracemalloc.start()
        assert tier.read(HOME, name) is None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
        assert (tier.counters.quarantined, tier.counters.errors) == (1, 0)


def test_a_record_is_held_once_while_it_is_read(tmp_path: Path) -> None:
    """Its arrays are what it is read into."""
    nbytes = 4 << 20
    with open_tier(tmp_path) as tier:
        put(tier, "ab", nbytes)
        tracemalloc.start()
        record = tier.read(HOME, names_of("ab")[0])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert same(record, make_record("ab", nbytes))
    assert peak < 1.1 * nbytes
