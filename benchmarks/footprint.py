"""What the store takes and keeps: bytes, how it scales, fidelity, what it costs at start-up.

All bytes are against 16-bit KV. Every figure is measured in this run, the yardstick with it.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import statistics
import subprocess
import tempfile
import tracemalloc
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx_lm_kvcache_plugin
from mlx_lm_kvcache_plugin.codecs.packing import Payload
from mlx_lm_kvcache_plugin.prefix_cache import PrefixCache

from .peers import held_by_chats, ours, stock
from .report import Report, Row, median_seconds, report_of, seconds
from .samples import LARGE, SMALL, TINY, TOPICS, extend, read_by_smollm2, topic_ids
from .stores import MODEL, make_store, relative_error, sequence, sixteen_bit

CODECS = ("rotated", "affine")


def bytes_held(quick: bool) -> Iterator[Row]:
    """Everything that 4,096 tokens take, index included, per byte of 16-bit KV.

    The larger of what the store counts and what Python's allocators say. On a CPU the codec's
    threads have some MB each to work in, which they keep, whatever is stored: they have it before.
    """
    for bits, limit in ((8, 0.55), (4, 0.30)):
        for shape in (SMALL, LARGE):
            ids, caches = sequence(4096), shape.prompt_cache(4096)
            make_store(kv_cache_bits=bits)[0].insert_cache(MODEL, ids, caches)
            store, _ = make_store(kv_cache_bits=bits)
            tracemalloc.start()
            store.insert_cache(MODEL, ids, caches)
            traced, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            yield Row(
                f"bytes per 16-bit byte, {bits} bits, head_dim {shape.head_dim}",
                max(store.nbytes, traced) / (4096 * shape.token_bytes),
                limit,
                f"{store.nbytes:,} of {4096 * shape.token_bytes:,} bytes, traced {traced:,}",
            )


def eight_chats(quick: bool) -> Iterator[Row]:
    """Eight chats that share 3,000 of 3,200 tokens, against one of them."""
    (one, all_), (stock_one, stock_all) = (
        held_by_chats(peer, SMALL) for peer in (ours(4), stock())
    )
    note = f"{all_:,} bytes; stock {stock_all / stock_one:.2f}x, {stock_all:,} bytes"
    yield Row("eight chats that share 3,000 of 3,200 tokens, to one", all_ / one, 1.7, note)


def index_memory(quick: bool) -> Iterator[Row]:
    """What the store takes beside the numbers themselves."""
    store, cache = make_store(kv_cache_bits=4)
    store.insert_cache(MODEL, sequence(16_384), TINY.prompt_cache(16_384))
    payloads = [block.payload for block in cache.tree if isinstance(block.payload, Payload)]
    numbers = sum(part.nbytes for p in payloads for parts in p.groups for part in parts)
    yield Row("index memory, bytes a token", (store.nbytes - numbers) / 16_384, 24)


def lookup(quick: bool) -> Iterator[Row]:
    """A long sequence is stored; a request shares its first 100 tokens, or all of them."""
    tokens = 16_384 if quick else 65_536
    ids = sequence(tokens)
    diverging = ids[:100] + sequence(tokens - 100, seed=1)
    quarter, whole = (_lookup_seconds(ids[:n], diverging[:n]) for n in (tokens // 4, tokens))
    for shared, short, long in zip(("100", "all"), quarter, whole, strict=True):
        note = f"{short * 1e3:.2f} and {long * 1e3:.2f} ms"
        yield Row(f"lookup, 4x the tokens, {shared} shared, time", long / short, 6, note)


def _lookup_seconds(ids: list[int], diverging: list[int]) -> tuple[float, float]:
    """A fetch that shares 100 tokens, and a match of all without decoding them."""
    store, cache = make_store(kv_cache_bits=4)
    store.insert_cache(MODEL, ids, TINY.prompt_cache(len(ids)))
    return (
        median_seconds(21, store.fetch_nearest_cache, MODEL, diverging),
        median_seconds(21, cache.match, MODEL, ids),
    )


def growing(quick: bool) -> Iterator[Row]:
    """256 more tokens onto 16,384, against the first insert."""
    tokens = 4096 if quick else 16_384
    ids = sequence(tokens + 256)
    firsts, ratios = [], []
    for seed in range(3):
        store, _ = make_store(kv_cache_bits=4)
        caches = SMALL.prompt_cache(tokens, seed)
        firsts.append(median_seconds(1, store.insert_cache, MODEL, ids[:tokens], caches))
        extend(caches, 256)
        more = median_seconds(1, store.insert_cache, MODEL, ids, caches)
        ratios.append(more / firsts[-1])
    what = f"inserting 256 more onto {tokens:,}, to the first insert's time"
    note = f"first {statistics.median(firsts):.2f} s"
    yield Row(what, statistics.median(ratios), 0.05, note)


def partial_fetch(quick: bool) -> Iterator[Row]:
    """A request that shares 200 of 4,096 tokens, against one that shares all."""
    store, _ = make_store(kv_cache_bits=4)
    ids = sequence(4096)
    store.insert_cache(MODEL, ids, SMALL.prompt_cache(4096))
    request = ids[:200] + sequence(3896, seed=1)
    wholes, ratios = [], []
    for _ in range(7):
        wholes.append(median_seconds(1, store.fetch_nearest_cache, MODEL, ids))
        part = median_seconds(1, store.fetch_nearest_cache, MODEL, request)
        ratios.append(part / wholes[-1])
    note = f"whole {statistics.median(wholes) * 1e3:.0f} ms"
    what = "fetch of 200 of 4,096 tokens, to the whole fetch's time"
    yield Row(what, statistics.median(ratios), 0.15, note)


def fidelity(quick: bool) -> Iterator[Row]:
    """The error of SmolLM2's keys and values for real text, affine beside rotated."""
    tokens = 256 if quick else 1024
    tensors = sixteen_bit(read_by_smollm2(topic_ids(TOPICS[0], tokens)), tokens)
    for name, side, limit in (("keys", 0, 0.055), ("values", 1, 0.085)):
        stores = (make_store(kv_cache_bits=4, kv_cache_codec=codec) for codec in CODECS)
        rotated, affine = (relative_error(cache, tensors[side::2], tokens) for _, cache in stores)
        what = f"SmolLM2, {tokens:,} tokens, 4 bits rotated, relative error of {name}"
        yield Row(what, rotated, limit, f"affine {affine:.3f}")


