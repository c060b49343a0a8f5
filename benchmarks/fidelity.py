"""What a hit costs: SmolLM2 and Gemma 3 go on after prefixes that were stored and fetched.

For each document the model reads a prefix, and its cache goes through the store. Then, with the
fetched cache and with the original one, the next tokens of the text are scored, and the likeliest
continuations compared: the engine of `mlx_lm.kvcache evaluate`. Gemma 3, a base model with sliding
windows, reads fewer documents under fewer settings, and no chats.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm import load
from tqdm import tqdm

from demo import DemoError, gemma3, smollm2
from demo.model_folder import default_cache_dir
from mlx_lm_kvcache_plugin.evaluation.choices import make_settings
from mlx_lm_kvcache_plugin.evaluation.documents import Document, begin, encode
from mlx_lm_kvcache_plugin.evaluation.engine import Evaluation, evaluate, steps
from mlx_lm_kvcache_plugin.evaluation.scoring import GREEDY_TOKENS
from mlx_lm_kvcache_plugin.evaluation.summary import Loss, Room, bits_text
from mlx_lm_kvcache_plugin.settings import Settings

from . import figures
from .report import Report, Row
from .texts import TEXTS, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCORED_TOKENS = 256

LENGTHS = dict(zip(TEXTS, (4096, 4096, 2048, 2048, 1024, 1024, 1024, 1024), strict=True))
"""Tokens of the prefix, by document: whole blocks, so that no tail is among them."""

RAW = make_settings("raw")
ROTATED_8, ROTATED_4 = make_settings("rotated", 8), make_settings("rotated", 4)
AFFINE_8, AFFINE_4 = make_settings("affine", 8), make_settings("affine", 4)

ROTATED = tuple(make_settings("rotated", bits) for bits in (8, 6, 5, 4, 3, 2))
MIXED = (make_settings("rotated", 5, 4), make_settings("rotated", 4, 3))
AFFINE = tuple(make_settings("affine", bits) for bits in (8, 6, 4, 3))

RATIO, CODEC_BITS, CLOSE_KL, SAME = 0.25, 4.65, 0.0002, 7
"""Targets, for SmolLM2: KL at 4 bits to that of affine, bits per element at 4 bits, KL at 8 bits,
and how many documents' likeliest continuation 8 bits leave as it is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of a model.

    Attributes:
        lengths: of its documents' prefixes, in tokens.
        has_targets: whether its figures are held to the targets.
    """

    name: str
    folder: Path
    settings: tuple[Settings, ...]
    lengths: Mapping[str, int]
    scored_tokens: int = SCORED_TOKENS
    has_targets: bool = True


def plans(quick: bool) -> Iterator[Plan]:
    """What is to be measured."""
    folder = smollm2.ensure_model(default_cache_dir())
    if quick:
        lengths = dict.fromkeys(("statuses", "chat about strings"), 256)
        yield Plan("SmolLM2", folder, (ROTATED_8, ROTATED_4, AFFINE_4), lengths, 64, False)
        return
    yield Plan("SmolLM2", folder, (RAW, *ROTATED, *MIXED, *AFFINE), LENGTHS)
    lengths = dict.fromkeys(("reference", "code, argparse", "statuses"), 1024)
    settings = (ROTATED_8, ROTATED_4, AFFINE_8, AFFINE_4)
    folder = gemma3.ensure_model(default_cache_dir())
    yield Plan("Gemma 3", folder, settings, lengths, has_targets=False)


def measure(arguments: argparse.Namespace) -> Report:
    """Measure all models."""
    try:
        planned = list(plans(arguments.quick))
    except DemoError as error:
        raise SystemExit(f"benchmarks: {error}") from None
    rows: list[Row] = []
    data: dict[str, list[Any]] = {"documents": [], "settings": [], "rounding": []}
    for plan in planned:
        evaluation = run(plan)
        rows += rows_of(plan, evaluation)
        for name, found in data_of(plan, evaluation).items():
            data[name] += [{"model": plan.name, **each} for each in found]
    return Report(rows, data)


def run(plan: Plan) -> Evaluation:
    """Let one model read its documents."""
    loaded: Any = load(str(plan.folder))
    model, tokenizer = loaded[0], loaded[1]
    documents = [
        document(tokenizer, name, length, plan.scored_tokens)
        for name, length in plan.lengths.items()
    ]
    with tqdm(total=steps(documents, plan.settings), desc=plan.name, unit="step") as bar:
        return evaluate(model, documents, plan.settings, lambda document, what: bar.update())


def document(tokenizer: Any, name: str, prefix_tokens: int, scored_tokens: int) -> Document:
    """The beginning of a text."""
    tokens = [*begin(tokenizer), *encode(tokenizer, text(name, tokenizer))]
    needed = prefix_tokens + scored_tokens + 1
    assert len(tokens) >= needed, f"{name}: {len(tokens)} tokens, and {needed} are needed"
    return Document.of(name, tokens[:needed], prefix_tokens)


def rows_of(plan: Plan, evaluation: Evaluation) -> Iterator[Row]:
    """The figures of one model, beside their targets if it has any."""

    def limit(target: float) -> float | None:
        return target if plan.has_targets else None

    ours, theirs, exact = map(evaluation.of, (ROTATED_4, AFFINE_4, ROTATED_8))
    ratios = [one.score.kl / other.score.kl for one, other in zip(ours, theirs, strict=True)]
    means = [Loss.of([each.score for each in found]).kl for found in (ours, theirs)]
    yield Row.of(
        f"{plan.name}, KL at 4 bits, rotated to affine, median of documents",
        ratios,
        limit(RATIO),
        f"means {means[0]:.5f} and {means[1]:.5f}",
    )
    longest = max(each.footprint.tokens for each in ours)
    rooms = [
        Room.of([each.footprint for each in found if each.footprint.tokens == longest])
        for found in (ours, theirs)
    ]
    yield Row(
        f"{plan.name}, bits per element at 4 bits, {longest:,} tokens, the codec's own",
        rooms[0].codec_bits_per_element or 0,
        limit(CODEC_BITS),
        f"affine {rooms[1].codec_bits_per_element:.3f}; everything counted "
        f"{rooms[0].bits_per_element:.3f} and {rooms[1].bits_per_element:.3f}",
    )
    loss = Loss.of([each.score for each in exact])
    kls = [each.score.kl for each in exact]
    yield Row(
        f"{plan.name}, KL at 8 bits, mean of documents",
        loss.kl,
        limit(CLOSE_KL),
        f"rounding alone {Loss.of(evaluation.rounding).kl:.2g}",
        low=min(kls),
        high=max(kls),
    )
    yield Row(
        f"{plan.name}, documents with the same {GREEDY_TOKENS} likeliest tokens at 8 bits",
        loss.same_greedy,
        limit(SAME),
        f"of {loss.documents}",
        at_least=True,
    )


def data_of(plan: Plan, evaluation: Evaluation) -> dict[str, list[dict[str, Any]]]:
    """What figures and tables are made from."""
    return {
        "documents": [
            {"name": name, "prefix_tokens": length, "scored_tokens": plan.scored_tokens}
            for name, length in plan.lengths.items()
        ],
        "settings": [summary.plain() for summary in evaluation.summaries()],
        "rounding": [asdict(Loss.of(evaluation.rounding))],
    }


def draw(data: Mapping[str, Any]) -> Figure:
    """KL over bits per element, a line for each codec of each model."""
    figure = figures.new(height=4.4)
    (axes,) = figure.axes
    lines = dict.fromkeys((each["model"], each["codec"]) for each in data["settings"])
    for model, codec in lines:
        points = [
            each
            for each in data["settings"]
            if (each["model"], each["codec"]) == (model, codec) and each["kl"] > 0
        ]
        if points:  # raw is exact: there is no place for it
            _draw_line(axes, f"{model}, {codec}", points)
    axes.set_yscale("log")
    axes.set_xlabel("bits per element, everything counted")
    axes.set_ylabel("KL divergence of the next token, nats")
    axes.set_title("What a stored prefix costs (beside each point: bits of keys and values)")
    axes.legend()
    return figure


def _draw_line(axes: Axes, label: str, points: Sequence[Mapping[str, Any]]) -> None:
    points = sorted(points, key=lambda each: each["bits_per_element"])
    style = "--" if "affine" in label else "-"
    bits, kl = [[each[key] for each in points] for key in ("bits_per_element", "kl")]
    axes.plot(bits, kl, style, marker="o", label=label)
    for each in points:
        settings = Settings(each["bits"], each["value_bits"], codec=each["codec"])
        place = (each["bits_per_element"], each["kl"])
        axes.annotate(bits_text(settings), place, (4, 4), textcoords="offset points", fontsize=8)
