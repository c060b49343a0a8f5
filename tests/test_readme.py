"""What the README shows is what the committed results say, and its links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]


def results(name: str) -> list[dict]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]


@pytest.mark.parametrize(
    "row",
    [row for name in ("footprint", "chat", "restart") for row in results(name)],
    ids=lambda row: row["what"],
)
def test_the_figures_are_the_measured_ones(row: dict) -> None:
    """Each row of the results stands in the table, with its value and its target."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {row['what']} |")]
    assert f"| {row['value']:.3g}" in line
    assert line.endswith(f"| ≤ {row['limit']:.3g} |")
    assert row["met"], "a missed target has to be told as missed"


@pytest.mark.parametrize("row", results("bench_fidelity"), ids=lambda row: str(row["codec"]))
def test_the_figures_of_fidelity_are_the_measured_ones(row: dict) -> None:
    same = f"{row['same_greedy']} of {row['documents']}"
    cells = (row["codec"], row["bits"], f"{row['kl']:.5f}", f"{row['top1']:.1%}", same)
    assert f"| {' | '.join(map(str, cells))} |" in README


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    """Those to files of the project; and no placeholder was left."""
    text = document.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("https://") or (document.parent / target).exists(), target
    assert not re.search(r"@[A-Z]+@", text)


def test_every_flag_is_in_the_readme_and_in_the_document_of_flags() -> None:
    """With its environment variable."""
    from mlx_lm_kvcache_plugin.options import OPTIONS

    flags = (ROOT / "docs" / "flags.md").read_text("utf-8")
    for option in OPTIONS:
        for text in (README, flags):
            assert f"`{option.flag}" in text and f"`{option.variable}" in text
