"""Fields and errors of the APIs as clients send and expect them."""

import json
import logging
from pathlib import Path

import anthropic
import httpx
import pytest
from anthropic.types import beta
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from serving.http.chat import ChatFields
from serving.http.completions import CompletionFields
from serving.http.fields import Fields, Ignored, Reading, Refused, declarations
from serving.http.messages_fields import Block, MessagesFields, TextBlock, Tool
from serving.http.responses_fields import ResponsesFields
from serving.http.route import IgnoredFields
from serving.limits import Limits
from tests.serving import field_table
from tests.serving.scripted import CALL, PARAMETERS, Scripted
from tests.test_house import ROOT

USER = {"role": "user", "content": "x"}
ROUTES = {
    "/v1/completions": (CompletionFields, {"prompt": "x"}),
    "/v1/chat/completions": (ChatFields, {"messages": [USER]}),
    "/v1/responses": (ResponsesFields, {"input": "x"}),
    "/v1/messages": (MessagesFields, {"messages": [USER], "max_tokens": 5}),
}
ROUTE_AND_MARK = [
    (path, name, mark)
    for path, (fields, _) in ROUTES.items()
    for name, mark in declarations(fields)
    if mark is not None
]
READ_TOOL = {"name": "read", "description": "Reads.", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory) -> Scripted:
    """A server for prompts of agents."""
    server = Scripted(
        tmp_path_factory.mktemp("dialects"), sizes=dict(max_model_len=8192, prefill_chunk=512)
    )
    yield server
    server.live.close()


@pytest.fixture
def post(scripted):
    """Posts a body to a path; `model` has a default."""
    with scripted.live.client() as client:
        yield lambda path, headers=None, **body: client.post(
            path, json={"model": "tiny"} | body, headers=headers
        )
    scripted.live.check_empty()


OF_CLIENTS = [
    (CompletionFields, completion_create_params.CompletionCreateParamsBase),
    (ChatFields, chat_create_params.CompletionCreateParamsBase),
    (ResponsesFields, ResponseCreateParamsBase),
    (MessagesFields, MessageCreateParamsBase),
    (TextBlock, beta.BetaTextBlockParam),
    (Block, beta.BetaToolUseBlockParam),
    (Block, beta.BetaToolResultBlockParam),
    (Block, beta.BetaThinkingBlockParam),
    (Block, beta.BetaRedactedThinkingBlockParam),
    (Tool, beta.BetaToolParam),
    (Tool, beta.BetaToolTextEditor20250728Param),
]


@pytest.mark.parametrize(("fields", "params"), OF_CLIENTS, ids=lambda one: one.__name__)
def test_every_field_of_the_clients_types_is_declared(fields: type[Fields], params: type):
    """A field that would change the text must not pass as an unknown one."""
    assert params.__annotations__.keys() - dict(declarations(fields)).keys() == set()


def test_the_page_has_the_declared_fields():
    page = (ROOT / "docs" / "fields.md").read_text(encoding="utf-8")
    assert field_table.page() == page, "python -m tests.serving.field_table docs/fields.md"


def take(path: str, **body) -> Reading:
    """Reads a body without a server."""
    fields, least = ROUTES[path]
    reading = Reading(Limits())
    fields.read(least | body, reading)
    return reading


@pytest.mark.parametrize(("path", "name", "mark"), ROUTE_AND_MARK, ids=str)
def test_each_declared_field_is_ignored_or_refused_by_name(path, name, mark):
    is_refused = isinstance(mark, Refused)
    for value in mark.neutral if is_refused else mark.met:
        assert take(path, **{name: value}).num_ignored == 0
    if isinstance(mark, Ignored):
        assert take(path, **{name: ["?"]}).names(ROUTES[path][0]) == [name]
        return
    with pytest.raises(Exception, match=f"^{name}: is not supported: ") as caught:
        take(path, **{name: ["?"]})
    assert caught.value.field == name


HINTS = {
    "/v1/chat/completions": """{"store": true, "verbosity": "low", "service_tier": "priority",
        "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"},
        "mm_processor_kwargs": {}, "prediction": {"type": "content", "content": "x"},
        "seed": -1, "kv_transfer_params": {}}""",
    "/v1/responses": """{"store": true, "truncation": "auto", "text": {"verbosity": "low"},
        "top_logprobs": 2, "reasoning": {"summary": "detailed"}, "service_tier": "flex",
        "prompt_cache_retention": "24h", "client_metadata": {"session_id": "a"},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}""",
}


