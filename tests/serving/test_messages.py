"""`/v1/messages`, driven by Anthropic's client against a model whose replies are given."""

import anthropic
import httpx
import pytest

from serving.errors import Code, ServiceError
from tests.serving.scripted import CALL, PARAMETERS, Scripted

TOOL = {"name": "read", "description": "Reads a file.", "input_schema": PARAMETERS}
HELLO = [{"role": "user", "content": "Read!"}]
ASK = dict(model="tiny", max_tokens=300, messages=HELLO)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    server = Scripted(tmp_path_factory.mktemp("messages"), tokens=[b"secret"])
    yield server
    server.live.close()


def test_a_stream_adds_up_to_the_same_message(scripted, claude):
    scripted.say(f"<think>Look.</think>Now: {CALL}\n{CALL} done")
    whole = claude.messages.create(**ASK, tools=[TOOL])
    with scripted.live.unmerged(), claude.messages.stream(**ASK, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        added_up = stream.get_final_message()
    assert [kinds[0], kinds[-1]] == ["message_start", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 5

    def plain(message) -> list:
        return [one.model_dump(exclude={"id", "parsed_output"}) for one in message.content]

    kinds = ["thinking", "text", "tool_use", "tool_use", "text"]
    assert [one.type for one in added_up.content] == kinds
    assert plain(added_up) == plain(whole)
    text = lambda message: "".join(one.text for one in message.content if one.type == "text")
    assert text(added_up) == "Now: done"
    assert added_up.stop_reason == whole.stop_reason == "tool_use"
    assert added_up.usage.output_tokens == whole.usage.output_tokens


def test_one_call_where_parallel_ones_are_disabled_and_none_where_none_is_chosen(scripted, claude):
    scripted.say(CALL + CALL)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = claude.messages.create(**ASK, tools=[TOOL], tool_choice=choice)
    assert [one.type for one in answer.content] == ["tool_use"]
    answer = claude.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "none"})
    assert [(one.type, one.text) for one in answer.content] == [("text", CALL + CALL)]


def test_the_reasons_to_stop(scripted, claude):
    scripted.say("Hello you")
    stopped = claude.messages.create(**ASK, stop_sequences=["you"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "you")
    assert stopped.content[0].text == "Hello "
    cut = claude.messages.create(**ASK | dict(max_tokens=3))
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "Hel")


def test_tokens_are_counted_without_a_request(scripted, claude):
    scripted.say("Hi")
    count = claude.messages.count_tokens(model="tiny", messages=HELLO, tools=[TOOL]).input_tokens
    assert scripted.prompts == []
    claude.messages.create(**ASK, tools=[TOOL])
    assert count == len(scripted.script.requests[0].prompt)


def test_thinking_is_a_variable_of_the_template(scripted, claude):
    scripted.say("Hi")
    claude.messages.create(**ASK, thinking={"type": "disabled"})
    assert scripted.prompts[-1].endswith("<|assistant|><no think>")


said = lambda *content: {"messages": [{"role": "user", "content": [*content]}]}
CALLED = {"type": "tool_use", "id": "a", "name": "b"}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document"}]}
formatted = lambda **fields: {"output_config": {"format": fields}}
WRONG = {
    "max_tokens": {"max_tokens": None},
    "messages[0].role": {"messages": [{"role": "tool", "content": "a"}]},
    "messages[0].content[0].type": said({"type": "image"}),
    "messages[1].content[0].type": {"messages": [*HELLO, *said({"type": "tool_use"})["messages"]]},
    "messages[0].content[0].text": said({"type": "text"}),
    "messages[0].content[0].input": {"messages": [{"role": "assistant", "content": [CALLED]}]},
    "messages[0].content[0].content[0].type": said(RESULT),
    "temperature": {"temperature": -1},
    "tools[0].type": {"tools": [{"type": "computer_20250124", "name": "computer"}]},
    "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
    "container": {"container": "x"},
    "output_config.format.type": formatted(type="xml"),
    "tools[0]": {"tools": [TOOL | {"name": "a b"}]},
    "output_config.format.schema": formatted(type="json_schema", schema={"not": {}}),
}


@pytest.mark.parametrize("field", WRONG)
def test_mistakes_are_refused_by_field_in_anthropics_form(scripted, field):
    content = ASK | WRONG[field]
    headers = {"x-api-key": "secret"}
    answer = httpx.post(
        f"http://{scripted.live.http_address}/v1/messages", json=content, headers=headers
    )
    assert answer.status_code == 400
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(f"{field}: ")


def test_errors_have_anthropics_types(scripted, claude):
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**ASK | dict(model="other"))
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(**ASK)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("PUT", "/v1/messages/count_tokens", 405, "invalid_request_error"),
    ],
)
def test_routes_that_are_not_there_are_refused_in_anthropics_form(
    scripted, method, path, status, kind
):
    url = f"http://{scripted.live.http_address}{path}"
    found = httpx.request(method, url, headers={"x-api-key": "secret"})
    assert found.status_code == status
    body = found.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert path in body["error"]["message"]


def test_an_error_ends_a_stream_as_an_event(scripted, claude):
    scripted.say("Hi")
    live = scripted.live

    def fail() -> None:
        for stream in live.frontend.admission.streams:
            stream.fail(ServiceError(Code.INTERNAL, "a test"))

    with live.paced() as pace:
        pace.release(2)
        with claude.messages.stream(**ASK) as stream:
            iterator = iter(stream)
            assert next(iterator).type == "message_start"
            live.call(fail)
            with pytest.raises(anthropic.APIStatusError, match="a test"):
                list(iterator)
