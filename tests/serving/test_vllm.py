"""`vllm.grpc.engine.VllmEngine` through a live server and smg-grpc-proto's stock stub."""

import hashlib
import io
import time
import zipfile
from types import SimpleNamespace

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from peagle_jax import SamplingParams
from serving.messages import Load
from serving.rpc.vllm import _Pace
from tests.serving.live import LiveServer
from tests.serving.test_peagle import violation
from tests.waiting import eventually

PROMPT = "hello there"
Params = pb.SamplingParams
LONG = dict(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def stub(live):
    with grpc.insecure_channel(live.address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def ask(stream=False, text=PROMPT, **params) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, stream=stream, sampling_params=Params(**params))


def completes(responses) -> list[pb.GenerateComplete]:
    return [one.complete for one in responses if one.HasField("complete")]


def refusal(call) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


def test_a_stream_is_chunks_and_one_complete(server, stub, alone):
    expected = alone.generate([PROMPT], SamplingParams(max_tokens=30))[0]
    *chunks, last = stub.Generate(ask(stream=True, temperature=0, max_tokens=30))
    chunks = [one.chunk for one in chunks]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.tokens
    counts = [chunk.completion_tokens for chunk in chunks]
    assert counts == sorted(set(counts))
    assert counts[-1] == len(expected.tokens)
    assert {chunk.prompt_tokens for chunk in chunks} == {len(expected.prompt)}
    whole = last.complete
    assert list(whole.output_ids) == expected.tokens
    assert (whole.prompt_tokens, whole.completion_tokens) == (len(expected.prompt), counts[-1])
    assert whole.finish_reason == expected.finish_reason
    assert whole.spec_draft_tokens == expected.drafted > 0
    assert whole.spec_accepted_tokens == expected.accepted
    (once,) = stub.Generate(ask(temperature=0, max_tokens=30))
    once.complete.cached_tokens = whole.cached_tokens
    assert once.complete == whole


def test_unset_fields_have_vllms_defaults(server, stub, alone):
    """Temperature 1, top_p 1, one sequence, and as many tokens as fit; not what proto3 says: 0."""
    (seeded,) = completes(stub.Generate(ask(seed=5, ignore_eos=True)))
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=96, ignore_eos=True)
    assert list(seeded.output_ids) == alone.generate([PROMPT], sampled)[0].tokens
    assert seeded.finish_reason == "length"
    assert seeded.prompt_tokens + seeded.completion_tokens == 96
    greedy = alone.generate([PROMPT], SamplingParams(max_tokens=96, ignore_eos=True))[0].tokens
    assert list(seeded.output_ids) != greedy


def test_seeds_repeat_and_minus_one_is_none(server, stub):
    request = ask(n=3, seed=7, max_tokens=20, ignore_eos=True)
    first, second = (completes(stub.Generate(request)) for _ in range(2))
    by_index = lambda wholes: {one.index: tuple(one.output_ids) for one in wholes}
    assert by_index(first) == by_index(second)
    assert len(set(by_index(first).values())) == 3
    free = ask(seed=-1, max_tokens=20, ignore_eos=True)
    texts = {tuple(one.output_ids) for _ in range(3) for one in completes(stub.Generate(free))}
    assert len(texts) == 3


def test_sequences_of_a_stream_are_distinguished_by_index(server, stub):
    responses = list(stub.Generate(ask(stream=True, n=3, seed=1, max_tokens=20, ignore_eos=True)))
    wholes = {one.index: list(one.output_ids) for one in completes(responses)}
    joined = {0: [], 1: [], 2: []}
    for one in responses:
        if one.HasField("chunk"):
            joined[one.chunk.index] += one.chunk.token_ids
            assert one.chunk.completion_tokens == len(joined[one.chunk.index])
    assert wholes == joined


