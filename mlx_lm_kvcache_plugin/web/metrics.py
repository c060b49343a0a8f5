"""The statistics as Prometheus reads them: every sum and state of `GET /v1/cache/stats`.

Made from what that answers, and without its text. A metric has a label either on all of its samples
or on none, so `sum()` counts nothing twice: what is there by model is there again, under another
name, for all models. A hit rate over time is for Prometheus to compute, from hit and prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX = "mlx_lm_kvcache"

_UNITS = {"bytes", "seconds", "tokens", "ratio"}


@dataclass(frozen=True, slots=True)
class _Figure:
    """A metric, and where its figures are in the statistics.

    Attributes:
        name: without prefix and `_total`; its last word is its unit, if that is one.
        path: keys; "*" stands for all keys, or for all of a list's objects. There is no sample
            where a key on the way is null.
        text: what it says.
        label: named after what "*" stands for; in a list, also the key that tells its objects
            apart. Those that it does not tell apart are added up.
    """

    name: str
    path: str
    text: str
    label: str = ""

    @property
    def unit(self) -> str:
        """Its unit, or nothing."""
        word = self.name.rpartition("_")[2]
        return word if word in _UNITS else ""

    def samples(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """The figures, by label value; by nothing without a label."""
        found: dict[str, float] = {}
        for label, value in _walk(stats, self.path.split("."), self.label):
            found[label] = found.get(label, 0.0) + value
        return found


_GAUGES = (
    _Figure("start_time_seconds", "start_time", "When the server started, in Unix time."),
    _Figure("enabled", "enabled", "1 while prompts are cached, 0 if that is switched off."),
    _Figure("memory_limit_bytes", "memory.limit_bytes", "Memory that may be used."),
    _Figure("memory_used_bytes", "memory.used_bytes", "Memory that is used."),
    _Figure("memory_short", "memory.is_short", "1 while the machine is short of memory."),
    _Figure("memory_blocks", "memory.blocks", "Whole blocks in memory."),
    _Figure("memory_tails", "memory.tails", "Ends of sequences that fill no block, in memory."),
    _Figure("memory_checkpoints", "memory.checkpoints", "Checkpoints in memory."),
    _Figure("memory_sequences", "memory.sequences", "Sequences in memory."),
    _Figure("memory_tokens", "memory.tokens", "Tokens in memory."),
    _Figure("loaded_models", "models.*.is_loaded", "Loaded models of this name.", "model"),
    _Figure("model_used_bytes", "models.*.used_bytes", "Memory used for a model.", "model"),
    _Figure("model_blocks", "models.*.blocks", "Whole blocks of a model, in memory.", "model"),
    _Figure("model_tails", "models.*.tails", "Ends that fill no block, of a model.", "model"),
    _Figure("model_checkpoints", "models.*.checkpoints", "Checkpoints of a model.", "model"),
    _Figure("model_tokens", "models.*.tokens", "Tokens of a model, in memory.", "model"),
    _Figure("disk_limit_bytes", "disk.limit_bytes", "Disk space that may be used."),
    _Figure("disk_used_bytes", "disk.used_bytes", "Disk space that is used."),
    _Figure(
        "predicted_hit_ratio",
        "scales.*.hit_rate",
        "Share of prompt tokens that are hits (scale 1), or would be at a scaled limit.",
        "scale",
    ),
    _Figure(
        "predicted_limit_bytes",
        "scales.*.limit_bytes",
        "Memory limit that a prediction is for.",
        "scale",
    ),
    _Figure("prediction_tokens", "sizing.prompt_tokens", "Tokens of prompts behind predictions."),
)
"""What is so now."""

_COUNTERS = (
    _Figure("requests", "hit_rate.start.requests", "Prompts that were looked up."),
    _Figure("prompt_tokens", "hit_rate.start.prompt_tokens", "Tokens of prompts."),
    _Figure("hit_tokens", "hit_rate.start.hit_tokens", "Tokens of prompts that were hits."),
    _Figure(
        "stops",
        "misses.*.requests",
        "Prompts, by why no more of their tokens were hits.",
        "reason",
    ),
    _Figure("misses", "misses.*.misses", "Prompts without any hit, by why.", "reason"),
    _Figure("missed_tokens", "misses.*.tokens", "Tokens of prompts computed, by why.", "reason"),
    _Figure("inserts", "inserts.count", "Sequences that were stored."),
    _Figure("inserted_tokens", "inserts.new_tokens", "Tokens stored that were not before."),
    _Figure("skipped_inserts", "inserts.skipped.*", "Sequences not stored, by why.", "reason"),
    _Figure("evicted_blocks", "evictions.*.blocks", "Blocks given up, by why.", "cause"),
    _Figure("evicted_bytes", "evictions.*.bytes", "Memory of blocks given up.", "cause"),
    _Figure("disk_restored_tokens", "disk.restored_tokens", "Tokens brought back from disk."),
    _Figure("disk_written_files", "disk.files_written", "Files written to disk."),
    _Figure("disk_written_bytes", "disk.bytes_written", "Bytes written to disk."),
    _Figure("disk_read_files", "disk.files_read", "Files read from disk, if sound."),
    _Figure("disk_read_bytes", "disk.bytes_read", "Bytes read from disk."),
    _Figure("disk_quarantined_files", "disk.quarantined", "Broken files on disk, set aside."),
    _Figure("disk_evicted_files", "disk.evicted_files", "Files deleted to make room."),
    _Figure("disk_evicted_bytes", "disk.evicted_bytes", "Bytes deleted to make room."),
    _Figure(
        "disk_skipped_writes", "disk.skipped", "Writes to disk left out, for want of time or room."
    ),
    _Figure("disk_errors", "disk.errors", "Other failures of the disk tier."),
    _Figure("errors", "errors.*", "What failed, and was done without.", "operation"),
)
"""Sums since the start."""

_SUMMARIES = {
    "decode": "Time to decode what was a hit and hand it over.",
    "encode": "Time to encode sequences and store them.",
    "restore": "Time to read sequences from disk.",
}


def exposition(stats: dict[str, Any], accept: str) -> tuple[bytes, str]:
    """Write the statistics in one of the formats of Prometheus.

    Args:
        stats: what `GET /v1/cache/stats` answers.
        accept: the Accept header of who asks; OpenMetrics if that is in it, else plain text.

    Returns:
        The text and its content type.
    """
    # Not at the top: most servers are never asked for metrics, and need not load it.
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector

    class Statistics(Collector):
        """Collects what was passed in."""

        def collect(self) -> Iterator[Metric]:
            return _families(stats)

    registry = CollectorRegistry()
    registry.register(Statistics())
    # Not the header itself: its versions and escapings, which our names have no need of, would come
    # back in the content type as the client wrote them.
    media_types = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    open_metrics = "application/openmetrics-text"
    encode, content_type = choose_encoder(open_metrics if open_metrics in media_types else "")
    return encode(registry), content_type


def _families(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """All metrics that have samples."""
    from prometheus_client import core

    yield core.InfoMetricFamily(PREFIX, "Version and settings.", _info(stats))
    figures = {**stats, "scales": _scales(stats["sizing"])}
    figures["start_time"] = round(stats["time"] - stats["uptime_seconds"], 3)
    for figure in _GAUGES + _COUNTERS:
        is_gauge = figure in _GAUGES
        kind: type[core.GaugeMetricFamily] | type[core.CounterMetricFamily]
        kind = core.GaugeMetricFamily if is_gauge else core.CounterMetricFamily
        labels = [figure.label] if figure.label else []
        family = kind(f"{PREFIX}_{figure.name}", figure.text, labels=labels, unit=figure.unit)
        for label, value in figure.samples(figures).items():
            family.add_metric([label] if labels else [], value)
        if family.samples:
            yield family
    for name, text in _SUMMARIES.items():
        timing = stats["timing"][name]
        values = timing["count"], timing["seconds"]
        yield core.SummaryMetricFamily(f"{PREFIX}_{name}_seconds", text, *values, unit="seconds")


def _info(stats: Mapping[str, Any]) -> dict[str, str]:
    """What does not change while the server runs; "full" for a precision without a number."""
    settings = {"version": stats["version"], **stats["settings"]}
    return {name: "full" if value is None else _text(value) for name, value in settings.items()}


def _scales(sizing: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The predictions, and the limit as it is as one more."""
    others = [scale for scale in sizing["scales"] if scale["scale"] != 1]
    return [{**sizing, "scale": 1}, *others]


def _walk(
    value: Any, steps: Sequence[str], label: str, at: str = ""
) -> Iterator[tuple[str, float]]:
    """What a path leads to, each with its label value."""
    if value is None:
        return
    if not steps:
        yield at, float(value)
    elif steps[0] != "*":
        yield from _walk(value[steps[0]], steps[1:], label, at)
    else:
        is_list = isinstance(value, list)
        found = [(item[label], item) for item in value] if is_list else value.items()
        for key, item in found:
            yield from _walk(item, steps[1:], label, _text(key))


def _text(value: object) -> str:
    """A label value; what UTF-8 cannot say, as in names of folders, becomes a question mark."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.encode("utf-8", "replace").decode("utf-8")
