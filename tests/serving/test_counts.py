"""Every interface reports the same counts of a request's drafts."""

from dataclasses import dataclass

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from peagle_jax import SamplingParams
from peagle_jax.engine.host.stats import Acceptance
from serving.client.command import as_json, statistics
from serving.errors import Code
from serving.logs import log_request
from serving.protos import peagle_v1_pb2
from serving.stream import Ask
from tests.serving.conftest import SIZES
from tests.serving.drafters import known_text, known_text_engine
from tests.serving.live import LiveServer
from tests.serving.test_metrics import moved, scrape
from tests.waiting import eventually

PROMPT = [5, 9, 13]
J = SIZES["num_draft"]
STOP = 17  # output tokens before the stop token


@pytest.fixture(scope="module")
def text(target) -> list[int]:
    """What the target writes after the prompt until the model's length."""
    return known_text(target, PROMPT)[len(PROMPT) :]


@pytest.fixture(scope="module")
def live(target, tokenizer, text):
    engine = known_text_engine(target, tokenizer, PROMPT + text, is_perfect=True)
    with LiveServer(engine, http=True) as server:
        yield server


@dataclass(frozen=True)
class Reported:
    """What one interface says of one request."""

    tokens: int
    accepted: int
    rejected: int


def over_http(server: LiveServer, fields: dict) -> Reported:
    body = dict(prompt=PROMPT, temperature=0, ignore_eos=True) | fields
    answer = server.post("/v1/completions", **body)
    usage = answer.json()["usage"]
    details = usage["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    if block := answer.json().get("metrics"):
        block = block["speculative_decoding"]
        assert block["num_accepted_draft_tokens"] == accepted
        emitted = usage["completion_tokens"] - 1
        assert block["mean_acceptance_length"] * block["num_spec_steps"] == pytest.approx(emitted)
    return Reported(usage["completion_tokens"], accepted, details["rejected_prediction_tokens"])


def over_peagle(server: LiveServer, fields: dict) -> Reported:
    with server.peagle() as stub:
        stopping = peagle_v1_pb2.Stopping(ignore_eos=True, **fields)
        ids = peagle_v1_pb2.TokenIds(ids=PROMPT)
        request = peagle_v1_pb2.GenerateRequest(tokens=ids, stopping=stopping)
        whole = stub.GenerateOnce(request)
    usage, counts = whole.usage, whole.usage.acceptance
    assert counts.emitted == usage.completion_tokens - 1
    assert sum(counts.accepted_per_position) == counts.accepted
    printed = as_json(whole)["usage"]
    assert (printed["accepted"], printed["emitted"]) == (counts.accepted, counts.emitted)
    if counts.rounds:
        length = counts.emitted / counts.rounds
        assert counts.acceptance_length == printed["acceptance_length"] == pytest.approx(length)
        assert f"acceptance length {length:.2f} over {counts.rounds} rounds" in statistics(whole)
    return Reported(usage.completion_tokens, counts.accepted, counts.drafted - counts.accepted)


def over_vllm(server: LiveServer, fields: dict) -> Reported:
    with grpc.insecure_channel(server.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        params = vllm_engine_pb2.SamplingParams(temperature=0, ignore_eos=True, **fields)
        tokenized = vllm_engine_pb2.TokenizedInput(input_ids=PROMPT)
        call = stub.Generate(
            vllm_engine_pb2.GenerateRequest(tokenized=tokenized, sampling_params=params)
        )
        (whole,) = (one.complete for one in call if one.HasField("complete"))
        trailers = dict(call.trailing_metadata())
    assert int(trailers["x-spec-accepted-tokens"]) == whole.spec_accepted_tokens
    if rounds := int(trailers["x-spec-rounds"]):
        length = (whole.completion_tokens - 1) / rounds
        assert float(trailers["x-spec-acceptance-length"]) == pytest.approx(length, abs=1e-4)
    rejected = whole.spec_draft_tokens - whole.spec_accepted_tokens
    return Reported(whole.completion_tokens, whole.spec_accepted_tokens, rejected)


@pytest.mark.sampled(4, slow=6)
@pytest.mark.parametrize("ask", [over_http, over_peagle, over_vllm])
@pytest.mark.parametrize("max_tokens", [1, 5, 96, None])
def test_a_perfect_drafter_is_credited_with_what_it_emitted(server, text, ask, max_tokens):
    fields = dict(max_tokens=max_tokens or 60)
    size = min(max_tokens or STOP, len(text))
    if max_tokens is None:
        fields["stop_token_ids"] = [text[STOP - 1]]
        size = text.index(text[STOP - 1]) + 1
    whole, rest = divmod(size - 1, J + 1)  # a whole round emits J drafts and one token
    accepted, rounds = whole * J + rest, whole + bool(rest)
    before = scrape(server)
    assert ask(server, fields) == Reported(size, accepted, rounds * J - accepted)
    changes = moved(server, before)
    name = lambda what: f"vllm:spec_decode_num_{what}_total"
    assert changes.get(name("drafts"), 0) == rounds
    assert changes.get(name("accepted_tokens"), 0) == accepted
    assert changes.get("peagle:spec_decode_num_emitted_tokens_total", 0) == size - 1
    by_position = [
        changes.get(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{i}}}", 0)
        for i in range(J)
    ]
    assert by_position == [whole + (i < rest) for i in range(J)]


def test_a_slow_reader_gets_the_drafts_of_every_round(live):
    """The stream is read only once the engine has finished, so that all its deltas are merged."""

    params = SamplingParams(max_tokens=STOP, ignore_eos=True)
    stream = live.call(live.frontend.open, Ask(request_id="slow", prompt=PROMPT, params=params))
    eventually(lambda: live.call(lambda: bool(stream.requests)), "the engine has finished")

    async def read():
        async with stream:
            return [delta async for delta in stream]

    (progress,) = (one.progress for one in stream._sequences)
    (delta,) = live.run(read())
    assert Acceptance.of([progress]) == delta.finish.acceptance
    assert sum(one.tokens for one in delta.rounds) == len(delta.tokens) - 1 == STOP - 1
    said = delta.tokens[1:]
    for drafts, accepted, num_tokens in delta.rounds:
        assert drafts[:accepted] == said[:accepted]
        said = said[num_tokens:]
    accepted = [one.accepted for one in delta.rounds]
    assert (len(accepted), sum(accepted)) == (
        delta.finish.acceptance.rounds,
        delta.finish.acceptance.accepted,
    )


@pytest.mark.parametrize("code", [Code.CANCELLED, Code.DEADLINE_EXCEEDED])
def test_a_request_that_is_cut_short_counts_what_was_generated(server, caplog, code):
    """It is reported before the engine gives its sequence back."""
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    with server.paced() as pace:
        ask = Ask(request_id=code.name, prompt=PROMPT, params=params)
        stream = server.call(server.frontend.open, ask)
        pace.release(3)
        (sequence,) = stream._sequences
        eventually(lambda: server.call(lambda: len(sequence.rounds) > 1), "two rounds have ended")
        if code is Code.DEADLINE_EXCEEDED:
            server.call(stream._expire)
        server.call(stream.close)
        usage, generated = stream.usage(), sequence.tokens
        server.check_freed(pace)
    assert (stream.code, stream.requests) == (code, [])
    assert usage.completion_tokens == len(generated) > 2 * J
    counts, rounds = usage.acceptance, sequence.rounds
    assert (counts.rounds, counts.emitted) == (len(rounds), len(generated) - 1)
    assert (
        counts.drafted == sum(len(one.drafts) for one in rounds) == sum(counts.drafted_per_position)
    )
    assert counts.accepted == sum(one.accepted for one in rounds) == sum(counts.per_position)
    with caplog.at_level("INFO", "serving"):
        log_request(stream)
    fields = caplog.records[-1].fields
    assert fields["completion_tokens"] == len(generated)
    assert fields["acceptance_length"] == round(counts.length, 3) > 1
