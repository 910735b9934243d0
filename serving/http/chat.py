"""`/v1/chat/completions`: OpenAI's route for conversations."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WrapValidator

from peagle_jax.text.tokenizer import Ending
from serving.errors import ServiceError, invalid
from serving.frontend import Frontend
from serving.http.errors import OPENAI
from serving.http.fields import Fields, Reading, ignored, listed, refused
from serving.http.openai_answer import ChoiceReports, OpenAiAnswer, TextField
from serving.http.options import LABEL, Options, SharedFields, read_options, read_params
from serving.http.reports import chat_logprobs
from serving.http.route import Call, Caller, Encode, Route
from serving.http.tools import MessageCall, ToolFields
from serving.stream import Ask, Delta
from serving.tools import Arguments, call_id

NO_MARKS = "the prefix cache needs no marks"
_OF_OTHERS = "the text and reasoning_content have what the model reads"
VERBOSITY = "models have no such control"
_REASONING = "answers have the reasoning, if the model marks it"
_VARIABLE = "send chat_template_kwargs"


def _check_type(value: object) -> object:
    if value not in ("text", "refusal"):
        raise ValueError("must be text: this server takes no images, sounds or files")
    return value


def _text(content: object, validate_parts: Callable[[object], list], info: ValidationInfo) -> str:
    """The text of a message; parts are joined by newlines."""
    if isinstance(content, str):
        return content
    if content is None:
        if info.data.get("role") in ("assistant", "tool"):
            # An answer with reasoning or calls only; a tool that returned nothing.
            return info.data.get("refusal") or ""
        raise ValueError("is missing")
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of parts")
    return "\n".join(part.text for part in validate_parts(content))


def text_or_refusal(text: str | None, info: ValidationInfo) -> str:
    """The text of a part, which a refusal of the assistant has under its own name."""
    text = info.data.get("refusal") if text is None else text
    if text is None:
        raise ValueError("is missing")
    return text


class Part(Fields):
    """A part of a message."""

    type: Annotated[str | None, BeforeValidator(_check_type)] = Field(None, validate_default=True)
    refusal: str | None = None
    text: Annotated[str | None, AfterValidator(text_or_refusal)] = Field(
        None, validate_default=True
    )
    cache_control: ignored(NO_MARKS) = None


class Message(Fields):
    """A message of a conversation."""

    role: str
    refusal: str | None = None
    content: Annotated[
        listed(Part), WrapValidator(_text, json_schema_input_type=str | list[Part])
    ] = Field(None, validate_default=True)
    # Templates may use these.
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: listed(MessageCall) = ()
    tool_call_id: str | None = None
    # Clients send received answers back unchanged, also those of other servers.
    id: ignored(LABEL) = None
    annotations: ignored(_OF_OTHERS, []) = None
    cache_control: ignored(NO_MARKS) = None
    provider_specific_fields: ignored(_OF_OTHERS, {}) = None
    reasoning_details: ignored(_OF_OTHERS, []) = None
    thinking_blocks: ignored(_OF_OTHERS, []) = None
    function_call: refused("send tool_calls") = None
    audio: refused("there are texts only") = None
    prefix: refused("send continue_final_message", False) = None
    partial: refused("send continue_final_message", False) = None

    def variables(self, arguments: Arguments, field: str) -> dict[str, object]:
        """The message as chat templates take it.

        Raises:
          ServiceError: INVALID_ARGUMENT; a call has no JSON object as its arguments.
        """
        names = ("name", "reasoning_content", "tool_call_id")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.reasoning is not None:  # the newer name of vLLM and gateways
            given.setdefault("reasoning_content", self.reasoning)
        if self.tool_calls:
            given["tool_calls"] = [
                call.as_dict(arguments, f"{field}.tool_calls[{place}]")
                for place, call in enumerate(self.tool_calls)
            ]
        return {"role": self.role, "content": self.content, **given}


class TemplateFields(ToolFields):
    """Fields of a request about the chat template."""

    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: refused("the model's own template is used") = None

    @property
    def ending(self) -> Ending:
        """How the prompt ends.

        Raises:
          ServiceError: INVALID_ARGUMENT; the fields contradict each other.
        """
        if self.continue_final_message:
            if self.add_generation_prompt:
                rule = "a reply cannot begin within a message; leave add_generation_prompt out"
                raise invalid("continue_final_message", rule)
            return "continued"
        return "closed" if self.add_generation_prompt is False else "reply"


class ChatFields(SharedFields, TemplateFields):
    """Fields of a request."""

    messages: listed(Message, is_needed=True)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    reasoning_effort: str | None = None

    prediction: ignored("drafts are the head's") = None
    verbosity: ignored(VERBOSITY, "medium") = None

    functions: refused("send tools", []) = None
    function_call: refused("send tool_choice", "none") = None
    modalities: refused("there are texts only", ["text"]) = None
    audio: refused("there are texts only") = None
    web_search_options: refused("send tools") = None
    add_special_tokens: refused("the template writes them", False) = None
    documents: refused("send them as messages", []) = None
    include_reasoning: refused(_REASONING, True) = None
    separate_reasoning: refused(_REASONING, True) = None
    echo: refused("/v1/completions has it", False) = None
    # Of gateways and other servers.
    enable_thinking: refused(_VARIABLE) = None
    thinking: refused(_VARIABLE) = None
    reasoning: refused("send reasoning_effort") = None


@dataclass(frozen=True)
class Conversation:
    """A chat that was understood.

    Args:
      encode: tokenises it.
      is_parallel: whether the client takes several calls.
    """

    encode: Callable[[], Awaitable[Ask]]
    options: Options
    is_parallel: bool


class Chat(Route[ChatFields]):
    """A conversation, as OpenAI's API has it."""

    path = "/v1/chat/completions"
    dialect = OPENAI
    fields = ChatFields

    def _prepare(self, fields: ChatFields, caller: Caller) -> Encode:
        frontend, talk = self._frontend, self._conversation(fields, caller, method=self.path)
        options, is_parallel = talk.options, talk.is_parallel

        async def encode() -> Call:
            ask = await talk.encode()
            answer = OpenAiAnswer(
                f"chatcmpl-{caller.request_id}",
                frontend.name,
                objects=("chat.completion", "chat.completion.chunk"),
                options=options,
                choices=_Choices(frontend, options, ask.prompt, is_parallel=is_parallel),
                num_prompt=len(ask.prompt),
            )
            return Call(asks=[ask], answer=answer)

        return encode

    def converted(
        self, content: dict[str, object], caller: Caller, *, method: str, names: Mapping[str, str]
    ) -> Conversation:
        """The conversation of another route's request, in the form of this route's requests.

        Args:
          method: the path that the client called.
          names: that route's names of this one's fields, where they differ. One that ends in *
            stands for all that it begins.

        Raises:
          ServiceError: see `Route.read`.
        """
        try:
            fields = ChatFields.read(content, Reading(self._frontend.limits))
            return self._conversation(fields, caller, method=method, names=names)
        except ServiceError as error:
            if error.field is None:
                raise
            raise error.of_field(renamed(error.field, names)) from None

    def _conversation(
        self,
        fields: ChatFields,
        caller: Caller,
        *,
        method: str,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> Conversation:
        frontend, options = self._frontend, read_options(fields)
        max_tokens, name = _max_tokens(fields)
        spelling = {
            "stop_ids": "stop_token_ids",
            "logprobs": "top_logprobs",
            "max_tokens": name,
            "prompt": "messages",
        }
        params = read_params(
            fields,
            frontend.limits,
            max_tokens=frontend.config.max_model_len if max_tokens is None else max_tokens,
            spelling=spelling,
            logprobs=_num_logprobs(fields),
        )
        tools, arguments = fields.allowed_tools(frontend), Arguments(frontend.limits)
        spelling["structured"], constraint = fields.constraint(
            frontend, tools, spelling["structured"], params.structured
        )
        params = replace(params, structured=constraint)
        messages = [
            message.variables(arguments, f"messages[{place}]")
            for place, message in enumerate(fields.messages)
        ]
        if frontend.replies.name == "harmony":
            messages = [_with_thinking(message) for message in messages]
            if not fields.skip_special_tokens:
                rule = "must be true: special tokens of this model mark the parts of a reply"
                raise invalid("skip_special_tokens", rule)
        variables = dict(fields.chat_template_kwargs or {})
        if fields.reasoning_effort is not None:
            variables["reasoning_effort"] = fields.reasoning_effort
        ask = Ask(
            request_id=caller.request_id,
            prompt=[],
            params=params,
            n=options.n,
            cache_salt=fields.cache_salt,
            priority=fields.priority,
            is_chat=True,
            tools=tools,
            protocol="http",
            method=method,
            trace=caller.trace,
            spelling={key: renamed(field, names) for key, field in spelling.items()},
        )

        ending = fields.ending

        async def encode() -> Ask:
            field = ask.spelling["prompt"]
            prompt = await frontend.chat(
                messages, variables, tools=tools, field=field, ending=ending
            )
            return replace(ask, prompt=prompt)

        return Conversation(encode, options, is_parallel=fields.parallel_tool_calls)


def renamed(field: str, names: Mapping[str, str]) -> str:
    """The name of a chat's field on a route with `names`, see `Chat.converted`."""
    for ours, theirs in names.items():
        if ours.endswith("*") and field.startswith(ours[:-1]):
            return theirs
        if field == ours or field.startswith(f"{ours}."):
            return theirs + field[len(ours) :]
    return field


def _with_thinking(message: dict[str, object]) -> dict[str, object]:
    """A message for GPT-OSS's template, which has its own name for reasoning before a call, and
    refuses content there.
    """
    reasoning = message.get("reasoning_content")
    if not (reasoning and "tool_calls" in message and not message["content"]):
        return message
    return message | {"thinking": reasoning}


def _max_tokens(fields: ChatFields) -> tuple[int | None, str]:
    """The limit and the field that gives it; `max_tokens` is OpenAI's old name."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "differs from max_completion_tokens; give one of them")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _num_logprobs(fields: ChatFields) -> int | None:
    """Number of alternatives per token; None without log-probabilities."""
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    return (fields.top_logprobs or 0) if fields.logprobs else None


class _Choices:
    def __init__(
        self, frontend: Frontend, options: Options, prompt: list[int], *, is_parallel: bool
    ):
        self._tokenizer, self._prompt = frontend.tokenizer, prompt
        self._reports = ChoiceReports(options, frontend.tokenizer)
        self._has_reasoning = frontend.replies.has_reasoning
        self._max_calls = None if is_parallel else 1
        self._started: set[int] = set()
        self._num_calls: Counter[int] = Counter()

    def part(self, index: int, delta: Delta) -> dict:
        message: dict[str, object] = {}
        if index not in self._started:
            message["role"] = "assistant"
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        first = self._num_calls[index]
        calls = self._calls(index, delta)
        if calls:
            message["tool_calls"] = [
                {"index": place, **call} for place, call in enumerate(calls, start=first)
            ]
        if delta.text or not (self._has_reasoning or calls):
            message["content"] = delta.text
        return self._choice(index, delta, "delta", message)

    def only_text(self, index: int, delta: Delta) -> TextField | None:
        is_plain = delta.finish is None and delta.logprobs is None and not delta.calls
        if not is_plain or index not in self._started:
            return None
        if not delta.reasoning:
            return "text" if delta.text or not self._has_reasoning else None
        return "reasoning" if self._has_reasoning and not delta.text else None

    def whole(self, index: int, delta: Delta) -> dict:
        message: dict[str, object] = {"role": "assistant", "content": delta.text}
        if self._has_reasoning:
            message["reasoning_content"] = delta.reasoning or None
        calls = self._calls(index, delta)
        if calls:
            message |= {"content": delta.text or None, "tool_calls": calls}
        return self._choice(index, delta, "message", message)

    def _calls(self, index: int, delta: Delta) -> list[dict]:
        """New calls of a choice; further ones are left out if the client allows one only."""
        calls = delta.calls
        if self._max_calls is not None:
            calls = calls[: self._max_calls - self._num_calls[index]]
        self._num_calls[index] += len(calls)
        return [
            {
                "id": call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]

    def _choice(self, index: int, delta: Delta, name: str, message: dict[str, object]) -> dict:
        logprobs = None
        if delta.logprobs is not None:
            logprobs = chat_logprobs(self._tokenizer, delta.tokens, delta.logprobs)
        finish = delta.finish
        reason = finish and finish.reason
        if reason == "stop" and self._num_calls[index]:
            reason = "tool_calls"
        choice = {
            "index": index,
            name: message,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": finish and finish.stop_reason,
        }
        prompt = None if index in self._started else self._prompt
        self._started.add(index)
        return choice | self._reports.of(index, delta, prompt)
