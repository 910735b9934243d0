"""Code that the command lines share: one-line errors, and options of a request.

Nothing here imports jax or numpy: `peagle-client` starts without them, and every command shows
mistakes in its options before it imports them.
"""

import argparse
import contextlib
import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial

from peagle_jax.errors import ConfigError
from peagle_jax.options import Option, options_of, read


class Parser(argparse.ArgumentParser):
    """Reports a mistake on one line and exits with code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}; --help lists the options\n")


def writes_output(program: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A decorator of a program's `main`, for output that cannot be written: where the reader of a
    pipe is gone, as after `| head`, the program ends with code 1 and says nothing; on a full disk
    with code 2 and one line."""

    def wrap(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        def run(*args, **named) -> int:
            try:
                try:
                    return main(*args, **named)
                finally:
                    if sys.stdout is not None:
                        sys.stdout.flush()
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ENOSPC):
                    raise
                # What stdout still holds would fail again at the exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                if error.errno == errno.EPIPE:
                    return 1
                message = f"the output cannot be written ({error.strerror})"
                sys.stderr.write(f"{program}: error: {message}\n")
                return 2

        return run

    return wrap


class DefaultsFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of each option whose help does not speak of it."""

    def add_argument(self, action: argparse.Action) -> None:
        text, default = action.help or "", action.default
        is_shown = not isinstance(default, bool) and default not in (None, argparse.SUPPRESS, [])
        if is_shown and "default" not in text:
            action.help = f"{text} (default %(default)s)".lstrip()
        super().add_argument(action)


class _Removed(argparse.Action):
    """An option that is no more: it refuses itself with the reason."""

    def __init__(self, *args, reason: str, **named):
        super().__init__(*args, nargs="?", help=argparse.SUPPRESS, **named)
        self._reason = reason

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"{option_string} is removed: {self._reason}")


def add_removed(parser: argparse.ArgumentParser, reasons: Mapping[str, str]) -> None:
    """Adds options of which only the reason is left why they are no more, by their names."""
    for name, reason in reasons.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, action=_Removed, reason=reason, default=argparse.SUPPRESS)


def whole(text: str) -> int:
    """Parses one whole number."""
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from error


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _named_value(text: str) -> tuple[str, object]:
    """Parses `NAME=VALUE`; a value that is not JSON is text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    with contextlib.suppress(ValueError):
        value = json.loads(value)
    return name, value


def add_chat(add: Callable) -> None:
    """Adds the options of a chat."""
    add("--chat", action="store_true", help="send each prompt through the model's chat template")
    add("--system", metavar="TEXT", help="with --chat: what stands before the conversation")
    add(
        "--chat-option",
        type=_named_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="with --chat: set what the template takes, as enable_thinking=false; repeatable",
    )


def add_constraints(add: Callable) -> None:
    """Adds the options that constrain the output."""
    add("--json-object", action="store_true", help="write a JSON object")
    add("--json-schema", metavar="FILE", help="write JSON that satisfies the JSON schema in FILE")
    add("--regex", metavar="PATTERN", help="write text that PATTERN matches as a whole")
    add("--choice", action="append", metavar="TEXT", help="write one of the TEXTs; repeatable")
    add("--grammar", metavar="FILE", help="write text of the grammar in FILE: Lark or GBNF")


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be ID=BIAS, as 42=-5") from error


_ITEMS = {"texts": str, "ints": whole, "biases": _bias}
"""Types of the items of lists."""


def _from_text(one: Option, text: str) -> object:
    try:
        return read(one, text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_options(add: Callable, owner: type, *names: str, has_defaults: bool = True) -> None:
    """Adds these options of a dataclass (`peagle_jax.options`).

    Args:
      has_defaults: whether options without a value have an attribute: their default, or None for
        lists.
    """
    for one in map(options_of(owner).__getitem__, names):
        is_shown = one.default is not None and not isinstance(one.default, bool | tuple)
        shown = f"{one.default:g}" if isinstance(one.default, float) else one.default
        text = f"{one.help} (default: {shown})" if is_shown else one.help
        flags = [f"--{one.flag}", *([one.short] if one.short else [])]
        default = None if one.kind in _ITEMS else one.default
        default = default if has_defaults else argparse.SUPPRESS
        arguments = dict(dest=one.name, default=default, help=text)
        if one.kind == "bool":
            switch = "store_true" if one.default is False else argparse.BooleanOptionalAction
            add(*flags, action=switch, **arguments)
            continue
        if one.kind in _ITEMS:
            arguments |= dict(action="append", type=_ITEMS[one.kind])
        else:
            arguments["type"] = partial(_from_text, one)
        choices = "{" + ",".join(one.choices) + "}" if one.choices else None
        add(*flags, metavar=one.metavar or choices, **arguments)


def given(args: argparse.Namespace, *names: str) -> dict[str, object]:
    """Those of the options that a command line has a value for."""
    values = {name: getattr(args, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
