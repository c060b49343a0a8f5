"""Loading plugins, calling them, and setting aside those that fail."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import logging
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvcache_plugin import Codec, hookimpl, hookspecs
from mlx_lm_kvcache_plugin import plugins as plugins_module
from mlx_lm_kvcache_plugin.codecs.base import CodecOptions
from mlx_lm_kvcache_plugin.codecs.packing import Packer
from mlx_lm_kvcache_plugin.codecs.tensors import TensorSpec
from mlx_lm_kvcache_plugin.events import Miss
from mlx_lm_kvcache_plugin.layers import LayerKinds
from mlx_lm_kvcache_plugin.patches.layer_kinds import BUILT_IN, BuiltInLayerKinds
from mlx_lm_kvcache_plugin.patches.prompt_cache import PrefixPromptCache
from mlx_lm_kvcache_plugin.patches.ranks import Ranks
from mlx_lm_kvcache_plugin.plugins import Plugins

from . import example_layer_kind, example_plugin
from .patches.cache_objects import plain, rows, same
from .store.caches import make_cache
from .tensors import Rows

HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("kvcache_"))


@pytest.fixture
def entry_point(monkeypatch):
    """Offer a plugin as an installed distribution would."""
    offered: list[EntryPoint] = []

    def offer(name: str, value: str) -> None:
        offered.append(EntryPoint(name, value, hookspecs.PROJECT))

    monkeypatch.setattr(plugins_module, "entry_points", lambda group: offered)
    return offer


def plugin_with(**hooks: Any) -> object:
    """A plugin of these hook implementations."""
    return type("Plugin", (), {name: staticmethod(hookimpl(f)) for name, f in hooks.items()})()


class Listener:
    def __init__(self) -> None:
        self.events: list[object] = []

    @hookimpl
    def kvcache_event(self, event):
        self.events.append(event)


class Failing:
    @hookimpl
    def kvcache_event(self, event):
        raise RuntimeError("no")


def test_built_in_codecs_come_through_the_hook_that_strangers_use() -> None:
    assert Plugins({}).codecs().names() == ["rotated", "affine", "raw"]


def test_every_entry_point_is_loaded_unless_the_variable_names_some(entry_point) -> None:
    entry_point("example", f"{__package__}.example_plugin")
    entry_point("other", f"{__package__}.example_plugin:Float8Codec")

    assert "example" in Plugins({}).names()
    assert "other" in Plugins({}).names()
    assert "example" in Plugins({"MLX_LM_KVCACHE_PLUGINS": "nothing, example"}).names()
    assert "other" not in Plugins({"MLX_LM_KVCACHE_PLUGINS": "nothing, example"}).names()
    assert "example" not in Plugins({"MLX_LM_KVCACHE_PLUGINS": ""}).names()


def test_a_plugin_that_exits_while_it_is_loaded_is_set_aside_too(
    entry_point, tmp_path, monkeypatch
) -> None:
    (tmp_path / "quitter.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    entry_point("quitter", "quitter")
    assert "quitter" in Plugins({}).set_aside


@pytest.mark.parametrize("value", ["no.such.module", f"{__package__}.example_plugin:nothing"])
def test_a_plugin_that_cannot_be_loaded_is_named_and_set_aside(entry_point, caplog, value) -> None:
    entry_point("broken", value)
    entry_point("example", f"{__package__}.example_plugin")
    plugins = Plugins({})
    assert "broken" not in plugins.names()
    assert "loading failed" in plugins.set_aside["broken"]
    assert "'broken' is set aside" in caplog.text
    assert "float8" in plugins.codecs().names()


def test_a_hook_of_unknown_name_or_argument_sets_its_plugin_aside() -> None:
    plugins = Plugins({})
    plugins.register(plugin_with(kvcache_no_such_hook=lambda: None), "misspelt")
    plugins.register(plugin_with(kvcache_event=lambda sound: None), "misread")
    assert set(plugins.set_aside) == {"misspelt", "misread"}
    plugins.call("kvcache_event", event=Miss(1))


def test_a_plugin_that_raises_takes_no_further_part_and_the_others_go_on(caplog) -> None:
    plugins, before, after = Plugins({}), Listener(), Listener()
    plugins.register(before, "before")
    plugins.register(Failing(), "failing")
    plugins.register(after, "after")

    plugins.call("kvcache_event", event=Miss(1))
    plugins.call("kvcache_event", event=Miss(2))

    assert before.events == after.events == [Miss(1), Miss(2)]
    assert "failing" not in plugins.names()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "'failing' is set aside" in warnings[0].getMessage()


def test_a_codec_of_a_taken_name_is_refused_and_its_plugin_set_aside() -> None:
    plugins = Plugins({})
    plugins.register(
        plugin_with(kvcache_register_codecs=lambda register: register("raw", None)),
        "usurper",
    )
    assert plugins.codecs().names() == ["rotated", "affine", "raw"]
    assert "usurper" in plugins.set_aside


@pytest.mark.parametrize(("name", "factory"), [(5, dict), ("", dict), (" ", dict), ("none", None)])
def test_a_codec_without_name_or_factory_sets_its_own_plugin_aside(name, factory) -> None:
    plugins = Plugins({})
    plugins.register(
        plugin_with(kvcache_register_codecs=lambda register: register(name, factory)), "careless"
    )
    assert plugins.codecs().names() == ["rotated", "affine", "raw"]
    assert list(plugins.set_aside) == ["careless"]


def test_a_refusal_by_the_parser_is_no_failure_of_the_plugin() -> None:
    def refuse(parser):
        parser.error("no")

    plugins = Plugins({})
    plugins.register(plugin_with(kvcache_configure=refuse), "strict")
    parser = argparse.ArgumentParser()
    with pytest.raises(SystemExit):
        plugins.call("kvcache_configure", args=None, command="server", parser=parser)
    assert "strict" in plugins.names()


def test_the_worked_codec_keeps_half_the_bytes_and_two_bits_of_mantissa() -> None:
    codec = example_plugin.Float8Codec(CodecOptions(8, 64))
    assert isinstance(codec, Codec)
    x = mx.random.normal((2, 256, 80)).astype(mx.float16)
    tensors = [Rows(x), Rows(x)]
    packer = Packer([TensorSpec(2, 80, mx.float16)] * 2, codec, codec)
    payloads = packer.encode(tensors, 0, 128, 2)
    assert sum(payload.nbytes for payload in payloads) < 0.51 * 2 * x.nbytes
    for decoded in packer.decode([0, 1], payloads, 200):
        original = x[:, :200]
        assert decoded.dtype == mx.float16 and decoded.shape == original.shape
        assert mx.all(mx.abs(decoded - original) <= mx.abs(original) / 8 + 2e-5)


def test_the_worked_codec_can_be_chosen_by_its_name(entry_point) -> None:
    entry_point("example", f"{__package__}.example_plugin")
    codec = Plugins({}).codecs().create("float8", CodecOptions(8, 64))
    assert codec.name == "float8"


# Layer kinds


@pytest.fixture
def taught(entry_point) -> Plugins:
    """The plugins of a server, and among them the one of docs/hooks.md."""
    entry_point("paired", f"{__package__}.example_layer_kind")
    plugins = Plugins({})
    plugins.register(BuiltInLayerKinds(), BuiltInLayerKinds.NAME)
    return plugins


def test_built_in_layer_kinds_come_through_the_hook_that_strangers_use() -> None:
    """With mlx-lm's patch, since they know its classes; without it there are none."""
    plugins = Plugins({})
    kinds = plugins.layer_kinds()
    assert all(kinds.get(cache_class) is None for cache_class in BUILT_IN)
    plugins.register(BuiltInLayerKinds(), BuiltInLayerKinds.NAME)
    kinds = plugins.layer_kinds()
    assert {cache_class: kinds.get(cache_class) for cache_class in BUILT_IN} == BUILT_IN


