"""Arguments of a tool call: read from JSON, and converted to the types of the tool's schema."""

import json
import math
import re
from collections.abc import Mapping, Sequence

from serving.replies.parts import ToolCall

_MOST_SCHEMAS = 32  # parts of the schema of an argument: its unions and references
_WHOLE = re.compile(r"[+-]?[0-9]+")


class NoCall(ValueError):
    """The text is not a call."""


class Tools:
    """The parameters of a request's tools, by name.

    Args:
      tools: as OpenAI's clients send them: {"type": "function", "function": {"name": ...,
        "parameters": schema}}.
    """

    def __init__(self, tools: Sequence[Mapping] = ()):
        self._schemas: dict[str, object] = {}
        for tool in tools:
            function = tool["function"]
            self._schemas[function["name"]] = function.get("parameters")

    def call(self, name: object, arguments: object) -> ToolCall:
        """A call of the tool. Texts become numbers, lists and so on by the schema of the tool, if
        it is known.

        Raises:
          NoCall: the name is not text, or the arguments are not a JSON object.
        """
        if isinstance(arguments, str):  # a JSON object written as a JSON string
            arguments = read_json(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise NoCall
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if isinstance(properties, dict):
            arguments = {
                key: _converted(value, types_of(properties.get(key), schema))
                for key, value in arguments.items()
            }
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise NoCall from error
        # JSON may hold halves of surrogate pairs, which UTF-8 cannot hold.
        return ToolCall(*(one.encode("utf-8", "replace").decode() for one in (name, text)))


def read_json(text: str) -> object:
    """The value of a JSON text.

    Raises:
      NoCall: the text is not JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NoCall from error


def _refuse(name: str):
    raise ValueError(f"{name} is not JSON")


def types_of(schema: object, root: dict) -> list[str]:
    """Names of the types that a schema allows, in its order; none if it does not say.

    Looks at `_MOST_SCHEMAS` parts of it: references may form circles.
    """
    types, schemas = [], [schema]
    for place in range(_MOST_SCHEMAS):
        if place == len(schemas):
            break
        part = schemas[place]
        if not isinstance(part, dict):
            continue
        declared = part.get("type")
        declared = declared if isinstance(declared, list) else [declared]
        types += [name for name in declared[:_MOST_SCHEMAS] if isinstance(name, str)]
        if isinstance(part.get("$ref"), str):
            schemas.append(_resolved(part["$ref"], root))
        for union in ("anyOf", "oneOf", "allOf"):
            choices = part.get(union)
            schemas += choices[:_MOST_SCHEMAS] if isinstance(choices, list) else []
    return types


def _resolved(reference: str, root: dict) -> object:
    """The schema at a reference such as "#/$defs/Point"; None if there is none."""
    value: object = root
    for name in reference.removeprefix("#").split("/", _MOST_SCHEMAS)[1:]:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _converted(value: object, types: Sequence[str]) -> object:
    """`value`, or what it means as one of the types if it is a text and may not be one."""
    if not isinstance(value, str):
        return value
    if "null" in types and value.strip() in ("null", "None"):
        return None
    if "string" in types:
        return value
    for name in types:
        try:
            return _READERS[name](value.strip())
        except (KeyError, ValueError):
            continue
    return value


def _integer(text: str) -> int:
    number = _number(text)
    if not number.is_integer():  # JSON Schema's integers include 3.0
        raise ValueError(text)
    return int(number)


def _number(text: str) -> int | float:
    if _WHOLE.fullmatch(text):
        return int(text)
    number = float(text)
    # Python also reads `1_0` and digits of other scripts.
    if not math.isfinite(number) or "_" in text or not text.isascii():
        raise ValueError(text)
    return number


def _boolean(text: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def _json_of(kind: type):
    def read(text: str):
        value = read_json(text)
        if not isinstance(value, kind):
            raise ValueError(text)
        return value

    return read


_READERS = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _json_of(dict),
    "array": _json_of(list),
}
