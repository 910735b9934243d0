"""Fields of chats about tools: those that the model may call, and calls in earlier messages."""

from collections.abc import Collection
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from peagle_jax.structured import Structured
from serving.errors import invalid
from serving.frontend import Frontend
from serving.http.fields import Fields, ignored, listed
from serving.replies.arguments import types_of
from serving.tools import NO_FORMAT, NOT_BESIDE_TOOLS, Arguments, loose, refuse_equal_names, tool


def _check_type(value: object) -> object:
    if value == "custom":
        raise ValueError("custom tools are not supported: declare a function with one string")
    if value != "function":
        raise ValueError("must be function: this server runs no tools of its own")
    return value


_Kind = Annotated[str | None, BeforeValidator(_check_type)]


class Function(Fields):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that the model may call."""

    type: _Kind = Field(None, validate_default=True)
    function: Function
    cache_control: ignored("the prefix cache needs no marks") = None

    @model_validator(mode="after")
    def _check_name(self):
        self.as_dict()
        return self

    def as_dict(self) -> dict:
        """The tool as templates take it."""
        function = self.function
        return tool(function.name, function.description, function.parameters)


class CalledFunction(Fields):
    """Name and arguments of a call."""

    name: str
    arguments: str


class MessageCall(Fields):
    """A call in a message of the assistant."""

    id: str
    type: _Kind = "function"
    function: CalledFunction
    index: ignored("calls are in order") = None

    def as_dict(self, arguments: Arguments, field: str) -> dict:
        """The call as templates take it.

        Raises:
          ServiceError: INVALID_ARGUMENT; the arguments are not a JSON object.
        """
        function, field = self.function, f"{field}.function.arguments"
        return arguments.call(self.id, function.name, function.arguments, field=field)


class ToolFields(Fields):
    """Fields of a request about tools."""

    tools: listed(Tool, most="max_tools") = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _leave_only_allowed(self) -> Self:
        """The choice `allowed_tools` leaves the other tools out, of the prompt too."""
        match self.tool_choice:
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)},
            }:
                try:
                    names = {one["function"]["name"] for one in listed}
                except (KeyError, TypeError):
                    raise invalid("tool_choice", "must name functions") from None
                self.tools = [one for one in self.tools if one.function.name in names]
                if missing := names - {one.function.name for one in self.tools}:
                    raise invalid("tool_choice", f"there is no tool {min(missing, key=str)!r}")
                self.tool_choice = mode
        return self

    def allowed_tools(self, frontend: Frontend) -> list[dict]:
        """The tools that the model may call; none if the client allows no call.

        Raises:
          ServiceError: INVALID_ARGUMENT; the model has no format for calls, or the choice is not
            supported.
        """
        tools = [one.as_dict() for one in self.tools]
        refuse_equal_names(tools, field="tools")
        self._named(tools)
        if not tools or self.tool_choice == "none":
            return []
        if not frontend.replies.has_calls:
            raise invalid("tools", NO_FORMAT)
        return tools

    def constraint(
        self, frontend: Frontend, tools: list[dict], field: str, text: Structured | None
    ) -> tuple[str, Structured | None]:
        """The constraint of a reply, and the field it is from.

        A reply that must be a call has no text, so `response_format` does not concern it.

        Args:
          tools: of `allowed_tools`.
          field: where `text` is from.
          text: the constraint of a text without calls, if it has one.

        Raises:
          ServiceError: INVALID_ARGUMENT; calls of this model cannot be constrained.
        """
        named = self._named(tools)
        if self.tool_choice in (None, "auto", "none"):
            return self._free(frontend, tools, field, text) if tools else (field, text)
        if not tools:
            raise invalid("tool_choice", "needs tools")
        if text is not None and field.startswith("structured_outputs"):
            raise invalid("tool_choice", f"a text has one constraint, and {field} is set too")
        is_parallel = self.parallel_tool_calls and named is None
        self._check_parameters({one["function"]["name"] for one in named or tools})
        forced = frontend.replies.calls(named or tools, is_parallel=is_parallel, must_call=True)
        if forced is None:
            raise invalid(
                "tool_choice", "must be auto or none: this model's calls cannot be forced"
            )
        return "tool_choice", forced

    def _free(
        self, frontend: Frontend, tools: list[dict], field: str, text: Structured | None
    ) -> tuple[str, Structured | None]:
        """The constraint of a reply that may be a call: of its text, of strict functions, or of
        both.
        """
        strict = {one.function.name for one in self.tools if one.function.strict}
        if not strict and text is None:
            return field, None
        self._check_parameters(strict)
        constraint = frontend.replies.calls(
            loose(tools, strict=strict),
            is_parallel=self.parallel_tool_calls,
            must_call=False,
            text=text,
        )
        if text is None:
            first = next(place for place, one in enumerate(self.tools) if one.function.strict)
            field = f"tools[{first}].function.strict"
        if constraint is None:
            rule = (
                NOT_BESIDE_TOOLS
                if text
                else "must be false: this model's calls cannot be constrained"
            )
            raise invalid(field, rule)
        return field, constraint

    def _check_parameters(self, names: Collection[str]) -> None:
        """Refuses functions of these names whose schema allows no object: the arguments of a call
        are one.
        """
        for place, one in enumerate(self.tools):
            schema = one.function.parameters or {}
            types = types_of(schema, schema)
            if one.function.name in names and types and "object" not in types:
                rule = 'must have the type "object": the arguments of a call are a JSON object'
                raise invalid(f"tools[{place}].function.parameters", rule)

    def _named(self, tools: list[dict]) -> list[dict] | None:
        """The tool that the client names; None if it names none."""
        choice = self.tool_choice
        if choice in (None, "auto", "none", "required"):
            return None
        match choice:
            case {"type": "function", "function": {"name": str(name)}}:
                named = [one for one in tools if one["function"]["name"] == name]
                if not named:
                    raise invalid("tool_choice", f"there is no tool {name!r}")
                return named
        raise invalid(
            "tool_choice", "must be auto, none, required, allowed_tools, or name a function"
        )
