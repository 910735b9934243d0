"""Fields of `/v1/responses`, OpenAI's newer route, and how they become those of a chat."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    model_validator,
)

from serving.http.chat import VERBOSITY, text_or_refusal
from serving.http.fields import Fields, described, ignored, listed, refused, required
from serving.http.options import CACHE, LABEL, NOT_STORED, ONE_TIER

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_WHOLE = f"{NOT_STORED}: send the whole conversation as input"
_HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
    "programmatic_tool_calling",
)
"""Beginnings of the types of tools that OpenAI's servers run."""
_ALL_TOOLS = "every tool is in the prompt, and the model calls it"
_NO_SUMMARY = "reasoning is in the answer as it is"
_SENT_BACK = "clients send items of an answer back"
_LOGPROBS = "message.output_text.logprobs"


class Part(Fields):
    """A part of a content."""

    type: Annotated[
        Literal[_TEXTS], described("must be text: this server takes no images or files")
    ]
    refusal: str | None = None
    text: Annotated[str | None, AfterValidator(text_or_refusal)] = Field(
        None, validate_default=True
    )
    annotations: ignored(_SENT_BACK, []) = None
    logprobs: ignored(_SENT_BACK, []) = None


Parts = listed(Part, lambda text: {"type": "text", "text": text})


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
    namespace: str | None = None
    id: ignored(_SENT_BACK) = None
    status: ignored(_SENT_BACK, "completed") = None
    phase: ignored(_SENT_BACK) = None
    summary: ignored(_NO_SUMMARY, []) = None
    encrypted_content: ignored("reasoning is not encrypted") = None


def _check_type(value: object) -> object:
    if value == "custom":
        raise ValueError("custom tools are not supported: declare a function with one string")
    if value != "function":
        raise ValueError("must be function")
    return value


def _check_tool_type(value: object) -> object:
    if value == "namespace" or (isinstance(value, str) and value.startswith(_HOSTED)):
        return value
    return _check_type(value)


class Function(Fields):
    """A function that the model may call."""

    type: Annotated[str, BeforeValidator(_check_type)]
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    defer_loading: ignored(_ALL_TOOLS, False) = None
    allowed_callers: ignored(_ALL_TOOLS, ["direct"]) = None
    output_schema: ignored("results of tools are texts") = None


class Tool(Function):
    """A function, a list of functions with a name, or a tool that OpenAI's servers run, which is
    left out.
    """

    type: Annotated[str, BeforeValidator(_check_tool_type)]
    name: str | None = None
    tools: listed(Function) = ()

    @property
    def is_hosted(self) -> bool:
        """Whether OpenAI's servers run it."""
        return self.type.startswith(_HOSTED)

    @model_validator(mode="after")
    def _check_parts(self, info: ValidationInfo) -> Self:
        if self.is_hosted:
            info.context.ignore(Tool, {f"type={self.type}"})
        elif self.name is None:
            raise ValueError("name is missing")
        return self

    def functions(self) -> list[tuple[str, Function]]:
        """The functions and their names for the model."""
        if self.type == "namespace":
            return [(joined_name(self.name, one.name), one) for one in self.tools]
        return [] if self.is_hosted else [(self.name, self)]


def joined_name(namespace: str | None, name: str) -> str:
    """The name of a function for the model, which knows no namespaces."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class Reasoning(Fields):
    """How much the model reasons."""

    effort: str | None = None
    summary: ignored(_NO_SUMMARY) = None
    generate_summary: ignored(_NO_SUMMARY) = None


class Text(Fields):
    """Options of the text."""

    format: dict[str, object] | None = None
    verbosity: ignored(VERBOSITY, "medium") = None


class ResponsesFields(Fields):
    """Fields of a request."""

    model: str | None = None
    input: listed(Item, lambda text: {"role": "user", "content": text}, is_needed=True)
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    tools: listed(Tool) = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: Text | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    # Fields of this server.
    priority: int = 0
    num_speculative_tokens: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    # The answer repeats them.
    metadata: dict[str, object] | None = None
    user: str | None = None

    safety_identifier: ignored(LABEL) = None
    client_metadata: ignored(LABEL) = None
    access_programs: ignored(LABEL) = None
    prompt_cache_key: ignored(CACHE) = None
    prompt_cache_retention: ignored(CACHE) = None
    prompt_cache_options: ignored(CACHE) = None
    store: ignored(NOT_STORED, False) = None
    max_tool_calls: ignored("it limits tools that a server runs") = None
    image: ignored("there are texts only") = None
    service_tier: ignored(ONE_TIER, "auto", "default") = None
    stream_options: ignored("events are not padded", {}, {"include_obfuscation": False}) = None
    truncation: ignored("a prompt that is too long is refused", "disabled") = None
    previous_response_id: refused(_WHOLE) = None
    conversation: refused(_WHOLE) = None
    background: refused(_WHOLE, False) = None
    background_options: ignored("background is refused") = None
    prompt: refused(_WHOLE) = None
    context_management: refused("send the items that the model is to read", []) = None
    moderation: refused("texts are not judged") = None

    @model_validator(mode="after")
    def _note_what_answers_lack(self, info: ValidationInfo) -> Self:
        others = set(self.include or ()) - {_LOGPROBS}
        info.context.ignore(ResponsesFields, {f"include={one}" for one in others})
        return self

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
        chat["tool_choice"] = _choice(self.tool_choice)
        chat["logprobs"] = _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        chat["top_logprobs"] = self.top_logprobs
        functions = [pair for one in self.tools for pair in one.functions()]
        if functions:
            chat["tools"] = [_function(*pair) for pair in functions]
        if self.reasoning is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = _response_format(self.text.format)
        return chat

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of functions in namespaces, by their names for the model."""
        return {
            name: (one.name, inner.name)
            for one in self.tools
            if one.type == "namespace"
            for name, inner in one.functions()
        }

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


def _choice(given: object) -> object:
    match given:
        case {"type": "allowed_tools", "tools": list(listed)}:
            functions = [
                one
                for one in map(_choice, listed)
                if not isinstance(one, dict) or one.get("type") == "function"
            ]
            allowed = {"mode": given.get("mode"), "tools": functions}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case dict():
            name, namespace = given.get("name"), given.get("namespace")
            if isinstance(name, str) and isinstance(namespace, str):
                name = joined_name(namespace, name)
            return {"type": given.get("type"), "function": {"name": name}}
    return given


def _function(name: str, one: Function) -> dict:
    function = {"name": name, "description": one.description, "parameters": one.parameters}
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
    name, arguments = (required(item, one, field) for one in ("name", "arguments"))
    function = {"name": joined_name(item.namespace, name), "arguments": arguments}
    call_id = required(item, "call_id", field)
    return message | {"tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def _merge(message: dict, later: dict) -> None:
    message["content"] = message["content"] + later["content"]
    for name, join in (("tool_calls", list.__add__), ("reasoning_content", "{}\n{}".format)):
        if name in later:
            given = message.get(name)
            message[name] = later[name] if given is None else join(given, later[name])
