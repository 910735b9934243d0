"""Options that are declared once. A field of a dataclass states type, default, bounds and help:

    min_p: float = option(0.0, "drop tokens less likely than this share of the likeliest", within(0, 1))

Command lines, prompt files, HTTP bodies and gRPC messages derive theirs from the fields. No jax here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from peagle_jax.errors import ConfigError

_SHOWN = 80
"""Most characters of a value in an error."""

Kind = Literal["bool", "int", "float", "text", "texts", "ints", "biases", "choice"]
"""What values of an option are; biases are pairs of a token id and a number."""
_KINDS: dict[object, Kind] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "text",
    tuple[str, ...]: "texts",
    tuple[int, ...]: "ints",
    tuple[tuple[int, float], ...]: "biases",
}


class Rule(NamedTuple):
    """What a value must be, as the end of a sentence, and whether one is. None is always allowed."""

    text: str
    holds: Callable[[Any], bool]


def within(least: float, most: float) -> Rule:
    """Bounds, both included."""
    return Rule(f"between {least:g} and {most:g}", lambda value: least <= value <= most)


def at_least(least: int) -> Rule:
    """A lower bound, included."""
    return Rule(f"at least {least}", lambda value: value >= least)


class Option(NamedTuple):
    """An option.

    Args:
      help: what it is, in a phrase.
      flag: its name on command lines, if that is not the field's: of one value of a list.
      short: a second, short name there.
      metavar: the placeholder of its value there.
      choices: all values, if they are few texts.
    """

    name: str
    kind: Kind
    default: Any
    choices: tuple[str, ...]
    help: str
    rules: tuple[Rule, ...]
    flag: str
    short: str | None
    metavar: str | None


def option(
    default: Any,
    help: str,
    *rules: Rule,
    flag: str | None = None,
    short: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A field of a dataclass; see `Option`."""
    stated = dict(help=help, rules=rules, flag=flag, short=short, metavar=metavar)
    return dataclasses.field(default=default, metadata={"option": stated})


@cache
def options_of(owner: type) -> Mapping[str, Option]:
    """The options of a dataclass, by the names of their fields."""
    found = {}
    for field in dataclasses.fields(owner):
        if "option" in field.metadata:
            kind, choices = _kind_of(field.type)
            stated = dict(field.metadata["option"])
            stated["flag"] = stated["flag"] or field.name.replace("_", "-")
            found[field.name] = Option(field.name, kind, field.default, choices, **stated)
    return found


def _kind_of(annotation: Any) -> tuple[Kind, tuple[str, ...]]:
    """The kind of an annotation such as `int | None`; its first type counts."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return "choice", get_args(annotation)
    return _KINDS[annotation], ()


def check_rules(owner: Any) -> None:
    """Checks each option of a dataclass by its own rules.

    Raises:
      ConfigError: a rule is broken; `field` is the option's name.
    """
    for name, one in options_of(type(owner)).items():
        value = getattr(owner, name)
        for rule in one.rules:
            if value is not None and not rule.holds(value):
                shown = repr(value)
                shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
                text = f"{shown} must be {rule.text}"
                raise ConfigError(f"{name}={text}", field=name, rule=text)
