"""Base of the pydantic models of request bodies, which declare every field of the APIs; refusals in
this server's own words.

A field is honoured unless its type is `ignored` or `refused`.
"""

import itertools
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from peagle_jax.sampling_params import MAX_BIAS
from serving.errors import ServiceError, invalid, shortened
from serving.limits import Limits

_RULES = {
    "missing": "is missing",
    "extra_forbidden": "is not a field that this server knows; leave it out",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list of objects",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "string_unicode": "has a name that is not valid Unicode",
}
"""Message for each type of pydantic error."""


_MOST_NAMES = 32
"""Fields of one request that the log can name as ignored."""
_LONGEST_NAME = 64  # characters


@dataclass(frozen=True)
class Ignored:
    """A field without effect on the text.

    Args:
      reason: why there is nothing to do.
      met: values for which nothing is left undone; others are named in the log.
    """

    reason: str
    met: tuple[object, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A field that would change the text or the answer, and is not supported.

    Args:
      reason: why, and what to send instead.
      neutral: values without effect, which are taken.
    """

    reason: str
    neutral: tuple[object, ...] = ()


@dataclass
class Reading:
    """What validators find in their context, and the fields of the request that were ignored.

    Attributes:
      ignored: the model and the name of some of them.
      num_ignored: number of all of them, by their occurrences.
    """

    limits: Limits
    ignored: set[tuple[type["Fields"], str]] = field(default_factory=set)
    num_ignored: int = 0

    def ignore(self, model: type["Fields"], names: set[str]) -> None:
        """Notes fields of an object."""
        self.num_ignored += len(names)
        room = _MOST_NAMES - len(self.ignored)
        self.ignored |= {(model, name) for name in itertools.islice(names, room)}

    def names(self, root: type["Fields"]) -> list[str]:
        """Paths of the fields that were ignored, within requests of `root`."""
        places = places_of(root)
        return sorted(
            shortened(places[model] + name, _LONGEST_NAME) for model, name in self.ignored
        )


class Fields(BaseModel):
    """The fields of a JSON object. A null field counts as left out. An unknown field is ignored, or
    refused if the server was started so, or if every field of the object matters (`is_closed`)."""

    model_config = ConfigDict(extra="forbid", strict=True)
    is_closed: ClassVar[bool] = False

    @classmethod
    def read(cls, content: dict[str, object], reading: Reading) -> Self:
        """The fields of `content`. Validators find `reading` in their context.

        Raises:
          ServiceError: INVALID_ARGUMENT that names a field.
        """
        try:
            return cls.model_validate(content, context=reading)
        except ValidationError as error:
            raise _refusal(error) from None

    @classmethod
    @cache
    def _declared(cls) -> tuple[frozenset[str], dict[str, Ignored]]:
        """The fields that have an effect, and the others."""
        declared = dict(declarations(cls))
        ignored = {name: one for name, one in declared.items() if isinstance(one, Ignored)}
        return frozenset(declared.keys() - ignored.keys()), ignored

    @model_validator(mode="before")
    @classmethod
    def _prune(cls, content: object, info: ValidationInfo) -> object:
        if not isinstance(content, dict):
            return content
        if None in content.values():
            content = {name: value for name, value in content.items() if value is not None}
        known, ignored = cls._declared()
        if content.keys() <= known:
            return content
        rest = content.keys() - known
        pruned = {name: content[name] for name in content.keys() & known}
        if (cls.is_closed or info.context.limits.unknown_fields == "refuse") and (
            unknown := rest - ignored.keys()
        ):
            # Keep one unknown field, which pydantic refuses: errors for 65,000 of them take 0.2 s.
            return pruned | {min(unknown): None}
        met = {name for name in rest & ignored.keys() if _is_one(content[name], ignored[name].met)}
        info.context.ignore(cls, rest - met)
        return pruned


def declarations(model: type[Fields]) -> Iterator[tuple[str, Ignored | Refused | None]]:
    """Yields the name of each field in JSON, and what is done with it; None: it is honoured."""
    for name, one in model.__pydantic_fields__.items():
        marks = (mark for mark in one.metadata if isinstance(mark, Ignored | Refused))
        yield one.alias or name, next(marks, None)


@cache
def places_of(model: type[Fields]) -> dict[type[Fields], str]:
    """The models within a model, itself first, with the beginning of the paths of their fields."""
    places: dict[type[Fields], str] = {model: ""}
    waiting = [model]
    for one in waiting:  # grows: a model in several places has the shortest path
        for name, inner in one.__pydantic_fields__.items():
            for part, mark in _models(inner.annotation, ""):
                if part not in places:
                    places[part] = f"{places[one]}{inner.alias or name}{mark}."
                    waiting.append(part)
    return places


def _models(annotation: object, mark: str) -> Iterator[tuple[type[Fields], str]]:
    """The models that a type names; the mark of those in a list is []."""
    if isinstance(annotation, type) and issubclass(annotation, Fields):
        yield annotation, mark
    mark += "[]" * (typing.get_origin(annotation) is list)
    for part in typing.get_args(annotation):
        yield from _models(part, mark)


def _refusal(error: ValidationError) -> ServiceError:
    """The first error, in the order of the model's fields."""
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    if "error" in first.get("ctx", ()):  # from a validator of this server
        rule = str(first["ctx"]["error"])
    elif first["type"] == "float_type" and type(first["input"]) is int:
        rule = "is too large"  # an integer above the largest float
    else:
        rule = _RULES[first["type"]]
    return invalid(path.removeprefix(".") or "body", rule)


def required(fields: Fields, name: str, field: str) -> Any:
    """The value of `name`, which pydantic need not find: `type` decides which fields an object must
    have.

    Args:
      field: path of the object within the request.

    Raises:
      ServiceError: INVALID_ARGUMENT if it is missing.
    """
    value = getattr(fields, name)
    if value is None:
        raise invalid(f"{field}.{name}", "is missing")
    return value


def described(rule: str) -> WrapValidator:
    """Replaces all errors of a type and of its items by one error of the field with the message
    `rule`.
    """

    def check(value: object, validate: Callable[[object], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(rule) from None

    return WrapValidator(check)


def ignored(reason: str, *met: object) -> Any:
    """Type of a field that is taken and has no effect; see `Ignored`."""
    return Annotated[Any, Ignored(reason, met)]


def refused(reason: str, *neutral: object) -> Any:
    """Type of a field that this server does not support; see `Refused`."""

    def check(value: object) -> object:
        if not _is_one(value, neutral):
            raise ValueError(f"is not supported: {reason}")
        return value

    return Annotated[Any, Refused(reason, neutral), SkipJsonSchema(), AfterValidator(check)]


def _is_one(value: object, values: tuple[object, ...]) -> bool:
    # In Python 0 == False; in JSON they differ.
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in values)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _biases(value: object) -> dict[int, float]:
    """JSON's {"id": bias}."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_BIAS:
        raise ValueError(f"{len(value)} tokens are more than {MAX_BIAS}")
    biases = {}
    for token, bias in value.items():
        # "5" and "05" name the same token, and the later of the two would replace the other.
        if not (
            token.isascii() and token.isdecimal() and len(token) < 10 and str(int(token)) == token
        ):
            raise ValueError(f"{token[:20]!r} must be a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"the bias of token {token} must be a number")
        biases[int(token)] = bias
    return biases


Biases = Annotated[Any, AfterValidator(_biases)]

# FailFast stops at the first wrong item. Otherwise each of 60,000 wrong items has an error object.
Integers = Annotated[list[int], FailFast(), described("must be a list of integers")]
Texts = Annotated[
    list[str],
    FailFast(),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
    described("must be a string or a list of strings"),
]


def listed(
    item: type[Fields],
    text_as: Callable[[str], object] | None = None,
    *,
    most: str = "max_messages",
    is_needed: bool = False,
) -> Any:
    """Type of a list of objects.

    Args:
      text_as: the object that a text in place of the list stands for; None: a text is refused.
      most: the limit of its length, a field of `Limits`. A longer list is refused before its items
        are read.
      is_needed: whether an empty list is refused.
    """

    def check(value: object, info: ValidationInfo) -> object:
        limit = getattr(info.context.limits, most)
        if isinstance(value, list) and len(value) > limit:
            raise ValueError(f"{len(value)} are more than the {limit} that this server takes")
        if is_needed and value == []:
            raise ValueError("must not be empty")
        return value

    checks = [BeforeValidator(check)]
    if text_as is not None:
        as_list = lambda value: [text_as(value)] if isinstance(value, str) else value
        checks.append(BeforeValidator(as_list, json_schema_input_type=str | list[item]))
    return Annotated[list[item], FailFast(), *checks]