def test_the_stop_reason_is_reported(server, stub, alone):
    free = alone.generate([PROMPT], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    stop = free.text[10:14]
    (whole,) = completes(stub.Generate(ask(**LONG, stop=[stop])))
    assert (whole.finish_reason, whole.matched_stop_str) == ("stop", stop)
    token = free.tokens[7]
    (whole,) = completes(stub.Generate(ask(**LONG, stop_token_ids=[token])))
    assert (whole.finish_reason, whole.matched_token_id) == ("stop", token)
    assert list(whole.output_ids) == free.tokens[: free.tokens.index(token) + 1]
    (whole,) = completes(stub.Generate(ask(**LONG)))
    assert whole.finish_reason == "length"
    assert whole.WhichOneof("matched_stop") is None


@pytest.mark.parametrize("num_top", [0, 2])
def test_logprobs_come_with_their_tokens(server, stub, num_top):
    request = ask(stream=True, temperature=0, max_tokens=9, ignore_eos=True, logprobs=num_top)
    *chunks, last = stub.Generate(request)
    whole = last.complete.output_logprobs
    assert list(whole.token_ids) == list(last.complete.output_ids)
    values = [value for one in chunks for value in one.chunk.output_logprobs.token_logprobs]
    assert values == list(whole.token_logprobs)
    assert all(value < 0 for value in values)
    assert len(values) == 9
    assert len(whole.top_logprobs) == (9 if num_top else 0)
    for token, value, top in zip(whole.token_ids, values, whole.top_logprobs, strict=False):
        assert (top.token_ids[0], len(top.token_ids)) == (token, num_top)  # greedy
        assert top.values[0] == pytest.approx(value, abs=1e-5)


def test_metadata_set_drafts_and_report_their_acceptance(server, stub):
    request = ask(**LONG)
    call = stub.Generate(request, metadata=[("x-spec-k", "0")])
    (plain,) = completes(call)
    assert (plain.spec_draft_tokens, plain.spec_accepted_tokens) == (0, 0)
    assert dict(call.trailing_metadata())["x-spec-draft-tokens"] == "0"
    call = stub.Generate(request, metadata=[("x-spec-k", "2")])
    (whole,) = completes(call)
    trailers = dict(call.trailing_metadata())
    assert list(whole.output_ids) == list(plain.output_ids)
    assert int(trailers["x-spec-draft-tokens"]) == whole.spec_draft_tokens
    assert int(trailers["x-spec-accepted-tokens"]) == whole.spec_accepted_tokens
    assert int(trailers["x-spec-draft-tokens"]) == 2 * int(trailers["x-spec-rounds"])
    positions = [int(count) for count in trailers["x-spec-accepted-per-position"].split(",")]
    assert (len(positions), sum(positions)) == (2, whole.spec_accepted_tokens)
    rounds = int(trailers["x-spec-rounds"])
    length = (whole.completion_tokens - 1) / rounds
    assert float(trailers["x-spec-acceptance-length"]) == pytest.approx(length, abs=1e-4)


@pytest.mark.parametrize("text", ["", "-1", "x", "1.5", "9999999999", "4"])
def test_invalid_numbers_of_drafts_are_refused(server, stub, text):
    error = refusal(stub.Generate(ask(), metadata=[("x-spec-k", text)]))
    assert violation(error) == "x-spec-k"


def with_unknown(number: int, **fields) -> pb.GenerateRequest:
    """A request of a later version: a field of an unknown number holds 1."""
    request = pb.GenerateRequest(text="a", sampling_params=Params(**fields))
    request.sampling_params.MergeFromString(bytes([(number << 3) & 0x7F | 0x80, number >> 4, 1]))
    return request


of = lambda **fields: pb.GenerateRequest(text="a", **fields)
WRONG = {
    "input": pb.GenerateRequest(),
    "tokenized.input_ids": pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5, 128])),
    "request_id": of(request_id="x" * 257),
    "mm_inputs": of(mm_inputs=pb.MultimodalInputs()),
    "media_refs": of(media_refs=pb.MediaRefs(items=[pb.MediaRef(url="http://a")])),
    "kv_transfer_params": of(kv_transfer_params=pb.KvTransferParams(remote_host="a")),
    "data_parallel_rank": of(data_parallel_rank=1),
    "sampling_params.seed": ask(seed=-2),
    "sampling_params.logprobs": ask(logprobs=-1),
    "sampling_params.prompt_logprobs": ask(prompt_logprobs=0),
    "sampling_params.truncate_prompt_tokens": ask(truncate_prompt_tokens=-1),
    "sampling_params.json_schema": ask(json_schema="{"),
    "sampling_params.structural_tag": ask(structural_tag="a"),
    "sampling_params.choice": ask(choice=pb.ChoiceConstraint(choices=["a", ""])),
    "sampling_params.99": with_unknown(99),
}


@pytest.mark.parametrize("field", WRONG)
def test_wrong_and_unsupported_fields_are_named(server, stub, field):
    error = refusal(stub.Generate(WRONG[field]))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violation(error) == field


