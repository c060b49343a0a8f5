"""Codecs by name: who is in, who may come in, and what is made of the settings."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_lm_kvcache_plugin.codecs.affine import AffineCodec
from mlx_lm_kvcache_plugin.codecs.base import CodecOptions
from mlx_lm_kvcache_plugin.codecs.raw import RawCodec
from mlx_lm_kvcache_plugin.codecs.registry import BUILT_IN, CodecRegistry
from mlx_lm_kvcache_plugin.errors import CodecError
from mlx_lm_kvcache_plugin.options import RECOMMENDED_BITS
from mlx_lm_kvcache_plugin.settings import Settings


class RecordingCodec(RawCodec):
    """Remembers what it was made from."""

    def __init__(self, options: CodecOptions) -> None:
        super().__init__(options)
        self.options = options


def make_registry(**factories: Any) -> CodecRegistry:
    registry = CodecRegistry()
    for name, factory in factories.items():
        registry.register(name, factory)
    return registry


def options_of(settings: Settings) -> list[CodecOptions]:
    pair: Any = make_registry(recording=RecordingCodec).create_pair(settings)
    return [codec.options for codec in pair]


def test_the_built_in_codecs() -> None:
    """These three come with the package; the names are what users type."""
    assert list(BUILT_IN) == ["rotated", "affine", "raw"]


def test_names_in_the_order_of_registration() -> None:
    """Lists of names read as they were registered."""
    assert make_registry(beta=AffineCodec, alpha=RawCodec).names() == ["beta", "alpha"]


def test_a_codec_is_made_of_its_options() -> None:
    """The factory gets exactly the options that were asked for, and makes a new codec each time."""
    registry = make_registry(mine=RecordingCodec)
    options = CodecOptions(5, 32)
    made: Any = registry.create("mine", options)
    assert made.options == options
    assert registry.create("mine", options) is not made


def test_a_name_is_taken_once() -> None:
    """A second codec of the same name is refused, and the first one stays."""
    registry = make_registry(mine=RecordingCodec)
    with pytest.raises(CodecError, match="'mine' is registered already"):
        registry.register("mine", AffineCodec)
    assert isinstance(registry.create("mine", CodecOptions(4, 64)), RecordingCodec)


@pytest.mark.parametrize("name", ["missing", "", "Mine", "mine "])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    """Names are exact; the message says which there are."""
    registry = make_registry(mine=RawCodec, yours=AffineCodec)
    with pytest.raises(CodecError, match=f"no codec named '{name}'; there are mine, yours"):
        registry.create(name, CodecOptions(4, 64))


def test_a_codec_that_cannot_be_made_is_a_refusal() -> None:
    """Whatever a stranger's factory raises: the message names the codec and tells its reason."""

    def refuse(options: CodecOptions) -> RawCodec:
        raise RuntimeError(f"{options.bits} bits are too many")

    with pytest.raises(
        CodecError, match="'picky' cannot be made .*: 8 bits are too many"
    ) as caught:
        make_registry(picky=refuse).create_pair(Settings(codec="picky"))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_keys_and_values_have_their_own_bits() -> None:
    """Each side's codec is made of that side's bits, and of the one group size."""
    settings = Settings(key_bits=4, value_bits=3, group_size=32, codec="recording")
    assert options_of(settings) == [CodecOptions(4, 32), CodecOptions(3, 32)]


def test_without_bits_a_codec_gets_the_recommended_ones() -> None:
    """A registered codec that is chosen by name alone still needs a number."""
    settings = Settings(codec="recording")
    assert options_of(settings) == [CodecOptions(RECOMMENDED_BITS, 64)] * 2


@pytest.mark.parametrize(("value_bits", "same"), [(4, True), (8, False)])
def test_one_codec_for_both_where_nothing_sets_them_apart(value_bits: int, same: bool) -> None:
    """Then keys and values that look alike are packed together; else they must not be."""
    settings = Settings(key_bits=4, value_bits=value_bits, codec="affine")
    key_codec, value_codec = make_registry(**BUILT_IN).create_pair(settings)
    assert (key_codec is value_codec) == same


def test_a_pair_of_an_unknown_name_is_refused() -> None:
    """The same error as for one codec."""
    with pytest.raises(CodecError, match="no codec named 'nix'"):
        make_registry(**BUILT_IN).create_pair(Settings(key_bits=4, value_bits=4, codec="nix"))
