"""Bodies of the routes that are adapters over chats: accepted, or refused by a field."""

import random
from types import SimpleNamespace

import pytest

from serving.errors import Code, ServiceError
from serving.http.chat import ChatFields
from serving.http.fields import Reading
from serving.http.messages_fields import MessagesFields, PromptFields
from serving.http.options import read_params
from serving.http.responses_fields import ResponsesFields
from serving.http.tokens import DetokenizeFields, TokenizeFields
from serving.limits import Limits
from serving.tools import Arguments
from tests.serving.test_http_fields import HELLO, damaged

LIMITS = Limits(max_messages=6, max_tools=3)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXT = {"type": "text", "text": "a"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "description": "a", "parameters": SCHEMA, "strict": False}
CHAT = {
    "messages": [
        HELLO,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": [TEXT]},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
}
ANSWER = [
    {"type": "thinking", "thinking": "a", "signature": ""},
    TEXT,
    {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}},
]
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [TEXT], "is_error": False}
MESSAGES = {
    "max_tokens": 5,
    "system": [TEXT | {"cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [TEXT]},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": [RESULT]},
    ],
    "tools": [{"name": "f", "description": "a", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["a"],
    "metadata": {"user_id": "a"},
}
THOUGHT = {"type": "reasoning", "id": "a", "summary": []}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        THOUGHT | {"content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
    ],
    "instructions": "a",
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "f"},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "metadata": {"a": "b"},
}
OF_GENERATION = ("max_tokens", "stop_sequences", "metadata")
BODIES = {
    ChatFields: CHAT,
    PromptFields: {name: MESSAGES[name] for name in MESSAGES if name not in OF_GENERATION},
    MessagesFields: MESSAGES,
    ResponsesFields: RESPONSES,
    TokenizeFields: {name: CHAT[name] for name in ("messages", "tools")} | {"prompt": "a"},
    DetokenizeFields: {"tokens": [1]},
}
REPLIES = SimpleNamespace(has_calls=True, calls=lambda tools, **how: tools)
FRONTEND = SimpleNamespace(replies=REPLIES)


def understand(model, content: dict) -> None:
    """What the routes do with a body before they tokenise it."""
    fields = model.read(content, Reading(LIMITS))
    if hasattr(fields, "as_chat"):
        fields = ChatFields.read(fields.as_chat(), Reading(LIMITS))
    if not isinstance(fields, ChatFields):
        return
    tools, arguments = fields.allowed_tools(FRONTEND), Arguments(LIMITS)
    fields.constraint(FRONTEND, tools, "response_format", None)
    for place, message in enumerate(fields.messages):
        message.variables(arguments, f"messages[{place}]")
    read_params(fields, LIMITS, max_tokens=5, spelling={}, logprobs=None)


def mistake(model, content: dict) -> ServiceError | None:
    try:
        understand(model, content)
    except ServiceError as error:
        return error
    return None


@pytest.mark.parametrize("model", BODIES)
def test_the_whole_body_is_accepted(model):
    understand(model, BODIES[model])


@pytest.mark.parametrize("model", BODIES)
def test_any_json_is_accepted_or_refused_by_field(num_cases, model):
    for seed in range(num_cases("bodies of adapters with wrong fields", 1000)):
        rng = random.Random(seed)
        content = damaged(BODIES[model], rng)
        if not isinstance(content, dict):
            continue
        content = damaged(content, rng) if rng.random() < 0.5 else content
        error = mistake(model, content if isinstance(content, dict) else {})
        if error is not None:
            assert error.code is Code.INVALID_ARGUMENT
            assert error.field
            assert "\n" not in error.message


def test_the_json_texts_of_a_request_are_bounded_together_before_they_are_read():
    arguments = Arguments(Limits(max_prompt_chars=100))
    assert arguments.parse('{"a": "é"}', field="first") == {"a": "é"}
    with pytest.raises(ServiceError) as caught:
        arguments.parse('{"a": 1' + " " * 90, field="second")
    said = "second: 107 characters of JSON are more than the 100 of a prompt"
    assert caught.value.message == said
