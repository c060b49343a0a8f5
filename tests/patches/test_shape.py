"""The checks of upstream's shape: what differs is refused, and said."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.errors import PatchRefused
from mlx_lm_kvcache_plugin.patches import shape


class Upstream:
    """What a patch might rely on."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def fetch(self, model: str, tokens: list[int]) -> Any:
        return self.cache.fetch(model, tokens)

    def insert(self, model: str, *, kind: str = "user") -> None:
        self.cache.insert(model, kind)
        self.other.cache.unheard_of()  # type: ignore[attr-defined]
        cache = self.cache
        cache.of_a_local_name()

    @property
    def nbytes(self) -> int:
        return int(self.cache.nbytes)

    @classmethod
    def make(cls, size: int) -> Upstream:
        return cls(size)


def uses() -> object:
    return Upstream, print, Upstream.make


def refusal(check: Callable[..., None], *arguments: Any) -> str:
    with pytest.raises(PatchRefused) as caught:
        check(*arguments)
    return str(caught.value)


def test_names() -> None:
    """All that are missing are named; one that is None is there."""
    module = ModuleType("upstream.module")
    module.one = module.two = None  # type: ignore[attr-defined]
    shape.require_names(module, ["one", "two"])
    shape.require_names(module, [])
    reason = refusal(shape.require_names, module, ["three", "one", "four"])
    assert reason == "upstream.module has no four, three"


def test_use() -> None:
    """A function that does not look a name up as a global has nothing from its being rebound."""
    shape.require_use(uses, ["Upstream", "print"])
    reason = refusal(shape.require_use, uses, ["Upstream", "shape", "pytest"])
    assert reason == "uses does not use pytest, shape"


def test_use_by_a_local_name_is_none() -> None:
    """An argument or an import inside of the function hides the module's name."""

    def hides(Upstream: object) -> object:
        import functools as shape

        return Upstream, shape

    assert "Upstream" in refusal(shape.require_use, hides, ["Upstream"])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("__init__", ("cache",)),
        ("fetch", ("model", "tokens")),
        ("insert", ("model", "kind")),
    ],
)
def test_parameters(name: str, parameters: tuple[str, ...]) -> None:
    """Names and their order have to be the same: no more, no fewer, no other."""
    shape.require_parameters(Upstream, {name: parameters})
    wrong: list[tuple[str, ...]] = [
        (),
        parameters[:-1],
        (*parameters, "more"),
        ("other", *parameters[1:]),
    ]
    for expected in {each for each in wrong if each != parameters}:
        reason = refusal(shape.require_parameters, Upstream, {name: expected})
        assert reason == f"Upstream.{name} does not take ({', '.join(expected)})"


def test_a_parameter() -> None:
    """It has to have that name; the others may be any."""
    shape.require_parameter(Upstream.insert, "kind")
    shape.require_parameter(Upstream.__init__, "cache")
    reason = refusal(shape.require_parameter, Upstream.insert, "label")
    assert reason == "Upstream.insert takes no label"


def test_a_missing_method_is_refused() -> None:
    """As one with other parameters."""
    reason = refusal(shape.require_parameters, Upstream, {"trim": ("n_bytes",)})
    assert reason == "Upstream.trim does not take (n_bytes)"


def test_a_wrapped_method_is_what_it_wraps() -> None:
    """A decorator that keeps the signature changes nothing for a caller."""

    class Decorated(Upstream):
        @functools.wraps(Upstream.fetch)
        def fetch(self, *arguments: Any, **options: Any) -> Any:
            return super().fetch(*arguments, **options)

    shape.require_parameters(Decorated, {"fetch": ("model", "tokens")})


def test_members() -> None:
    """Those that `self.cache` is asked for, and nothing that some other cache is."""
    shape.require_members(Upstream, "cache", {"fetch", "insert", "nbytes", "never used"})
    reason = refusal(shape.require_members, Upstream, "cache", {"nbytes"})
    assert reason == "Upstream uses cache.fetch, insert"


def test_members_of_a_class_without_source() -> None:
    """Nothing is known of it, so it is refused."""
    names: dict[str, Any] = {"__name__": __name__}
    exec("class Unseen:\n    pass", names)
    linecache.checkcache()
    reason = refusal(shape.require_members, names["Unseen"], "cache", {"fetch"})
    assert reason == "the source of Unseen cannot be read"