@pytest.mark.parametrize("usurped", BUILT_IN, ids=lambda cache_class: cache_class.__name__)
def test_a_class_of_a_known_kind_is_refused_and_its_plugin_set_aside(taught, usurped) -> None:
    """Whoever came in first: the built-in kinds are there before those of any other."""
    kind = example_layer_kind.Paired()
    taught.register(
        plugin_with(kvcache_register_layer_kinds=lambda register: register(usurped, kind)),
        "usurper",
    )
    assert taught.layer_kinds().get(usurped) is BUILT_IN[usurped]
    assert list(taught.set_aside) == ["usurper"]


def test_two_plugins_for_one_class(taught) -> None:
    """One of them is set aside, and the class has the kind of the other."""
    cache_class, other = example_layer_kind.PairedCache, example_layer_kind.Paired()
    taught.register(
        plugin_with(kvcache_register_layer_kinds=lambda register: register(cache_class, other)),
        "another",
    )
    assert taught.layer_kinds().get(cache_class) is other
    assert list(taught.set_aside) == ["paired"]


@pytest.mark.parametrize(
    ("cache_class", "kind"),
    [("PairedCache", example_layer_kind.Paired()), (dict, None), (dict, example_layer_kind.Paired)],
)
def test_no_class_or_no_kind_sets_its_own_plugin_aside(cache_class, kind) -> None:
    """A kind is an object that takes apart and puts together; the class of one is none."""
    plugins = Plugins({})
    plugins.register(
        plugin_with(kvcache_register_layer_kinds=lambda register: register(cache_class, kind)),
        "careless",
    )
    assert plugins.layer_kinds().get(dict) is None
    assert list(plugins.set_aside) == ["careless"]


