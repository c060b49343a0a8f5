"""`mlx_lm.kvcache evaluate`: what each setting of the prefix cache costs on a user's model."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import KVCachePluginError, SettingsError

if TYPE_CHECKING:
    from ..settings import Settings
    from .documents import Document
    from .engine import Evaluation

UNUSABLE, INTERRUPTED = 2, 130
"""Exit statuses: for what cannot be evaluated, and for Ctrl-C, as shells have it."""

STDOUT = Path("-")

_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""What may be one on the Hugging Face hub; anything else is a folder that is not there."""

DESCRIPTION = """\
Let a model read texts, keep their prefixes as the prefix cache would, and tell how far it strays
when it goes on from a fetched prefix: KL divergence of the next token in nats, how often the
likeliest token is the same, perplexity of the text, and how often 64 likeliest tokens in a row are
the same. The line "rounding" tells what the model's own arithmetic does, once the last bit of each
number in the cache is turned over: nothing comes closer. Then it says which setting takes the least
room of those with a KL that adds at most 0.0002 to rounding, or doubles it (answers as good as
without a cache; the same ones, if no document goes on otherwise than with rounding), and of those
that add at most 0.01 (a small loss).
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to a parser."""
    parser = subparsers.add_parser(
        "evaluate",
        help="measure on a model what fewer bits cost, and say which to use",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder or a Hugging Face repository, as mlx_lm takes it")
    add("--text", type=Path, metavar="FILE", help="read this instead of the sample texts")
    add("--codec", nargs="+", metavar="NAME", help="default: rotated and affine")
    add(
        "--bits",
        nargs="+",
        metavar="N",
        help="2, 3, 4, 5, 6 or 8, or 5/4 for keys and values (default: 8 6 4 3; affine 8 4)",
    )
    add("--group-size", metavar="N", help="elements that share a scale (default: 64)")
    add("--prefix-tokens", metavar="N", default="1024", help="default: %(default)s")
    add("--scored-tokens", metavar="N", default="256", help="default: %(default)s")
    add(
        "--json",
        nargs="?",
        type=Path,
        const=STDOUT,
        metavar="FILE",
        help="write it all as JSON, without FILE to stdout and in place of the table",
    )
    add("--plot", type=Path, metavar="FILE", help="draw KL over bits, as .svg, .png, .pdf, ...")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate and tell; 2 for what cannot be evaluated."""
    try:
        _run(args)
    except KVCachePluginError as error:
        print(f"mlx_lm.kvcache evaluate: {' '.join(str(error).split())}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("mlx_lm.kvcache evaluate: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _run(args: argparse.Namespace) -> None:
    from .choices import choose
    from .documents import read_text

    prefix_tokens = _count("--prefix-tokens", args.prefix_tokens)
    scored_tokens = _count("--scored-tokens", args.scored_tokens)
    settings = choose(args.codec, args.bits, args.group_size)
    _check_model(args.model)
    _check_outputs(args)
    text = read_text(args.text, prefix_tokens + scored_tokens) if args.text else None
    model, tokenizer = _load(args.model)
    documents = _documents(tokenizer, args.text, text, prefix_tokens, scored_tokens)
    _tell(args, documents, _evaluate(model, documents, settings))


def _count(flag: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise SettingsError(f"{flag}: {text!r} is not a whole number") from None
    if number < 1:
        raise SettingsError(f"{flag}: {number} is not enough, it takes 1 or more")
    return number


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise a SettingsError for what could not be written in the end."""
    if args.plot:
        from .figure import check

        check(args.plot)
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path in (None, STDOUT):
            continue
        if path.is_dir():
            raise SettingsError(f"{flag} {path}: it is a folder")
        if not path.parent.is_dir():
            raise SettingsError(f"{flag} {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise SettingsError(f"{flag} {path}: it cannot be written")


def _check_model(name: str) -> None:
    """Raise a SettingsError for what is surely no model."""
    if os.path.isfile(name):
        raise SettingsError(f"--model {name}: it is a file, and has to be a folder")
    if not os.path.isdir(name) and not _REPOSITORY.fullmatch(name):
        raise SettingsError(f"--model {name}: there is no such folder")


def _load(name: str) -> tuple[Any, Any]:
    """The model and its tokenizer, as mlx-lm's own commands load them."""
    from ..patches.models import load

    try:
        return load(name)
    except Exception as error:  # whatever a hub or a broken folder comes to
        raise SettingsError(f"--model {name}: {error}") from error


def _documents(
    tokenizer: Any, path: Path | None, text: str | None, prefix_tokens: int, scored_tokens: int
) -> list[Document]:
    from .documents import passages, samples

    if path is None or text is None:
        return samples(tokenizer, prefix_tokens, scored_tokens)
    return passages(tokenizer, text, path.name, prefix_tokens, scored_tokens)


def _evaluate(
    model: Any, documents: Sequence[Document], settings: Sequence[Settings]
) -> Evaluation:
    from tqdm import tqdm

    from .engine import evaluate, steps

    with tqdm(total=steps(documents, settings), unit="step") as bar:
        begun = itertools.count()

        def tell(document: str, what: str) -> None:
            bar.set_description(f"{document}: {what}", refresh=False)
            bar.update(next(begun) - bar.n)

        evaluation = evaluate(model, documents, settings, tell)
        bar.update(next(begun) - bar.n)
    return evaluation


def _tell(args: argparse.Namespace, documents: Sequence[Document], evaluation: Evaluation) -> None:
    from .report import lines, plain

    found = plain(args.model, documents, evaluation)
    text = json.dumps(found, indent=1)
    if args.json == STDOUT:
        print(text)
    else:
        print("\n".join(lines(evaluation)))
    try:
        if args.json not in (None, STDOUT):
            args.json.write_text(text + "\n", "utf-8")
        if args.plot:
            from .figure import draw

            draw(found).savefig(args.plot)
    except OSError as error:
        raise SettingsError(f"{error.filename}: {error.strerror}") from None
