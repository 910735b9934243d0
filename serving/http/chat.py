"""`/v1/chat/completions`: OpenAI's route for conversations."""

from serving.frontend import Frontend
from serving.http.fields import Fields
from serving.http.options import LABELS, Options, read_options, read_params
from serving.http.reports import chat_logprobs
from serving.http.route import Call, Caller, Encode, one_ask_each
from serving.stream import Ask, Delta

_NEUTRAL = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),  # of no tools
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": (),
    "include_reasoning": (True,),
    "echo": (False,),
}
_NEUTRAL_IN_MESSAGE = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}
"""Clients send answers back as they got them, with fields that hold nothing."""
_PASSED_ON = ("name", "reasoning_content")  # templates use them or not


class Chat:
    """The route over one frontend; see `Route`."""

    path = "/v1/chat/completions"
    prefix = "chatcmpl-"
    whole_object, part_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    def read(self, fields: Fields, caller: Caller) -> Encode:
        """See `Route`."""
        frontend = self._frontend
        options = read_options(fields, frontend.name)
        fields.refuse_unless(_NEUTRAL)
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
        messages = _messages(fields, frontend.limits.max_messages)
        variables = _variables(fields)
        fields.done(ignored=LABELS)
        ask = Ask(
            request_id=caller.request_id,
            prompt=[],
            params=params,
            n=options.n,
            is_chat=True,
            protocol="http",
            method=self.path,
            trace=caller.trace,
            spelling=spelling,
        )

        async def encode() -> Call:
            prompt = await frontend.chat(messages, variables, field="messages")
            choices = _Choices(frontend, options, prompt)
            return Call(asks=one_ask_each(ask, [prompt]), options=options, choices=choices)

        return encode


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    """The bound and the name it was given by; `max_tokens` is OpenAI's old one."""
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise fields.wrong("max_tokens", "differs from max_completion_tokens; give one of them")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _num_logprobs(fields: Fields) -> int | None:
    """Alternatives to report; None for no log-probabilities at all."""
    wanted, number = fields.flag("logprobs"), fields.integer("top_logprobs")
    if number and not wanted:
        raise fields.wrong("top_logprobs", "needs logprobs to be true")
    return (number or 0) if wanted else None


def _messages(fields: Fields, most: int) -> list[dict[str, str]]:
    if "messages" not in fields:
        raise fields.wrong("messages", "is missing")
    messages = [_message(one, most) for one in fields.inners("messages", most=most)]
    if not messages:
        raise fields.wrong("messages", "must not be empty")
    return messages


def _message(fields: Fields, most: int) -> dict[str, str]:
    fields.refuse_unless(_NEUTRAL_IN_MESSAGE)
    role = fields.text("role")
    if role is None:
        raise fields.wrong("role", "is missing")
    message = {"role": role, "content": _content(fields, role, most)}
    for name in _PASSED_ON:
        if (value := fields.text(name)) is not None:
            message[name] = value
    fields.done()
    return message


def _content(fields: Fields, role: str, most: int) -> str:
    """A text, or at most so many parts that are texts."""
    content = fields.take("content")
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""  # an answer that was reasoning alone
        raise fields.wrong("content", "is missing")
    if not isinstance(content, list):
        raise fields.wrong("content", "must be a string or a list of parts")
    texts = []
    for part in fields.inners("content", most=most):
        if part.text("type") != "text":
            raise part.wrong("type", "must be text: this server takes no images, sounds or files")
        if (text := part.text("text")) is None:
            raise part.wrong("text", "is missing")
        part.done()
        texts.append(text)
    return "\n".join(texts)


def _variables(fields: Fields) -> dict[str, object]:
    """What the model's chat template takes beside the messages."""
    given = fields.take("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise fields.wrong("chat_template_kwargs", "must be an object")
    variables = dict(given or {})
    if (effort := fields.text("reasoning_effort")) is not None:
        variables["reasoning_effort"] = effort
    return variables


class _Choices:
    """See `Choices`."""

    def __init__(self, frontend: Frontend, options: Options, prompt: list[int]):
        self._tokenizer, self._options, self._prompt = frontend.tokenizer, options, prompt
        self._reasons = frontend.channels is not None
        self._begun: set[int] = set()

    def part(self, index: int, delta: Delta) -> dict:
        said: dict[str, object] = {}
        if index not in self._begun:
            said["role"] = "assistant"
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.text or not self._reasons:
            said["content"] = delta.text
        return self._choice(index, delta, "delta", said)

    def whole(self, index: int, delta: Delta) -> dict:
        said: dict[str, object] = {"role": "assistant", "content": delta.text}
        if self._reasons:
            said["reasoning_content"] = delta.reasoning or None
        return self._choice(index, delta, "message", said)

    def _choice(self, index: int, delta: Delta, name: str, said: dict[str, object]) -> dict:
        logprobs = None
        if delta.logprobs is not None:
            logprobs = chat_logprobs(self._tokenizer, delta.tokens, delta.logprobs)
        finish = delta.finish
        choice = {
            "index": index,
            name: said,
            "logprobs": logprobs,
            "finish_reason": finish and finish.reason,
            "stop_reason": finish and finish.stop_reason,
        }
        if self._options.with_ids:
            choice["token_ids"] = delta.tokens
            if index not in self._begun:
                choice["prompt_token_ids"] = self._prompt
        self._begun.add(index)
        return choice
