"""Requests that the HTTP port refuses: statuses, named fields, sizes."""

import asyncio
import gzip
import json

import httpx
import openai
import pytest

from serving.limits import Limits
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually

LONG = dict(prompt="a", max_tokens=90, ignore_eos=True, temperature=0)
HELLO = [{"role": "user", "content": "a"}]
TALK = dict(messages=HELLO)
BOUND = 50_000  # bytes of a body


@pytest.fixture(scope="module")
def live(make_engine):
    with LiveServer(make_engine(), http=True, max_message_bytes=BOUND) as server:
        yield server


def refusal(response: httpx.Response, status: int = 400) -> dict:
    """The error object of a response, which must have `status`."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


SAMPLING = {
    "temperature": [-1, 101, "hot", True],
    "top_p": [0, []],
    "seed": [-2, 2**63, 0.5],
    "n": [0, 17, "2", 10**400],
    "stop": [[""], 5, [5], ["x"] * 17, {}],
    "stop_token_ids": [5, ["a"], [True], list(range(257))],
    "priority": [2**31, "high", True, 0.5],
    "stream": ["true", 1],
    "model": [5],
    "request_id": ["x" * 257, "a\nb", "ä", 5],
    "logit_bias": [5, {"x": 1}, {"5": "1"}, {"5": True}, {"128": 1}, {"5": 1, "05": 2}],
    "allowed_token_ids": [[], [128], [-1], ["a"], 5],
    "best_of": [2],
    "bad_words": [[""], 5, ["xyz"], [5], ["\ud800"]],
    "response_format": ["json"],
    "guided_regex": ["a"],
    "prompt_logprobs": [1],
    "skip_special_tokens": [0, "no"],
}
A_TOOL = {"type": "function", "function": {"name": "f"}}


def a_call(arguments: object) -> dict:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


COMPLETION = SAMPLING | {
    "prompt": ["", [], [[]], ["a", 5], [5, "a"], [128], [-1], [True], 5, {}, [5] * 96, ["a"] * 17],
    "max_tokens": [0, -1, 1.5, "16", True],
    "logprobs": [4, -1, True],
    "echo": [1, "yes"],
    "suffix": ["x"],
}
ASSISTANT = {"role": "assistant"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CHAT = {
    "messages": [[], 5, "hi"],
    "messages[0].role": [[{"content": "a"}], [{"role": 5, "content": "a"}]],
    "messages[0].content": [[{"role": "user"}], [{"role": "user", "content": 5}]],
    "messages[1].content[0].type": [[*HELLO, {"role": "user", "content": [IMAGE]}]],
    "messages[0].content[0].text": [[{"role": "user", "content": [{"type": "text"}]}]],
    "messages[0].tool_calls[0].id": [[ASSISTANT | {"tool_calls": [{"type": "function"}]}]],
    "messages[0].tool_calls[1].function.arguments": [
        [ASSISTANT | {"tool_calls": [a_call("{}"), a_call(wrong)]}]
        for wrong in ("[]", "{", "5", '{"a": 1, "a": 2}', 5)
    ],
    "max_tokens": [0, "5"],
    "logprobs": [5, "yes"],
    "top_logprobs": [4, -1, "x"],
    "tools": [5, [A_TOOL], [A_TOOL, A_TOOL], [5] * 129],
    "tools[0].type": [[{"function": {"name": "f"}}], [A_TOOL | {"type": "code_interpreter"}]],
    "tools[0]": [[A_TOOL | {"function": {"name": "a b"}}]],
    "tools[0].function.parameters": [[A_TOOL | {"function": {"name": "f", "parameters": 5}}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}, 5],
    "chat_template_kwargs": [5],
    "temperature": [-1],
}


def post_ascii(http, path: str, body: dict):
    """As httpx's `json=`, but with escapes: UTF-8 cannot encode half of a surrogate pair."""
    return http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize("field", COMPLETION)
def test_completions_name_the_invalid_field(server, http, field):
    for place, value in enumerate(COMPLETION[field]):
        body = {"prompt": "a", "stream": place % 2 == 0, field: value}
        if field == "n":
            body["temperature"] = 1
        error = refusal(post_ascii(http, "/v1/completions", body))
        assert (error["param"], error["type"]) == (field, "invalid_request_error")
        assert f"{field}: " in error["message"]


