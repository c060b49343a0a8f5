"""The plugin's flags in an upstream command's parser.

A patched module gets a stand-in for its name `argparse`; `sys.modules["argparse"]` stays as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import SettingsError
from ..options import OPTIONS, Option
from . import complain

GROUP_TITLE = "KV cache (mlx_lm_kvcache_plugin)"

Group = argparse._ArgumentGroup  # has no public name


class StockDefault(int):
    """A stock default that nobody typed."""


@dataclass(frozen=True, slots=True)
class Extension:
    """What a command's parser gains.

    Attributes:
        command: the command's name, as "server".
        add: adds the options to our group.
        configure: takes the parsed arguments, and the parser for its `error`.
        mark_defaults: stock options whose default, if nobody typed a value, becomes a
            `StockDefault`; upstream's objects get it and can tell it from a typed one.
    """

    command: str
    add: Callable[[Group], None]
    configure: Callable[[argparse.Namespace, argparse.ArgumentParser], None]
    mark_defaults: frozenset[str] = frozenset()


class ExtendedParser(argparse.ArgumentParser):
    """The stock parser with our group at its end, added when it parses for the first time."""

    extension: ClassVar[Extension]

    _extended = False
    _kvcache_group: Group | None = None

    def parse_known_args(  # type: ignore[override]  # typeshed overloads it for the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        if not self._extended:
            self._extended = True
            self._kvcache_group = _add_group(self, self.extension)
        if self._kvcache_group is None:
            return super().parse_known_args(args, namespace)
        with _marked_defaults(self, self.extension.mark_defaults):
            parsed, rest = super().parse_known_args(args, namespace)
        self.extension.configure(parsed, self)
        return parsed, rest

    def add_subparsers(self, **kwargs: Any) -> Any:
        # By default they would be of our class, and each would show our group again.
        kwargs.setdefault("parser_class", argparse.ArgumentParser)
        return super().add_subparsers(**kwargs)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # The candidates for an abbreviation: (action, option, ...). Without ours, those of a stock
        # option resolve as ever, and ours have to be written out.
        found: list[Any] = super()._get_option_tuples(option_string)
        ours = self._kvcache_group._group_actions if self._kvcache_group else []
        typed = option_string.partition("=")[0]
        return [
            candidate
            for candidate in found
            if candidate[0] not in ours or not _abbreviates(typed, candidate[1])
        ]


def argparse_namespace(
    command: str,
    add: Callable[[Group], None],
    configure: Callable[[argparse.Namespace, argparse.ArgumentParser], None],
    mark_defaults: frozenset[str] = frozenset(),
) -> Any:
    """What a patched module is to see as `argparse`: the real one, with an extended parser."""

    class ArgumentParser(ExtendedParser):
        extension = Extension(command, add, configure, mark_defaults)

    return _Namespace(ArgumentParser)


class _Namespace:
    def __init__(self, parser_class: type[ExtendedParser]) -> None:
        self.ArgumentParser = parser_class

    def __getattr__(self, name: str) -> Any:
        return getattr(argparse, name)

    def __dir__(self) -> list[str]:
        return dir(argparse)


def add_options(
    group: Group, options: Sequence[Option] = OPTIONS, has_variables: bool = True
) -> None:
    """Add flags of the plugin's own; an option that was not given is None, a switch False.

    Args:
        has_variables: whether each can also be given by its environment variable.
    """
    for option in options:
        help_text = option.help + f" [env: {option.variable}]" * has_variables
        if option.metavar is None:
            group.add_argument(option.flag, dest=option.name, action="store_true", help=help_text)
        else:
            group.add_argument(
                option.flag,
                dest=option.name,
                type=_argument_type(option.parse),
                metavar=option.metavar,
                help=help_text,
            )


def _argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except SettingsError as error:  # argparse shows the words of this type alone
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _abbreviates(typed: str, option: str) -> bool:
    return option != typed and option.startswith(typed)


def _add_group(parser: argparse.ArgumentParser, extension: Extension) -> Group | None:
    """Add our group, or nothing: a stock flag of the same name leaves the stock parser as it is."""
    registered: list[Any] = [
        parser._actions,
        parser._action_groups,
        parser._mutually_exclusive_groups,
        parser._has_negative_number_optionals,
    ]
    before = [list(part) for part in registered]
    options_before = dict(parser._option_string_actions)
    # A parser that resolves conflicts would give our group the stock option's name.
    group = parser.add_argument_group(GROUP_TITLE, conflict_handler="error")
    try:
        extension.add(group)
    except Exception as error:
        for part, content in zip(registered, before, strict=True):
            part[:] = content
        parser._option_string_actions.clear()
        parser._option_string_actions.update(options_before)
        complain(f"mlx_lm.{extension.command} keeps its stock options: {error}")
        return None
    return group


@contextmanager
def _marked_defaults(parser: argparse.ArgumentParser, dests: frozenset[str]) -> Iterator[None]:
    marked = [a for a in parser._actions if a.dest in dests and type(a.default) is int]
    for action in marked:
        action.default = StockDefault(action.default)
    try:
        yield
    finally:
        for action in marked:
            action.default = int(action.default)
