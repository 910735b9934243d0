"""Options that decide what a text has: stop strings, special tokens, its two ends."""

import httpx
import pytest

from tests.serving.scripted import END, Scripted
from tests.serving.test_http import events
from tests.serving.test_http_errors import refusal

MARK = "<|mark|>"
MIDDLE = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
USER = {"role": "user", "content": "hi"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory) -> Scripted:
    server = Scripted(tmp_path_factory.mktemp("marked"), special=[MARK], added=MIDDLE)
    yield server
    server.live.close()


@pytest.fixture(params=[COMPLETIONS, CHATS])
def ask(scripted, request):
    """Asks one route for a text, whole or as a stream; returns text, last choice and usage."""
    body = {"prompt": "hi"} if request.param == COMPLETIONS else {"messages": [USER]}

    def ask(*, stream: bool, **options) -> tuple[str, dict, dict]:
        content = body | {"max_tokens": 64, "stream": stream} | options
        if stream:
            content["stream_options"] = {"include_usage": True}
        answer = scripted.live.post(request.param, **content)
        if not stream:
            choice = answer.json()["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            return text, choice, answer.json()["usage"]
        *chunks, last = events(answer)
        assert all(one["usage"] is None for one in chunks)
        choices = [one["choices"][0] for one in chunks]
        texts = [one["text"] if "text" in one else one["delta"].get("content") for one in choices]
        return "".join(text or "" for text in texts), choices[-1], last["usage"]

    yield ask
    scripted.live.check_empty()


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_may_include_its_stop_string(scripted, ask, stream):
    scripted.say("one STOP two")
    without = ask(stream=stream, stop=["STOP"])
    scripted.say("one STOP two")
    with_it = ask(stream=stream, stop=["STOP"], include_stop_str_in_output=True)
    assert (without[0], with_it[0]) == ("one ", "one STOP")
    assert with_it[1]["stop_reason"] == "STOP"
    assert without[2]["completion_tokens"] == with_it[2]["completion_tokens"] == len("one STOP")


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_may_have_special_tokens(scripted, ask, stream):
    for options, expected in (
        ({}, "ab"),
        (dict(skip_special_tokens=False), f"a{MARK}b"),
        (dict(skip_special_tokens=False, include_stop_str_in_output=True), f"a{MARK}b{END}"),
        (dict(skip_special_tokens=False, stop=[MARK]), "a"),
        (dict(stop=[MARK]), "ab"),
        (dict(stop=["ab"]), ""),
        (dict(skip_special_tokens=False, stop=["ab"]), f"a{MARK}b"),
    ):
        scripted.say(f"a{MARK}b")
        text, choice, _ = ask(stream=stream, **options)
        assert text == expected, options
        assert choice["finish_reason"] == "stop"


def test_offsets_count_the_special_tokens_of_a_text(scripted):
    scripted.say(f"a{MARK}b")
    body = {"prompt": "hi", "max_tokens": 9, "logprobs": 0, "skip_special_tokens": False}
    answer = scripted.live.post(COMPLETIONS, **body)
    scores = answer.json()["choices"][0]["logprobs"]
    assert scores["text_offset"] == [0, 1, 1 + len(MARK), 2 + len(MARK)]


def test_a_final_message_is_continued(scripted):
    address = f"http://{scripted.live.http_address}"
    messages = [USER, {"role": "assistant", "content": "I say"}]
    for options, ending in (
        ({}, "<|assistant|>I say<|assistant|>"),
        (dict(continue_final_message=True), "<|assistant|>I say"),
        (dict(continue_final_message=True, add_generation_prompt=False), "<|assistant|>I say"),
    ):
        scripted.say("so")
        body = {"messages": messages, "max_tokens": 9} | options
        assert httpx.post(f"{address}{CHATS}", json=body).status_code == 200
        assert scripted.prompts == [f"<|user|>hi{ending}"]
        counted = httpx.post(f"{address}/tokenize", json={"messages": messages} | options).json()
        assert scripted.tokenizer.spell(counted["tokens"]) == scripted.prompts[0]
    body |= dict(add_generation_prompt=True)
    error = refusal(httpx.post(f"{address}{CHATS}", json=body))
    assert error["param"] == "continue_final_message"


def test_a_suffix_is_marked_for_the_model(scripted, http):
    address = f"http://{scripted.live.http_address}{COMPLETIONS}"
    scripted.say("+")
    answer = httpx.post(address, json={"prompt": "a", "suffix": "b", "max_tokens": 9})
    assert answer.json()["choices"][0]["text"] == "+"
    before, between, after = MIDDLE
    (prompt,) = (one.prompt for one in scripted.script.requests)
    assert scripted.tokenizer.spell(prompt) == f"{before}a{between}b{after}"
    assert [prompt[place] for place in (0, 2, 4)] == [
        scripted.tokenizer.added[one] for one in MIDDLE
    ]
    for wrong, field in (({"echo": True}, "echo"), ({"prompt": [1]}, "suffix")):
        body = {"prompt": "a", "suffix": "b"} | wrong
        assert refusal(httpx.post(address, json=body))["param"] == field
    assert refusal(http.post(COMPLETIONS, json={"prompt": "a", "suffix": "b"}))["param"] == "suffix"