@pytest.mark.parametrize("path", HINTS)
def test_hints_that_change_no_text_are_taken(scripted, post, path):
    scripted.say("Hi")
    answer = post(path, **ROUTES[path][1], **json.loads(HINTS[path]))
    assert answer.status_code == 200, answer.text
    if path == "/v1/responses":
        said = {"store": False, "truncation": "disabled", "service_tier": "default"}
        assert answer.json().items() >= said.items()
        assert "encrypted_content" not in answer.text


CACHED = {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}
READ = {"id": "a", "function": {"name": "read", "arguments": '{"path": "p"}'}}
answered = lambda **fields: [USER, {"role": "assistant", **fields}, USER]
EXTRAS = [
    ([{"role": "system", "content": [CACHED]}, USER], "<|system|>s<|user|>x"),
    (answered(content="", reasoning="t"), "<|user|>x<|assistant|>t<|user|>x"),
    (answered(content=[{"type": "refusal", "refusal": "n"}]), "<|user|>x<|assistant|>n<|user|>x"),
    (answered(content=None, refusal="no"), "<|user|>x<|assistant|>no<|user|>x"),
    (answered(content="y", reasoning_details=[{}]), "<|user|>x<|assistant|>y<|user|>x"),
    (
        [*answered(tool_calls=[READ])[:2], {"role": "tool", "tool_call_id": "a", "content": None}],
        "<|user|>x<|assistant|><tool_call>p</tool_call><|tool|>",
    ),
    ([USER | {"id": "1", "no_such_field": 1}], "<|user|>x"),
    (answered(tool_calls=[READ])[:2], "<|user|>x<|assistant|><tool_call>p</tool_call>"),
]


@pytest.mark.parametrize(("messages", "prompt"), EXTRAS, ids=range(len(EXTRAS)))
def test_messages_of_other_servers_go_on_here(scripted, post, messages, prompt):
    scripted.say("Hi")
    assert post("/v1/chat/completions", messages=messages).status_code == 200
    assert scripted.prompts == [f"{prompt}<|assistant|>"]


def ignored_lines(caplog) -> list[dict]:
    return [one.fields for one in caplog.records if one.message == "fields without effect"]


def test_ignored_fields_are_named_once_a_client(scripted, post, caplog):
    scripted.say("Hi")
    caplog.set_level(logging.INFO, "serving")
    extra = {"no_such_field": 1, "safety_identifier": "s", "user": None}
    for path in ("/v1/chat/completions", "/v1/chat/completions", "/v1/completions"):
        post(path, **ROUTES[path][1] | extra)
    post("/v1/chat/completions", messages=[USER | {"x" * 10_000: 1}], no_such_field=1)
    names = [(one["method"], one["ignored"]) for one in ignored_lines(caplog)]
    assert names == [
        ("/v1/chat/completions", ["no_such_field", "safety_identifier"]),
        ("/v1/completions", ["no_such_field", "safety_identifier"]),
        ("/v1/chat/completions", [f"messages[].{'x' * 49} ..."]),
    ]


def test_the_names_of_a_client_and_the_clients_are_bounded(caplog):
    caplog.set_level(logging.INFO, "serving")
    ignored = IgnoredFields("/v1/chat/completions")

    def send(address: str, first: int) -> None:
        body = {f"f{first + number}": 1 for number in range(60_000)}
        ignored.log("id", address, take("/v1/chat/completions", **body), ChatFields)

    for round_ in range(4):
        send("a", 100_000 * round_)
    lines = ignored_lines(caplog)
    assert [len(one["ignored"]) for one in lines] == [32, 32]
    assert lines[0]["num_ignored"] == 60_000
    for number in range(2000):
        send_one = take("/v1/chat/completions", x=1)
        ignored.log("id", f"other {number}", send_one, ChatFields)
    assert len(ignored._named) <= 256


def test_a_strict_server_refuses_unknown_fields_and_takes_known_hints():
    strict = Limits(unknown_fields="refuse")
    for path, (fields, least) in ROUTES.items():
        with pytest.raises(Exception, match="is not a field that this server knows") as caught:
            fields.read(least | {"no_such_field": 1}, Reading(strict))
        assert caught.value.field == "no_such_field", path
        fields.read(least | {"service_tier": "flex"}, Reading(strict))