def test_server_info(server, stub, monkeypatch):
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.served_model_name, info.is_generation) == ("tiny", True)
    assert not info.supports_vision
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (96, 95, 128)
    assert (info.model_type, list(info.architectures)) == ("qwen3", ["Qwen3ForCausalLM"])
    assert list(info.eos_token_ids) == [126, 127]
    # Neither a folder nor a hub id, so that gateways fetch the tokenizer from this server.
    assert info.model_path == info.tokenizer_path == "/peagle-jax/served/tiny"
    about = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (about.server_type, about.data_parallel_size) == ("peagle-jax", 1)
    assert (about.block_size, about.max_num_seqs, about.model_dtype) == (4, 4, "float32")
    assert not about.is_paused
    before = time.time()
    frontend = server.frontend
    monkeypatch.setattr(frontend, "started", frontend.started + 1e6)  # the clock is set back
    list(stub.Generate(ask(temperature=0, max_tokens=2)))
    after = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert after.last_receive_timestamp >= before
    assert after.uptime_seconds > about.uptime_seconds > 0
    health = stub.HealthCheck(pb.HealthCheckRequest())
    assert (health.healthy, health.message) == (True, "serving")


def test_loads_follow_the_engine(server, stub):
    (idle,) = stub.GetLoads(pb.GetLoadsRequest(include=["core"])).loads
    assert (idle.num_running_reqs, idle.num_total_reqs, idle.num_used_tokens) == (0, 0, 0)
    assert idle.num_waiting_uncached_tokens == 0
    assert (idle.max_total_num_tokens, idle.max_running_requests) == (4 * 4 * 96, 4)
    seen = []

    def newest():
        seen.append(stub.GetLoads(pb.GetLoadsRequest()).loads[0])
        return seen[-1]

    with server.paced() as pace:
        calls = [stub.Generate(ask(**LONG)) for _ in range(12)]
        eventually(lambda: server.frontend.num_open == 12)
        pace.release(3)
        eventually(lambda: (newest().num_running_reqs, newest().num_waiting_reqs) == (4, 8))
        busiest = newest()
        prompt_tokens = len(server.frontend.tokenizer.encode(PROMPT))
        assert busiest.num_waiting_uncached_tokens == 8 * prompt_tokens
    for call in calls:
        list(call)
    assert all(one.num_total_reqs == one.num_running_reqs + one.num_waiting_reqs for one in seen)
    assert busiest.token_usage == busiest.num_used_tokens / busiest.max_total_num_tokens > 0
    eventually(lambda: newest().gen_throughput > 0)
    response = stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
    assert (response.dp_rank_count, len(response.loads)) == (1, 0)


def test_the_tokenizer_can_be_fetched(server, stub, tokenizer, tmp_path):
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    content = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(content).hexdigest()
    assert not any(chunk.sha256 for chunk in chunks[:-1])
    assert all(len(chunk.data) <= 65536 for chunk in chunks)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert (tmp_path / "tokenizer.json").read_bytes() == (
        tokenizer.folder / "tokenizer.json"
    ).read_bytes()
    again = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    assert again[-1].sha256 == chunks[-1].sha256


def test_a_server_without_a_tokenizer_takes_ids_only(make_engine):
    server = LiveServer(make_engine(with_tokenizer=False))
    with grpc.insecure_channel(server.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        error = refusal(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refusal(stub.Generate(ask())).code() is grpc.StatusCode.FAILED_PRECONDITION
        assert stub.GetModelInfo(pb.GetModelInfoRequest()).tokenizer_path == ""
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=[5, 6]), sampling_params=Params(max_tokens=4)
        )
        assert len(completes(stub.Generate(request))[0].output_ids) <= 4
    server.close()


@pytest.mark.parametrize("running", [1, 3, 4])
def test_the_reported_speed_is_that_of_full_slots(running):
    """A gateway divides waiting tokens by it: equal servers must report the same."""
    slots, tokens, seconds = 4, 0, 0.0
    frontend = SimpleNamespace(config=SimpleNamespace(max_num_seqs=slots), load=Load())
    pace = _Pace(frontend)
    assert pace.measure() == 0
    for _ in range(200):  # rounds of 10 ms, in which each sequence gets 2 tokens
        tokens, seconds = tokens + 2 * running, seconds + 0.01 * running
        frontend.load = Load(num_tokens=tokens, sequence_seconds=seconds)
        assert pace.measure() in (0, pytest.approx(slots * 2 / 0.01))
    assert pace.measure() > 0
