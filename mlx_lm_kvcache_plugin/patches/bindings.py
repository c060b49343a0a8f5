"""What the names of upstream's server module are bound to while the plugin is on."""

from __future__ import annotations

from typing import Any

from .arguments import StockDefault
from .endpoints import with_endpoints
from .prompt_cache import PrefixPromptCache
from .ranks import Ranks
from .serving import NO_LIMIT, Serving


def bound(serving: Serving, stock: dict[str, Any]) -> dict[str, Any]:
    """Our classes and functions, by the names that they take the place of.

    Args:
        stock: what those names are bound to without us.
    """
    handler = with_endpoints(stock["APIHandler"], serving, stock["ResponseGenerator"]._tokenize)

    def stream_generate(*args: Any, **kwargs: Any) -> Any:
        return stock["stream_generate"](*args, **serving.watched(kwargs))

    def _run_http_server(*args: Any, **kwargs: Any) -> Any:
        # Upstream's own default was bound when the function was defined.
        return stock["_run_http_server"](*args, **{"handler_class": handler, **kwargs})

    bindings = (
        _prompt_cache(serving),
        _model_provider(serving, stock["ModelProvider"]),
        _response_generator(serving, stock["ResponseGenerator"]),
        _batch_generator(serving, stock["BatchGenerator"]),
        handler,
        stream_generate,
        _run_http_server,
    )
    return {binding.__name__: binding for binding in bindings}


def _prompt_cache(serving: Serving) -> type:
    class LRUPromptCache(PrefixPromptCache):
        def __init__(self, max_size: int = StockDefault(10), max_bytes: int = NO_LIMIT) -> None:
            cache = serving.make_cache(max_size, max_bytes)
            super().__init__(cache, serving.kinds, Ranks(), serving.tell)
            serving.open(self)

    return LRUPromptCache


def _model_provider(serving: Serving, stock: Any) -> type:
    class ModelProvider(stock):  # type: ignore[misc]
        def load(self, *args: Any, **kwargs: Any) -> Any:
            before = self.model_key
            loaded = super().load(*args, **kwargs)
            if self.model_key != before:
                serving.model_loaded(self)
            return loaded

    return ModelProvider


def _response_generator(serving: Serving, stock: Any) -> type:
    class ResponseGenerator(stock):  # type: ignore[misc]
        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
            return serving.cut(tokenizer, request, super()._tokenize(tokenizer, request, args))

    return ResponseGenerator


def _batch_generator(serving: Serving, stock: Any) -> type:
    class BatchGenerator(stock):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            serving.generates_with(self)

    return BatchGenerator
