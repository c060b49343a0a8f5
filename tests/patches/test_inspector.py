"""What a server tells about its cache before, while and after it has one, and of which model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx_lm.server
import pytest

from mlx_lm_kvcache_plugin.patches.inspector import ServerInspector, _names_of
from mlx_lm_kvcache_plugin.patches.serving import Serving
from mlx_lm_kvcache_plugin.settings import Settings
from mlx_lm_kvcache_plugin.stats.statistics import Statistics
from mlx_lm_kvcache_plugin.web.messages import Refusal

KEY = ("path/to/model", None, None)


class Tokenizer:
    """A token is a character."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def make_provider(key: Any = KEY, **flags: Any) -> Any:
    """Upstream's own provider, as if it had loaded something."""
    given = {
        "model": "path/to/model",
        "adapter_path": None,
        "draft_model": None,
        "trust_remote_code": False,
        "chat_template": "",
        "pipeline": False,
        **flags,
    }
    provider = mlx_lm.server.ModelProvider(SimpleNamespace(**given))
    provider.model_key, provider.model, provider.tokenizer = key, object(), Tokenizer()
    return provider


def make_inspector(provider: Any, has_cache: bool = True) -> ServerInspector:
    """An inspector of a server that was asked nothing yet."""
    serving = Serving(Settings(), None)
    serving._flags = provider.cli_args
    serving.statistics = Statistics()
    if has_cache:
        face = SimpleNamespace(cache=serving.make_cache(10, 1 << 30))
        # A server's own would be kept alive by its generator.
        serving._face = lambda: face  # type: ignore[assignment, return-value]

    def tokenize(generator: Any, tokenizer: Any, request: Any, args: Any) -> tuple[Any, ...]:
        text = request.prompt or "".join(each["content"] for each in request.messages)
        return list(map(ord, text)), [], []

    return ServerInspector(serving, SimpleNamespace(model_provider=provider), tokenize)


def refusal(inspector: ServerInspector, body: dict[str, Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        inspector.explain(body)
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"model": "default_model"},
        {"model": "path/to/model"},
        {"draft_model": "default_model", "adapters": None},
    ],
)
def test_the_model_is_asked_for_as_upstream_has_it(body: dict[str, Any]) -> None:
    """By default or by name; nothing is loaded for it, and the provider stays as it is."""
    provider = make_provider()
    before = dict(vars(provider))
    inspector = make_inspector(provider)
    with mock.patch.object(mlx_lm.server.ModelProvider, "_load", side_effect=AssertionError):
        told = inspector.explain({"prompt": "hello", **body})
        assert (told["model"], told["prompt_tokens"]) == ("path/to/model", 5)
        other = refusal(inspector, {"prompt": "hello", "model": "other"})
    assert other.status == 409 and "path/to/model" in other.line
    assert vars(provider) == before


@pytest.mark.parametrize("name", ["model", "draft_model", "adapters"])
@pytest.mark.parametrize("value", [3, ["one"], {"a": 1}, True])
def test_names_are_texts(name: str, value: object) -> None:
    """As upstream wants them."""
    inspector = make_inspector(make_provider())
    assert refusal(inspector, {"prompt": "hello", name: value}).status == 400


def test_nothing_is_loaded() -> None:
    """Or not yet: upstream takes what it has away before it loads another one."""
    provider = make_provider(key=None)
    inspector = make_inspector(provider)
    assert refusal(inspector, {"prompt": "hello"}).status == 503
    provider.model_key, provider.tokenizer = KEY, None
    assert refusal(inspector, {"prompt": "hello"}).status == 503


def test_nothing_is_kept() -> None:
    """With `--disable-prefix-cache`, and once a server is on its way out."""
    inspector = make_inspector(make_provider(), has_cache=False)
    assert inspector.stats(shows_text=True)["enabled"] is False
    assert inspector.clear(memory_alone=False) == {"freed_bytes": 0, "deleted_files": 0}
    assert refusal(inspector, {"prompt": "hello"}).status == 409
    assert b"mlx_lm_kvcache_enabled 0.0" in inspector.metrics("")[0]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({}, "it takes messages"),
        ({"messages": []}, "it takes messages"),
        ({"messages": {"role": "user"}}, "it takes messages"),
        ({"prompt": None}, "it takes messages"),
        ({"messages": [{"content": [IMAGE]}]}, "images"),
        ({"messages": [{"content": [{"type": "text", "text": "a"}, IMAGE]}]}, "images"),
        ({"messages": [{"role": "user"}]}, "KeyError('content')"),
        ({"messages": [3]}, "TypeError"),
    ],
)
def test_no_prompt_can_be_made_of_it(body: dict[str, Any], line: str) -> None:
    """What upstream would not take, and images: what they are is known once they are computed."""
    refused = refusal(make_inspector(make_provider()), body)
    assert refused.status == 400 and line in refused.line


@pytest.mark.parametrize(
    "name", ["truncation", "max_length", "padding", "tokenizer_kwargs", "return_tensors"]
)
def test_a_template_gets_nothing_that_is_not_for_it(name: str) -> None:
    """It would cut the prompts of requests under way, or have MLX compute on a client's thread."""
    body = {"messages": [{"content": "hello"}], "chat_template_kwargs": {name: 3, "kind": 1}}
    refused = refusal(make_inspector(make_provider()), body)
    line = f"with {name} in chat_template_kwargs nothing can be explained"
    assert (refused.status, refused.line) == (400, line)


@pytest.mark.parametrize("template", [[["truncation", True]], [["kind", 1]], "kind", 3, True])
def test_what_a_template_gets_has_names(template: Any) -> None:
    """Upstream takes pairs too, in which no name would be seen."""
    body = {"messages": [{"content": "hello"}], "chat_template_kwargs": template}
    refused = refusal(make_inspector(make_provider()), body)
    assert (refused.status, refused.line) == (400, "chat_template_kwargs is an object")


def test_a_provider_without_its_model() -> None:
    """Whoever asks what would be loaded never holds what is: its arrays must not die there."""
    provider = make_provider()
    names = _names_of(provider)
    assert names.model is None and provider.model is not None
    assert names.load("default_model", None, "default_model") == (None, provider.tokenizer)


def test_words_are_those_of_the_loaded_model() -> None:
    """Another one's tokenizer would say something else; images say nothing, and long texts end."""
    provider = make_provider()
    inspector = make_inspector(provider)
    assert inspector._words(KEY, [72, -5, 105]) == "Hi"
    assert len(inspector._words(KEY, [72] * 1000) or "") == 200
    assert inspector._words(("other", None, None), [72]) is None
    provider.tokenizer = None
    assert inspector._words(KEY, [72]) is None