@pytest.mark.parametrize("field", CHAT)
def test_chats_name_the_invalid_field(server, http, field):
    for value in CHAT[field]:
        body = dict(messages=HELLO, logprobs=True) | {field.partition("[")[0]: value}
        error = refusal(post_ascii(http, "/v1/chat/completions", body))
        assert error["param"] == field
        assert error["message"].startswith(f"{field}: ")


def test_arguments_of_transformers_are_not_template_variables(server, http):
    for name in ("tokenize", "chat_template", "messages", "self", "padding"):
        body = dict(messages=HELLO, chat_template_kwargs={name: "x"})
        error = refusal(http.post("/v1/chat/completions", json=body))
        assert repr(name) in error["message"]
        assert error["param"] == "chat_template_kwargs"


def test_contradictory_fields_are_refused(server, http):
    post = lambda path, **body: refusal(http.post(path, json=body))
    wrong = post("/v1/completions", prompt="a", stream_options={"include_usage": True})
    assert wrong["param"] == "stream_options"
    wrong = post("/v1/completions", prompt="a", n=2, temperature=0)
    assert wrong["param"] == "n"
    for num_prompts, n, what in ((6, 3, "6 prompts with n=3"), (17, 1, "17 prompts")):
        wrong = post("/v1/completions", prompt=["a"] * num_prompts, n=n)
        assert wrong["param"] == "prompt"
        rule = f"{what} are more than the 16 sequences that a request may have (--max-n)"
        assert wrong["message"] == f"prompt: {rule}"
    chat = lambda **body: post("/v1/chat/completions", **body)["param"]
    assert chat(messages=HELLO, top_logprobs=2) == "top_logprobs"
    assert chat(messages=HELLO, max_tokens=2, max_completion_tokens=3) == "max_tokens"
    assert chat() == "messages"
    assert post("/v1/completions")["param"] == "prompt"


BODIES = [
    *(b"", b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 20000),
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": [' + b"1" * 5000 + b"]}",
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:20]))
def test_a_body_that_is_not_a_json_object_is_refused(server, http, body):
    headers = {"content-type": "application/json"}
    error = refusal(http.post("/v1/completions", content=body, headers=headers))
    assert error["param"] == "body"


def test_a_lone_surrogate_does_no_harm(server, http):
    headers = {"content-type": "application/json"}
    body = rb'{"prompt": "\ud800"}'
    refusal(http.post("/v1/completions", content=body, headers=headers))
    for body in (rb'{"prompt": "a", "stop": "\ud800"}', rb'{"\ud800": 1, "prompt": "a"}'):
        assert http.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_bodies_are_bounded(server, http):
    body = json.dumps(dict(prompt="a" * BOUND)).encode()
    headers = {"content-type": "application/json"}
    for content in (body, iter([body])):  # with its length in front, and in chunks without
        error = refusal(http.post("/v1/completions", content=content, headers=headers), 413)
        assert "50000 bytes" in error["message"]
    assert http.get("/health").status_code == 200


def test_other_content_types_are_refused(server, http):
    error = refusal(http.post("/v1/completions", data={"prompt": "a"}))
    assert error["param"] == "content-type"


def test_encoded_bodies_are_refused_by_the_header(server, http):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    content = gzip.compress(b'{"prompt": "a"}')
    error = refusal(http.post("/v1/completions", content=content, headers=headers))
    assert error["param"] == "content-encoding"


