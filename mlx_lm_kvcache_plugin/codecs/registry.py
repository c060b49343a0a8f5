"""Codecs by name."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import CodecError
from ..options import RECOMMENDED_BITS
from ..settings import Settings
from .affine import AffineCodec
from .base import Codec, CodecOptions
from .raw import RawCodec
from .rotated import RotatedCodec

CodecFactory = Callable[[CodecOptions], Codec]
"""Makes a codec for the keys or for the values."""

BUILT_IN: dict[str, CodecFactory] = {
    "rotated": RotatedCodec,
    "affine": AffineCodec,
    "raw": RawCodec,
}


class CodecRegistry:
    """The codecs that can be chosen."""

    def __init__(self) -> None:
        self._factories: dict[str, CodecFactory] = {}

    def register(self, name: str, factory: CodecFactory) -> None:
        """Offer a codec.

        Raises:
            CodecError: if the name is taken or no name, or the factory cannot be called.
        """
        if not (isinstance(name, str) and name.strip() and callable(factory)):
            raise CodecError(f"{name!r} and {factory!r} are not a name and a factory of codecs")
        if name in self._factories:
            raise CodecError(f"a codec named {name!r} is registered already")
        self._factories[name] = factory

    def names(self) -> list[str]:
        """The names, in the order of registration."""
        return list(self._factories)

    def create_pair(self, settings: Settings) -> tuple[Codec, Codec]:
        """Make the codecs for keys and for values that the settings ask for.

        They are one object where nothing sets them apart, so that keys and values that look alike
        are packed together.

        Raises:
            CodecError: if there is none of that name.
        """
        key_options, value_options = (
            CodecOptions(bits or RECOMMENDED_BITS, settings.group_size)
            for bits in (settings.key_bits, settings.value_bits)
        )
        key_codec = self.create(settings.codec, key_options)
        if value_options == key_options:
            return key_codec, key_codec
        return key_codec, self.create(settings.codec, value_options)

    def create(self, name: str, options: CodecOptions) -> Codec:
        """Make a codec.

        Raises:
            CodecError: if there is none of that name, or it does not take the options.
        """
        if name not in self._factories:
            known = ", ".join(self._factories)
            raise CodecError(f"there is no codec named {name!r}; there are {known}")
        try:
            return self._factories[name](options)
        except Exception as error:
            raise CodecError(f"codec {name!r} cannot be made with {options}: {error}") from error
