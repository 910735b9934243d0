"""Fields of `/v1/responses`, OpenAI's newer route, and how they become those of a chat."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast
from pydantic.json_schema import SkipJsonSchema

from serving.http.chat import check_length, check_messages
from serving.http.fields import Fields, described, neutral, required

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_NOT_STORED = "this server stores no responses: send the whole conversation as input"


def _not_stored(*values: object) -> Any:
    """Type of a field that needs stored responses."""

    def check(value: object) -> object:
        if value not in values:
            raise ValueError(_NOT_STORED)
        return value

    return Annotated[Any, SkipJsonSchema(), BeforeValidator(check)]


class Part(Fields):
    """A part of a content."""

    type: Annotated[
        Literal[_TEXTS], described("must be text: this server takes no images or files")
    ]
    text: str
    annotations: neutral([]) = None
    logprobs: Any = None


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[
    list[Part],
    FailFast(),
    BeforeValidator(check_length),
    BeforeValidator(_as_parts, json_schema_input_type=str | list[Part]),
]


class Item(Fields):
    """An item of the input. Its type decides which fields it has."""

    type: Annotated[
        Literal["message", "function_call", "function_call_output", "reasoning"],
        described("must be message, function_call, function_call_output or reasoning"),
    ] = "message"
    role: str | None = None
    content: Parts = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: Parts = None
    # Clients send items of an answer back unchanged.
    id: Any = None
    status: Any = None
    phase: Any = None
    summary: Any = None
    encrypted_content: neutral() = None


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class Tool(Fields):
    """A function that the model may call."""

    type: Annotated[
        Literal["function"], described("must be function: this server runs no tools of its own")
    ]
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Reasoning(Fields):
    """How much the model reasons."""

    effort: str | None = None
    summary: neutral("auto") = None
    generate_summary: neutral() = None


class Text(Fields):
    """Options of the text."""

    format: dict[str, object] | None = None
    verbosity: neutral("medium") = None


class ResponsesFields(Fields):
    """Fields of a request."""

    model: str | None = None
    input: Annotated[
        list[Item],
        FailFast(),
        BeforeValidator(check_length),
        BeforeValidator(check_messages),
        BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    tools: Annotated[list[Tool], FailFast(), BeforeValidator(check_length)] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: Text | None = None
    # Fields of this server.
    priority: int = 0
    num_speculative_tokens: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    # A client's own labels are accepted and not used.
    metadata: dict[str, object] | None = None
    user: str | None = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    store: _not_stored(False) = None
    previous_response_id: _not_stored() = None
    conversation: _not_stored() = None
    background: _not_stored(False) = None
    include: neutral([]) = None
    max_tool_calls: neutral() = None
    prompt: neutral() = None
    service_tier: neutral("auto", "default") = None
    stream_options: neutral({}, {"include_obfuscation": False}) = None
    top_logprobs: neutral(0) = None
    truncation: neutral("disabled") = None

    def as_chat(self) -> dict[str, object]:
        """The content of a chat that asks for the same.

        Raises:
          ServiceError: INVALID_ARGUMENT; an item lacks a field of its type.
        """
        same = (
            *("model", "temperature", "top_p", "stream", "parallel_tool_calls"),
            *("priority", "num_speculative_tokens", "cache_salt", "chat_template_kwargs"),
        )
        chat: dict[str, object] = {name: getattr(self, name) for name in same}
        chat |= {"max_tokens": self.max_output_tokens, "messages": self._messages()}
        chat["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, dict):
            named = {"name": self.tool_choice.get("name")}
            chat["tool_choice"] = {"type": self.tool_choice.get("type"), "function": named}
        if self.tools:
            chat["tools"] = [_function(one) for one in self.tools]
        if self.reasoning is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = _response_format(self.text.format)
        return chat

    def _messages(self) -> list[dict]:
        """Items of the assistant that follow each other are one message."""
        messages: list[dict] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for place, item in enumerate(self.input):
            message = _message(item, f"input[{place}]")
            is_same = messages and messages[-1]["role"] == message["role"] == "assistant"
            if is_same:
                _merge(messages[-1], message)
            else:
                messages.append(message)
        return messages


def _response_format(given: dict[str, object]) -> dict[str, object]:
    if given.get("type") != "json_schema":
        return given
    rest = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": rest}


def _function(one: Tool) -> dict:
    function = {"name": one.name, "description": one.description, "parameters": one.parameters}
    return {"type": "function", "function": function | {"strict": one.strict}}


def _texts(parts: list[Part]) -> list[dict]:
    return [{"type": "text", "text": part.text} for part in parts]


def _message(item: Item, field: str) -> dict:
    if item.type == "message":
        role = required(item, "role", field)
        return {"role": role, "content": _texts(required(item, "content", field))}
    if item.type == "function_call_output":
        call_id, output = required(item, "call_id", field), required(item, "output", field)
        return {"role": "tool", "tool_call_id": call_id, "content": _texts(output)}
    message: dict[str, Any] = {"role": "assistant", "content": []}
    if item.type == "reasoning":
        thoughts = "\n".join(part.text for part in item.content or ())
        return message | ({"reasoning_content": thoughts} if thoughts else {})
    names = ("name", "arguments")
    function = {name: required(item, name, field) for name in names}
    call_id = required(item, "call_id", field)
    return message | {"tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def _merge(message: dict, later: dict) -> None:
    message["content"] = message["content"] + later["content"]
    for name, join in (("tool_calls", list.__add__), ("reasoning_content", "{}\n{}".format)):
        if name in later:
            given = message.get(name)
            message[name] = later[name] if given is None else join(given, later[name])