def test_a_constraint_has_no_unknown_fields():
    for body, field in (
        ({"structured_outputs": {"jsonn": {}}}, "structured_outputs.jsonn"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ):
        with pytest.raises(Exception, match="is not a field") as caught:
            take("/v1/chat/completions", **body)
        assert caught.value.field == field


def test_a_prompt_that_is_too_long_has_the_sentence_that_clients_look_for(scripted, post, claude):
    sentence = "This model's maximum context length is 8192 tokens. "
    for size in (8192, 1_000_000):  # refused by its tokens, and before it is tokenised
        text = "x" * size
        bodies = {"prompt": text}, {"messages": [USER | {"content": text}]}, {"input": text}
        for path, body in zip(list(ROUTES)[:3], bodies, strict=True):
            answer = post(path, **body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), path
            assert error["param"] in body
            assert error["message"].startswith(f"{sentence}The prompt is too long: ")
        said = r"prompt is too long: \d+ tokens > \d+ maximum"
        with pytest.raises(anthropic.BadRequestError, match=said):
            claude.messages.create(model="tiny", max_tokens=5, messages=[USER | {"content": text}])


def test_anthropics_tool_runner_sends_the_whole_conversation(scripted, claude):
    """It falls back from a thread on the server where the error's details say so."""
    scripted.say(CALL, "It says 1.")

    @anthropic.beta_tool
    def read(path: str, line: int = 0) -> str:
        """Reads a file."""
        return f"{path}:{line}"

    ask = dict(model="tiny", max_tokens=300, messages=[USER])
    runner = claude.beta.messages.tool_runner(tools=[read], **ask)
    assert [one.stop_reason for one in runner] == ["tool_use", "end_turn"]
    assert "<|tool|>é.py:3" in scripted.prompts[-1]


@pytest.mark.parametrize("role", ["system", "ctx", "msg"])
def test_messages_of_other_roles_stay_in_place(scripted, post, role):
    scripted.say("Hi")
    messages = [USER, {"role": role, "content": [{"type": "text", "text": "s"}]}]
    assert post("/v1/messages", max_tokens=5, messages=messages).status_code == 200
    name = "system" if role == "system" else "user"
    assert scripted.prompts == [f"<|user|>x<|{name}|>s<|assistant|>"]


def tools_of(prompt: str) -> list[dict]:
    """The functions of a prompt."""
    text = prompt.partition("<tools>")[2].partition("</tools>")[0]
    return [one["function"] for one in json.loads(text or "[]")]


def test_tools_of_anthropics_clients_have_their_schemas_and_those_of_servers_are_left_out(
    scripted, post, claude
):
    scripted.say("Hi")
    editor = "str_replace_based_edit_tool"
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": editor, "max_characters": 99},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"name": "read", "input_schema": PARAMETERS, "input_examples": [{"path": "a.py"}]},
    ]
    blocks = [{"type": "redacted_thinking", "data": "a"}, {"type": "text", "text": "y"}]
    redacted = {"role": "assistant", "content": blocks}
    ask = dict(model="tiny", max_tokens=5, messages=[USER, redacted, USER])
    claude.beta.messages.create(**ask, tools=tools)
    functions = {one["name"]: one for one in tools_of(scripted.prompts[0])}
    assert list(functions) == ["bash", editor, "memory", "read"]
    assert functions["bash"]["parameters"]["properties"].keys() == {"command", "restart"}
    assert "rename" in functions["memory"]["parameters"]["properties"]["command"]["enum"]
    assert functions["read"]["description"] == 'Examples of input: [{"path": "a.py"}]'
    assert scripted.prompts[0].endswith("<|user|>x<|assistant|>y<|user|>x<|assistant|>")
    choice = {"type": "tool", "name": "web_search"}
    answer = post("/v1/messages", **ask, tools=tools, tool_choice=choice)
    assert answer.json()["error"]["message"] == "tool_choice: there is no tool 'web_search'"


def test_anthropics_stream_begins_with_the_prompts_tokens_and_answers_have_its_headers(
    scripted, claude
):
    scripted.say("Hi")
    with claude.messages.stream(model="tiny", max_tokens=5, messages=[USER]) as stream:
        first = next(iter(stream))
        last = stream.get_final_message()
        assert stream.response.headers["request-id"]
    usage = first.message.usage
    (request,) = scripted.script.requests
    assert usage.input_tokens + usage.cache_read_input_tokens == len(request.prompt)
    assert (usage.input_tokens, usage.output_tokens) == (last.usage.input_tokens, 0)
    (model,) = claude.models.list().data
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert model.created_at.tzinfo is not None


