"""Prompt caches of ours, and the cache objects that come out of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList

from mlx_lm_kvcache_plugin.patches.prompt_cache import PrefixPromptCache
from mlx_lm_kvcache_plugin.patches.ranks import Ranks
from tests.patches.cache_objects import known_kinds
from tests.store.caches import make_cache


def make_face(codec: str, **options: Any) -> PrefixPromptCache:
    """The options are those of `make_cache`."""
    return PrefixPromptCache(make_cache(codec, **options), known_kinds(), Ranks())


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """Upstream's cache objects, those inside of others too."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def are_at(caches: Sequence[Any], tokens: int) -> bool:
    """Whether each cache object that counts tokens and holds any has counted these."""
    counting = [leaf for leaf in leaves(caches) if isinstance(getattr(leaf, "offset", None), int)]
    return all(leaf.offset == tokens or leaf.empty() for leaf in counting)