def immutable_blocks(quick: bool) -> Iterator[Row]:
    """Twenty turns of fetch, append, insert in bf16 at 8 bits: bytes that changed."""
    store, cache = make_store(kv_cache_bits=8)
    ids = sequence(500)
    caches: Any = SMALL.prompt_cache(500)
    store.insert_cache(MODEL, ids, caches)
    before = leading_bytes(cache, 3)
    for turn in range(20):
        fetched, rest = store.fetch_nearest_cache(MODEL, [*ids, 1])
        assert fetched is not None and len(rest) == 1
        extend(fetched, 50)
        ids = ids + sequence(50, seed=turn + 1)
        store.insert_cache(MODEL, ids, fetched)
    changed = sum(a != b for a, b in zip(before, leading_bytes(cache, 3), strict=True))
    what = "bytes of the first blocks that twenty turns changed"
    yield Row(what, changed, 0, f"of {len(before):,}")


def leading_bytes(cache: PrefixCache, blocks: int) -> bytes:
    """The payloads of the first blocks of the one sequence that is stored."""
    found = b""
    prefix = cache.match(MODEL, sequence(500))
    assert prefix is not None
    for block in prefix.blocks[:blocks]:
        assert isinstance(block.payload, Payload)
        found += b"".join(part.tobytes() for parts in block.payload.groups for part in parts)
    return found


def start_up(quick: bool) -> Iterator[Row]:
    """What the start-up file adds to a start of Python that has nothing to do with mlx-lm."""
    with tempfile.TemporaryDirectory() as folder:
        bare, plugged = (_environment(Path(folder, name)) for name in ("bare", "plugged"))
        package = Path(mlx_lm_kvcache_plugin.__file__).parent
        (site_packages,) = plugged.parents[1].glob("lib/python*/site-packages")
        shutil.copytree(package, site_packages / package.name)
        (site_packages / f"{package.name}.pth").write_text(
            f"import {package.name}; {package.name}.install()\n"
        )
        compileall.compile_dir(site_packages, quiet=1)  # as pip does
        alone, added = [], []
        for _ in range(30 if quick else 200):
            alone.append(seconds(_start, bare))
            added.append(seconds(_start, plugged) - alone[-1])
    note = f"without {statistics.median(alone) * 1e3:.1f} ms"
    yield Row("added to `python -c pass`, ms", statistics.median(added) * 1e3, 1, note)


def _start(python: Path) -> None:
    """As anybody would, without the OpenBLAS that benchmarks start with."""
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([python, "-c", "pass"], env=variables, check=True)


def _environment(folder: Path) -> Path:
    """Make an empty virtual environment and return its interpreter."""
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


MEASURES: tuple[Callable[[bool], Iterator[Row]], ...] = (
    bytes_held,
    eight_chats,
    index_memory,
    lookup,
    growing,
    partial_fetch,
    fidelity,
    immutable_blocks,
    start_up,
)


def measure(arguments: argparse.Namespace) -> Report:
    """All of them."""
    return report_of(MEASURES, arguments.quick)
