"""Refused messages of `ModelStreamInfer` are answered, and end no other request."""

import json

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.serving.test_open_inference import LONG, PROMPT, typed_request
from tests.waiting import LIMIT


@pytest.fixture(scope="module")
def stub(live):
    with grpc.insecure_channel(live.address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


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
