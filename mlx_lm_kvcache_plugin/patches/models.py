"""A model of the user's, loaded as mlx-lm's own commands load it."""

from __future__ import annotations

from typing import Any

from mlx_lm.utils import load as upstream_load


def load(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer; its weights are read once they are used.

    Args:
        name: a folder, or a repository of the Hugging Face hub, which is downloaded.
    """
    model, tokenizer, *_ = upstream_load(name, lazy=True)
    return model, tokenizer
