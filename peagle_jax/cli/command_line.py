"""Code that the command lines share: one-line errors, and options of a request.

Nothing here imports jax or numpy: `peagle-client` starts without them, and every command shows mistakes
in its options before it imports them.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Mapping


class Parser(argparse.ArgumentParser):
    """Reports a mistake on one line and exits with code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}; --help lists the options\n")


class DefaultsFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of each option whose help does not speak of it."""

    def add_argument(self, action: argparse.Action) -> None:
        text, default = action.help or "", action.default
        is_shown = not isinstance(default, bool) and default not in (None, argparse.SUPPRESS)
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


def named_value(text: str) -> tuple[str, object]:
    """Parses `NAME=VALUE`; a value that is not JSON is text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    with contextlib.suppress(ValueError):
        value = json.loads(value)
    return name, value


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


def add_controls(add: Callable) -> None:
    """Adds the options that change the target's logits."""
    add(
        "--min-tokens",
        type=int,
        default=0,
        metavar="N",
        help="nothing ends the text before N tokens",
    )
    add(
        "--repetition-penalty", type=float, default=1.0, metavar="R",
        help="divide the logits of tokens in prompt and output by R (negative ones: multiply)",
    )  # fmt: skip
    add(
        "--frequency-penalty", type=float, default=0.0, metavar="F",
        help="subtract F from a token's logit for each time it was generated",
    )  # fmt: skip
    add(
        "--presence-penalty", type=float, default=0.0, metavar="F",
        help="subtract F from the logits of tokens that were generated",
    )  # fmt: skip
    add(
        "--logit-bias", type=_bias, action="append", default=[], metavar="ID=BIAS",
        help="add BIAS to the logit of token ID; repeatable",
    )  # fmt: skip
    add(
        "--bad-word", action="append", default=[], metavar="WORD",
        help="never generate WORD, which must be one token; repeatable",
    )  # fmt: skip
