"""Tools through the smg gateway: its own template and parsers, over a model whose replies are given."""

import json

import openai
import pytest

from tests.serving.gateway import running_gateway
from tests.serving.scripted import CALL, READ, Scripted
from tests.serving.test_tools import CHAT, streamed
from tests.waiting import LIMIT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    server = Scripted(tmp_path_factory.mktemp("tools"))
    server.say("Hi")
    yield server
    server.live.close()


@pytest.fixture(scope="module")
def client(scripted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smg")
    options = ("--tool-call-parser", "qwen", "--disable-retries")
    with (
        running_gateway([scripted.live.address], folder, "tiny", *options) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=LIMIT) as client,
    ):
        yield client


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_gateway_finds_the_calls_in_our_tokens(scripted, client, is_stream):
    scripted.say(f"Look: {CALL.replace('"3"', '3')}")
    answer = client.chat.completions.create(**CHAT | dict(stream=is_stream, tool_choice="auto"))
    if is_stream:
        whole = streamed(answer)
        calls = [(name, arguments) for _, name, arguments in whole["tool_calls"]]
        text, reason = whole["content"], whole["finish_reason"]
    else:
        choice = answer.choices[0]
        calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls]
        text, reason = choice.message.content, choice.finish_reason
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("read", READ)]
    assert (text.strip(), reason) == ("Look:", "tool_calls")
    assert scripted.prompts[-1].startswith("<tools>")
    scripted.live.check_empty()


def test_a_client_runs_a_loop_of_tools_through_the_gateway(scripted, client):
    scripted.say(CALL.replace('"3"', "3"), "It says 1.")
    first = client.chat.completions.create(**CHAT).choices[0]
    (call,) = first.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "1"}
    answered = first.message.model_dump(exclude_none=True)
    messages = [*CHAT["messages"], answered, result]
    second = client.chat.completions.create(**CHAT | dict(messages=messages)).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "It says 1.")
    assert scripted.prompts[-1].endswith("<tool_call>é.py</tool_call><|tool|>1<|assistant|>")
    scripted.live.check_empty()
