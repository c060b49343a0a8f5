"""The metrics: both formats are read back with the parsers of Prometheus' own client."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import count
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open_metrics
from prometheus_client.parser import text_string_to_metric_families as read_plain

from mlx_lm_kvcache_plugin.web.metrics import exposition
from tests.web import figures

Stats = dict[str, Any]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

PLAIN, OPEN_METRICS = "text/plain", "application/openmetrics-text; version=1.0.0"
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""What a server of Prometheus 3 sends."""

NOT_SUMS = {"time", "history", "last_misses", "sequences", "settings"}
"""Parts of the statistics without a figure of their own here; settings are in the info."""


def families(stats: Stats, accept: str = OPEN_METRICS) -> list[Metric]:
    body, content_type = exposition(stats, accept)
    is_open = content_type.startswith("application/openmetrics-text")
    return list((read_open_metrics if is_open else read_plain)(body.decode("utf-8")))


def samples(stats: Stats, accept: str = OPEN_METRICS) -> Samples:
    """All figures, by name and labels; fails if any is there twice."""
    found: Samples = {}
    for family in families(stats, accept):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def value(stats: Stats, name: str, **labels: str) -> float | None:
    return samples(stats).get((f"mlx_lm_kvcache_{name}", frozenset(labels.items())))


def numbered(stats: Stats) -> tuple[Stats, dict[int, str]]:
    """Statistics in which every figure is another one, and where each of them is."""
    numbers, places = count(1000), {}

    def number(part: Any, place: str) -> Any:
        if isinstance(part, dict):
            return {key: number(below, f"{place}.{key}") for key, below in part.items()}
        if isinstance(part, list):
            return [number(below, f"{place}.{n}") for n, below in enumerate(part)]
        if isinstance(part, bool | str) or part is None or place.endswith(".scale"):
            return part
        given = next(numbers)
        places[given] = place.removeprefix(".")
        return given

    changed = {key: part if key in NOT_SUMS else number(part, key) for key, part in stats.items()}
    return changed, places


FIGURES = numbered(figures.with_disk())


@pytest.mark.parametrize("accept", [PLAIN, OPEN_METRICS])
def test_every_figure_is_there(accept: str) -> None:
    """Every sum and state of the statistics has its sample, and none is there twice."""
    stats, places = FIGURES
    shown = list(samples(stats, accept).values())
    missing = {place for number, place in places.items() if number not in shown}
    windows = {place for place in places.values() if re.match(r"hit_rate\.(\d+m\.|.*rate$)", place)}
    assert missing - windows == {"uptime_seconds"}
    assert [number for number in places if shown.count(number) > 1] == []


def test_both_formats_say_the_same() -> None:
    """But for the info, which only one of them has a type for."""
    stats, _ = FIGURES
    assert samples(stats, PLAIN) == samples(stats, OPEN_METRICS)


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("start_time_seconds", {}, 1764560000.0 - 9400.5),
        ("enabled", {}, 1),
        ("memory_short", {}, 0),
        ("memory_limit_bytes", {}, 4 * figures.GIB),
        ("memory_used_bytes", {}, 1_331_000_000),
        ("memory_tokens", {}, 1_258_400),
        ("model_used_bytes", {"model": figures.LLAMA}, 1_100_000_000),
        ("loaded_models", {"model": figures.LLAMA}, 1),
        ("loaded_models", {"model": figures.QWEN}, 0),
        ("requests_total", {}, 336),
        ("prompt_tokens_total", {}, 1_834_560),
        ("hit_tokens_total", {}, 1_522_758),
        ("stops_total", {"reason": "nothing stored"}, 41),
        ("misses_total", {"reason": "evicted"}, 2),
        ("missed_tokens_total", {"reason": "diverged"}, 188_416),
        ("missed_tokens_total", {"reason": "other model"}, 0),
        ("inserts_total", {}, 334),
        ("inserted_tokens_total", {}, 1_620_992),
        ("skipped_inserts_total", {"reason": "no room"}, 2),
        ("evicted_blocks_total", {"cause": "pressure"}, 64),
        ("evicted_bytes_total", {"cause": "memory"}, 326 * figures.MIB),
        ("decode_seconds_count", {}, 295),
        ("decode_seconds_sum", {}, 11.8),
        ("encode_seconds_sum", {}, 25.1),
        ("restore_seconds_count", {}, 31),
        ("disk_limit_bytes", {}, 20 * figures.GIB),
        ("disk_written_files_total", {}, 1310),
        ("disk_skipped_writes_total", {}, 3),
        ("errors_total", {"operation": "fetch"}, 2),
        ("predicted_hit_ratio", {"scale": "0.5"}, 0.71),
        ("predicted_hit_ratio", {"scale": "1"}, 0.83),
        ("predicted_hit_ratio", {"scale": "2"}, 0.91),
        ("predicted_hit_ratio", {"scale": "4"}, None),
        ("predicted_limit_bytes", {"scale": "1"}, 4 * figures.GIB),
        ("predicted_limit_bytes", {"scale": "4"}, 16 * figures.GIB),
        ("prediction_tokens", {}, 1_834_560),
    ],
)
def test_a_figure(name: str, labels: dict[str, str], expected: float | None) -> None:
    """Under this name; dashboards and alerts are written for it."""
    stats = {**figures.with_disk(), "errors": {"fetch": 2}}
    assert value(stats, name, **labels) == expected


