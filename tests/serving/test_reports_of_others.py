"""Faults that other servers have had, tried on this one; docs/reliability.md names them."""

import grpc
import pytest

from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests.serving.test_http import events
from tests.waiting import LIMIT

PROMPT = "hello there"


def test_requests_without_a_seed_share_no_random_stream(server, http):
    body = dict(prompt=PROMPT, temperature=1, max_tokens=6, ignore_eos=True, return_token_ids=True)
    choices = []
    for n in (*[1] * 24, 8):
        choices += http.post("/v1/completions", json=body | {"n": n}).json()["choices"]
    texts = {tuple(one["token_ids"]) for one in choices}
    assert len(texts) == len(choices) == 32
    for place in (0, 4):
        assert len({one["token_ids"][place] for one in choices}) > 8


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
        (sequence,) = (
            peagle_v1_pb2_grpc.GenerationStub(channel)
            .GenerateOnce(request, timeout=LIMIT)
            .sequences
        )
    assert list(sequence.token_ids) == ids
    assert sequence.text == whole[: whole.index(stop)]
