"""Tool calls over OpenAI's chat route: OpenAI's client and a model whose replies are given."""

import json
import re

import grpc
import openai
import pytest

from serving.client import main
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests.serving.scripted import CALL, PARAMETERS, READ

FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CHAT = dict(model="tiny", temperature=0, tools=[TOOL])
CHAT["messages"] = [{"role": "user", "content": "Read!"}]


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
    first = client.chat.completions.create(**CHAT).choices[0]
    assert first.finish_reason == "tool_calls"
    assert (first.message.content, first.message.reasoning_content) == ("I read it.", "Look.")
    (call,) = first.message.tool_calls
    assert (call.type, call.function.name) == ("function", "read")
    assert json.loads(call.function.arguments) == READ
    result = {"role": "tool", "tool_call_id": call.id, "content": "1"}
    messages = [*CHAT["messages"], first.message.model_dump(), result]
    second = client.chat.completions.create(**CHAT | dict(messages=messages)).choices[0]
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
        whole = streamed(client.chat.completions.create(stream=True, **CHAT))
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
    options = CHAT | dict(parallel_tool_calls=False, stream=is_stream)
    answer = client.chat.completions.create(**options)
    calls = streamed(answer)["tool_calls"] if is_stream else answer.choices[0].message.tool_calls
    assert len(calls) == 1


def test_without_a_choice_of_tools_the_model_sees_none_and_its_text_is_text(scripted, client):
    scripted.say(CALL)
    for options in ({"tool_choice": "none"}, {"tools": []}):
        choice = client.chat.completions.create(**CHAT | options).choices[0]
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
        assert choice.message.tool_calls is None
        assert scripted.prompts[-1] == "<|user|>Read!<|assistant|>"


def test_a_call_that_is_cut_off_or_broken_stays_content(scripted, client):
    scripted.say(CALL)
    cut = client.chat.completions.create(max_tokens=40, **CHAT).choices[0]
    assert (cut.message.content, cut.finish_reason) == (
        scripted.tokenizer.decode(scripted.tokenizer.encode(CALL)[:40]),
        "length",
    )
    broken = CALL.replace('"read"', "read")
    scripted.say(broken)
    choice = client.chat.completions.create(**CHAT).choices[0]
    assert (choice.message.content, choice.finish_reason) == (broken, "stop")


def test_tools_count_as_the_characters_of_the_prompt(scripted, client):
    much = json.loads(json.dumps(TOOL))
    much["function"]["description"] = "a" * scripted.live.frontend.limits.max_prompt_chars
    with pytest.raises(openai.BadRequestError, match="characters are more than"):
        client.chat.completions.create(**CHAT | dict(tools=[much]))
    with pytest.raises(openai.BadRequestError, match="'tools' is no variable"):
        client.chat.completions.create(**CHAT, extra_body=dict(chat_template_kwargs=dict(tools=[])))


def test_the_priority_of_a_request_reaches_the_queue(scripted, client, capsys):
    scripted.say("Hi")
    extra = dict(extra_body=dict(priority=-3))
    client.chat.completions.create(**CHAT, **extra)
    client.completions.create(model="tiny", prompt="a", **extra)
    client.completions.create(model="tiny", prompt="a")
    assert main(["--address", scripted.live.address, "--priority", "7", "a"]) == 0
    capsys.readouterr()
    assert [one.priority for one in scripted.script.requests] == [-3, -3, 0, 7]


def test_calls_over_grpc_and_from_the_terminal(scripted, tmp_path, capsys):
    scripted.say(f"Look: {CALL}", "It says 1.")
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([TOOL]))
    command = ["--address", scripted.live.address, "--chat", "--tools", str(path)]
    assert main([*command, "Read!"]) == 0
    text, line = capsys.readouterr().out.strip().split("\n")
    call = json.loads(line)
    assert (text, call["name"], call["arguments"]) == ("Look:", "read", READ)
    with grpc.insecure_channel(scripted.live.address) as channel:
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        schema = json.dumps(PARAMETERS)
        tool = pb.Tool(name="read", description="Reads a file.", parameters_json=schema)
        made = pb.ToolCall(id=call["id"], name="read", arguments_json=json.dumps(call["arguments"]))
        messages = [
            pb.ChatMessage(role="user", content="Read!"),
            pb.ChatMessage(role="assistant", content=text, tool_calls=[made]),
            pb.ChatMessage(role="tool", content="1", tool_call_id=call["id"]),
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


@pytest.mark.parametrize(
    "content", ["{}", "[5]", '[{"type": "function"}]', "[", '[{"function": {"name": 5}}]']
)
def test_a_file_without_tools_is_one_line_for_the_user(tmp_path, capsys, content):
    path = tmp_path / "tools.json"
    path.write_text(content)
    assert main(["--chat", "--tools", str(path), "Hi"]) == 2
    (line,) = capsys.readouterr().err.strip().split("\n")
    assert str(path) in line
    assert main(["--tools", str(path), "Hi"]) == 2
