"""Fields of `/v1/messages`, Anthropic's route, and how they become those of a chat."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field

from serving.errors import invalid
from serving.http.chat import check_length, check_messages
from serving.http.fields import Fields, Texts, described, neutral, required

_KINDS = (
    "must be text, thinking, tool_use or tool_result: this server takes no images, documents or "
    "redacted reasoning"
)


class TextBlock(Fields):
    """A block of text."""

    type: Annotated[
        Literal["text"], described("must be text: this server takes no images or files")
    ]
    text: str
    cache_control: Any = None  # without effect: the prefix cache needs no marks
    citations: neutral([]) = None


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextBlocks = Annotated[
    list[TextBlock],
    FailFast(),
    BeforeValidator(check_length),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]
"""Text, or a list of blocks of text."""


class Block(Fields):
    """A block of a message. Its type decides which fields it has."""

    type: Annotated[Literal["text", "thinking", "tool_use", "tool_result"], described(_KINDS)]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: TextBlocks = ()
    # Without effect.
    is_error: bool = False
    signature: Any = None
    caller: Any = None
    cache_control: Any = None
    citations: neutral([]) = None


class Message(Fields):
    """A message of a conversation."""

    role: Annotated[Literal["user", "assistant"], described("must be user or assistant")]
    content: Annotated[
        list[Block],
        FailFast(),
        BeforeValidator(check_length),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
    ]


class Tool(Fields):
    """A tool that the model may call."""

    type: Annotated[
        Literal["custom"], described("must be custom: this server runs no tools of its own")
    ] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None  # without effect: calls come whole
    defer_loading: neutral(False) = None
    allowed_callers: neutral(["direct"]) = None


class Choice(Fields):
    """Whether the model may call a tool."""

    type: Annotated[
        Literal["auto", "none", "any", "tool"], described("must be auto, none, any or tool")
    ]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Fields):
    """Whether the model reasons before it answers; a budget is not enforced."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive"],
        described("must be enabled, disabled or adaptive"),
    ]
    budget_tokens: int | None = None
    display: Any = None


class Turns(Fields):
    """A number of the assistant's newest turns."""

    type: Annotated[
        Literal["all", "thinking_turns"], described("must be all or thinking_turns")
    ] = "thinking_turns"
    value: Annotated[int, Field(ge=0), described("must be an integer of at least 0")] = 1


class Edit(Fields):
    """An edit of the conversation before the model reads it."""

    type: Annotated[
        Literal["clear_thinking_20251015"],
        described("must be clear_thinking_20251015: this server makes no other edits"),
    ]
    keep: Annotated[
        Turns, BeforeValidator(lambda one: {"type": "all"} if one == "all" else one)
    ] = Turns()


class ContextManagement(Fields):
    """Edits of the conversation."""

    edits: Annotated[list[Edit], FailFast(), BeforeValidator(check_length)] = ()

    def turns_with_thinking(self) -> int | None:
        """Newest turns of the assistant that keep their reasoning; None: all."""
        kept = [one.keep.value for one in self.edits if one.keep.type != "all"]
        return min(kept, default=None)


class Output(Fields):
    """Form of the output."""

    effort: str | None = None
    format: dict[str, object] | None = None