def test_the_info() -> None:
    """Version and settings; a precision that is none in bits is said in a word."""
    stats = figures.busy()
    stats["settings"] |= {"key_bits": None}
    expected = {"version": "0.1.0", "codec": "rotated", "key_bits": "full", "value_bits": "4"}
    assert value(stats, "info", **expected, group_size="64", block_tokens="128") == 1


STATES = {
    "with_disk": figures.with_disk(),
    "without_text": figures.without_text(),
    "empty": figures.empty(),
    "disabled": figures.disabled(),
    "in_trouble": {**figures.busy(), **figures.trouble()},
}
LABELS = ("model", "reason", "cause", "operation", "scale")

every_state = pytest.mark.parametrize("stats", STATES.values(), ids=STATES)


@every_state
@pytest.mark.parametrize("accept", [PLAIN, OPEN_METRICS])
def test_the_rules_of_promtool(stats: Stats, accept: str) -> None:
    """What its linter asks for, and that a name says what its figures are in."""
    for family in families(stats, accept):
        name = family.name
        assert re.fullmatch(r"mlx_lm_kvcache(_[a-z]+)*", name)
        assert family.documentation.endswith(".")
        assert family.type in {"gauge", "counter", "summary", "info"}
        assert not set(name.split("_")) & {"total", "count", "sum", "bucket", "created"}
        assert not set(name.split("_")) & {"gauge", "counter", "summary", "ms", "mb", "percent"}
        assert family.unit in {"", "bytes", "seconds", "tokens", "ratio"}
        assert name.endswith(family.unit)
        if accept is OPEN_METRICS and re.search("_(bytes|seconds|tokens|ratio)$", name):
            assert family.unit
        if family.type == "counter":
            assert {sample.name for sample in family.samples} == {f"{name}_total"}


@every_state
def test_sums_count_nothing_twice(stats: Stats) -> None:
    """A metric has the same labels on all samples, and never more than one of them."""
    for family in families(stats):
        if family.type != "info":
            labels = {frozenset(sample.labels) for sample in family.samples}
            assert len(labels) == 1
            assert labels <= {frozenset({name}) for name in LABELS} | {frozenset()}


@every_state
def test_every_figure_is_a_number(stats: Stats) -> None:
    """And none is below zero."""
    assert all(figure >= 0 for figure in samples(stats).values())


@pytest.mark.parametrize("state", ["empty", "disabled"])
def test_what_is_not_there_has_no_sample(state: str) -> None:
    """No disk, no models, no errors, and nothing that could be predicted yet."""
    names = {name for name, _ in samples(STATES[state])}
    assert not [name for name in names if re.search("disk|model|errors|predicted_hit", name)]
    assert {"mlx_lm_kvcache_requests_total", "mlx_lm_kvcache_memory_used_bytes"} <= names


