"""The patch of `mlx_lm.generate`: scripts, and the command, reuse what they computed before."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, ClassVar

from ..errors import PatchRefused, PromptFileError
from ..plugins import plugins
from ..settings import Settings
from . import shape
from .flags import BuiltInFlags, CommandPatch

REBOUND = ("generate_step", "speculative_generate_step", "generate", "batch_generate")
"""The names of upstream's module that are bound to ours while the plugin is on."""

LOADER = "load_prompt_cache"
"""Bound to ours while --prompt-cache-file names a file that only we can read."""

PARAMETERS = {
    "generate_step": (
        *("prompt", "model", "max_tokens", "logits_processors", "max_kv_size", "prompt_cache"),
        *("prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start"),
        *("prompt_progress_callback", "input_embeddings"),
    ),
    "speculative_generate_step": (
        *("prompt", "model", "draft_model", "max_tokens", "logits_processors", "prompt_cache"),
        *("prefill_step_size", "kv_bits"),
    ),
    "generate": ("model", "tokenizer", "prompt", "verbose"),
    "batch_generate": ("model", "prompts", "prompt_caches", "verbose"),
}
"""Those of each function that ours know by name; it may have others."""

USES = {
    "stream_generate": ("generate_step", "speculative_generate_step"),
    "generate": ("stream_generate",),
    "batch_generate": ("BatchGenerator", "next_generated"),
    "main": ("setup_arg_parser", "generate", LOADER),
    "setup_arg_parser": ("argparse",),
}


def apply(module: ModuleType) -> None:
    """Give the command our flags, and its functions the store if the environment asks for it.

    Raises:
        PatchRefused: if the module does not have the shape that this was written for.
    """
    check_shape(module)
    GeneratePatch(module).apply()


def check_shape(module: ModuleType) -> None:
    """Compare what this patch relies on with what the module is."""
    shape.require_names(module, [*REBOUND, LOADER, *USES, "argparse", "BatchGenerator"])
    for name, parameters in PARAMETERS.items():
        _require_parameters_among(module, name, parameters)
    for name, names in USES.items():
        shape.require_use(getattr(module, name), names)
    generator: Any = vars(module)["BatchGenerator"]
    shape.require_parameters(generator, {"_make_batch": ("n",), "next_generated": ()})
    shape.require_use(generator._next, ["_make_batch"])
    shape.require_use(generator._make_batch, ["_unprocessed_sequences"])


def _require_parameters_among(module: ModuleType, name: str, expected: tuple[str, ...]) -> None:
    function = getattr(module, name)
    if not isinstance(function, FunctionType):
        raise PatchRefused(f"{module.__name__}.{name} is not a plain function")
    missing = [each for each in expected if each not in inspect.signature(function).parameters]
    if missing:
        raise PatchRefused(f"{module.__name__}.{name} does not take {', '.join(missing)}")


class GeneratePatch(CommandPatch):
    """The flags of `mlx_lm.generate`, and what switches generation over to the store."""

    command: ClassVar[str] = "generate"

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module, (*REBOUND, LOADER))

    def add_arguments(self, group: Any) -> None:
        # Only now: a script that merely imports mlx-lm should not load all plugins.
        plugins().register(BuiltInFlags(), BuiltInFlags.NAME)
        super().add_arguments(group)

    def is_wanted(self, settings: Settings) -> bool:
        return super().is_wanted(settings) and not settings.disabled

    def configure(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        super().configure(args, parser)
        if args.prompt_cache_file is not None:
            vars(self.module)[LOADER] = self._loader(args.prompt_cache_file, parser)

    def _loader(self, path: str, parser: argparse.ArgumentParser) -> Callable[..., Any]:
        """What reads a prompt-cache file: upstream's own, if it has no mark of ours."""
        from .layer_kinds import register_built_in
        from .prompt_file import is_marked, load

        if not is_marked(path):
            return self.stock[LOADER]  # type: ignore[no-any-return]
        register_built_in()
        try:  # at once: what is wrong with it takes one line here, and no model was loaded
            caches, metadata = load(path)
        except PromptFileError as error:
            parser.error(f"--prompt-cache-file: {error}")

        def load_prompt_cache(file_name: str, return_metadata: bool = False) -> Any:
            return (caches, metadata) if return_metadata else caches

        return load_prompt_cache

    def bindings(
        self, settings: Settings | None, args: argparse.Namespace | None
    ) -> dict[str, Callable[..., Any]]:
        """Ours; without settings, the store reads the environment when it is opened."""
        from . import batches, steps  # much to load for a script that does not ask for it
        from .scripts import Scripts

        scripts, stock = Scripts(settings), self.stock
        plain, speculative = stock["generate_step"], stock["speculative_generate_step"]
        return {
            "generate_step": steps.over_the_store(plain, scripts, draws=False),
            "speculative_generate_step": steps.over_the_store(speculative, scripts, draws=True),
            "generate": _telling(stock["generate"]),
            "batch_generate": batches.over_the_store(stock["batch_generate"], self.module, scripts),
        }


def _telling(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's `generate`, whose statistics have one line more."""
    from .scripts import Tally, tallied
    from .steps import Call

    @functools.wraps(stock)
    def generate(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(stock, args, kwargs)
        with tallied() as tally:
            text = stock(*args, **kwargs)
        if call is not None and call["verbose"] and text is not None and tally.prompts:
            print(Tally(tally.prompts[:1]).line())  # others were computed on its way
        return text

    return generate
