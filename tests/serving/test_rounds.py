"""`return_rounds`: every interface reports which round made which tokens, and what it drafted."""

import pytest

from peagle_jax.engine.host.request import Round
from serving.protos import peagle_v1_pb2 as pb
from serving.rounds import RoundReports
from serving.stream import Delta
from tests.serving.conftest import SIZES
from tests.serving.drafters import known_text, known_text_engine
from tests.serving.live import LiveServer
from tests.serving.test_http import events
from tests.waiting import LIMIT

PROMPT = "hello there"
NUM_TOKENS = 40
BODY = dict(prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
J = SIZES["num_draft"]


@pytest.fixture(scope="module")
def live(target, tokenizer):
    text = known_text(target, tokenizer.encode(PROMPT))
    with LiveServer(known_text_engine(target, tokenizer, text), http=True) as server:
        yield server


def post(server: LiveServer, path: str = "/v1/completions", **changes) -> dict:
    return server.post(path, **BODY | {"return_rounds": True} | changes).json()


def check(rounds: list[dict], text: str, usage: dict) -> None:
    """Rounds are complete, agree with text and usage, and each is possible."""
    assert "".join(piece for one in rounds for piece in one["texts"]) == text
    assert sum(one["tokens"] for one in rounds) == usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    accepted = sum(one["accepted"] for one in rounds)
    assert accepted == details["accepted_prediction_tokens"]
    drafted = sum(len(one["drafts"]) for one in rounds)
    assert drafted - accepted == details["rejected_prediction_tokens"]
    first, *others = rounds
    assert (first["tokens"], first["accepted"], first["drafts"]) == (1, 0, [])
    for one in others:
        assert len(one["texts"]) == one["tokens"] >= 1
        assert one["accepted"] <= one["tokens"] <= one["accepted"] + 1
        assert one["drafts"][: one["accepted"]] == one["texts"][: one["accepted"]]
        if one["accepted"] < min(one["tokens"], len(one["drafts"])):  # the target corrected a draft
            assert one["drafts"][one["accepted"]] != one["texts"][one["accepted"]]


def test_rounds_of_a_whole_answer(server):
    answer = post(server)
    (choice,) = answer["choices"]
    check(choice["rounds"], choice["text"], answer["usage"])
    kinds = {one["accepted"] for one in choice["rounds"][1:]}
    assert kinds == {*range(J + 1)}  # every number of accepted drafts occurs


def test_rounds_of_a_stream(server):
    whole = post(server)["choices"][0]["rounds"]
    body = BODY | dict(return_rounds=True, stream=True, stream_options=dict(include_usage=True))
    found = events(server.post("/v1/completions", **body))
    choices = [one["choices"][0] for one in found if one["choices"]]
    rounds = [one for choice in choices for one in choice["rounds"]]
    assert rounds == whole
    check(rounds, "".join(choice["text"] for choice in choices), found[-1]["usage"])


def test_rounds_of_a_chat_and_of_several_sequences(server):
    messages = [dict(role="user", content="hello")]
    body = dict(messages=messages, max_tokens=12, temperature=1, seed=3, n=3, return_rounds=True)
    answer = server.post("/v1/chat/completions", **body).json()
    assert len(answer["choices"]) == 3
    for choice in answer["choices"]:
        text = "".join(piece for one in choice["rounds"] for piece in one["texts"])
        assert text == choice["message"]["content"]


def test_requests_without_drafts_have_rounds_of_one_token(server):
    rounds = post(server, num_speculative_tokens=0)["choices"][0]["rounds"]
    assert len(rounds) == NUM_TOKENS
    assert all((one["tokens"], one["accepted"], one["drafts"]) == (1, 0, []) for one in rounds)


def test_rounds_are_not_reported_unless_asked_for(server):
    assert "rounds" not in post(server, return_rounds=False)["choices"][0]
    refused = post(server, return_rounds=1)
    assert refused["error"]["param"] == "return_rounds"


def test_rounds_over_grpc_are_those_over_http(server):
    wanted = post(server)["choices"][0]["rounds"]
    stopping = pb.Stopping(max_tokens=NUM_TOKENS, ignore_eos=True)
    output = pb.Output(return_rounds=True)
    request = pb.GenerateRequest(text=PROMPT, stopping=stopping, output=output)
    with server.peagle() as stub:
        streamed = [one for delta in stub.Generate(request, timeout=LIMIT) for one in delta.rounds]
        whole = list(stub.GenerateOnce(request, timeout=LIMIT).sequences[0].rounds)
        request.output.tokens_only = True
        bare = stub.GenerateOnce(request, timeout=LIMIT).sequences[0].rounds
        request.output.return_rounds = False
        assert not stub.GenerateOnce(request, timeout=LIMIT).sequences[0].rounds
    as_http = [
        dict(tokens=one.tokens, accepted=one.accepted, drafts=[*one.drafts], texts=[*one.texts])
        for one in streamed
    ]
    assert streamed == whole
    assert as_http == wanted
    assert [one.draft_ids for one in bare] == [one.draft_ids for one in whole]
    assert not any(one.drafts or one.texts for one in bare)


def test_a_character_belongs_to_the_token_that_completes_it():
    """Tokens may end within a character; an incomplete end is U+FFFD, as in the text."""

    class Bytes:
        num_stripped = 0
        name_of = staticmethod(str)

        def bytes_table(self, shown):
            return {token: bytes([token]) for token in range(256)}

    euro = "€".encode()
    rounds = [Round([euro[0], 9], 1, 2), Round([], 0, 1), Round([8], 0, 1)]
    made = dict(tokens=[65, *euro, euro[0]], rounds=rounds, finish=object())
    delta = Delta(index=0, text="", logprobs=None, **made)
    reports = RoundReports(Bytes()).of(0, delta)
    assert [one.texts for one in reports] == [["A"], ["", ""], ["€"], ["\ufffd"]]
    assert [one.drafts for one in reports] == [[], [str(euro[0]), "9"], [], ["8"]]
