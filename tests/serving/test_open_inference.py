"""`inference.GRPCInferenceService` through a live server and tritonclient."""

import json
import queue
import re

import grpc
import numpy as np
import pytest
from tritonclient.grpc import (
    InferenceServerClient,
    InferInput,
    InferRequestedOutput,
    InferResult,
    service_pb2,
    service_pb2_grpc,
)
from tritonclient.grpc.model_config_pb2 import DataType
from tritonclient.utils import InferenceServerException

from peagle_jax import SamplingParams
from tests.waiting import LIMIT, eventually

PROMPT = "hello there"
LONG = dict(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def client(live):
    with InferenceServerClient(live.address) as client:
        yield client


@pytest.fixture(scope="module")
def stub(live):
    """For what the stock client does not do."""
    with grpc.insecure_channel(live.address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def tensor(name: str, value: str | bool, shape=(1,)) -> InferInput:
    kind = "BOOL" if isinstance(value, bool) else "BYTES"
    made = InferInput(name, list(shape), kind)
    data = value if isinstance(value, bool) else value.encode()
    made.set_data_from_numpy(np.array([data], bool if kind == "BOOL" else object).reshape(shape))
    return made


def inputs(sampling=None, *, text=PROMPT, **others) -> list[InferInput]:
    made = [tensor("text_input", text)]
    if sampling is not None:
        made.append(tensor("sampling_parameters", json.dumps(sampling)))
    return made + [tensor(name, value) for name, value in others.items()]


def texts(result: InferResult) -> list[str]:
    return [text.decode() for text in result.as_numpy("text_output").tolist()]


def parameter(result: InferResult, name: str):
    one = result.get_response().parameters[name]
    return getattr(one, one.WhichOneof("parameter_choice"))


class Talk:
    """A stream of a client of its own."""

    def __init__(self, server):
        self.client = InferenceServerClient(server.address)
        self.answers: queue.Queue = queue.Queue()
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()

    def ask(self, given, **options) -> None:
        self.client.async_stream_infer("tiny", given, **options)

    def results(self, count: int) -> dict[str, list[InferResult]]:
        """By id, until `count` final responses have come."""
        found: dict[str, list[InferResult]] = {}
        while count:
            result, error = self.answers.get(timeout=LIMIT)
            assert error is None
            found.setdefault(result.get_response().id, []).append(result)
            count -= parameter(result, "triton_final_response")
        return found


def test_an_answer_equals_the_engines_output(server, client, alone):
    expected = alone.generate([PROMPT], SamplingParams(max_tokens=30))[0]
    result = client.infer(
        "tiny", inputs(dict(temperature=0, max_tokens=30)), request_id="7", model_version="1"
    )
    assert texts(result) == [expected.text]
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("7", "tiny", "1")
    assert parameter(result, "finish_reason") == expected.finish_reason
    assert parameter(result, "prompt_tokens") == len(expected.prompt)
    assert parameter(result, "completion_tokens") == len(expected.tokens)
    assert parameter(result, "spec_draft_tokens") == expected.drafted > 0
    assert parameter(result, "spec_accepted_tokens") == expected.accepted


def test_numbers_may_be_strings_and_batches_one_by_one(server, client):
    as_text = {"temperature": "0.7", "max_tokens": "12", "seed": "9007199254740993", "n": "1"}
    as_numbers = {"temperature": 0.7, "max_tokens": 12.0, "seed": 9007199254740993, "top_k": -1}
    given = [
        tensor("text_input", PROMPT, (1, 1)),
        tensor("sampling_parameters", json.dumps(as_text), (1, 1)),
        tensor("exclude_input_in_output", True),
        tensor("stream", False),
    ]
    wanted = [InferRequestedOutput("text_output")]
    one = client.infer("tiny", given, outputs=wanted)
    assert texts(one) == texts(client.infer("tiny", inputs(as_numbers)))


def test_several_sequences_are_several_elements(server, client):
    sampling = dict(n=3, seed=4, max_tokens=20, ignore_eos=True)
    result = client.infer("tiny", inputs(sampling))
    together = texts(result)
    assert len(set(together)) == 3
    assert parameter(result, "finish_reason") == "length,length,length"
    with Talk(server) as talk:
        talk.ask(inputs(sampling, stream=True), request_id="a")
        joined = ["", "", ""]
        for one in talk.results(1)["a"]:
            joined[parameter(one, "index")] += texts(one)[0]
    assert joined == together


def test_a_stream_is_the_same_in_pieces(server, client):
    whole = client.infer("tiny", inputs(LONG))
    with server.unmerged(), Talk(server) as talk:
        talk.ask(inputs(LONG, stream=True), request_id="a", enable_empty_final_response=True)
        pieces = talk.results(1)["a"]
    assert len(pieces) > 3
    assert "".join(texts(one)[0] for one in pieces) == texts(whole)[0]
    finals = [parameter(one, "triton_final_response") for one in pieces]
    assert finals == [False] * (len(pieces) - 1) + [True]
    for name in ("finish_reason", "prompt_tokens", "completion_tokens", "spec_accepted_tokens"):
        assert parameter(pieces[-1], name) == parameter(whole, name)


def test_requests_of_a_stream_are_distinguished_by_id(server, client):
    with server.unmerged(), Talk(server) as talk, Talk(server) as other:
        for number in range(6):
            is_streamed = number % 2 == 0
            sampling = LONG | dict(max_tokens=10 + number)
            for one in (talk, other):  # two clients may use the same ids
                one.ask(inputs(sampling, stream=is_streamed), request_id=str(number))
        for one in (talk, other):
            found = one.results(6)
            for number in range(6):
                results = found[str(number)]
                assert parameter(results[-1], "completion_tokens") == 10 + number
                assert (len(results) > 1) == (number % 2 == 0)


def test_an_error_in_a_stream_names_its_request(server, stub):
    request = service_pb2.ModelInferRequest(model_name="other", id="7")
    (answer,) = stub.ModelStreamInfer(iter([request]))
    assert answer.error_message == "NOT_FOUND: there is no model 'other'; this server has 'tiny'"
    assert answer.infer_response.id == "7"
    assert answer.infer_response.parameters["triton_final_response"].bool_param


def test_leaving_a_stream_frees_everything(server):
    with Talk(server) as talk:
        for number in range(12):
            talk.ask(inputs(LONG, stream=number % 2 == 0), request_id=str(number))
        talk.answers.get(timeout=LIMIT)
        talk.client.stop_stream(cancel_requests=True)
    server.check_empty()


def typed_request(**values: str | bool) -> service_pb2.ModelInferRequest:
    """A request in the form that clients other than Triton's send."""
    request = service_pb2.ModelInferRequest(model_name="tiny")
    for name, value in values.items():
        kind = "BOOL" if isinstance(value, bool) else "BYTES"
        contents = request.inputs.add(name=name, datatype=kind, shape=[1]).contents
        if isinstance(value, bool):
            contents.bool_contents.append(value)
        else:
            contents.bytes_contents.append(value.encode())
    return request


def test_typed_contents_are_answered_in_kind(server, stub, client):
    request = typed_request(text_input=PROMPT, sampling_parameters=json.dumps(LONG), stream=False)
    response = stub.ModelInfer(request)
    assert not response.raw_output_contents
    (text,) = response.outputs[0].contents.bytes_contents
    assert [text.decode()] == texts(client.infer("tiny", inputs(LONG)))


@pytest.mark.parametrize("options", [dict(client_timeout=0.005), dict(timeout=5000)])
def test_deadlines_of_calls_and_of_requests_are_kept(server, client, pace, options):
    long = LONG | dict(temperature=1, n=16)
    with pytest.raises(InferenceServerException) as caught:
        client.infer("tiny", inputs(long), **options)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    # The client's own words, ours, or ours to a call that came too late.
    messages = r"Deadline|the time was up|the deadline had passed"
    assert re.search(messages, caught.value.message())
    server.check_freed(pace)


WRONG = {
    "inputs['text_input']: is missing": [tensor("sampling_parameters", "{}")],
    "inputs['text_input']: is given twice": [*inputs(), tensor("text_input", "a")],
    "inputs['text_input']: is of type 'BOOL'": [tensor("text_input", True)],
    "inputs['stream']: true is for ModelStreamInfer": inputs(LONG, stream=True),
    "inputs['exclude_input_in_output']: the output": inputs(LONG, exclude_input_in_output=False),
    "inputs['image']: is not an input of this model; it has text_input": inputs(LONG, image="a"),
    "sampling_parameters: is not valid JSON": [*inputs(), tensor("sampling_parameters", "{")],
    "sampling_parameters.colour: is not known; there are max_tokens": inputs(dict(colour=1)),
    "sampling_parameters.max_tokens: 1.5 must be a whole": inputs(dict(max_tokens=1.5)),
    "sampling_parameters.ignore_eos: must be true or false": inputs(dict(ignore_eos="yes")),
    "sampling_parameters.stop: [1] must be a string or a list": inputs(dict(stop=[1])),
    "sampling_parameters.logprobs: ": inputs(dict(logprobs=1)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_and_unsupported_fields_are_named(server, client, message):
    with pytest.raises(InferenceServerException, match=re.escape(message)) as caught:
        client.infer("tiny", WRONG[message])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    if "ModelStreamInfer" not in message:
        with Talk(server) as talk:
            talk.ask(WRONG[message])
            _, error = talk.answers.get(timeout=LIMIT)
        assert error.message().startswith(f"INVALID_ARGUMENT: {message}")


OPTIONS = {
    "parameters['colour']": dict(parameters={"colour": "red"}),
    "parameters['priority']": dict(priority=2**31),
    "outputs['text_output']": dict(outputs=[InferRequestedOutput("text_output", class_count=1)]),
    "id": dict(request_id="x" * 257),
    "id: must be printable ASCII": dict(request_id="a\nb"),
}


@pytest.mark.parametrize("field", OPTIONS)
def test_unsupported_options_are_refused(server, client, field):
    with pytest.raises(InferenceServerException, match=re.escape(f"] {field}")):
        client.infer("tiny", inputs(), **OPTIONS[field])


def test_a_model_is_described_as_triton_does(server, client):
    config = client.get_model_config("tiny").config
    assert (config.name, config.max_batch_size) == ("tiny", 0)
    assert config.model_transaction_policy.decoupled
    required = [one.name for one in config.input if not one.optional]
    metadata = client.get_model_metadata("tiny")
    assert required == ["text_input"]
    assert [one.name for one in config.input] == [one.name for one in metadata.inputs]
    kinds = {"BYTES": DataType.TYPE_STRING, "BOOL": DataType.TYPE_BOOL}
    wanted = [kinds[one.datatype] for one in metadata.inputs]
    assert [one.data_type for one in config.input] == wanted
    assert [(one.name, list(one.dims)) for one in config.output] == [("text_output", [-1])]
    index = client.get_model_repository_index().models
    assert [(one.name, one.version, one.state) for one in index] == [("tiny", "1", "READY")]
    for ask in (client.get_model_config, client.get_inference_statistics):
        with pytest.raises(InferenceServerException, match="there is no model 'other'"):
            ask("other")


def test_statistics_count_what_succeeds_and_what_fails(server, client):
    def counts():
        (one,) = client.get_inference_statistics().model_stats
        stats = one.inference_stats
        assert one.inference_count == stats.success.count
        times = [part.ns for part in (stats.success, stats.queue, stats.compute_infer)]
        return [stats.success.count, stats.fail.count, one.execution_count], times

    (before, times_before), _ = counts(), client.infer("tiny", inputs(LONG))
    with pytest.raises(InferenceServerException):
        client.infer("tiny", [])
    eventually(lambda: counts()[0][:2] == [before[0] + 1, before[1] + 1], "both are counted")
    after, times_after = counts()
    assert after[2] > before[2]
    success, queue, compute = np.subtract(times_after, times_before)
    assert abs(success - queue - compute) < 0.05 * success + 5e6


def test_requests_have_a_priority(server, client, pace):
    errors = queue.Queue()
    ended = lambda result, error: errors.put(error)
    client.async_infer("tiny", inputs(LONG), ended, priority=7)
    eventually(lambda: server.frontend.num_open == 1)
    (stream,) = server.call(lambda: server.frontend.admission.streams)
    assert stream.ask.priority == 7
    pace.release(1_000_000)
    assert errors.get(timeout=LIMIT) is None


def test_raw_contents_must_be_sound(server, stub):
    def asks(*raw: bytes, contents: bool = False) -> str:
        request = service_pb2.ModelInferRequest(model_name="tiny", raw_input_contents=raw)
        one = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        if contents:
            one.contents.bytes_contents.append(b"a")
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return caught.value.details()

    for raw in (b"", b"ab", b"\5\0\0\0ab", b"\1\0\0\0ab"):
        assert "length in front" in asks(raw)
    assert "not valid UTF-8" in asks(b"\1\0\0\0\xff")
    assert "2 entries for 1 inputs" in asks(b"", b"")
    assert "beside raw_input_contents" in asks(b"\1\0\0\0a", contents=True)
    assert "needs one element" in asks()


def test_metadata_of_server_and_model(server, client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("tiny", "2")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata().name == "peagle-jax"
    metadata = client.get_model_metadata("tiny")
    assert (metadata.name, list(metadata.versions)) == ("tiny", ["1"])
    named = {one.name: (one.datatype, list(one.shape)) for one in metadata.inputs}
    assert named["text_input"] == ("BYTES", [1])
    assert named["stream"] == ("BOOL", [1])
    assert [(one.name, one.datatype) for one in metadata.outputs] == [("text_output", "BYTES")]
    for call in (
        lambda: client.get_model_metadata("other"),
        lambda: client.infer("tiny", inputs(), model_version="2"),
    ):
        with pytest.raises(InferenceServerException, match="NOT_FOUND"):
            call()
    with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
        client.load_model("tiny")


def test_a_message_that_is_refused_ends_itself_only(server, live):
    """No message, and one with too many fields: the stream goes on around them."""
    good = typed_request(text_input=PROMPT, sampling_parameters=json.dumps(LONG), stream=True)
    good.id = "good"
    many = service_pb2.ModelInferRequest(model_name="tiny")
    for _ in range(100_000):
        many.inputs.add()
    sent = [b"\xff\xff", good.SerializeToString(), many.SerializeToString(), b"\x0a\x02\xff\xfe"]
    with grpc.insecure_channel(live.address) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        answers = list(call(iter([*sent, good.SerializeToString()]), timeout=LIMIT))
    errors = [one.error_message for one in answers if one.error_message]
    assert sorted(message.partition(", or holds")[0] for message in errors) == [
        "INVALID_ARGUMENT: the request holds more than the 16384 fields that this server takes",
        *["INVALID_ARGUMENT: the request is no such message"] * 2,
    ]
    finals = [one for one in answers if is_final(one.infer_response)]
    assert [one.infer_response.id for one in finals].count("good") == 2
    assert len(finals) == 5


def test_an_error_that_quotes_half_a_surrogate_pair_ends_its_request_only(server, stub):
    """JSON may hold one, protobuf cannot."""
    bad = typed_request(text_input=PROMPT, sampling_parameters=r'{"\ud800": 1}')
    good = typed_request(text_input=PROMPT, sampling_parameters=json.dumps(LONG))
    bad.id, good.id = "bad", "good"
    with pytest.raises(grpc.RpcError, match=r"sampling_parameters\.\?: is not known") as refused:
        stub.ModelInfer(bad, timeout=LIMIT)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    answers = stub.ModelStreamInfer(iter([good, bad, good]), timeout=LIMIT)
    errors = {one.infer_response.id: bool(one.error_message) for one in answers}
    assert errors == {"bad": True, "good": False}


def is_final(response: service_pb2.ModelInferResponse) -> bool:
    return response.parameters["triton_final_response"].bool_param