def test_a_limit_that_is_not_known_yet_has_no_sample() -> None:
    """A share of memory is settled when it is first needed."""
    stats = figures.busy()
    stats["memory"]["limit_bytes"] = stats["sizing"]["limit_bytes"] = None
    assert value(stats, "memory_limit_bytes") is None
    assert value(stats, "memory_used_bytes") == 1_331_000_000


def test_nothing_of_a_prompt_is_there() -> None:
    """Nor the disk's folder, nor the last error: whoever asks may see all of it."""
    stats = {**figures.with_disk(), "last_error": "fetch: KeyError: a secret"}
    body, _ = exposition(stats, PLAIN)
    assert figures.SYSTEM.encode() not in body
    assert b"secret" not in body and b"/Users" not in body


def test_models_of_one_name_are_one() -> None:
    """Such as one with and without an adapter; a set of labels may be there only once."""
    stats = figures.busy()
    stats["models"] = [{**model, "model": "same"} for model in stats["models"]]
    assert value(stats, "model_used_bytes", model="same") == 1_331_000_000
    assert value(stats, "loaded_models", model="same") == 1


def test_the_limit_as_it_is_is_there_once() -> None:
    """Even if it is among the predictions."""
    stats = figures.busy()
    stats["sizing"]["scales"].append({"scale": 1.0, "limit_bytes": 5, "hit_rate": 0.5})
    assert value(stats, "predicted_hit_ratio", scale="1") == 0.83


@pytest.mark.parametrize("accept", [PLAIN, OPEN_METRICS])
@pytest.mark.parametrize(
    "name",
    [
        'with "quotes"',
        "line\nbreak",
        "back\\slash",
        "back\\nslash",
        "ends in \\",
        "}",
        "a,b=c",
        "# HELP",
        "日本 🙂",
        "",
    ],
)
def test_names_of_models_survive(name: str, accept: str) -> None:
    """Whatever a folder may be called."""
    stats = figures.busy()
    stats["models"][0]["model"] = name
    read = samples(stats, accept)
    assert read["mlx_lm_kvcache_model_blocks", frozenset({("model", name)})] == 8100


def test_a_name_that_is_no_unicode_is_shown_as_far_as_it_is() -> None:
    """Folders of Linux may be called anything."""
    stats = figures.busy()
    stats["models"][0]["model"] = "caf\udce9"
    assert value(stats, "model_blocks", model="caf?") == 8100


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("text/html", "text/plain"),
        ("text/plain;version=0.0.4", "text/plain"),
        ("text/plain;version=9;escaping=dots", "text/plain"),
        (OPEN_METRICS, "application/openmetrics-text"),
        ("Application/OpenMetrics-Text", "application/openmetrics-text"),
        ("text/html, application/openmetrics-text;version=1.0.0;q=0.5", "application/openmetrics"),
        ("application/openmetrics-text;version=2\r\n X: y", "application/openmetrics-text"),
        ("application/openmetrics-text;version=a.b;escaping=values", "application/openmetrics"),
        ("application/openmetrics-text-no", "text/plain"),
        (";;,,==\x00", "text/plain"),
        (PROMETHEUS, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    ],
)
def test_the_format_that_is_asked_for(accept: str, content_type: str) -> None:
    """Nothing of the header itself comes back, and the text is what its type says."""
    body, given = exposition(figures.busy(), accept)
    assert given.startswith(content_type)
    assert re.fullmatch(r"[a-z/-]+; version=[01]\.0\.[04]; charset=utf-8", given)
    assert body.endswith(b"# EOF\n") == given.startswith("application/openmetrics-text")
    for line in body.decode().splitlines():
        assert line.startswith(("# HELP ", "# TYPE ", "# UNIT ", "# EOF", "mlx_lm_kvcache_"))


def test_statistics_are_not_changed() -> None:
    """They may be shared with others who ask at the same time."""
    stats = figures.with_disk()
    exposition(stats, PLAIN)
    assert stats == figures.with_disk()


def test_the_client_is_loaded_when_metrics_are_asked_for() -> None:
    """And by nothing else of the endpoints."""
    code = (
        "import sys; from mlx_lm_kvcache_plugin.web import endpoints, metrics; "
        "print('prometheus_client' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
