"""Which classes run, and what the server says once a model is loaded."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.generate
import mlx_lm.server
import pytest
from mlx_lm.models.cache import LRUPromptCache, QuantizedKVCache

from mlx_lm_kvcache_plugin.patches.prompt_cache import PrefixPromptCache
from tests import models
from tests.integration.clients import MODES, same_answer
from tests.integration.local_server import LocalServer
from tests.integration.stock_server import StockServer
from tests.models import prompt

BLOCKS = "blocks of 128 tokens"

needs_kv_bits = pytest.mark.skipif(
    "--kv-bits" not in inspect.getsource(mlx_lm.server), reason="this mlx-lm has no --kv-bits"
)


def start_lines(server: LocalServer) -> list[str]:
    """What was said once a model was loaded."""
    server.settle()
    return server.messages(logging.INFO)


# The classes


@pytest.mark.parametrize("arguments", [(), ("--prompt-cache-size", "3")])
@pytest.mark.parametrize("value", ["", "0"])
def test_without_a_flag_of_ours_all_is_stocks(
    model: Path, arguments: tuple[str, ...], value: str
) -> None:
    """Class and behaviour: a switch that is off is no request, and nothing is said."""
    variables = {"MLX_LM_DISABLE_PREFIX_CACHE": value}
    with LocalServer("--model", str(model), *arguments, **variables) as server:
        assert type(server.prompt_cache) is LRUPromptCache
        assert server.module.LRUPromptCache is LRUPromptCache
        assert type(server.generator.model_provider).__bases__ == (object,)
        answers = [server.text(prompt(name, 40), seed=1) for name in ("a", "ab", "b")]
        assert [answer.cached_tokens for answer in answers] == [0, 1, 0]
        assert server.prompt_cache.max_size == (3 if arguments else 10)
        assert not server.messages() and not server.recorder.events


@needs_kv_bits
def test_live_quantization_alone_is_stocks(model: Path) -> None:
    """`--kv-bits` is upstream's own flag."""
    arguments = ("--kv-bits", "8", "--quantized-kv-start", "0")
    with LocalServer("--model", str(model), *arguments) as server:
        assert type(server.prompt_cache) is LRUPromptCache
        server.text(prompt("a", 40))
        server.settle()
        assert len(server.prompt_cache) == 1
        assert not server.messages()


@needs_kv_bits
@pytest.mark.parametrize("start", [0, 150])
def test_live_quantization_beside_ours(model: Path, start: int) -> None:
    """Dequantized before it is stored, and handed back as plain caches.

    Upstream quantizes them anew, so that a hit gives the tokens that stock's own cache gives.
    """
    live = ("--kv-bits", "8", "--quantized-kv-start", str(start))
    quantized: list[bool] = []
    with (
        LocalServer("--model", str(model), *live, "--kv-cache-codec", "raw") as ours,
        LocalServer("--model", str(model), *live) as stock,
    ):
        fetch, insert = ours.prompt_cache.fetch_nearest_cache, ours.prompt_cache.insert_cache

        def watched_fetch(key: Any, tokens: list[int]) -> Any:
            caches, rest = fetch(key, tokens)
            for layer in caches or ():
                assert layer.keys.dtype == mx.float32 and layer.keys.shape[-1] == 64
            return caches, rest

        def watched_insert(key: Any, tokens: list[int], caches: Any, **options: Any) -> None:
            quantized.append(all(type(layer) is QuantizedKVCache for layer in caches))
            insert(key, tokens, caches, **options)

        ours.prompt_cache.fetch_nearest_cache = watched_fetch
        ours.prompt_cache.insert_cache = watched_insert
        text = prompt("live", 200)
        for length in (100, 140, 200):
            answer, other = (server.text(text[:length]) for server in (ours, stock))
            assert answer.text == other.text
            assert answer.cached_tokens == other.cached_tokens == answer.longest_hit
        assert quantized == [start < 100, start < 140, True]
        assert sorted(len(tokens) for tokens in ours.sequences()) == [108, 148, 208]
        assert ours.is_alive() and not ours.recorder.errors


@needs_kv_bits
def test_live_quantization_beside_a_quantized_store(model: Path) -> None:
    """Each does its own; a hit is a hit."""
    arguments = ("--kv-bits", "4", "--quantized-kv-start", "0", "--kv-cache-bits", "8")
    with LocalServer("--model", str(model), *arguments) as server:
        first = server.text(prompt("a", 300))
        again = server.text(prompt("a", 300) + first.text + prompt("b", 20))
        assert again.cached_tokens == 308
        assert server.is_alive() and not server.recorder.errors


