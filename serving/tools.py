"""Tools of a request, and calls within its messages, as chat templates take them."""

import re
import uuid
from collections.abc import Collection, Iterable

from serving.errors import invalid
from serving.json_input import check_sizes, parse_object
from serving.limits import Limits

NO_FORMAT = (
    "this model's chat template has no known format of calls; the server's operator may choose "
    "one with "
    "--reply-format"
)
NOT_BESIDE_TOOLS = (
    "excludes tools, because this model's calls cannot be constrained: leave one of them out"
)
_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def call_id() -> str:
    """A new id of a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def tool(name: str, description: str | None, parameters: dict | None) -> dict:
    """A tool as OpenAI's clients send it, without fields that are left out.

    Raises:
      ValueError: the name has other characters, or too many.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError("must be 1 to 128 letters, digits, or _ - . :")
    optional = (("description", description), ("parameters", parameters))
    given = {key: value for key, value in optional if value is not None}
    return {"type": "function", "function": {"name": name, **given}}


def loose(tools: Iterable[dict], *, strict: Collection[str] = ()) -> list[dict]:
    """The tools for a grammar of calls: those that are not strict take any JSON object as
    arguments.
    """
    free = lambda name: {"type": "function", "function": {"name": name}}
    named = ((one, one["function"]["name"]) for one in tools)
    return [one if name in strict else free(name) for one, name in named]


def refuse_equal_names(tools: Iterable[dict], *, field: str) -> None:
    """Refuses two tools of one name.

    Raises:
      ServiceError: INVALID_ARGUMENT.
    """
    seen: set[str] = set()
    for one in tools:
        name = one["function"]["name"]
        if name in seen:
            raise invalid(field, f"the name {name!r} stands there twice")
        seen.add(name)


class Arguments:
    """Parses JSON objects within a request, such as the arguments of calls: chat templates take
    objects.

    All objects of a request together have the bounds of one JSON text, and the number of characters
    of a prompt.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._num_values = self._num_chars = 0

    def call(self, call_id: str, name: str, arguments: str, *, field: str) -> dict:
        """A call as templates take it; empty arguments are an empty object.

        Raises:
          ServiceError: INVALID_ARGUMENT; the arguments are not a JSON object, or too many.
        """
        value = self.parse(arguments.strip() or "{}", field=field)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": value}}

    def parse(self, text: str, *, field: str) -> dict:
        """A JSON object.

        Raises:
          ServiceError: INVALID_ARGUMENT; the text is not a JSON object, or the objects so far are
            too large.
        """
        self._num_chars += len(text)
        most = self._limits.max_prompt_chars
        if self._num_chars > most:
            rule = f"{self._num_chars} characters of JSON are more than the {most} of a prompt"
            raise invalid(field, rule)
        content = text.encode("utf-8", "replace")
        self._num_values = check_sizes(
            content, field=field, limits=self._limits, num_before=self._num_values
        )
        return parse_object(content, field=field, limits=self._limits)
