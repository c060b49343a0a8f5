"""What a running server tells about its prefix cache. Called on the threads of its clients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..inspection.clearing import clear
from ..inspection.explanation import Explanation, explain
from ..inspection.report import Models, report
from ..web.messages import Refusal
from ..web.metrics import exposition

if TYPE_CHECKING:
    from .serving import Serving

DEFAULT_MODEL = "default_model"
"""Upstream's word for the model that the server was started with."""

NAMES_OF_PROVIDER = (
    "_adapter_map",
    "_draft_model_map",
    "_model_map",
    "cli_args",
    "model_key",
    "tokenizer",
)
"""What upstream's `ModelProvider.load` looks at."""

NOT_OF_THE_TEMPLATE = {"max_length", "padding", "return_tensors", "tokenizer_kwargs", "truncation"}
"""Arguments beside those of a template that change the settings of the one tokenizer that all
threads have, or have MLX make an array, which belongs to the generation thread."""

LONGEST_WORDS = 200
"""Characters of what a run of tokens says."""


class ServerInspector:
    """What the endpoints ask for. Nothing in here computes: MLX belongs to the generation thread.

    Args:
        serving: the settings, the statistics and the prompt cache.
        generator: upstream's `ResponseGenerator`.
        tokenize: its method that makes a prompt of a request, as upstream has it.
    """

    def __init__(self, serving: Serving, generator: Any, tokenize: Callable[..., Any]) -> None:
        self._serving = serving
        self._generator = generator
        self._provider = generator.model_provider
        self._tokenize = tokenize

    def stats(self, shows_text: bool, lists_sequences: bool = True) -> dict[str, Any]:
        """All that is told; see docs/statistics.md."""
        serving = self._serving
        assert serving.statistics is not None  # else nobody asks
        face = serving.face
        cache = face.cache if face is not None else None
        models = Models(serving.name_of, self._is_loaded, self._words)
        statistics, settings = serving.statistics, serving.settings
        return report(settings, cache, statistics, models, shows_text, lists_sequences)

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The same for Prometheus, and its content type."""
        return exposition(self.stats(shows_text=False, lists_sequences=False), accept)

    def clear(self, memory_alone: bool) -> dict[str, int]:
        """Drop everything, in memory alone or on disk too."""
        face = self._serving.face
        if face is None or face.cache is None:
            return {"freed_bytes": 0, "deleted_files": 0}
        return clear(face.cache, face.lock, memory_alone)

    def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """What would become of a chat or a prompt, and where it leaves what is stored.

        Raises:
            Refusal: if no prompt can be made of it, or not now.
        """
        face = self._serving.face
        if face is None or face.cache is None:
            raise Refusal(409, "nothing is kept: the server runs with --disable-prefix-cache")
        namespace, tokenizer = self._loaded(body)
        tokens = self._tokens(tokenizer, body)
        explanation = explain(face.cache, namespace, tokens)
        return _told(explanation, self._serving.name_of(namespace), tokenizer)

    def _loaded(self, body: dict[str, Any]) -> tuple[Hashable, Any]:
        """The loaded model's namespace and its tokenizer, if it is the one that a body asks for."""
        provider = _names_of(self._provider)
        key, tokenizer = provider.model_key, provider.tokenizer
        if key is None or tokenizer is None:
            raise Refusal(503, "no model is loaded yet: try again, or send a request first")
        model, adapter = body.get("model", DEFAULT_MODEL), body.get("adapters")
        draft_model = body.get("draft_model", DEFAULT_MODEL)
        if not all(isinstance(name, str) for name in (model, draft_model, adapter or "")):
            raise Refusal(400, "model, draft_model and adapters are names")
        others: list[Any] = []
        provider._load = lambda *names: others.append(names)
        provider.load(model, adapter, draft_model)  # upstream knows best what it would load
        if others:
            loaded = self._serving.name_of(key)
            raise Refusal(409, f"that model is not loaded; a prompt of {loaded} can be explained")
        return key, tokenizer

    def _tokens(self, tokenizer: Any, body: dict[str, Any]) -> list[int]:
        """The prompt that upstream would make of a body."""
        request = _request_of(body)
        template = body.get("chat_template_kwargs") or {}
        if not isinstance(template, dict):  # upstream takes a list of pairs as well
            raise Refusal(400, "chat_template_kwargs is an object")
        if refused := template.keys() & NOT_OF_THE_TEMPLATE:
            names = ", ".join(sorted(refused))
            raise Refusal(400, f"with {names} in chat_template_kwargs nothing can be explained")
        args = SimpleNamespace(chat_template_kwargs=template)
        try:
            # Tokenizers encode on several threads at once, as long as none changes their settings.
            prompt, *_ = self._tokenize(self._generator, tokenizer, request, args)
            return list(map(operator.index, prompt))
        except Exception as error:
            raise Refusal(400, f"no prompt can be made of it: {error!r}") from error

    def _is_loaded(self, namespace: Hashable) -> bool:
        return bool(self._provider.model_key == namespace)

    def _words(self, namespace: Hashable, tokens: list[int]) -> str | None:
        tokenizer = self._provider.tokenizer
        if tokenizer is None or not self._is_loaded(namespace):
            return None  # another one would say something else
        return _text(tokenizer, tokens)[:LONGEST_WORDS]


def _names_of(provider: Any) -> Any:
    """A provider that knows the names of the loaded model, and never held the model.

    Whoever holds it last ends its arrays, which a client's thread must not.
    """
    names = object.__new__(type(provider))
    for name in NAMES_OF_PROVIDER:
        if hasattr(provider, name):
            setattr(names, name, getattr(provider, name))
    names.model = names.draft_model = None
    return names


def _request_of(body: dict[str, Any]) -> SimpleNamespace:
    """What upstream makes of a body, as far as its prompt goes."""
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list) and messages:
        if _has_images(messages):
            raise Refusal(400, "prompts with images cannot be explained")
        kind = "chat"
    elif isinstance(prompt, str):
        kind, messages = "text", []
    else:
        raise Refusal(400, "it takes messages, as a list, or a prompt, as a string")
    return SimpleNamespace(
        request_type=kind,
        prompt=prompt if kind == "text" else "",
        messages=messages,
        tools=body.get("tools") or None,
        role_mapping=body.get("role_mapping"),
    )


def _has_images(messages: Sequence[Any]) -> bool:
    contents = (each.get("content") for each in messages if isinstance(each, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)


def _told(explanation: Explanation, model: str, tokenizer: Any) -> dict[str, Any]:
    """As JSON holds it."""
    stop, nearest = explanation.stop, explanation.nearest
    return {
        "model": model,
        "prompt_tokens": explanation.prompt_tokens,
        "hit_tokens": explanation.hit_tokens,
        "on_disk_tokens": explanation.on_disk_tokens,
        "stop": stop and stop.told(),
        "nearest": nearest
        and {
            "common_tokens": nearest.common_tokens,
            "age_seconds": nearest.age_seconds,
            "before": _text(tokenizer, nearest.before),
            "request": _text(tokenizer, nearest.prompt),
            "stored": _text(tokenizer, nearest.stored),
        },
    }


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """What tokens say; those of images say nothing."""
    return str(tokenizer.decode([token for token in tokens if token >= 0]))