def test_nothing_is_kept_if_so_asked(model: Path) -> None:
    """Every request is prefilled from its first token, and the log says so at the start."""
    with LocalServer("--model", str(model), "--disable-prefix-cache") as server:
        for mode in ("batched", "sequential", "batched"):
            assert server.text(prompt("a", 200), **MODES[mode]).cached_tokens == 0
        assert isinstance(server.prompt_cache, PrefixPromptCache)
        assert (len(server.prompt_cache), server.prompt_cache.nbytes) == (0, 0)
        (line,) = start_lines(server)
        assert "disabled" in line
        assert server.is_alive()


# The line


def test_the_real_command_says_what_holds_before_any_request(
    model: Path, tmp_path: Path, installed: None
) -> None:
    """On its own log, at level INFO, as soon as the model is loaded."""
    arguments = ("--model", str(model), "--kv-cache-bits", "4", "--cache-memory-mb", "100")
    with StockServer(tmp_path / "log", *arguments) as server:
        line = server.wait_for("prefix cache: ")
        assert " - INFO - " in line
        layers = "2 layers: 2 token-wise at 4 bits"
        for part in ("codec rotated", "4 bits", "group size 64", BLOCKS, layers):
            assert part in line
        assert "limit 104,857,600 bytes (a fixed limit)" in line


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--kv-cache-bits", "8"], ["codec rotated, 8 bits", "2 token-wise at 8 bits"]),
        (["--kv-cache-quantization"], ["codec rotated, 8 bits", "2 token-wise at 8 bits"]),
        (["--kv-cache-bits", "5", "--kv-cache-value-bits", "4"], ["keys 5 bits, values 4 bits"]),
        (["--kv-cache-codec", "affine"], ["codec affine, 8 bits, group size 64"]),
        (["--kv-cache-codec", "raw"], ["codec raw,", "2 layers: 2 token-wise in full precision"]),
        (["--cache-memory-mb", "1"], ["codec raw", "limit 1,048,576 bytes (a fixed limit)"]),
        (["--kv-cache-group-size", "32"], ["codec rotated", "group size 32"]),
        (["--cache-memory-percent", "50%"], ["codec raw", "(50% of the "]),
        (["--kv-cache-checkpoint-tokens", "64"], ["codec raw", "(20% of the "]),
    ],
)
def test_the_start_line(model: Path, arguments: list[str], parts: list[str]) -> None:
    """One line, whatever is asked for."""
    with LocalServer("--model", str(model), *arguments) as server:
        (line,) = start_lines(server)
        for part in [*parts, BLOCKS]:
            assert part in line


def test_a_variable_does_what_its_flag_does(model: Path) -> None:
    """The stock command without a flag, and a line that says what holds."""
    variables = {"MLX_LM_KV_CACHE_BITS": "4", "MLX_LM_CACHE_MEMORY_MB": "2"}
    with LocalServer("--model", str(model), **variables) as server:
        (line,) = start_lines(server)
        assert "codec rotated, 4 bits" in line and "limit 2,097,152 bytes (a fixed limit)" in line
        server.text(prompt("a", 1000))
        server.settle()
        sixteen_bit_bytes = 1008 * 2 * 2 * 2 * 64 * 2  # tokens, layers, K and V, heads, width
        assert server.prompt_cache.nbytes < 0.35 * sixteen_bit_bytes
        assert server.text(prompt("a", 1000)).cached_tokens == 999


def test_a_percentage_is_of_what_is_available_with_the_model_loaded(model: Path) -> None:
    """The resolved limit is said in bytes, with the sum that it was taken of."""
    with LocalServer("--model", str(model), "--cache-memory-percent", "0.25") as server:
        (line,) = start_lines(server)
        found = re.search(r"limit ([\d,]+) bytes \(25% of the ([\d,]+) bytes available\)", line)
        assert found
        limit_bytes, available_bytes = (int(n.replace(",", "")) for n in found.groups())
        assert limit_bytes == available_bytes // 4 == server.cache.budget.limit_bytes


def test_the_smaller_limit_is_said(model: Path) -> None:
    """Where `--prompt-cache-bytes` leaves less than our own budget, that is what holds."""
    arguments = ("--kv-cache-bits", "8", "--prompt-cache-bytes", "900000")
    with LocalServer("--model", str(model), *arguments) as server:
        (line,) = start_lines(server)
        assert "900,000 bytes" in line and "--prompt-cache-bytes" in line


