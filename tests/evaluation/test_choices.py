"""Which settings are evaluated."""

from __future__ import annotations

import pytest

from mlx_lm_kvcache_plugin.evaluation.choices import choose, make_settings
from mlx_lm_kvcache_plugin.settings import Settings


@pytest.mark.parametrize(
    ("codecs", "bits", "named"),
    [
        (None, None, "rotated 8, rotated 6, rotated 4, rotated 3, affine 8, affine 4"),
        (["affine"], None, "affine 8, affine 4"),
        (None, ["5"], "rotated 5, affine 5"),
        (["affine", "rotated"], ["8", "2"], "affine 8, affine 2, rotated 8, rotated 2"),
        (["rotated"], ["5/4", "4/4"], "rotated 5/4, rotated 4"),
        (["raw", "affine"], ["8", "4", "8"], "raw None, affine 8, affine 4"),
    ],
)
def test_all_combinations_each_once(codecs, bits, named: str) -> None:
    def name(settings: Settings) -> str:
        same = settings.key_bits == settings.value_bits
        other = "" if same else f"/{settings.value_bits}"
        return f"{settings.codec} {settings.key_bits}{other}"

    assert ", ".join(map(name, choose(codecs, bits, None))) == named


def test_the_settings_are_those_of_the_flags() -> None:
    (chosen,) = choose(["affine"], ["5/4"], "32")
    assert chosen == make_settings("affine", 5, 4, 32)
    assert chosen == Settings.resolve(
        {
            "kv_cache_codec": "affine",
            "kv_cache_bits": 5,
            "kv_cache_value_bits": 4,
            "kv_cache_group_size": 32,
        }
    )