HOSTED = {"type": "file_search", "vector_store_ids": []}


def test_hosted_tools_are_left_out_unless_the_choice_names_one(scripted, post, caplog):
    scripted.say("Hi")
    caplog.set_level(logging.INFO, "serving")
    tools = [{"type": "function", **READ_TOOL}, HOSTED]
    answer = post("/v1/responses", input="x", tools=tools)
    assert [one["name"] for one in answer.json()["tools"]] == ["read"]
    assert [one["name"] for one in tools_of(scripted.prompts[0])] == ["read"]
    assert "tools[].type=file_search" in ignored_lines(caplog)[0]["ignored"]
    for choice in ({"type": "file_search"}, "required"):
        answer = post("/v1/responses", input="x", tools=[HOSTED], tool_choice=choice)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


def test_only_allowed_tools_are_in_the_prompt(scripted, post):
    scripted.say(CALL.replace('"3"', "3"))
    other = READ_TOOL | {"name": "other"}
    choice = {"mode": "required", "tools": [{"type": "function", "function": {"name": "read"}}]}
    of_chat = {"type": "allowed_tools", "allowed_tools": choice}
    tools = [{"type": "function", "function": one} for one in (other, READ_TOOL)]
    chat = dict(messages=[USER], tools=tools, tool_choice=of_chat)
    allowed = [{"type": "function", "name": "read"}]
    flat_choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    flat_tools = [{"type": "function", **one} for one in (other, READ_TOOL)]
    flat = dict(input="x", tools=flat_tools, tool_choice=flat_choice)
    assert post("/v1/chat/completions", **chat).json()["choices"][0]["message"]["tool_calls"]
    assert post("/v1/responses", **flat).json()["output"][0]["type"] == "function_call"
    for prompt in scripted.prompts:
        assert [one["name"] for one in tools_of(prompt)] == ["read"]
    choice["tools"][0]["function"]["name"] = "missing"
    answer = post("/v1/chat/completions", **chat)
    assert answer.json()["error"]["message"] == "tool_choice: there is no tool 'missing'"


def test_custom_tools_are_refused_by_name(post):
    custom = {"type": "custom", "name": "patch", "custom": {"name": "patch"}}
    for path in ("/v1/chat/completions", "/v1/responses"):
        error = post(path, **ROUTES[path][1], tools=[custom]).json()["error"]
        assert error["param"] == "tools[0].type"
        assert "custom tools are not supported" in error["message"]


def recorded(name: str) -> tuple[str, dict, dict]:
    """Path, headers and body of a request as a client sent it, with long texts cut."""
    content = json.loads((Path(__file__).parent / "recorded" / f"{name}.json").read_text())
    return content["path"], content["headers"], content["body"] | {"model": "tiny"}


def events_of(answer: httpx.Response) -> list[dict]:
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_claude_codes_loop_of_tools_is_closed(scripted, post):
    path, headers, body = recorded("claude_code")
    call = {"name": "Bash", "arguments": {"command": "ls"}}
    scripted.say(f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "There is a.txt.")
    events = events_of(post(path, headers, **body))
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    (block,) = [one["content_block"] for one in events if one["type"] == "content_block_start"]
    deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    text = "".join(one.get("partial_json", "") for one in deltas)
    assert (block["name"], json.loads(text)) == ("Bash", {"command": "ls"})
    called = block | {"input": json.loads(text), "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "a.txt"}
    result["is_error"] = False
    talk = [{"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    talk = [*body["messages"], *talk]
    events = events_of(post(path, headers, **body | {"messages": talk}))
    texts = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    assert "".join(texts) == "There is a.txt."
    first, second = scripted.prompts
    assert second.startswith(first.removesuffix("<|assistant|>"))
    assert "<|system|>Available agent types" in first


def test_codexs_loop_of_tools_is_closed(scripted, post):
    path, headers, body = recorded("codex")
    call = {"name": "multi_agent_v1__close_agent", "arguments": {"target": "a"}}
    scripted.say(f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "Closed.")
    events = events_of(post(path, headers, **body))
    assert events[-1]["type"] == "response.completed"
    (item,) = events[-1]["response"]["output"]
    assert (item["namespace"], item["name"]) == ("multi_agent_v1", "close_agent")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
    events = events_of(post(path, headers, **body | {"input": [*body["input"], item, result]}))
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == "Closed."
    assert "<|tool|>ok<|assistant|>" in scripted.prompts[1]
