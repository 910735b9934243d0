"""`peagle.v1.Generation` through a live server and a stock client."""

import threading
import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from peagle_jax import SamplingParams
from serving.errors import Code
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from serving.stream import Ask
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually

PROMPT = "hello there"
LONG = pb.Stopping(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def stub(live):
    with grpc.insecure_channel(live.address) as channel:
        yield peagle_v1_pb2_grpc.GenerationStub(channel)


def ids(*tokens: int) -> pb.TokenIds:
    return pb.TokenIds(ids=tokens)


def joined(deltas) -> pb.Sequence:
    """All deltas of one sequence, as one."""
    whole = pb.Sequence()
    for delta in deltas:
        whole.text += delta.text
        whole.token_ids.extend(delta.token_ids)
        whole.logprobs.extend(delta.logprobs)
        if delta.HasField("finish"):
            whole.finish.CopyFrom(delta.finish)
    return whole


def violation(error: grpc.RpcError) -> str:
    """The field that an INVALID_ARGUMENT names."""
    details = error_details_pb2.BadRequest()
    assert rpc_status.from_call(error).details[0].Unpack(details)
    return details.field_violations[0].field


def test_a_stream_equals_the_engines_output(server, stub, alone):
    expected = alone.generate([PROMPT], SamplingParams(max_tokens=30))[0]
    request = pb.GenerateRequest(text=PROMPT, stopping=pb.Stopping(max_tokens=30))
    deltas = list(stub.Generate(request))
    whole = joined(deltas)
    assert list(whole.token_ids) == expected.tokens
    assert whole.text == expected.text
    usage = deltas[-1].usage
    assert usage.prompt_tokens == len(expected.prompt)
    assert usage.completion_tokens == len(expected.tokens)
    assert usage.acceptance.rounds == expected.rounds
    assert list(usage.acceptance.accepted_per_position) == expected.accepted_per_position
    assert 0 < usage.time_to_first_token <= usage.duration
    once = stub.GenerateOnce(request)
    assert once.sequences[0] == whole
    assert once.usage.completion_tokens == usage.completion_tokens


def test_text_tokens_and_chat_are_prompts(server, stub, tokenizer):
    stopping = pb.Stopping(max_tokens=12)
    of = lambda **prompt: stub.GenerateOnce(pb.GenerateRequest(stopping=stopping, **prompt))
    by_text = of(text=PROMPT)
    by_ids = of(tokens=ids(*tokenizer.encode(PROMPT)))
    assert by_text.sequences == by_ids.sequences
    messages = [pb.ChatMessage(role="user", content="ab")]
    by_chat = of(chat=pb.Chat(messages=messages))
    assert by_chat.sequences == of(text="user:ab\n").sequences


def test_logprobs_and_opting_out_of_drafts(server, stub):
    request = pb.GenerateRequest(
        text=PROMPT,
        stopping=pb.Stopping(max_tokens=9, ignore_eos=True),
        output=pb.Output(logprobs=2, tokens_only=True),
        speculation=pb.Speculation(num_speculative_tokens=0),
    )
    response = stub.GenerateOnce(request)
    sequence = response.sequences[0]
    assert len(sequence.logprobs) == len(sequence.token_ids) == 9
    assert sequence.text == ""
    for token, one in zip(sequence.token_ids, sequence.logprobs, strict=True):
        assert one.alternatives[0].token_id == token  # greedy
        assert one.alternatives[0].logprob == pytest.approx(one.logprob, abs=1e-5)
        assert len(one.alternatives) == 2
    assert response.usage.acceptance.drafted == 0
    request.ClearField("speculation")
    assert stub.GenerateOnce(request).usage.acceptance.drafted > 0


ask = lambda **fields: pb.GenerateRequest(text="a", **fields)
sample = lambda **fields: ask(sampling=pb.Sampling(**fields))
until = lambda **fields: ask(stopping=pb.Stopping(**fields))
MESSAGE = pb.ChatMessage(role="user")
WRONG = {
    "prompt": pb.GenerateRequest(),
    "tokens": pb.GenerateRequest(tokens=ids(5, 128)),
    "chat.messages": pb.GenerateRequest(chat=pb.Chat()),
    "chat.variables_json": pb.GenerateRequest(chat=pb.Chat(messages=[MESSAGE], variables_json="{")),
    "request_id": ask(request_id="x" * 257),
    "sampling.temperature": sample(temperature=-1),
    "sampling.seed": sample(seed=2**63),
    "sampling.allowed_token_ids": sample(allowed_token_ids=pb.TokenIds()),
    "stopping.stop_token_ids": until(stop_token_ids=range(257)),
    "output.logprobs": ask(output=pb.Output(logprobs=4)),
    "speculation.num_speculative_tokens": ask(speculation=pb.Speculation(num_speculative_tokens=4)),
}


@pytest.mark.parametrize("given", ["a\nb", "é", "\x7f"])
def test_an_id_that_metadata_cannot_hold_is_refused_as_over_http(server, stub, given):
    request = pb.GenerateRequest(text="a", request_id=given)
    for call in (lambda: list(stub.Generate(request)), lambda: stub.GenerateOnce(request)):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "request_id: must be printable ASCII"


@pytest.mark.parametrize("field", WRONG)
def test_wrong_fields_are_named(server, stub, field):
    for call in (lambda request: list(stub.Generate(request)), stub.GenerateOnce):
        with pytest.raises(grpc.RpcError) as caught:
            call(WRONG[field])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert violation(caught.value) == field


def test_every_call_is_reported_once(server, stub):
    counted = lambda: {
        sample.labels["code"]: sample.value
        for family in server.frontend.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "peagle:requests_total" and sample.labels["protocol"] == "grpc"
    }
    before = server.call(counted)
    stub.GenerateOnce(pb.GenerateRequest(text="a", stopping=pb.Stopping(max_tokens=2)))
    for request in (WRONG["tokens"], WRONG["prompt"], WRONG["sampling.seed"]):
        with pytest.raises(grpc.RpcError):
            stub.GenerateOnce(request)
    after = server.call(counted)
    assert after["OK"] == before.get("OK", 0) + 1
    assert after["INVALID_ARGUMENT"] == before.get("INVALID_ARGUMENT", 0) + 3


@pytest.mark.parametrize(("seconds", "code"), [(0.04, "DEADLINE_EXCEEDED"), (60, "CANCELLED")])
def test_a_client_that_leaves_at_its_deadline_is_counted_so(server, seconds, code):
    """Its call is often cancelled before the deadline passes by the clock of the server."""

    async def leave() -> Code:
        deadline = time.monotonic() + seconds
        ask = Ask(request_id="a", prompt=[1], params=SamplingParams(), deadline=deadline)
        async with server.frontend.open(ask) as stream:
            pass
        return stream.code

    assert server.run(leave()) is Code[code]


def test_low_priorities_are_refused(server, stub):
    least = server.frontend.limits.min_priority
    assert stub.GenerateOnce(ask(priority=least), timeout=LIMIT)
    with pytest.raises(grpc.RpcError, match="--min-priority") as caught:
        stub.GenerateOnce(ask(priority=least - 1), timeout=LIMIT)
    assert violation(caught.value) == "priority"


def test_a_slot_is_not_left_empty_between_two_requests_of_a_client(server, stub):
    """The next request comes while a round runs; it is prefilled before the one after that."""
    request = pb.GenerateRequest(text="b", stopping=pb.Stopping(max_tokens=1))
    with server.paced() as pace:
        other = stub.Generate(pb.GenerateRequest(text="a", stopping=LONG))
        for _ in range(4):
            assert pace.is_waiting.wait(LIMIT)
            call = stub.GenerateOnce.future(request)
            eventually(lambda: server.frontend.num_open == 2)
            # The round that waits; the one beside the prefill; the one that runs while its token is
            # read.
            pace.release(3)
            assert len(call.result(LIMIT).sequences[0].token_ids) == 1
        other.cancel()


def test_model_info_and_stats(server, stub):
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.name, info.method, info.num_speculative_tokens) == ("tiny", "peagle", 3)
    assert (info.vocab_size, info.max_model_len, info.has_tokenizer) == (128, 96, True)
    assert info.tensor_parallel == 1
    before = stub.GetStats(pb.GetStatsRequest())
    assert before.state == "serving"
    stub.GenerateOnce(pb.GenerateRequest(text="a", stopping=LONG))
    after = stub.GetStats(pb.GetStatsRequest())
    assert after.acceptance.rounds > before.acceptance.rounds
    assert after.kv_pages_total == server.engine.config.total_pages - 1


def test_smaller_batches_compile_while_it_serves(make_engine):
    with LiveServer(make_engine()) as server, server.peagle() as stub:
        request = pb.GenerateRequest(text=PROMPT, stopping=LONG)
        first = stub.GenerateOnce(request)
        pending = [stub.GetStats(pb.GetStatsRequest()).batch_sizes_pending]
        while pending[-1]:
            assert stub.GenerateOnce(request).sequences == first.sequences
            pending.append(stub.GetStats(pb.GetStatsRequest()).batch_sizes_pending)
        assert pending == sorted(pending, reverse=True)
        assert stub.GenerateOnce(request).sequences == first.sequences
        assert tuple(server.engine.programs.rounds) == server.engine.config.batch_buckets


def test_a_round_that_hangs_counts_as_death(make_engine):
    server = LiveServer(make_engine())
    held = threading.Event()
    with server.peagle() as stub:
        call = stub.Generate(pb.GenerateRequest(text="a", stopping=LONG))
        next(call)
        server.engine.scheduler.schedule = held.wait
        server.run(server.frontend.watch(0.2))
        with pytest.raises(grpc.RpcError, match="TimeoutError") as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
    held.set()
    server.close()