def test_other_models_are_not_found(server, http):
    for path, body in (("completions", dict(prompt="a")), ("chat/completions", TALK)):
        error = refusal(http.post(f"/v1/{path}", json=body | dict(model="gpt-5")), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        several = body | dict(model="gpt-5", temperature="hot", tempratur=1)
        assert refusal(http.post(f"/v1/{path}", json=several), 404)["param"] == "model"
    models = http.get("/v1/models").json()["data"]
    assert [(one["id"], one["max_model_len"]) for one in models] == [("tiny", 96)]
    assert http.get("/v1/models/tiny").json() == models[0]
    refusal(http.get("/v1/models/gpt-5"), 404)


def test_unknown_paths_and_methods(server, http):
    refusal(http.get("/v1/nothing"), 404)
    refusal(http.get("/v1/completions"), 405)
    refusal(http.post("/metrics"), 405)
    assert set(http.get("/version").json()) == {"version"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_gives_a_retry_time(server, stream):
    async def ask(pace):
        limits = httpx.Limits(max_connections=None)
        address = f"http://{server.http_address}"
        async with httpx.AsyncClient(base_url=address, timeout=LIMIT, limits=limits) as http:
            body = LONG | dict(stream=stream, max_tokens=9)
            post = lambda: asyncio.create_task(http.post("/v1/completions", json=body))
            calls = [post()]
            assert await asyncio.to_thread(pace.is_waiting.wait, LIMIT)
            calls += [post() for _ in range(119)]
            await asyncio.to_thread(eventually, lambda: server.frontend.num_open == 120)
            pace.release(1_000_000)
            return await asyncio.gather(*calls)

    with server.paced() as pace:  # 4 run and 64 may wait
        answers = asyncio.run(ask(pace))
    assert {one.status_code for one in answers} == {200, 429}
    refused = next(one for one in answers if one.status_code == 429)
    assert refusal(refused, 429)["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 30


def test_several_prompts_are_accepted_together_or_not_at_all(server, http):
    """The second prompt leaves no room for output, so the first must not run either."""
    error = refusal(http.post("/v1/completions", json=LONG | dict(prompt=[[5], [5] * 96])))
    assert error["param"] == "prompt"
    server.check_empty()


@pytest.mark.slow
def test_the_servers_time_limit_is_a_504_and_an_event(make_engine):
    server = LiveServer(make_engine(), http=True, limits=Limits(max_request_seconds=3.0))
    with server.client() as http, server.paced() as pace:
        assert refusal(http.post("/v1/completions", json=LONG), 504)["type"] == "server_error"
        pace.release(1)  # the round that waited
        server.check_empty()
        pace.release(2)  # of 90 tokens the first come in time, the last do not
        # After a status of 200 an error can only be an event.
        answer = http.post("/v1/completions", json=LONG | dict(stream=True))
        assert answer.status_code == 200
        lines = [line for line in answer.text.split("\n\n") if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert lines[-1] == "data: [DONE]"
        pace.release(1)
        server.check_empty()
        pace.release(2)
        with server.openai() as client:
            options = dict(model="tiny", max_tokens=90, extra_body={"ignore_eos": True})
            stream = client.completions.create(prompt="a", stream=True, **options)
            with pytest.raises(openai.APIError, match="time was up"):
                list(stream)
    server.check_empty()
    server.close()


def test_a_dead_engine_is_reported(make_engine):
    server = LiveServer(make_engine(), http=True)

    def die(*args):
        raise RuntimeError("out of luck")

    server.engine.programs.round = die
    with server.client() as http:
        assert http.get("/ready").json()["status"] == "serving"
        assert "RuntimeError" in refusal(http.post("/v1/completions", json=LONG), 500)["message"]
        refused = http.post("/v1/completions", json=LONG | dict(stream=True))
        refusal(refused, 503)
        assert "retry-after" not in refused.headers
        for path in ("/health", "/ready"):
            assert http.get(path).status_code == 503
            assert http.get(path).json()["status"] == "dead"
    server.close()


def test_an_unexpected_exception_is_a_500_without_details(make_engine, monkeypatch):
    server = LiveServer(make_engine(), http=True)

    def fail(*args, **named):
        raise KeyError("secret")

    monkeypatch.setattr(server.frontend, "open", fail)
    error = refusal(server.post("/v1/completions", **LONG), 500)
    assert "KeyError" in error["message"]
    assert "secret" not in error["message"]
    server.close()


def test_without_a_tokenizer_tokens_go_in_and_out(make_engine):
    with (
        LiveServer(make_engine(with_tokenizer=False), http=True) as server,
        server.client() as http,
    ):
        body = LONG | dict(prompt=[5, 6], max_tokens=8, return_token_ids=True, logprobs=1)
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert (len(choice["token_ids"]), choice["text"]) == (8, "")
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert "tokenizer" in refusal(http.post("/v1/completions", json=LONG))["message"]
        chat = http.post("/v1/chat/completions", json=dict(messages=HELLO))
        assert "tokenizer" in refusal(chat)["message"]
        stop = http.post("/v1/completions", json=body | dict(stop="x"))
        assert refusal(stop)["param"] == "stop"