class PromptFields(Fields):
    """Fields of which the prompt is made."""

    model: str | None = None
    messages: Annotated[
        list[Message], FailFast(), BeforeValidator(check_length), BeforeValidator(check_messages)
    ]
    system: TextBlocks = ()
    tools: Annotated[list[Tool], FailFast(), BeforeValidator(check_length)] = ()
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, object] | None = None
    context_management: ContextManagement | None = None
    mcp_servers: neutral([]) = None
    output_config: Output | None = None
    speed: neutral("standard") = None
    inference_geo: neutral() = None
    diagnostics: neutral() = None
    cache_control: Any = None  # without effect, as in blocks
    user_profile_id: Any = None
    workspace_id: Any = None

    def as_chat(self) -> dict[str, object]:
        """The content of a chat with the same prompt.

        Raises:
          ServiceError: INVALID_ARGUMENT; a block lacks a field of its type, or has another role's.
        """
        chat: dict[str, object] = {"model": self.model, "messages": self._messages()}
        if self.tools:
            chat["tools"] = [_function(one) for one in self.tools]
        if self.tool_choice is not None:
            chat["tool_choice"] = _choice(self.tool_choice)
            chat["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        variables = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            variables.setdefault("enable_thinking", self.thinking.type != "disabled")
        if self.output_config is not None:
            chat["reasoning_effort"] = self.output_config.effort
            if self.output_config.format is not None:
                chat["response_format"] = _response_format(self.output_config.format)
        return chat | {"chat_template_kwargs": variables}

    def _messages(self) -> list[dict]:
        messages = []
        if self.system:
            messages.append({"role": "system", "content": _parts(self.system)})
        for place, message in enumerate(self.messages):
            field = f"messages[{place}].content"
            as_chat = _of_assistant if message.role == "assistant" else _of_user
            messages += as_chat(message.content, field)
        if self.context_management is not None:
            _clear_thinking(messages, self.context_management.turns_with_thinking())
        return messages


class MessagesFields(PromptFields):
    """Fields of a request."""

    max_tokens: int
    stop_sequences: Texts = ()
    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    # Fields of this server.
    priority: int = 0
    num_speculative_tokens: int | None = None
    cache_salt: str | None = None
    # A client's own labels are accepted and not used.
    metadata: Any = None
    service_tier: neutral("auto", "standard_only") = None

    def as_chat(self) -> dict[str, object]:
        """See `PromptFields`."""
        same = (
            *("max_tokens", "stream", "temperature", "top_p", "top_k", "priority"),
            *("num_speculative_tokens", "cache_salt"),
        )
        given = {name: getattr(self, name) for name in same}
        return super().as_chat() | given | {"stop": list(self.stop_sequences)}


def _clear_thinking(messages: list[dict], kept: int | None) -> None:
    """Removes the reasoning of all but the newest `kept` messages that have some; None keeps all."""
    thoughts = [one for one in messages if "reasoning_content" in one]
    for message in thoughts[: max(0, len(thoughts) - kept) if kept is not None else 0]:
        del message["reasoning_content"]


def _choice(given: Choice) -> object:
    if given.type == "tool":
        return {"type": "function", "function": {"name": given.name or ""}}
    return "required" if given.type == "any" else given.type


def _response_format(given: dict[str, object]) -> dict[str, object]:
    if given.get("type") != "json_schema":
        raise invalid("output_config.format.type", "must be json_schema")
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


def _parts(blocks: list[TextBlock]) -> list[dict]:
    return [{"type": "text", "text": block.text} for block in blocks]


def _function(one: Tool) -> dict:
    function = {"name": one.name, "description": one.description, "parameters": one.input_schema}
    return {"type": "function", "function": function | {"strict": one.strict}}


def _of_user(blocks: list[Block], field: str) -> list[dict]:
    """Results of tools become messages of their own; texts between them stay together."""
    messages: list[dict] = []
    for place, block in enumerate(blocks):
        path = f"{field}[{place}]"
        if block.type == "tool_result":
            call = required(block, "tool_use_id", path)
            result = {"role": "tool", "tool_call_id": call, "content": _parts(block.content)}
            messages.append(result)
        elif block.type == "text":
            part = {"type": "text", "text": required(block, "text", path)}
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(part)
        else:
            raise invalid(f"{path}.type", f"{block.type} is for the assistant")
    return messages


def _of_assistant(blocks: list[Block], field: str) -> list[dict]:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        path = f"{field}[{place}]"
        if block.type == "text":
            texts.append({"type": "text", "text": required(block, "text", path)})
        elif block.type == "thinking":
            thoughts.append(required(block, "thinking", path))
        elif block.type == "tool_use":
            arguments = json.dumps(required(block, "input", path), ensure_ascii=False)
            function = {"name": required(block, "name", path), "arguments": arguments}
            call_id = required(block, "id", path)
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            raise invalid(f"{path}.type", "tool_result is for the user")
    message: dict[str, object] = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [message | ({"tool_calls": calls} if calls else {})]
