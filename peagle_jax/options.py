"""Options that are declared once. A field of a dataclass states type, default, bounds and help:

    min_p: float = option(0.0, "drop tokens less likely than this share of the likeliest", within(0,
      1))

Command lines, prompt files, HTTP bodies and gRPC messages derive theirs from the fields. No jax
here.
"""

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, NamedTuple, Never, Union, get_args, get_origin

from peagle_jax.errors import ConfigError
from peagle_jax.removed import check_choice

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
    """What a value must be, as the end of a sentence, and whether one is."""

    text: str
    holds: Callable[[Any], bool]


def within(least: float, most: float) -> Rule:
    """Bounds, both included."""
    return Rule(f"between {least:g} and {most:g}", lambda value: least <= value <= most)


def at_least(least: int) -> Rule:
    """A lower bound, included."""
    return Rule(f"at least {least}", lambda value: value >= least)


NOT_EMPTY = Rule("left out or given", bool)


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
        # None stands within Literal: typing caches unions of Literals regardless of their order.
        return "choice", tuple(one for one in get_args(annotation) if one is not None)
    return _KINDS[annotation], ()


def read(one: Option, given: object) -> object:
    """The value of an option from a text, or from a value of JSON or YAML.

    Raises:
      ConfigError: there is no such value, or it breaks a rule.
    """
    if given is None and one.default is None:
        return None
    value = converted(one, given)
    check(one, value)
    return value


def converted(one: Option, given: object, *, texts_are_numbers: bool = True) -> object:
    """`read` without the option's own rules.

    Args:
      texts_are_numbers: whether a text may stand for a number or a truth value.
    """
    try:
        is_text = one.kind in ("text", "texts", "choice")
        if isinstance(given, str) and not texts_are_numbers and not is_text:
            return _refused(given)
        return _READERS[one.kind](given)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise ConfigError(f"{given!r} must be {_WANTED[one.kind]}") from None


def _refused(given: object) -> Never:
    raise ValueError(given)


def _int(given: object) -> int:
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            return int(given)
        given = float(given)
    if isinstance(given, float) and given.is_integer():
        return int(given)
    is_number = isinstance(given, int) and not isinstance(given, bool)
    return given if is_number else _refused(given)


def _float(given: object) -> float:
    is_number = isinstance(given, int | float | str) and not isinstance(given, bool)
    return float(given) if is_number else _refused(given)


def _text(given: object) -> str:
    return given if isinstance(given, str) else _refused(given)


def _texts(given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    return tuple(map(_text, given)) if isinstance(given, list) else _refused(given)


def _ints(given: object) -> tuple[int, ...]:
    return tuple(map(_int, given)) if isinstance(given, list) else _refused(given)


def _biases(given: object) -> dict[int, float]:
    if not isinstance(given, dict):
        return _refused(given)
    return {_int(token): _float(bias) for token, bias in given.items()}


_WANTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "text": "a text",
    "texts": "a string or a list of strings",
    "ints": "a list of token ids",
    "biases": "an object of token ids and numbers",
}
_TRUTH = dict.fromkeys(("true", "1", "yes", "on", "y", "t"), True) | dict.fromkeys(
    ("false", "0", "no", "off", "n", "f"), False
)
_READERS: dict[Kind, Callable[[object], object]] = {
    "bool": lambda given: _TRUTH[str(given).lower()],
    "int": _int,
    "float": _float,
    "text": _text,
    "choice": lambda given: given,
    "texts": _texts,
    "ints": _ints,
    "biases": _biases,
}


def _is_number(value: object, wanted: type = numbers.Real) -> bool:
    """Whether it is one, numpy's included; a truth value is none."""
    return isinstance(value, wanted) and not isinstance(value, bool)


def is_int(value: object) -> bool:
    """Whether it is a whole number, numpy's included; a truth value is none."""
    return _is_number(value, numbers.Integral)


_TYPES: dict[Kind, Callable[[Any], bool]] = {
    "int": is_int,
    "float": _is_number,
    "texts": lambda value: isinstance(value, tuple) and all(isinstance(one, str) for one in value),
    "ints": lambda value: isinstance(value, tuple) and all(map(is_int, value)),
    "biases": lambda value: (
        isinstance(value, tuple)
        and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in value)
        and all(is_int(token) and _is_number(bias) for token, bias in value)
    ),
}
_RULES_OF_KIND = {kind: (Rule(_WANTED[kind], holds),) for kind, holds in _TYPES.items()}
"""Kinds whose values of another type would be refused late, or taken as something else."""


def check(one: Option, value: object) -> None:
    """Checks the type of an option's value, and its own rules.

    Raises:
      ConfigError: one is broken; `field` is the option's name.
    """
    if value is None and one.default is None:
        return
    if one.kind == "choice":
        check_choice(one.name, value, one.choices)
    for rule in (*_RULES_OF_KIND.get(one.kind, ()), *one.rules):
        if not rule.holds(value):
            shown = repr(list(value) if isinstance(value, tuple) else value)  # as users write it
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
            text = f"{shown} must be {rule.text}"
            raise ConfigError(f"{one.name}={text}", field=one.name, rule=text)


def check_all(owner: Any) -> None:
    """Checks each option of a dataclass; raises as `check` does."""
    for name, one in options_of(type(owner)).items():
        check(one, getattr(owner, name))
