"""Our group in a stock parser: what it reads, and that the stock options do not notice."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.options import OPTIONS
from mlx_lm_kvcache_plugin.patches.arguments import (
    GROUP_TITLE,
    Group,
    StockDefault,
    add_options,
    argparse_namespace,
)

Make = Callable[..., argparse.ArgumentParser]


def ignore(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """What `configure` does where a test is not about it."""


def small_parser(**extension: Any) -> argparse.ArgumentParser:
    """A stock-like program with our group."""
    given = {"add": add_options, "configure": ignore, **extension}
    parser: argparse.ArgumentParser = argparse_namespace("server", **given).ArgumentParser("stock")
    parser.add_argument("--kv-bits", type=int)
    parser.add_argument("--prompt-cache-size", type=int, default=10)
    parser.add_argument("--port", type=int, default=8080)
    return parser


@pytest.fixture
def server_parser(monkeypatch: pytest.MonkeyPatch) -> Make:
    """The parser that the real server makes when its module sees the given `argparse`."""
    from mlx_lm import server

    class Made(Exception):
        pass

    def give_up(parser: argparse.ArgumentParser) -> None:
        raise Made(parser)

    def make(namespace: Any) -> argparse.ArgumentParser:
        with monkeypatch.context() as patch, pytest.raises(Made) as caught:
            patch.setattr(server, "argparse", namespace)
            patch.setattr(argparse.ArgumentParser, "parse_args", give_up)
            server.main()
        parser: argparse.ArgumentParser = caught.value.args[0]
        return parser

    return make


def outcome(parser: argparse.ArgumentParser, *arguments: str) -> object:
    """The stock values and the rest, or the exit code and the error line."""
    ours = {option.name for option in OPTIONS}
    errors = StringIO()
    try:
        with redirect_stderr(errors), redirect_stdout(StringIO()):
            parsed, rest = parser.parse_known_args(arguments)
    except SystemExit as stop:
        return stop.code, errors.getvalue().splitlines()[-1:]
    return {name: value for name, value in vars(parsed).items() if name not in ours}, rest


def test_every_prefix_of_every_stock_option_resolves_as_before(server_parser: Make) -> None:
    """Alone, with a value, and with a value after the equals sign, right or ambiguous or wrong."""
    stock = server_parser(argparse)
    extended = server_parser(argparse_namespace("server", add_options, ignore))
    names = [name for action in stock._actions for name in action.option_strings]
    assert "--prompt-cache-bytes" in names
    prefixes = {name[:end] for name in names for end in range(2, len(name) + 1)}
    for prefix in sorted(prefixes):
        for arguments in ([prefix], [prefix, "1"], [f"{prefix}=1"], [prefix, "1", "y"]):
            assert outcome(extended, *arguments) == outcome(stock, *arguments), arguments


def test_ours_are_never_abbreviated(server_parser: Make) -> None:
    """A shortened flag of ours is as unknown as it is to stock, unless a stock one begins so."""
    stock = server_parser(argparse)
    extended = server_parser(argparse_namespace("server", add_options, ignore))
    for option in OPTIONS:
        for end in range(3, len(option.flag)):
            prefix = option.flag[:end]
            if prefix not in {other.flag for other in OPTIONS}:
                for arguments in ([prefix], [prefix, "4"], [f"{prefix}=4"]):
                    assert outcome(extended, *arguments) == outcome(stock, *arguments), arguments


def test_the_group_is_the_last_in_the_help(server_parser: Make) -> None:
    parser = server_parser(argparse_namespace("server", add_options, ignore))
    parser.parse_known_args([])
    parser.parse_known_args([])
    text = parser.format_help()
    assert text.count(GROUP_TITLE) == 1
    group = text.partition(GROUP_TITLE)[2]
    assert "\n\n" not in group.strip()
    words = " ".join(group.split())
    for option in OPTIONS:
        assert option.flag in words and f"[env: {option.variable}]" in words


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--kv-cache-bits", "4"], "kv_cache_bits", 4),
        (["--kv-cache-bits=8"], "kv_cache_bits", 8),
        (["--kv-cache-value-bits", "3"], "kv_cache_value_bits", 3),
        (["--kv-cache-group-size", "32"], "kv_cache_group_size", 32),
        (["--kv-cache-codec", "affine"], "kv_cache_codec", "affine"),
        (["--kv-cache-quantization"], "kv_cache_quantization", True),
        (["--cache-memory-mb", "512"], "cache_memory_mb", 512),
        (["--cache-memory-percent", "20%"], "cache_memory_percent", 0.2),
        (["--disable-prefix-cache"], "disable_prefix_cache", True),
    ],
)
def test_values(arguments: list[str], name: str, value: object) -> None:
    parsed = small_parser().parse_args(arguments)
    assert getattr(parsed, name) == value
    others = {option.name for option in OPTIONS} - {name}
    assert not any(getattr(parsed, other) for other in others)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        *(
            ("--kv-cache-bits", value, "is not one of 2, 3, 4, 5, 6, 8")
            for value in ("1", "7", "16")
        ),
        ("--kv-cache-bits", "four", "'four' is not a whole number"),
        ("--kv-cache-group-size", "16", "is not one of 32, 64, 128"),
        ("--cache-memory-mb", "0", "--disable-prefix-cache"),
        ("--cache-memory-mb", "-5", "--disable-prefix-cache"),
        ("--cache-memory-mb", "8GB", "8 GB is 8192"),
        ("--cache-memory-percent", "20", "write 20%"),
        ("--cache-memory-percent", "nan", "not between 0 and 1"),
        ("--cache-memory-percent", "-1", "not between 0 and 1"),
        ("--cache-memory-percent", "", "is not a share of memory"),
        ("--kv-cache-codec", " ", "the name of a codec is missing"),
    ],
)
def test_a_wrong_value_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, words: str
) -> None:
    for arguments in ([flag, value], [f"{flag}={value}"]):
        with pytest.raises(SystemExit) as stop:
            small_parser().parse_args(arguments)
        last = capsys.readouterr().err.splitlines()[-1]
        assert stop.value.code == 2
        assert last.startswith(f"stock: error: argument {flag}: ") and words in last


def test_configure_gets_what_was_parsed() -> None:
    """Once for each parse; its parser can refuse what was given."""
    calls: list[tuple[object, object]] = []
    parser = small_parser(configure=lambda args, parser: calls.append((args.kv_cache_bits, parser)))
    parser.parse_args(["--kv-cache-bits", "4"])
    parser.parse_args([])
    assert calls == [(4, parser), (None, parser)]


def test_a_default_that_nobody_typed_is_marked() -> None:
    """Only the named one, only its default, and only while parsing."""
    parser = small_parser(mark_defaults=frozenset({"prompt_cache_size"}))
    untouched = parser.parse_args([])
    assert type(untouched.prompt_cache_size) is StockDefault and untouched.prompt_cache_size == 10
    assert type(untouched.port) is int
    assert type(parser.parse_args(["--prompt-cache-size", "10"]).prompt_cache_size) is int
    assert type(parser.get_default("prompt_cache_size")) is int


def test_all_else_is_the_real_argparse() -> None:
    namespace = argparse_namespace("server", add_options, ignore)
    assert namespace.Namespace is argparse.Namespace
    assert namespace.SUPPRESS is argparse.SUPPRESS
    assert issubclass(namespace.ArgumentParser, argparse.ArgumentParser)
    assert dir(namespace) == dir(argparse)
    assert argparse.ArgumentParser.parse_known_args.__module__ == "argparse"


def test_sub_parsers_stay_stock() -> None:
    """Only the whole command has our group, before its sub-command."""
    parser = small_parser()
    sub = parser.add_subparsers(dest="sub").add_parser("sub")
    sub.add_argument("--kv-cache-bits", type=str)
    parsed = parser.parse_args(["--kv-cache-bits", "4", "sub"])
    assert parsed.sub == "sub"
    assert type(sub) is argparse.ArgumentParser
    assert GROUP_TITLE in parser.format_help() and GROUP_TITLE not in sub.format_help()


@pytest.mark.parametrize("handler", ["error", "resolve"])
def test_a_stock_flag_of_the_same_name_stays_stocks(
    capsys: pytest.CaptureFixture[str], handler: str
) -> None:
    """Should upstream take one of our names, its command goes on as if we were not there."""
    configured: list[object] = []
    namespace = argparse_namespace("server", add_options, lambda *args: configured.append(args))
    parser = namespace.ArgumentParser("stock", conflict_handler=handler)
    parser.add_argument("--cache-memory-mb", type=str)
    before = parser.format_help()
    assert parser.parse_args(["--cache-memory-mb", "x"]).cache_memory_mb == "x"
    assert parser.parse_args(["--cache", "x"]).cache_memory_mb == "x"
    assert parser.format_help() == before
    assert not configured and capsys.readouterr().err == ""


def test_a_plugins_short_option_takes_its_value() -> None:
    """`-q4` is no abbreviation."""

    def add(group: Group) -> None:
        group.add_argument("-q", "--quick", type=int)

    assert small_parser(add=add).parse_args(["-q4"]).quick == 4
