"""Models of request bodies: any JSON is accepted, or refused with the name of a field."""

import copy
import random
import re
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from serving.errors import Code, ServiceError
from serving.http.chat import ChatFields
from serving.http.completions import CompletionFields
from serving.http.fields import Fields, Reading
from serving.http.messages_fields import MessagesFields, PromptFields
from serving.http.options import SamplingFields, SharedFields, read_params
from serving.http.responses_fields import ResponsesFields
from serving.http.tokens import DetokenizeFields, TokenizeFields
from serving.limits import Limits
from serving.tools import Arguments

LIMITS = Limits(max_messages=4)
STRICT = Limits(max_messages=4, unknown_fields="refuse")
HELLO = {"role": "user", "content": "a"}
ROUTES = {
    CompletionFields: {"prompt": "a"},
    ChatFields: {"messages": [HELLO]},
}
MANY = 60_000


def refusal(model: type[Fields], **content: object) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        model.read(ROUTES[model] | content, Reading(STRICT))
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    assert "\n" not in caught.value.message
    return caught.value


VALUES = (
    *(None, True, False, 0, 1, -1, 0.5, 1.0, 1e999, 2**70, 10**400, "", "a", "text", "auto"),
    *("\ud800", [], {}, [None], [1], ["a"], [True], ["a", 1], [[1]], [["a"]], [[]], [{}], [HELLO]),
    *({"type": "text"}, {"include_usage": True}, {"a": None}),
    HELLO | {"content": [{"type": "text"}]},
)


def damaged(value: object, rng: random.Random) -> object:
    """The value with one of its parts replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice([*value, "unknown"])
        return value | {name: damaged(value.get(name), rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], damaged(value[place], rng), *value[place + 1 :]]
    return copy.deepcopy(rng.choice(VALUES))


@pytest.mark.parametrize("model", ROUTES)
def test_a_null_counts_as_left_out(model):
    nulls = dict.fromkeys([*model.model_fields, "unknown"]) | ROUTES[model]
    assert model.read(nulls, Reading(LIMITS)) == model.read(ROUTES[model], Reading(LIMITS))
    assert refusal(model, unknown=0).field == "unknown"
    inner = model.read(ROUTES[model] | {"stream_options": {"include_usage": None}}, Reading(LIMITS))
    assert inner.stream_options.include_usage is False


def test_an_integer_above_the_largest_float_is_too_large():
    assert refusal(ChatFields, temperature=10**400).message == "temperature: is too large"


def test_no_option_of_the_engine_is_hidden_by_a_field_of_its_name():
    assert not SamplingFields.model_fields.keys() & SharedFields.__annotations__.keys()


def test_only_the_assistant_may_leave_out_content():
    answer = {"role": "assistant", "reasoning_content": "hm"}
    (message,) = ChatFields.read({"messages": [answer]}, Reading(LIMITS)).messages
    assert message.variables(Arguments(LIMITS), "messages[0]") == answer | {"content": ""}
    for role in ("user", "system"):
        assert refusal(ChatFields, messages=[HELLO, {"role": role}]).field == "messages[1].content"


def test_a_name_that_is_not_unicode_is_refused():
    error = refusal(ChatFields, **{"\ud800": 1})
    assert error.message == "body: has a name that is not valid Unicode"
    assert refusal(ChatFields, messages=[HELLO | {"\ud800": 1}]).field == "messages[0]"


TOO_MUCH = [
    (CompletionFields, {f"field {i}": 1 for i in range(MANY)}, "field 0"),
    (CompletionFields, {"prompt": [None] * MANY}, "prompt"),
    (CompletionFields, {"prompt": [[None]] * MANY}, "prompt"),
    (CompletionFields, {"prompt": [["a"] * MANY]}, "prompt"),
    (CompletionFields, {"stop": [5] * MANY}, "stop"),
    (CompletionFields, {"stop_token_ids": ["a"] * MANY}, "stop_token_ids"),
    (ChatFields, {"messages": [5] * 4}, "messages[0]"),
    (ChatFields, {"messages": [HELLO | {"content": [5] * 4}]}, "messages[0].content[0]"),
]


def num_errors(error: ValidationError) -> int:
    """Number of errors, including those that `described` replaced."""
    own = [line["ctx"]["error"] for line in error.errors() if line["type"] == "value_error"]
    caught = [one.__context__ for one in own if isinstance(one.__context__, ValidationError)]
    return error.error_count() + sum(map(num_errors, caught))


@pytest.mark.parametrize(("model", "content", "field"), TOO_MUCH, ids=lambda value: str(value)[:40])
def test_validation_stops_after_few_errors(model, content, field):
    """An error object for each of 60,000 mistakes takes longer than parsing."""
    error = refusal(model, **content)
    assert error.field == field
    # One for each of the four types of a prompt, and the one that replaces them.
    assert num_errors(error.__context__) <= 5


@pytest.mark.parametrize("place", ["messages", "messages[0].content"])
def test_the_length_of_a_list_is_checked_before_its_items(place):
    """5 is neither a message nor a part, but the error is about the length."""
    items = [5] * (LIMITS.max_messages + 1)
    messages = items if place == "messages" else [HELLO | {"content": items}]
    error = refusal(ChatFields, messages=messages)
    assert error.message == f"{place}: 5 are more than the 4 that this server takes"


OF_ADAPTERS = Limits(max_messages=6, max_tools=3)
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
OPTIONS = {"stream_options": {"include_usage": True}, "stop": ["a"], "stop_token_ids": [1]}
BODIES = {
    CompletionFields: dict.fromkeys(CompletionFields.model_fields) | {"prompt": "a"} | OPTIONS,
    ChatFields: dict.fromkeys(ChatFields.model_fields) | CHAT | OPTIONS,
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
    fields = model.read(content, Reading(OF_ADAPTERS))
    if hasattr(fields, "as_chat"):
        fields = ChatFields.read(fields.as_chat(), Reading(OF_ADAPTERS))
    if not isinstance(fields, ChatFields):
        return
    tools, arguments = fields.allowed_tools(FRONTEND), Arguments(OF_ADAPTERS)
    fields.constraint(FRONTEND, tools, "response_format", None)
    for place, message in enumerate(fields.messages):
        message.variables(arguments, f"messages[{place}]")
    read_params(fields, OF_ADAPTERS, max_tokens=5, spelling={}, logprobs=None)


def mistake(model: type[Fields], content: dict) -> ServiceError | None:
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
    for seed in range(num_cases("bodies with wrong fields", 2000)):
        rng = random.Random(seed)
        content = damaged(BODIES[model], rng)
        if rng.random() < 0.5 and isinstance(content, dict):
            content = damaged(content, rng)
        error = mistake(model, content) if isinstance(content, dict) else None
        if error is not None:
            assert error.code is Code.INVALID_ARGUMENT
            assert error.field
            assert "\n" not in error.message
            name = re.match(r"\w+", error.field)[0]
            assert model not in ROUTES or name in content or name in BODIES[model], content


def test_the_json_texts_of_a_request_are_bounded_together_before_they_are_read():
    arguments = Arguments(Limits(max_prompt_chars=100))
    assert arguments.parse('{"a": "é"}', field="first") == {"a": "é"}
    with pytest.raises(ServiceError) as caught:
        arguments.parse('{"a": 1' + " " * 90, field="second")
    said = "second: 107 characters of JSON are more than the 100 of a prompt"
    assert caught.value.message == said
