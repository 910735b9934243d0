"""`/v1/responses`, `/tokenize` and `/detokenize` of a model whose replies are given."""

import contextlib

import pytest

from tests.serving.scripted import CALL, PARAMETERS

FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": PARAMETERS}
TOOL = {"type": "function", **FUNCTION, "strict": False}


def test_a_text_is_a_response(scripted, client):
    scripted.say("Hello you")
    response = client.responses.create(model="tiny", input="Hi", instructions="Be brief.")
    assert (response.output_text, response.status) == ("Hello you", "completed")
    assert response.object == "response"
    assert scripted.prompts == ["<|system|>Be brief.<|user|>Hi<|assistant|>"]
    assert response.usage.input_tokens == len(scripted.script.requests[0].prompt)
    assert response.usage.output_tokens == len("Hello you") + 1
    cut = client.responses.create(model="tiny", input="Hi", max_output_tokens=3)
    assert (cut.status, cut.output_text) == ("incomplete", "Hel")
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream_adds_up_to_the_same_response(scripted, client):
    scripted.say(f"<think>Look.</think>Now: {CALL}\n{CALL}")
    ask = dict(model="tiny", input="Read!", tools=[TOOL])
    whole = client.responses.create(**ask)
    with scripted.live.unmerged():
        events = list(client.responses.create(stream=True, **ask))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    items = [one.item for one in events if one.type == "response.output_item.done"]
    assert items == events[-1].response.output
    plain = lambda output: [one.model_dump(exclude={"id", "call_id"}) for one in output]
    assert plain(items) == plain(whole.output)
    for kind, index in (("reasoning_text", 0), ("output_text", 1), ("function_call_arguments", 2)):
        some = [one for one in events if one.type == f"response.{kind}.delta"]
        deltas = [one.delta for one in some if one.output_index == index]
        item = items[index]
        assert "".join(deltas) == (item.arguments if index == 2 else item.content[0].text)
    with client.responses.stream(**ask) as stream:
        for _ in stream:
            pass
        added_up = stream.get_final_response()
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [one.type for one in added_up.output] == kinds


def test_log_probabilities_are_those_of_a_chat(scripted, client):
    scripted.say("Hello you")
    asked = dict(include=["message.output_text.logprobs"], top_logprobs=2)
    talk = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(
        model="tiny", messages=talk, temperature=0, logprobs=True, top_logprobs=2
    ).choices[0]
    plain = lambda some: [one.model_dump() for one in some]
    wanted = plain(chat.logprobs.content)
    assert len(wanted) == len("Hello you") + 1
    ask = dict(model="tiny", input="Hi", temperature=0)
    response = client.responses.create(**ask, **asked)
    assert plain(response.output[0].content[0].logprobs) == wanted
    assert response.top_logprobs == 2
    with scripted.live.unmerged():
        events = list(client.responses.create(stream=True, **ask, **asked))
    deltas = [one for one in events if one.type == "response.output_text.delta"]
    assert [entry.token for one in deltas for entry in one.logprobs] == list("Hello you")
    assert events[-1].response.output[0].content[0].logprobs == (
        response.output[0].content[0].logprobs
    )
    assert client.responses.create(**ask).output[0].content[0].logprobs == []


@pytest.mark.parametrize("is_merged", [True, False])
def test_a_call_that_is_cut_off_is_the_last_item(scripted, client, is_merged):
    reply = f"{CALL}\n{CALL[:-20]}"
    scripted.say(reply)
    size = len(scripted.tokenizer.encode(reply))
    ask = dict(model="tiny", input="Read!", tools=[TOOL], max_output_tokens=size)
    whole = client.responses.create(**ask)
    with contextlib.nullcontext() if is_merged else scripted.live.unmerged():
        events = list(client.responses.create(stream=True, **ask))
    streamed = events[-1].response
    items = [one.item for one in events if one.type == "response.output_item.done"]
    assert items == streamed.output
    for response in (whole, streamed):
        assert response.status == "incomplete"
        found = [(one.type, one.status) for one in response.output]
        assert found == [("function_call", "completed"), ("message", "incomplete")]
        assert response.output[1].content[0].text == CALL[:-20]


CALLED = {"type": "function_call", "name": "a", "arguments": "{}"}
formatted = lambda **fields: {"text": {"format": {"type": "json_schema", "name": "a", **fields}}}
WRONG = {
    "previous_response_id": {"previous_response_id": "resp_1"},
    "input": {"input": []},
    "input[0].type": {"input": [{"type": "image_generation_call"}]},
    "input[0].content[0].type": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    "input[0].call_id": {"input": [CALLED]},
    "tools[0].type": {"tools": [{"type": "custom", "name": "patch"}]},
    "text.format.type": {"text": {"format": {"type": "xml"}}},
    "text.format.schema": formatted(schema={"not": {}}),
    "tools[0].strict": {"tools": [TOOL | {"strict": 5}]},
    "max_output_tokens": {"max_output_tokens": 0},
    "top_logprobs": {"top_logprobs": 1000},
    # Found in the chat that the request becomes.
    "tools[0]": {"tools": [TOOL | {"name": "a b"}]},
    "input ": {"input": [CALLED | {"call_id": "a", "arguments": "no JSON"}]},
}


@pytest.mark.parametrize("field", WRONG)
def test_mistakes_are_refused_by_field(scripted, field):
    content = {"model": "tiny", "input": "Hi"} | WRONG[field]
    answer = scripted.live.post("/v1/responses", **content)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field.strip()
    assert answer.json()["error"]["message"].startswith(f"{field.strip()}: ")


@pytest.fixture
def post(scripted):
    return scripted.live.post


def test_texts_become_tokens_and_back(scripted, post):
    text = "é <|im_end|>\n"
    answer = post("/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["tokens"] == scripted.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["token_strs"][-2:] == ["<|im_end|>", "\n"]
    assert answer["max_model_len"] == scripted.live.frontend.config.max_model_len
    assert post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}


def test_a_chat_becomes_the_tokens_of_its_prompt(scripted, post):
    scripted.say("Hi")
    chat = dict(messages=[{"role": "user", "content": "Hi"}])
    tool = {"type": "function", "function": {"name": "f"}}
    answer = post("/tokenize", **chat, tools=[tool]).json()
    assert scripted.prompts == []
    post("/v1/chat/completions", **chat, tools=[tool])
    assert answer["tokens"] == scripted.script.requests[0].prompt


ASKED_TWICE = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "content", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a" * 1_000_001}, "prompt"),
        ("/tokenize", ASKED_TWICE, "messages"),
        ("/detokenize", {"tokens": [0] * 1025}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_is_no_text_and_no_tokens_is_refused_by_field(post, path, content, field):
    answer = post(path, **content)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
