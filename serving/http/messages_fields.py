"""Fields of `/v1/messages`, Anthropic's route, and how they become those of a chat."""

import json
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from serving.errors import invalid
from serving.http.chat import NO_MARKS
from serving.http.fields import Fields, Texts, described, ignored, listed, refused, required
from serving.http.options import LABEL, ONE_TIER


def _schema(required: str, **properties: object) -> dict[str, object]:
    given = {
        name: {"type": one} if isinstance(one, str) else one for name, one in properties.items()
    }
    return {"type": "object", "properties": given, "required": required.split()}


def _commands(names: str, **properties: object) -> dict[str, object]:
    return _schema("command", command={"type": "string", "enum": names.split()}, **properties)


_RANGE = {"type": "array", "items": {"type": "integer"}}
_EDITS = dict(
    path="string",
    file_text="string",
    old_str="string",
    new_str="string",
    insert_line="integer",
    insert_text="string",
    view_range=_RANGE,
)
_BASH = (
    "Runs a command in a shell that keeps its state. restart starts the shell anew.",
    _schema("", command="string", restart="boolean"),
)
_EDITOR = (
    "Views and edits files. view shows a file, or the lines of view_range (-1 is the last), or "
    "lists a directory; create "
    "writes file_text; str_replace replaces old_str, which must occur once, by new_str; insert "
    "puts insert_text after "
    "the line insert_line.",
    _commands("view create str_replace insert", **_EDITS) | {"required": ["command", "path"]},
)
_MEMORY = (
    "Keeps notes in files below /memories; look there first. view shows a file, or the lines of "
    "view_range, or lists a "
    "directory; create writes file_text; str_replace replaces old_str by new_str; insert puts "
    "insert_text after the line "
    "insert_line; delete removes path; rename moves old_path to new_path.",
    _commands(
        "view create str_replace insert delete rename",
        **_EDITS,
        old_path="string",
        new_path="string",
    ),
)
CLIENT_TOOLS = {
    "bash_20250124": _BASH,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}
"""Description and schema of the arguments, by type."""


_KINDS = (
    "must be text, thinking, redacted_thinking, tool_use or tool_result: this server takes no "
    "images or documents"
)
_HOSTED = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    "tool_search_",
    "mcp_toolset",
    "advisor_",
)
"""Beginnings of the types of tools that Anthropic's servers run."""
_ALL_TOOLS = "every tool is in the prompt, and the model calls it"
_NO_CITATIONS = "there are no documents to cite"


class TextBlock(Fields):
    """A block of text."""

    type: Annotated[
        Literal["text"], described("must be text: this server takes no images or files")
    ]
    text: str
    cache_control: ignored(NO_MARKS) = None
    citations: ignored(_NO_CITATIONS, []) = None


def _as_block(text: str) -> object:
    return {"type": "text", "text": text}


TextBlocks = listed(TextBlock, _as_block)
"""Text, or a list of blocks of text."""


class Block(Fields):
    """A block of a message. Its type decides which fields it has."""

    type: Annotated[
        Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"],
        described(_KINDS),
    ]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: TextBlocks = ()
    is_error: ignored("the content of a result says it", False) = None
    data: ignored("no model here reads redacted reasoning") = None
    signature: ignored("reasoning is not signed", "") = None
    caller: ignored(_ALL_TOOLS) = None
    toolset_name: ignored(_ALL_TOOLS) = None
    cache_control: ignored(NO_MARKS) = None
    citations: ignored(_NO_CITATIONS, []) = None


class Message(Fields):
    """A message of a conversation."""

    role: Annotated[
        Literal["user", "assistant", "system", "ctx", "msg"],
        described("must be user, assistant or system"),
    ]
    content: listed(Block, _as_block)


def _check_tool_type(value: object) -> object:
    is_known = isinstance(value, str) and (value == "custom" or value in CLIENT_TOOLS)
    if not is_known and not (isinstance(value, str) and value.startswith(_HOSTED)):
        raise ValueError(f"must be custom, {', '.join(CLIENT_TOOLS)}, or run by a server")
    return value


class Tool(Fields):
    """A tool: the client's own, one that Anthropic's clients run, or one that its servers run,
    which is left out.
    """

    type: Annotated[str, BeforeValidator(_check_tool_type)] = "custom"
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    input_examples: list[dict[str, object]] = ()
    strict: bool | None = None
    cache_control: ignored(NO_MARKS) = None
    eager_input_streaming: ignored("calls come whole", False) = None
    defer_loading: ignored(_ALL_TOOLS, False) = None
    allowed_callers: ignored(_ALL_TOOLS, ["direct"]) = None
    max_characters: ignored("the client cuts what its tool shows") = None

    @property
    def is_hosted(self) -> bool:
        """Whether Anthropic's servers run it."""
        return self.type.startswith(_HOSTED)

    @model_validator(mode="after")
    def _note_hosted(self, info: ValidationInfo) -> Self:
        if self.is_hosted:
            info.context.ignore(Tool, {f"type={self.type}"})
        return self


