"""docs/models.md, made of what the tests saw of every model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx_lm
from mlx_lm.utils import load_model

from mlx_lm_kvcache_plugin.patches.announcement import describe_layers, layers_of
from tests.families import ALONE_IN_A_BATCH, EXCLUDED, NEVER_IN_A_BATCH, SPLIT_SENSITIVE
from tests.families.excluded import BUILDING_BLOCK
from tests.integration.clients import Answer
from tests.integration.hits import CUT_TOKENS, PLACES, PROMPT, Seen
from tests.patches.cache_objects import known_kinds
from tests.store.caches import make_cache

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
VERSION = "0.32.2"
"""The mlx-lm that the page tells of."""

WRITE = "WRITE_MODELS_PAGE"
"""The environment variable that makes the tests write the page instead of comparing it."""

INTRODUCTION = f"""# Models

What the prefix cache does with every model file of mlx-lm {VERSION}. Each was run in a tiny random
configuration on a CPU, on the real server: a prompt of {len(PROMPT)} tokens was answered with 8,
and then it was asked

- **end**: the same prompt again;
- **answer**: the prompt, its answer, and more;
- **other answer**: the prompt, and something else behind it;
- **cut**: its first {CUT_TOKENS} tokens, and something else behind them.

Tokens are those that were cached, of those of the prompt; the last one is always computed. Answers
after a hit were the same as without one, alone and in a batch, except as told below. "layers" is
what the start line says at `--kv-cache-bits 8`. Windows are of 32 tokens here; as long as a prompt
is shorter than the window of its model, it can be cut like one without windows.

Written by `{WRITE}=1 python -m pytest tests/integration/test_every_model.py`.
"""


def layers(folder: Path) -> str:
    """What the start line says of a model's layers at 8 bits, but for their number."""
    model, _ = load_model(folder, lazy=True)
    text = describe_layers(make_cache("rotated", bits=8), layers_of(model), known_kinds())
    return text.partition(": ")[2]


def page(seen: Mapping[str, Seen], layers_by_name: Mapping[str, str]) -> str:
    """The whole text."""
    lines = [
        INTRODUCTION,
        f"| model | layers | {' | '.join(PLACES)} |",
        "|---|---|" + "---|" * len(PLACES),
    ]
    for name in sorted(seen, key=str.lower):
        hits = seen[name].hits["sequential"]
        cells = [name, layers_by_name[name], *(_tokens(hits[place]) for place in PLACES)]
        lines.append(f"| {' | '.join(cells)} |")
    parts = {
        "Not the same after a hit": SPLIT_SENSITIVE,
        "Wrong beside others, with or without a cache": ALONE_IN_A_BATCH,
        "Cannot be batched, with or without a cache": NEVER_IN_A_BATCH,
        "Not run": {name: why for name, why in EXCLUDED.items() if why != BUILDING_BLOCK},
    }
    for title, reasons in parts.items():
        lines += ["", f"## {title}", ""]
        lines += [f"- `{name}`: {reason}" for name, reason in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def tells_of_this_mlx_lm() -> bool:
    """Whether what is seen here belongs on the page."""
    return mlx_lm.__version__ == VERSION


def _tokens(answer: Answer) -> str:
    return f"{answer.cached_tokens}/{answer.prompt_tokens}"
