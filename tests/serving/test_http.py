"""OpenAI's routes through a live server: a stock client, and requests by hand."""

import asyncio
import json
import threading

import httpx
import pytest

from peagle_jax import SamplingParams
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually

PROMPT = "hello there"
PLAIN = dict(model="tiny", temperature=0)


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as made:
        yield made


def url(live: LiveServer, path: str = "") -> str:
    return f"http://{live.http_address}{path}"


def events(response: httpx.Response) -> list[dict]:
    """The chunks of a stream, which must end like OpenAI's."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion_equals_the_text_of_the_engine(server, client, alone):
    expected = alone.generate([PROMPT], SamplingParams(max_tokens=30))[0]
    answer = client.completions.create(prompt=PROMPT, max_tokens=30, **PLAIN)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.id.startswith("cmpl-")
    usage = answer.usage
    assert usage.prompt_tokens == len(expected.prompt)
    assert usage.completion_tokens == len(expected.tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == expected.accepted
    assert details.rejected_prediction_tokens == expected.drafted - expected.accepted


def test_a_stream_joins_to_the_whole_answer(server, client):
    options = dict(prompt=PROMPT, max_tokens=30, **PLAIN)
    whole = client.completions.create(**options)
    as_stream = dict(stream=True, stream_options={"include_usage": True})
    chunks = list(client.completions.create(**as_stream, **options))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].metrics == whole.metrics
    assert len({c.id for c in chunks}) == 1
    bare = list(client.completions.create(stream=True, **options))
    assert all(len(c.choices) == 1 and c.usage is None for c in bare)
    assert "".join(c.choices[0].text for c in bare) == whole.choices[0].text


def test_a_request_sets_its_number_of_drafts(server, client):
    ask = lambda drafts: client.completions.create(
        prompt=PROMPT, max_tokens=20, extra_body={"num_speculative_tokens": drafts}, **PLAIN
    )
    plain, two = ask(0), ask(2)
    assert plain.choices[0].text == two.choices[0].text
    assert not hasattr(plain, "metrics")
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert two.metrics["speculative_decoding"]["num_spec_tokens"] == 2


def test_a_chat_equals_the_completion_of_its_template(server, client):
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "ab"}], max_tokens=12, **PLAIN
    )
    plain = client.completions.create(prompt="user:ab\n", max_tokens=12, **PLAIN)
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.choices[0].message.role == "assistant"
    assert not hasattr(chat.choices[0].message, "reasoning_content")
    assert chat.usage.completion_tokens_details == plain.usage.completion_tokens_details
    assert chat.usage.total_tokens == plain.usage.total_tokens
    assert (chat.object, chat.id[:9]) == ("chat.completion", "chatcmpl-")
    parts = [{"type": "text", "text": "ab"}]
    again = client.chat.completions.create(
        messages=[{"role": "user", "content": parts}], max_completion_tokens=12, **PLAIN
    )
    assert again.choices[0].message.content == plain.choices[0].text


def test_a_chat_streams(server, client):
    options = dict(messages=[{"role": "user", "content": "ab"}], max_tokens=20, **PLAIN)
    whole = client.chat.completions.create(**options)
    as_stream = dict(stream=True, stream_options={"include_usage": True})
    chunks = list(client.chat.completions.create(**as_stream, **options))
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    roles = [c.choices[0].delta.role for c in chunks[:-1]]
    assert roles == ["assistant"] + [None] * (len(roles) - 1)
    text = "".join(c.choices[0].delta.content for c in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_a_chat_without_max_tokens_runs_to_max_model_len(server, client):
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "ab"}], extra_body={"ignore_eos": True}, **PLAIN
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 96
    short = client.completions.create(prompt="a", extra_body={"ignore_eos": True}, **PLAIN)
    assert short.usage.completion_tokens == 16


def test_prompts_are_texts_or_token_ids(server, client, tokenizer):
    ask = lambda prompt: client.completions.create(prompt=prompt, max_tokens=9, **PLAIN).choices
    first, second = ask("ab")[0].text, ask("xyz")[0].text
    assert first != second
    ids = [tokenizer.encode(text) for text in ("ab", "xyz")]
    assert ask(ids[0])[0].text == first
    for several in (["ab", "xyz"], ids):
        choices = ask(several)
        assert [(c.index, c.text) for c in choices] == [(0, first), (1, second)]


def test_n_sequences_of_several_prompts_are_numbered_by_prompt(server, client):
    options = dict(model="tiny", max_tokens=15, n=3, seed=7)
    single = [client.completions.create(prompt=p, **options).choices for p in ("ab", "xyz")]
    texts = [choice.text for choices in single for choice in choices]
    assert len(set(texts)) == 6
    whole = client.completions.create(prompt=["ab", "xyz"], **options)
    assert [c.text for c in whole.choices] == texts
    assert [c.index for c in whole.choices] == list(range(6))
    assert not hasattr(whole, "metrics")  # they are of one sequence
    streamed = [""] * 6
    for chunk in client.completions.create(prompt=["ab", "xyz"], stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_the_default_temperature_is_one(server, client):
    ask = dict(model="tiny", prompt="ab", max_tokens=20)
    text = lambda **options: client.completions.create(**ask, **options).choices[0].text
    assert len({text() for _ in range(4)}) > 1
    greedy = text(temperature=0)
    assert text(extra_body={"top_k": 1}) == greedy
    assert text(extra_body={"top_k": -1, "min_p": 1.0}) == greedy  # min_p 1 leaves the likeliest


def test_the_answer_names_its_stop_string_or_token(server, client, alone):
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    expected = alone.generate([PROMPT], params)[0]
    stop = expected.text[10:14]
    options = dict(prompt=PROMPT, max_tokens=60, **PLAIN)
    for given in (stop, ["never in it", stop]):
        answer = client.completions.create(stop=given, extra_body={"ignore_eos": True}, **options)
        choice = answer.choices[0]
        assert choice.text == expected.text[: expected.text.index(stop)]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    token = expected.tokens[5]
    body = {"ignore_eos": True, "stop_token_ids": [token], "return_token_ids": True}
    choice = client.completions.create(extra_body=body, **options).choices[0]
    assert choice.token_ids == expected.tokens[: expected.tokens.index(token) + 1]
    assert choice.prompt_token_ids == expected.prompt
    assert choice.stop_reason == token


def test_logprobs_of_completions(server, client, tokenizer):
    body = {"return_token_ids": True, "ignore_eos": True}
    options = dict(prompt=PROMPT, max_tokens=12, logprobs=2, extra_body=body, **PLAIN)
    choice = client.completions.create(**options).choices[0]
    report = choice.logprobs
    assert report.tokens == [tokenizer.name_of(token) for token in choice.token_ids]
    for token, logprob, top in zip(
        report.tokens, report.token_logprobs, report.top_logprobs, strict=True
    ):
        assert len(top) == 2
        assert max(top, key=top.get) == token  # greedy
        assert top[token] == pytest.approx(logprob, abs=1e-5)
    for token, offset in zip(report.tokens, report.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    pieces = list(client.completions.create(stream=True, **options))
    offsets = [offset for c in pieces for offset in c.choices[0].logprobs.text_offset]
    assert offsets == report.text_offset
    assert pieces[0].choices[0].prompt_token_ids == tokenizer.encode(PROMPT)
    none = client.completions.create(prompt=PROMPT, **PLAIN)
    assert none.choices[0].logprobs is None


def test_logprobs_of_chats(server, client):
    options = dict(messages=[{"role": "user", "content": "ab"}], max_tokens=9, **PLAIN)
    choice = client.chat.completions.create(
        logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True}, **options
    ).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == len(choice.token_ids)
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 3
    own = client.chat.completions.create(logprobs=True, **options).choices[0].logprobs.content
    assert [entry.logprob for entry in own] == pytest.approx([e.logprob for e in entries])
    assert own[0].top_logprobs == []


def test_usage_in_every_chunk(server, http, tokenizer):
    shown = {"include_usage": True, "continuous_usage_stats": True}
    body = dict(prompt=PROMPT, max_tokens=20, stream=True, stream_options=shown, **PLAIN)
    chunks = events(http.post("/v1/completions", json=body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == counts[-2]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(tokenizer.encode(PROMPT))}


def test_token_ids_are_returned(server, http):
    body = dict(model="tiny", prompt="a")
    given = http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert given.headers["x-request-id"] == "mine"
    assert given.json()["id"] == "cmpl-mine"
    made = http.post("/v1/completions", json=body)
    assert made.json()["id"] == f"cmpl-{made.headers['x-request-id']}"
    named = http.post("/v1/completions", json=body | {"request_id": "yours"})
    assert named.headers["x-request-id"] == "yours"


def num_cancelled(http: httpx.Client) -> float:
    """Requests so far that ended because of a lost connection."""
    lines = http.get("/metrics").text.splitlines()
    name = 'peagle:requests_total{code="CANCELLED"'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


LONG = dict(prompt="a", max_tokens=90, ignore_eos=True, temperature=0)


@pytest.mark.parametrize(("stream", "prompt"), [(True, "a"), (False, ["a", "b", "c"])])
def test_a_lost_connection_frees_everything(server, http, pace, stream, prompt):
    """Running or queued requests: at most 4 of 20 run at once."""
    before = num_cancelled(http)

    async def ask_and_leave():
        async with httpx.AsyncClient(base_url=url(server), timeout=LIMIT) as client:
            body = LONG | dict(stream=stream, prompt=prompt)
            post = lambda: asyncio.create_task(client.post("/v1/completions", json=body))
            calls = [post() for _ in range(20)]
            await asyncio.to_thread(eventually, lambda: server.frontend.num_open >= 20)
            assert server.frontend.load.num_running <= 4
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(ask_and_leave())
    server.check_freed(pace)
    assert num_cancelled(http) > before


def test_a_slow_reader_does_not_delay_others(server, http, client):
    with http.stream("POST", "/v1/completions", json=LONG | dict(stream=True)) as response:
        lines = response.iter_lines()
        next(lines)
        for _ in range(6):
            client.completions.create(prompt="b", max_tokens=20, **PLAIN)
        assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_draining_finishes_old_requests_and_refuses_new_ones(make_engine):
    server = LiveServer(make_engine(), http=True)
    with httpx.Client(base_url=url(server), timeout=LIMIT) as http:
        answers = []
        ask = lambda: answers.append(server.post("/v1/completions", **LONG))
        threads = [threading.Thread(target=ask) for _ in range(6)]
        with server.paced():
            for thread in threads:
                thread.start()
            eventually(lambda: server.frontend.num_open == 6)
            drained = threading.Thread(target=lambda: server.run(server.frontend.drain(60.0)))
            drained.start()
            eventually(lambda: server.frontend.state.value != "serving")
            refused = http.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert http.get("/health").status_code == 503
        for thread in (*threads, drained):
            thread.join()
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {90}
    server.close()
