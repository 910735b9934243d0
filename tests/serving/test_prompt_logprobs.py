"""Log-probabilities of prompts on every API, and requests of lm-evaluation-harness."""

import json

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from peagle_jax import SamplingParams
from serving import client
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests.serving.live import LiveServer

TEXT = "hello there, a longer prompt of several chunks"


@pytest.fixture(scope="module")
def scoring(make_engine):
    with LiveServer(make_engine(prompt_logprobs=True), http=True) as server:
        yield server


@pytest.fixture(scope="module")
def http(scoring):
    with scoring.client() as client:
        yield client


@pytest.fixture(scope="module")
def stub(scoring):
    with grpc.insecure_channel(scoring.address) as channel:
        yield peagle_v1_pb2_grpc.GenerationStub(channel)


@pytest.fixture(scope="module")
def expected(make_engine):
    """What an engine of its own says about `TEXT`."""
    params = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=2)
    return make_engine(prompt_logprobs=True).generate([TEXT], params)[0]


def complete(http, **fields) -> dict:
    response = http.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_request_of_lm_evaluation_harness(http, tokenizer, expected):
    """As `local-completions` sends loglikelihoods: ids or text, one or several prompts."""
    request = dict(model="tiny", temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    short = tokenizer.encode("hello")
    for prompt in ([expected.prompt, short], expected.prompt, [TEXT], TEXT):
        choices = complete(http, prompt=prompt, **request)["choices"]
        assert len(choices) == (2 if prompt == [expected.prompt, short] else 1)
        first = min(choices, key=lambda choice: choice["index"])
        logprobs = first["logprobs"]
        assert first["text"] == TEXT + tokenizer.decode(expected.tokens[:1])
        spelled = [tokenizer.decode([token]) for token in expected.prompt + expected.tokens[:1]]
        assert logprobs["tokens"] == spelled
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        want = [one.logprob for one in (*expected.prompt_logprobs[1:], expected.logprobs[0])]
        assert logprobs["token_logprobs"][1:] == pytest.approx(want, abs=1e-4)
        starts = [len(tokenizer.decode(expected.prompt[:i])) for i in range(len(spelled) - 1)]
        assert logprobs["text_offset"][:-1] == starts
        # The harness looks up whether the prompt's token is the most likely one.
        for token, top, one in zip(
            spelled[1:], logprobs["top_logprobs"][1:], expected.prompt_logprobs[1:], strict=False
        ):
            assert 1 <= len(top) <= 2
            assert (max(top, key=top.get) == token) == (one.rank == 1)


def test_an_echo_without_output_is_the_prompt_alone(http, tokenizer, expected):
    body = dict(prompt=TEXT, max_tokens=0, echo=True, temperature=0, return_token_ids=True)
    (choice,) = complete(http, **body)["choices"]
    assert (choice["text"], choice["token_ids"]) == (TEXT, [])
    assert choice["logprobs"] is None
    (choice,) = complete(http, **body | dict(logprobs=0))["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(expected.prompt)
    refused = http.post("/v1/completions", json=body | dict(echo=False))
    assert refused.json()["error"]["param"] == "max_tokens"


def test_a_stream_echoes_the_prompt_in_its_first_chunk(http, tokenizer, expected):
    body = dict(prompt=TEXT, max_tokens=4, echo=True, temperature=0, logprobs=2, stream=True)
    chunks = []
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks += json.loads(line.removeprefix("data: "))["choices"]
    assert "".join(chunk["text"] for chunk in chunks) == TEXT + tokenizer.decode(expected.tokens)
    assert chunks[0]["text"].startswith(TEXT)
    tokens = [token for chunk in chunks for token in chunk["logprobs"]["tokens"]]
    assert len(tokens) == len(expected.prompt) + 4
    scores = [one for chunk in chunks for one in chunk["logprobs"]["token_logprobs"]]
    want = [one.logprob for one in expected.prompt_logprobs[1:] + expected.logprobs]
    assert scores[1:] == pytest.approx(want, abs=1e-4)


def test_prompt_logprobs_are_by_token_id_as_in_vllm(http, expected):
    body = dict(prompt=TEXT, max_tokens=1, temperature=0, n=1, prompt_logprobs=2)
    (choice,) = complete(http, **body)["choices"]
    assert choice["logprobs"] is None
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for token, found, one in zip(
        expected.prompt[1:], rest, expected.prompt_logprobs[1:], strict=True
    ):
        assert found.keys() == {str(other) for other, _ in (*one.top, (token, 0))}
        assert found[str(token)]["logprob"] == pytest.approx(one.logprob, abs=1e-4)
        assert found[str(token)]["rank"] == one.rank
        assert sorted(other["rank"] for other in found.values())[:2] == [1, 2]
    (narrow,) = complete(http, **body | dict(echo=True, logprobs=0))["choices"]
    assert all(len(one) == 1 for one in narrow["logprobs"]["top_logprobs"][1:])
    assert narrow["prompt_logprobs"] == choice["prompt_logprobs"]


def test_peagle_v1_has_them_in_the_first_delta(stub, expected):
    request = pb.GenerateRequest(
        text=TEXT, stopping=pb.Stopping(max_tokens=4), output=pb.Output(prompt_logprobs=2)
    )

    def check(found) -> None:
        for got, one in zip(found, expected.prompt_logprobs[1:], strict=True):
            assert got.logprob == pytest.approx(one.logprob, abs=1e-4)
            assert got.rank == one.rank
            assert [x.token_id for x in got.alternatives] == [token for token, _ in one.top]

    first, *others = stub.Generate(request)
    check(first.prompt_logprobs)
    assert not any(delta.prompt_logprobs for delta in others)
    check(stub.GenerateOnce(request).sequences[0].prompt_logprobs)


def test_vllm_engine_has_them_in_the_first_chunk_and_the_whole(scoring, expected):
    with grpc.insecure_channel(scoring.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        params = vllm_pb.SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2)
        request = vllm_pb.GenerateRequest(text=TEXT, stream=True, sampling_params=params)
        first, *_, last = stub.Generate(request)
    found = last.complete.input_logprobs
    assert first.chunk.input_logprobs == found
    assert list(found.token_ids) == expected.prompt
    assert [one.HasField("value") for one in found.token_logprobs] == [False] + [True] * (
        len(expected.prompt) - 1
    )
    want = [one.logprob for one in expected.prompt_logprobs[1:]]
    assert [one.value for one in found.token_logprobs[1:]] == pytest.approx(want, abs=1e-4)
    assert [list(one.token_ids) for one in found.top_logprobs[1:]] == [
        [token for token, _ in one.top] for one in expected.prompt_logprobs[1:]
    ]


REFUSED = {
    "prompt_logprobs": dict(prompt_logprobs=4),
    "prompt_logprobs of a stream": dict(prompt_logprobs=0, stream=True),
    "prompt_logprobs, all": dict(prompt_logprobs=-1),
    "logprobs": dict(echo=True, logprobs=4),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(http, case):
    response = http.post("/v1/completions", json=dict(prompt="a") | REFUSED[case])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == case.split()[0].rstrip(",")


def test_the_client_writes_them_as_json(scoring, expected, capsys):
    options = ["--json", "--prompt-logprobs", "2", "--max-tokens", "1"]
    assert client.main(["--address", scoring.address, *options, TEXT]) == 0
    first, *rest = json.loads(capsys.readouterr().out)["sequences"][0]["prompt_logprobs"]
    assert first is None
    for found, one in zip(rest, expected.prompt_logprobs[1:], strict=True):
        assert found["rank"] == one.rank
        assert found["logprob"] == pytest.approx(one.logprob, abs=1e-4)
        assert [token for token, _ in found["alternatives"]] == [token for token, _ in one.top]


def test_a_server_without_the_program_refuses_by_the_clients_own_name(live):
    with live.another_client() as client:
        asks = {"echo": dict(echo=True, logprobs=1), "prompt_logprobs": dict(prompt_logprobs=0)}
        for name, fields in asks.items():
            error = client.post("/v1/completions", json=dict(prompt="a") | fields).json()["error"]
            assert error["param"] == name
            assert "--prompt-logprobs" in error["message"]
        assert client.post("/v1/completions", json=dict(prompt="a", echo=True)).json()["choices"]
