"""Base of the pydantic models of request bodies; refusals in this server's own words."""

from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from peagle_jax.sampling_params import MAX_BIAS
from serving.errors import ServiceError, invalid
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


class Fields(BaseModel):
    """The fields of a JSON object. A null field counts as left out; an unknown field is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def read(cls, content: dict[str, object], limits: Limits) -> Self:
        """The fields of `content`. Validators find `limits` in their context.

        Raises:
          ServiceError: INVALID_ARGUMENT that names a field.
        """
        try:
            return cls.model_validate(content, context=limits)
        except ValidationError as error:
            raise _refusal(error) from None

    @model_validator(mode="before")
    @classmethod
    def _prune(cls, content: object) -> object:
        if not isinstance(content, dict):
            return content
        if None in content.values():
            content = {name: value for name, value in content.items() if value is not None}
        known = {field.alias or name for name, field in cls.__pydantic_fields__.items()}
        if not content.keys() <= known:
            # Keep one unknown field, which pydantic refuses: errors for 65,000 of them take 0.2 s.
            first = min(content.keys() - known)
            content = {name: content[name] for name in content.keys() & known} | {first: None}
        return content


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
    """The value of `name`, which pydantic need not find: `type` decides which fields an object must have.

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
    """Replaces all errors of a type and of its items by one error of the field with the message `rule`."""

    def check(value: object, validate: Callable[[object], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(rule) from None

    return WrapValidator(check)


def neutral(*values: object) -> Any:
    """Type of a field that this server does not support: only `values` are accepted, which have no effect."""

    def check(value: object) -> object:
        # In Python 0 == False; in JSON they differ.
        if not any(
            value == one and isinstance(value, bool) is isinstance(one, bool) for one in values
        ):
            raise ValueError("this is not supported; leave it out")
        return value

    return Annotated[Any, SkipJsonSchema(), AfterValidator(check)]


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
