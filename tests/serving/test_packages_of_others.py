"""Packages that people put before a server, in Python and JavaScript, unmodified: only address, key
and model are given. `.ci/run` installs them (the extra `clients`, and what `node/package.json`
names); elsewhere these tests are skipped.
"""

import asyncio
import json
import subprocess
from pathlib import Path

import openai
import pydantic
import pytest

from tests.serving.scripted import CALL, READ
from tests.waiting import LIMIT

pytestmark = pytest.mark.slow
VALID = CALL.replace('"3"', "3")
SAID = "The file is empty."
LONG = "a" * 5000  # more than the model's 1,024 tokens
NODE = Path(__file__).parent / "node"


class Switch(pydantic.BaseModel):
    on: bool


@pytest.fixture
def url(scripted):
    yield f"http://{scripted.live.http_address}/v1"
    scripted.live.check_empty()


def read(path: str, line: int) -> str:
    """Reads a line of a file."""
    assert (path, line) == tuple(READ.values())
    return "nothing"


def test_litellm_calls_streams_and_knows_a_prompt_that_is_too_long(scripted, url):
    litellm = pytest.importorskip("litellm")
    made = dict(model="openai/tiny", api_base=url, api_key="none", max_retries=0, timeout=LIMIT)
    hello = [{"role": "user", "content": "Read!"}]
    parameters = {"type": "object", "properties": {"path": {"type": "string"}, "line": {}}}
    tools = [{"type": "function", "function": {"name": "read", "parameters": parameters}}]
    scripted.say(VALID, SAID)
    answer = litellm.completion(messages=hello, tools=tools, **made)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == READ
    chunks = litellm.completion(messages=hello, stream=True, **made)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == SAID
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": LONG}], **made)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=hello, **made | {"model": "openai/other"})


def test_langchain_calls_streams_and_structures(scripted, url):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        model="tiny", base_url=url, api_key="none", max_retries=0, timeout=LIMIT
    )
    scripted.say(VALID, SAID, SAID, '{"on": true}')
    asked = model.bind_tools([read]).invoke("Read!")
    assert [(one["name"], one["args"]) for one in asked.tool_calls] == [("read", READ)]
    results = [
        ("user", "Read!"),
        asked,
        {"role": "tool", "content": "nothing", "tool_call_id": "1"},
    ]
    results[2]["tool_call_id"] = asked.tool_calls[0]["id"]
    assert model.bind_tools([read]).invoke(results).content == SAID
    assert "".join(one.content for one in model.stream("Go on.")) == SAID
    assert model.with_structured_output(Switch).invoke("On?") == Switch(on=True)


def test_instructor_gets_an_object(scripted, url):
    instructor = pytest.importorskip("instructor")
    scripted.say('<tool_call>\n{"name": "Switch", "arguments": {"on": true}}\n</tool_call>')
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=LIMIT) as client:
        hello = dict(model="tiny", messages=[{"role": "user", "content": "On?"}])
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            made = instructor.from_openai(client, mode=mode)
            found = made.chat.completions.create(response_model=Switch, **hello)
            assert found.on is True
            scripted.say('{"on": true}')


def test_pydantic_ai_closes_the_loop_of_a_tool(scripted, url):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = pydantic_ai.Agent(model, tools=[read])
    scripted.say(VALID, SAID)
    assert agent.run_sync("Read!").output == SAID
    assert "nothing" in scripted.prompts[1]


def test_openais_agents_close_the_loop_of_a_tool_on_both_apis(scripted, url):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
                model = kind("tiny", client)
                agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(read)])
                scripted.say(VALID, SAID)
                found = await agents.Runner.run(agent, "Read!")
                assert found.final_output == SAID
                assert "nothing" in scripted.prompts[1]

    asyncio.run(run())


@pytest.fixture
def in_node(scripted):
    """Runs a client of `node/clients.mjs`; returns what it got."""
    if not (NODE / "node_modules").is_dir():
        pytest.skip(f"npm has not installed the packages of {NODE / 'package.json'}")

    def run(client: str) -> dict:
        command = ["node", NODE / "clients.mjs", client, scripted.live.http_address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    yield run
    scripted.live.check_empty()


def test_openais_package_of_node_closes_loops_streams_and_reads_refusals(scripted, in_node):
    scripted.say(VALID, SAID)
    got = in_node("openai")
    assert (got["texts"], got["calls"]) == ([SAID] * 3, [READ])
    assert "nothing" in scripted.prompts[1]
    assert (got["long"]["status"], got["long"]["code"]) == (400, "context_length_exceeded")
    assert (got["other"]["status"], got["other"]["code"]) == (404, "model_not_found")


def test_anthropics_package_of_node_closes_loops_streams_and_counts(scripted, in_node):
    scripted.say(CALL, SAID)
    got = in_node("anthropic")
    assert (got["texts"], got["calls"]) == ([SAID] * 2, [READ])
    assert "nothing" in scripted.prompts[1]
    assert got["counted"] > 0
    assert (got["long"]["status"], got["long"]["code"]) == (400, "invalid_request_error")
    assert "prompt is too long" in got["long"]["said"]


@pytest.mark.parametrize("client", ["ai-compatible", "ai-responses"])
def test_vercels_ai_sdk_closes_loops_streams_and_gets_an_object(scripted, in_node, client):
    scripted.say(VALID, SAID, SAID, '{"on": true}')
    got = in_node(client)
    assert (got["texts"], got["calls"]) == ([SAID] * 2, [READ])
    assert "nothing" in scripted.prompts[1]
    assert got["object"] == {"on": True}
