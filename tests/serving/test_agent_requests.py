"""Requests as agents send them, with OpenAI's and Anthropic's clients."""

import json

import anthropic
import grpc
import openai
import pytest

from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests.serving.scripted import CALL, PARAMETERS, READ
from tests.waiting import LIMIT

FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
ON = {"on": {"type": "boolean"}}
SWITCH = {"type": "object", "properties": ON, "required": ["on"], "additionalProperties": False}
NAMED = {"name": "switch", "schema": SWITCH, "strict": True}
FORMAT = {"type": "json_schema", "json_schema": NAMED}
READ_TOOL = {"name": "read", "input_schema": PARAMETERS}
HELLO = [{"role": "user", "content": "Read!"}]
CHAT = dict(model="tiny", temperature=0, messages=HELLO)
ANSWER = '{"on": true}'
VALID = CALL.replace('"3"', "3")
"""The call with arguments that satisfy the schema as they are written."""


@pytest.fixture
def claude(scripted):
    """Anthropic's client of the scripted server."""
    url = f"http://{scripted.live.http_address}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=LIMIT) as made:
        yield made
    scripted.live.check_empty()


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_chat_with_tools_and_a_format_calls_or_answers_in_the_format(scripted, client, is_strict):
    tool = {"type": "function", "function": FUNCTION | {"strict": is_strict}}
    options = CHAT | dict(tools=[tool], response_format=FORMAT)
    scripted.say(VALID, ANSWER)
    (call,) = client.chat.completions.create(**options).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("read", READ)
    answer = client.chat.completions.create(**options).choices[0]
    assert (answer.message.content, answer.finish_reason) == (ANSWER, "stop")
    scripted.say("I read it.")
    with pytest.raises(openai.APIStatusError, match="constraint"):
        client.chat.completions.create(**options)


def test_responses_and_messages_call_or_answer_in_the_format(scripted, client, claude):
    scripted.say(CALL, ANSWER, CALL, ANSWER)
    text = {"format": {"type": "json_schema", "name": "switch", "schema": SWITCH}}
    tool = {"type": "function", **FUNCTION, "strict": False}
    for kind in ("function_call", "message"):
        response = client.responses.create(model="tiny", input="Read!", tools=[tool], text=text)
        assert [one.type for one in response.output] == [kind]
    form = {"format": {"type": "json_schema", "schema": SWITCH}}
    for reason in ("tool_use", "end_turn"):
        message = claude.messages.create(
            model="tiny", max_tokens=200, messages=HELLO, tools=[READ_TOOL], output_config=form
        )
        assert message.stop_reason == reason


def test_a_chat_of_peagle_calls_or_answers_in_the_format(scripted):
    scripted.say(CALL, ANSWER)
    request = pb.GenerateRequest()
    request.chat.messages.add(role="user", content="Read!")
    request.chat.tools.add(name="read", parameters_json=json.dumps(PARAMETERS))
    request.structured.json_schema = json.dumps(SWITCH)
    with grpc.insecure_channel(scripted.live.address) as channel:
        ask = peagle_v1_pb2_grpc.GenerationStub(channel).GenerateOnce
        call, answer = (ask(request, timeout=LIMIT).sequences[0] for _ in range(2))
    assert ([one.name for one in call.tool_calls], call.text) == (["read"], "")
    assert (list(answer.tool_calls), answer.text) == ([], ANSWER)


def test_a_reply_that_must_be_a_call_has_no_text_to_format(scripted, client):
    scripted.say(VALID)
    options = CHAT | dict(tools=[TOOL], tool_choice="required", response_format=FORMAT)
    assert client.chat.completions.create(**options).choices[0].finish_reason == "tool_calls"
    with pytest.raises(openai.BadRequestError, match="tool_choice: "):
        client.chat.completions.create(
            **CHAT | dict(tools=[TOOL], tool_choice="required"),
            extra_body={"structured_outputs": {"regex": "a"}},
        )


def test_messages_of_the_developer_are_the_systems_where_the_template_has_no_developer(
    scripted, client
):
    scripted.say("Hi")
    rules = {"role": "developer", "content": "Use tools."}
    messages = [{"role": "system", "content": "Be brief."}, rules, *HELLO]
    client.chat.completions.create(**CHAT | dict(messages=messages))
    client.responses.create(model="tiny", instructions="Be brief.", input=messages[1:])
    prompt = "<|system|>Be brief.<|system|>Use tools.<|user|>Read!<|assistant|>"
    assert scripted.prompts == [prompt, prompt]


def test_a_stream_of_two_sequences_with_calls_ends_with_the_usage(scripted, client):
    scripted.say(CALL + CALL)
    options = dict(temperature=1, n=2, tools=[TOOL], stream=True)
    options["stream_options"] = {"include_usage": True}
    *parts, last = client.chat.completions.create(**CHAT | options)
    assert last.choices == []
    assert last.usage.completion_tokens == 2 * (len(scripted.tokenizer.encode(CALL + CALL)) + 1)
    for index in (0, 1):
        choices = [one for part in parts for one in part.choices if one.index == index]
        calls = [call for one in choices for call in one.delta.tool_calls or ()]
        assert [call.index for call in calls] == [0, 1]
        assert len({call.id for call in calls}) == 2
        assert [one.finish_reason for one in choices if one.finish_reason] == ["tool_calls"]


def test_a_stop_string_within_arguments_leaves_the_beginning_of_the_call_as_content(
    scripted, client
):
    scripted.say(CALL)
    choice = client.chat.completions.create(**CHAT, tools=[TOOL], stop=["line"]).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content == CALL[: CALL.index("line")]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "line")


thought = lambda turn: {"type": "thinking", "thinking": f"Hm {turn}.", "signature": ""}
answered = lambda turn: [*HELLO, {"role": "assistant", "content": [thought(turn)]}]
THOUGHTS = [*answered(1), *answered(2)]


@pytest.mark.parametrize(
    ("keep", "kept"), [("all", [1, 2]), ({"type": "thinking_turns", "value": 1}, [2]), (None, [2])]
)
def test_reasoning_is_cleared_as_the_client_asks(scripted, claude, keep, kept):
    """Claude Code sends such edits with every request."""
    scripted.say("Hi")
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    ask = dict(model="tiny", max_tokens=20, betas=["context-management-2025-06-27"])
    talk, edits = [*THOUGHTS, *HELLO], {"edits": [edit]}
    claude.beta.messages.create(messages=talk, context_management=edits, **ask)
    thoughts = [turn for turn in (1, 2) if f"Hm {turn}." in scripted.prompts[-1]]
    assert thoughts == kept


CLEAR = "clear_thinking_20251015"
NO_TURNS = {"type": "thinking_turns", "value": -1}
EDITS = [
    ({"type": "clear_tool_uses_20250919"}, "type"),
    ({"type": CLEAR, "keep": NO_TURNS}, "keep.value"),
    ({"type": CLEAR, "keep": "some"}, "keep"),
]


@pytest.mark.parametrize(("edit", "field"), EDITS)
def test_other_edits_of_the_conversation_are_refused_by_name(claude, edit, field):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.beta.messages.create(
            model="tiny", max_tokens=5, messages=HELLO, context_management={"edits": [edit]}
        )
    message = caught.value.body["error"]["message"]
    assert message.startswith(f"context_management.edits[0].{field}: ")