def paired(tokens: int) -> Any:
    """A cache of the worked plugin's class, filled in two steps."""
    cache, first = example_layer_kind.PairedCache(), tokens // 2
    keys, values = rows(tokens, seed=1), rows(tokens, seed=2)
    for part in (slice(0, first), slice(first, None)):
        cache.update_and_fetch(keys[:, :, part], values[:, :, part])
    return cache


@pytest.mark.parametrize("hit", [1, 5, 128, 150, 199])
def test_the_worked_kind_can_be_cut_anywhere(taught, hit) -> None:
    """What shares 5 tokens with a stored prompt gets those, beside a layer of upstream's own."""
    face = PrefixPromptCache(make_cache(block_tokens=128), taught.layer_kinds(), Ranks())
    face.insert_cache("model", list(range(200)), [paired(200), plain(200)])
    caches, rest = face.fetch_nearest_cache("model", [*range(hit), -1, -2])
    assert rest == [-1, -2] and caches is not None
    assert type(caches[0]) is example_layer_kind.PairedCache
    for cache, whole in zip(caches, (paired(hit), plain(hit)), strict=True):
        assert cache.offset == hit
        new = rows(3, seed=7), rows(3, seed=8)
        assert same(cache.update_and_fetch(*new), whole.update_and_fetch(*new))


def test_a_class_that_nobody_taught_is_kept_whole() -> None:
    """The same without the plugin: at its own end, and nowhere else."""
    face = PrefixPromptCache(make_cache(block_tokens=128), LayerKinds(), Ranks())
    face.insert_cache("model", list(range(200)), [paired(200)])
    assert face.fetch_nearest_cache("model", [*range(150), -1])[0] is None
    caches, rest = face.fetch_nearest_cache("model", [*range(200), -1])
    assert rest == [-1] and same(caches, [paired(200)])


DOCUMENT = Path(__file__).parents[1] / "docs" / "hooks.md"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_signature(hook) -> None:
    parameters = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"{hook}({parameters})" in DOCUMENT.read_text("utf-8")


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_one_sentence(hook) -> None:
    text = inspect.getdoc(getattr(hookspecs, hook))
    assert text and text.endswith(".") and "\n\n" not in text


@pytest.mark.parametrize("example", [example_plugin, example_layer_kind], ids=lambda m: m.__name__)
def test_the_document_shows_the_worked_plugins_as_they_are_tested(example) -> None:
    assert inspect.getsource(example).strip() in DOCUMENT.read_text("utf-8")


def test_the_entry_point_group_is_the_projects_name() -> None:
    """What docs/hooks.md tells plugin authors to write into their metadata."""
    assert f"[project.entry-points.{hookspecs.PROJECT}]" in DOCUMENT.read_text("utf-8")
    assert importlib.metadata.entry_points(group=hookspecs.PROJECT) is not None


def test_one_set_of_plugins_serves_the_process() -> None:
    code = (
        "from mlx_lm_kvcache_plugin.plugins import plugins; assert plugins() is plugins();"
        "import sys; assert 'mlx_lm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