class Choice(Fields):
    """Whether the model may call a tool."""

    type: Annotated[
        Literal["auto", "none", "any", "tool"], described("must be auto, none, any or tool")
    ]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Fields):
    """Whether the model reasons before it answers."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive"],
        described("must be enabled, disabled or adaptive"),
    ]
    budget_tokens: ignored("reasoning has no limit of its own") = None
    display: ignored("reasoning is shown whole") = None
    block_binding: ignored("reasoning is not signed") = None


class Turns(Fields):
    """A number of the assistant's newest turns."""

    is_closed = True

    type: Annotated[
        Literal["all", "thinking_turns"], described("must be all or thinking_turns")
    ] = "thinking_turns"
    value: Annotated[int, Field(ge=0), described("must be an integer of at least 0")] = 1


class Edit(Fields):
    """An edit of the conversation before the model reads it."""

    is_closed = True

    type: Annotated[
        Literal["clear_thinking_20251015"],
        described("must be clear_thinking_20251015: this server makes no other edits"),
    ]
    keep: Annotated[
        Turns, BeforeValidator(lambda one: {"type": "all"} if one == "all" else one)
    ] = Turns()


class ContextManagement(Fields):
    """Edits of the conversation."""

    edits: listed(Edit) = ()

    def turns_with_thinking(self) -> int | None:
        """Newest turns of the assistant that keep their reasoning; None: all."""
        kept = [one.keep.value for one in self.edits if one.keep.type != "all"]
        return min(kept, default=None)


class Output(Fields):
    """Form of the output."""

    effort: str | None = None
    format: dict[str, object] | None = None
    task_budget: ignored("a task has no limit of its own") = None


class PromptFields(Fields):
    """Fields of which the prompt is made."""

    model: str | None = None
    messages: listed(Message, is_needed=True)
    system: TextBlocks = ()
    tools: listed(Tool) = ()
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, object] | None = None
    context_management: ContextManagement | None = None
    output_config: Output | None = None
    cache_control: ignored(NO_MARKS) = None
    speed: ignored(ONE_TIER, "standard") = None
    inference_geo: ignored("there is one place") = None
    diagnostics: ignored("there are none") = None
    fallbacks: ignored("there is one model", []) = None
    fallback_credit_token: ignored(LABEL) = None
    billing_policy: ignored(LABEL) = None
    user_profile_id: ignored(LABEL) = None
    workspace_id: ignored(LABEL) = None
    betas: ignored("what is supported needs no name", []) = None
    mcp_servers: refused("this server runs no tools", []) = None
    container: refused("this server runs no tools") = None
    thread: refused("send the whole conversation as messages") = None
    compaction: refused("send the messages that the model is to read") = None
    output_format: refused("send output_config.format") = None

    def as_chat(self) -> dict[str, object]:
        """The content of a chat with the same prompt.

        Raises:
          ServiceError: INVALID_ARGUMENT; a block lacks a field of its type, or has another role's.
        """
        chat: dict[str, object] = {"model": self.model, "messages": self._messages()}
        if self.tools:
            chat["tools"] = [
                _function(one, f"tools[{place}]")
                for place, one in enumerate(self.tools)
                if not one.is_hosted
            ]
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
            if message.role == "assistant":
                messages += _of_assistant(message.content, field)
                continue
            some = _of_user(message.content, field)
            if message.role == "system":
                some = [one | {"role": "system"} if one["role"] == "user" else one for one in some]
            messages += some
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
    metadata: ignored(LABEL) = None
    service_tier: ignored(ONE_TIER, "auto", "standard_only") = None

    def as_chat(self) -> dict[str, object]:
        same = (
            *("max_tokens", "stream", "temperature", "top_p", "top_k", "priority"),
            *("num_speculative_tokens", "cache_salt"),
        )
        given = {name: getattr(self, name) for name in same}
        return super().as_chat() | given | {"stop": list(self.stop_sequences)}


def _clear_thinking(messages: list[dict], kept: int | None) -> None:
    """Removes the reasoning of all but the newest `kept` messages that have some; None
    keeps all.
    """
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


def _function(one: Tool, field: str) -> dict:
    description, schema = CLIENT_TOOLS.get(one.type, (one.description, one.input_schema))
    if one.input_examples:
        examples = json.dumps(one.input_examples, ensure_ascii=False)
        description = f"{description or ''}\n\nExamples of input: {examples}".lstrip()
    function = {"name": required(one, "name", field), "description": description}
    function["parameters"] = schema
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
        elif block.type == "tool_result":
            raise invalid(f"{path}.type", "tool_result is for the user")
    message: dict[str, object] = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [message | ({"tool_calls": calls} if calls else {})]
