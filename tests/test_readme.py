"""What the README shows is what the committed results say, and its links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


SHOWN = ("store", "hit_rate", "sizing", "server", "stats", "page", "fidelity", "soak", "footprint")
SHOWN += ("chat", "restart")


@pytest.mark.parametrize(
    "row",
    [row for name in SHOWN for row in results(name)["rows"] if row["limit"] is not None],
    ids=lambda row: row["what"],
)
def test_the_figures_are_the_measured_ones(row: dict) -> None:
    """Each row that has a target stands in a table, and a missed one is told as missed."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {row['what']} |")]
    sign = "≥" if row.get("at_least") else "≤"
    assert f"| {row['value']:.3g}" in line
    assert line.endswith(f"| {sign} {row['limit']:.3g} |")
    assert ("**missed**" in line) == (not row["met"])


FIDELITY = [each for each in results("fidelity")["data"]["settings"] if each["model"] == "SmolLM2"]


@pytest.mark.parametrize("each", FIDELITY, ids=lambda each: f"{each['codec']} {each['bits']}")
def test_the_figures_of_fidelity_are_the_measured_ones(each: dict) -> None:
    """Every setting stands in the table; keys and values may have bits of their own."""
    bits = " / ".join(str(b) for b in dict.fromkeys((each["bits"], each["value_bits"])) if b)
    same = f"{each['same_greedy']} of {each['documents']}"
    room = f"{each['codec_bits_per_element']:.2f}"
    cells = (each["codec"], bits, room, f"{each['kl']:.5f}", f"{each['top1']:.1%}", same)
    assert f"| {' | '.join(cells)} |" in README


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
