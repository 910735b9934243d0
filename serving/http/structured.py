"""Constraints in requests: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast, Field

from peagle_jax import ConfigError
from peagle_jax.structured import Structured
from serving.errors import invalid
from serving.http.fields import Fields, described, ignored, refused


def _check_schema(value: object) -> object:
    if not isinstance(value, dict | bool | str):
        raise ValueError("must be a JSON schema: an object, or its text")
    return value


Schema = Annotated[Any, BeforeValidator(_check_schema)]
_NO_OPTION = "say it in the schema"
Choices = Annotated[list[str], FailFast(), described("must be a list of strings")]


class JsonSchema(Fields):
    """`response_format.json_schema`. `strict` makes no difference: the schema always holds."""

    is_closed = True

    name: str | None = None
    description: str | None = None
    schema_: Schema = Field(None, alias="schema")
    strict: bool = True


class ResponseFormat(Fields):
    """`response_format` of a request."""

    is_closed = True

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    """`structured_outputs` of a request, as in vLLM."""

    is_closed = True

    json_: Schema = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Choices = None
    grammar: str | None = None
    structural_tag: refused("send tools or a grammar") = None
    disable_any_whitespace: bool = False
    disable_additional_properties: refused(_NO_OPTION, False) = None
    whitespace_pattern: str | None = None
    disable_fallback: ignored("there is one backend") = None


def read_structured(
    response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> tuple[Structured | None, str]:
    """The constraint of a request, and the field it comes from.

    Raises:
      ServiceError: INVALID_ARGUMENT names a field.
    """
    constraints = [*_of_format(response_format), *_of_outputs(outputs)]
    if len(constraints) > 1:
        raise invalid(
            constraints[1][0], f"a text has one constraint, and {constraints[0][0]} is set too"
        )
    for field, make in constraints:
        try:
            return make(), field
        except ConfigError as error:
            raise invalid(field, error.rule) from error
    return None, "structured_outputs"


_Found = list[tuple[str, Callable[[], Structured]]]


def _of_format(given: ResponseFormat | None) -> _Found:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [("response_format", Structured.json_object)]
    if given.type != "json_schema":
        rule = f"{given.type!r} must be text, json_object or json_schema"
        raise invalid("response_format.type", rule)
    field = "response_format.json_schema"
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise invalid(field, "needs a schema")
    schema = given.json_schema.schema_
    return [(f"{field}.schema", lambda: Structured.json_schema(schema))]


def _of_outputs(given: StructuredOutputs | None) -> _Found:
    if given is None:
        return []
    if given.disable_any_whitespace and given.whitespace_pattern is not None:
        rule = "needs disable_any_whitespace to be false"
        raise invalid("structured_outputs.whitespace_pattern", rule)
    whitespace = "" if given.disable_any_whitespace else given.whitespace_pattern
    makers = (
        ("json", given.json_, lambda schema: Structured.json_schema(schema, whitespace)),
        ("regex", given.regex, Structured.regex),
        ("choice", given.choice, Structured.choice),
        ("grammar", given.grammar, Structured.grammar),
    )
    constraints: _Found = [
        (f"structured_outputs.{name}", lambda make=make, value=value: make(value))
        for name, value, make in makers
        if value is not None
    ]
    if given.json_object:
        make = lambda: Structured.json_object(whitespace)
        constraints.append(("structured_outputs.json_object", make))
    return constraints
