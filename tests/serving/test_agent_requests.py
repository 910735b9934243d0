"""Requests as agents send them, with OpenAI's and Anthropic's clients."""

import json
import re

import anthropic
import grpc
import openai
import pytest

from serving.client import main
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


OFFER = CHAT | dict(tools=[TOOL])


def streamed(chunks) -> dict:
    """Choice 0 of a stream, added up as OpenAI documents it."""
    whole = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            whole["content"] += delta.content or ""
            whole["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(whole["tool_calls"])
                    assert call.type == "function"
                    whole["tool_calls"].append([call.id, call.function.name, ""])
                whole["tool_calls"][call.index][2] += call.function.arguments or ""
            whole["finish_reason"] = choice.finish_reason or whole["finish_reason"]
    return whole


def test_a_client_runs_a_loop_of_tools(scripted, client):
    scripted.say(f"<think>\nLook.\n</think>\n\nI read it.\n\n{CALL}", "It says 1.")
    first = client.chat.completions.create(**OFFER).choices[0]
    assert first.finish_reason == "tool_calls"
    assert (first.message.content, first.message.reasoning_content) == ("I read it.", "Look.")
    (call,) = first.message.tool_calls
    assert (call.type, call.function.name) == ("function", "read")
    assert json.loads(call.function.arguments) == READ
    result = {"role": "tool", "tool_call_id": call.id, "content": "1"}
    messages = [*OFFER["messages"], first.message.model_dump(), result]
    second = client.chat.completions.create(**OFFER | dict(messages=messages)).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "It says 1.")
    assert second.message.tool_calls is None
    tools = f"<tools>{json.dumps([TOOL])}</tools>"
    assert scripted.prompts == [
        f"{tools}<|user|>Read!<|assistant|>",
        f"{tools}<|user|>Read!<|assistant|>I read "
        "it.<tool_call>é.py</tool_call><|tool|>1<|assistant|>",
    ]


def test_a_stream_has_the_same_calls(scripted, client):
    scripted.say(f"<think>Look.</think>Now: {CALL}\n{CALL.replace('read', 'other')}")
    with scripted.live.unmerged():
        whole = streamed(client.chat.completions.create(stream=True, **OFFER))
    ids = [one[0] for one in whole["tool_calls"]]
    assert len(set(ids)) == 2
    assert [one[1] for one in whole["tool_calls"]] == ["read", "other"]
    assert json.loads(whole["tool_calls"][0][2]) == READ
    assert json.loads(whole["tool_calls"][1][2]) == READ | {
        "line": "3"
    }  # no schema of an unknown tool
    rest = (whole["content"], whole["reasoning_content"], whole["finish_reason"])
    assert rest == ("Now:", "Look.", "tool_calls")


@pytest.mark.parametrize("is_stream", [False, True])
def test_only_one_call_where_the_client_wants_one(scripted, client, is_stream):
    scripted.say(CALL + CALL)
    options = OFFER | dict(parallel_tool_calls=False, stream=is_stream)
    answer = client.chat.completions.create(**options)
    calls = streamed(answer)["tool_calls"] if is_stream else answer.choices[0].message.tool_calls
    assert len(calls) == 1


def test_without_a_choice_of_tools_the_model_sees_none_and_its_text_is_text(scripted, client):
    scripted.say(CALL)
    for options in ({"tool_choice": "none"}, {"tools": []}):
        choice = client.chat.completions.create(**OFFER | options).choices[0]
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
        assert choice.message.tool_calls is None
        assert scripted.prompts[-1] == "<|user|>Read!<|assistant|>"


def test_tools_count_as_the_characters_of_the_prompt(scripted, client):
    much = json.loads(json.dumps(TOOL))
    much["function"]["description"] = "a" * scripted.live.frontend.limits.max_prompt_chars
    with pytest.raises(openai.BadRequestError, match="characters are more than"):
        client.chat.completions.create(**OFFER | dict(tools=[much]))
    with pytest.raises(openai.BadRequestError, match="'tools' is no variable"):
        client.chat.completions.create(
            **OFFER, extra_body=dict(chat_template_kwargs=dict(tools=[]))
        )


def test_the_priority_of_a_request_reaches_the_queue(scripted, client, capsys):
    scripted.say("Hi")
    extra = dict(extra_body=dict(priority=-3))
    client.chat.completions.create(**OFFER, **extra)
    client.completions.create(model="tiny", prompt="a", **extra)
    client.completions.create(model="tiny", prompt="a")
    assert main(["--address", scripted.live.address, "--priority", "7", "a"]) == 0
    capsys.readouterr()
    assert [one.priority for one in scripted.script.requests] == [-3, -3, 0, 7]


def test_calls_over_grpc(scripted):
    scripted.say("It says 1.")
    with grpc.insecure_channel(scripted.live.address) as channel:
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        schema = json.dumps(PARAMETERS)
        tool = pb.Tool(name="read", description="Reads a file.", parameters_json=schema)
        made = pb.ToolCall(id="call-1", name="read", arguments_json=json.dumps(READ))
        messages = [
            pb.ChatMessage(role="user", content="Read!"),
            pb.ChatMessage(role="assistant", content="Look:", tool_calls=[made]),
            pb.ChatMessage(role="tool", content="1", tool_call_id="call-1"),
        ]
        chat = pb.Chat(messages=messages, tools=[tool])
        once = stub.GenerateOnce(pb.GenerateRequest(chat=chat)).sequences[0]
        assert (once.text, list(once.tool_calls)) == ("It says 1.", [])
        scripted.say(CALL)
        once = stub.GenerateOnce(pb.GenerateRequest(chat=chat)).sequences[0]
        assert [json.loads(one.arguments_json) for one in once.tool_calls] == [READ]
        offering = lambda *tools: pb.Chat(messages=messages, tools=tools)
        bad_call = [pb.ToolCall(arguments_json="5")]
        said = pb.ChatMessage(role="assistant", tool_calls=bad_call)
        for field, wrong in {
            "chat.tools": offering(tool, tool),
            "chat.tools[0].name": offering(pb.Tool(name="a b")),
            "chat.tools[0].parameters_json": offering(pb.Tool(name="a", parameters_json="[")),
            "chat.messages[0].tool_calls[0].arguments_json": pb.Chat(messages=[said]),
        }.items():
            with pytest.raises(grpc.RpcError, match=re.escape(f"{field}: ")):
                stub.GenerateOnce(pb.GenerateRequest(chat=wrong))
    tools = f"<tools>{json.dumps([TOOL])}</tools>"
    assert scripted.prompts[0].startswith(tools)