def test_a_model_that_a_request_names_is_announced_too(model: Path, light_model: Path) -> None:
    """Each time that one is loaded, and not at the start if there is none."""
    with LocalServer("--kv-cache-bits", "8") as server:
        assert start_lines(server) == []
        text = prompt("a", 150)
        for folder in (model, model, light_model, model):
            server.text(text, model=str(folder))
            server.text(text, model=str(folder), seed=1)
        layers = [re.findall(r"(\d) layers?: ", line) for line in start_lines(server)]
        assert layers == [["2"], ["1"], ["2"]]


def test_prefixes_of_two_models_never_mix(model: Path, tmp_path: Path) -> None:
    """The same architecture with other weights: no hit, and the tokens of each alone."""
    other = models.llama(tmp_path / "other", seed=1)
    text = prompt("a", 200)
    with (
        LocalServer("--kv-cache-codec", "raw") as server,
        LocalServer("--disable-prefix-cache") as cold,
    ):
        for folder, cached in ((model, 0), (other, 0), (model, 199), (other, 199)):
            answer = server.text(text, model=str(folder))
            assert answer.cached_tokens == cached
            assert same_answer(answer, cold.text(text, model=str(folder)))


# Widths of heads: what no group size divides stays as it is.

WIDTHS = {
    64: {32: 32, 64: 64, 128: 64},
    80: {32: None, 64: None, 128: None},
    96: {32: 32, 64: 32, 128: 32},
    112: {32: None, 64: None, 128: None},
    128: {32: 32, 64: 64, 128: 128},
}
"""The group size that is used, by the width of the heads and the group size asked for."""


@pytest.fixture(scope="module")
def model_of_width(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    folder = tmp_path_factory.mktemp("widths")
    return lambda width: models.llama(
        folder / str(width), head_dim=width, num_hidden_layers=1, dtype=mx.bfloat16
    )


@pytest.mark.parametrize(
    ("width", "asked", "used"), [(w, a, u) for w, sizes in WIDTHS.items() for a, u in sizes.items()]
)
def test_the_width_of_heads(
    model_of_width: Callable[[int], Path], width: int, asked: int, used: int | None
) -> None:
    """Group sizes divide the width, or the tensor stays raw; shapes and dtype come back.

    The start line says which, and the store is smaller where it quantizes.
    """
    arguments = ("--kv-cache-bits", "4", "--kv-cache-group-size", str(asked))
    with LocalServer("--model", str(model_of_width(width)), *arguments) as server:
        (line,) = start_lines(server)
        if used is None:
            assert f"1 layer: 1 token-wise raw: head_dim {width};" in line
        else:
            assert "1 layer: 1 token-wise at 4 bits" in line and "raw" not in line
        server.text(prompt("a", 512), max_tokens=1, seed=1)
        server.settle()
        caches, rest = server.prompt_cache.fetch_nearest_cache(
            server.generator.model_provider.model_key, list(prompt("a", 512).encode())
        )
        for tensor in (caches[0].keys, caches[0].values):
            assert (tensor.shape, tensor.dtype) == ((1, 2, 511, width), mx.bfloat16)
        assert caches[0].offset == 511 and len(rest) == 1
        raw_bytes = 512 * 2 * 2 * width * 2
        share = server.prompt_cache.nbytes / raw_bytes
        assert 0.25 < share < 0.45 if used else 1 < share < 1.1


@pytest.mark.parametrize(
    ("family", "shapes", "line"),
    [
        ("deepseek", [(1, 512), (1, 64)], "2 layers: 2 token-wise at 8 bits"),
        ("minicpm", [(4, 192), (4, 128)], "2 layers: 2 token-wise at 8 bits"),
    ],
)
def test_keys_and_values_of_unequal_width(
    tmp_path: Path, family: str, shapes: list[tuple[int, int]], line: str
) -> None:
    """Latent attention has plain caches too: full service."""
    folder = models.FAMILIES[family](tmp_path)
    text = prompt("a", 300)
    with (
        LocalServer("--model", str(folder), "--kv-cache-bits", "8") as server,
        LocalServer("--model", str(folder), "--kv-cache-codec", "raw") as raw,
        LocalServer("--model", str(folder), "--disable-prefix-cache") as cold,
    ):
        assert line in start_lines(server)[0]
        for each in (server, raw):
            each.text(text)
            answer = each.text(text[:200] + "!" * 30)
            assert answer.cached_tokens == 200
        assert same_answer(answer, cold.text(text[:200] + "!" * 30))
        caches, _ = server.prompt_cache.fetch_nearest_cache(
            server.generator.model_provider.model_key, list(text.encode())
        )
        for layer in caches:
            found = [tensor.shape for tensor in (layer.keys, layer.values)]
            assert found == [(1, heads, 299, width) for heads, width in shapes]
