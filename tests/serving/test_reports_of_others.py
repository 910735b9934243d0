"""Faults that other servers have had, tried on this one; docs/reliability.md names them."""

import json

import grpc
import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests import tiny
from tests.serving.live import LiveServer
from tests.serving.test_http import events
from tests.waiting import LIMIT

PROMPT = "hello there"


def test_requests_without_a_seed_share_no_random_stream(server, http, target, tokenizer):
    """Texts differ, and their first and fifth tokens have the target's law: where a draw falls in
    the distribution that the text before it gives is uniform."""
    body = dict(prompt=PROMPT, temperature=1, max_tokens=6, ignore_eos=True, return_token_ids=True)
    texts = []
    for n in (*[1] * 40, *[8] * 10):
        choices = http.post("/v1/completions", json=body | {"n": n}).json()["choices"]
        texts += [one["token_ids"] for one in choices]
    assert len({tuple(text) for text in texts}) == len(texts) == 120
    prompt = tokenizer.encode(PROMPT)
    rows = jnp.asarray([prompt + text for text in texts])
    hidden, _, _ = target(rows, jnp.arange(rows.shape[1])[None], [None], tiny.causal_attention)
    p = np.asarray(jax.nn.softmax(target.unembed(hidden)), np.float64)
    draws = np.random.default_rng(0)
    for place in (0, 4):
        law = p[:, len(prompt) + place - 1]
        below = [one[: text[place]].sum() for one, text in zip(law, texts, strict=True)]
        within = [one[text[place]] for one, text in zip(law, texts, strict=True)]
        falls = np.asarray(below) + draws.random(len(texts)) * within
        counts, _ = np.histogram(falls, 8, (0, 1))
        assert counts.sum() == len(texts)
        assert stats.chisquare(counts).pvalue > 1e-6


@pytest.fixture(scope="module")
def padded(make_json_engine):
    """A client of a server whose model has more ids than its tokenizer."""
    server = LiveServer(make_json_engine(), http=True)
    with httpx.Client(base_url=f"http://{server.http_address}", timeout=LIMIT) as client:
        yield client
    server.check_empty()
    server.close()


def test_ids_that_the_tokenizer_lacks_have_no_text_and_every_count(padded):
    lacking = 150
    short = dict(max_tokens=6, ignore_eos=True, temperature=0, return_token_ids=True)
    biased = short | {"logit_bias": {str(lacking): 100}}
    body = biased | dict(prompt=[3, lacking, 5], logprobs=2, return_rounds=True)
    whole = padded.post("/v1/completions", json=body).json()
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    parts = events(padded.post("/v1/completions", json=body | usage))
    for answers in ([whole], parts):
        choices = [one for answer in answers for one in answer["choices"]]
        assert "".join(one["text"] for one in choices) == ""
        assert [token for one in choices for token in one["token_ids"]] == [lacking] * 6
        scored = [one["logprobs"]["tokens"] for one in choices if one["logprobs"]]
        assert [name for names in scored for name in names] == [""] * 6
        assert answers[-1]["usage"]["completion_tokens"] == 6
    chat = dict(messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2)
    answer = padded.post("/v1/chat/completions", json=biased | chat).json()["choices"][0]
    assert answer["message"]["content"] == ""
    assert [one["bytes"] for one in answer["logprobs"]["content"]] == [[]] * 6
    schema = {"enum": [True, [1, 2]]}
    body = chat | dict(temperature=0, max_tokens=20, logit_bias=biased["logit_bias"])
    body["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": schema},
    }
    answer = padded.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert json.loads(answer["message"]["content"]) in schema["enum"]
    answer = padded.post("/detokenize", json={"tokens": [40, lacking, 41]}).json()
    assert (
        answer["prompt"] == padded.post("/detokenize", json={"tokens": [40, 41]}).json()["prompt"]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_and_no_count(server, http, stream):
    """Ids, logprobs, usage and rounds all include the tokens that the stop string took."""
    body = dict(prompt=PROMPT, temperature=0, max_tokens=24, ignore_eos=True)
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = whole[6:9]
    body |= dict(stop=[stop], logprobs=0, return_token_ids=True, return_rounds=True, stream=stream)
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = http.post("/v1/completions", json=body)
    parts = events(answer) if stream else [answer.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    ids = [token for one in choices for token in one["token_ids"]]
    assert "".join(one["text"] for one in choices) == whole[: whole.index(stop)]
    scored = [token for one in choices for token in one["logprobs"]["tokens"]]
    rounds = [one for choice in choices for one in choice["rounds"]]
    assert parts[-1]["usage"]["completion_tokens"] == len(ids) == len(scored)
    assert sum(one["tokens"] for one in rounds) == len(ids)
    assert stop in "".join(text for one in rounds for text in one["texts"])
    with grpc.insecure_channel(server.address) as channel:
        request = pb.GenerateRequest(
            text=PROMPT, stopping=pb.Stopping(max_tokens=24, ignore_eos=True, stop=[stop])
        )
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        (sequence,) = stub.GenerateOnce(request, timeout=LIMIT).sequences
    assert list(sequence.token_ids) == ids
    assert sequence.text == whole[: whole.index(stop)]
