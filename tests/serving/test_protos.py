"""The committed stubs, and messages that must read as other people's."""

from pathlib import Path

import pytest
import smg_grpc_proto.generated.common_pb2 as smg_common
import smg_grpc_proto.generated.vllm_engine_pb2 as smg_vllm
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import model_config_pb2 as triton_config
from tritonclient.grpc import service_pb2 as triton

from serving.protos import __main__ as generator
from serving.protos import open_inference_pb2, vllm_engine_pb2

FOLDER = Path(generator.__file__).parent


def test_the_stubs_are_those_of_the_protos(tmp_path):
    assert generator.main(tmp_path) == 0
    made = {path.name: path.read_text() for path in (tmp_path / "serving/protos").iterdir()}
    committed = {path.name: path.read_text() for path in FOLDER.glob("*_pb2*")}
    assert made.keys() == committed.keys()
    for name in made:
        assert made[name] == committed[name], f"{name} is old: run python -m serving.protos"


name_of = lambda one: one and one.name


def check_wire(ours: Descriptor, theirs: Descriptor) -> None:
    """Name, number, type, and whether unset differs from zero, of every field are equal."""
    for field in ours.fields:
        other = theirs.fields_by_name[field.name]
        kind = lambda f: (f.number, f.type, f.is_repeated, f.has_presence)
        assert kind(field) == kind(other), field.full_name
        assert name_of(field.containing_oneof) == name_of(other.containing_oneof), field.full_name
        assert name_of(field.message_type) == name_of(other.message_type), field.full_name
    for nested in ours.nested_types:
        check_wire(nested, theirs.nested_types_by_name[nested.name])


of = lambda module: module.DESCRIPTOR.message_types_by_name.values()
MESSAGES = {
    **dict.fromkeys(of(vllm_engine_pb2), (smg_vllm, smg_common)),
    **dict.fromkeys(of(open_inference_pb2), (triton, triton_config)),
}


@pytest.mark.parametrize("ours", MESSAGES, ids=lambda message: message.name)
def test_messages_read_as_their_models_do(ours):
    found = [
        module.DESCRIPTOR.message_types_by_name[ours.name]
        for module in MESSAGES[ours]
        if ours.name in module.DESCRIPTOR.message_types_by_name
    ]
    check_wire(ours, found[0])


SERVICES = [
    (vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"], smg_vllm),
    (open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"], triton),
]


@pytest.mark.parametrize(("ours", "module"), SERVICES, ids=lambda x: getattr(x, "name", ""))
def test_services_have_the_calls_of_their_models(ours, module):
    theirs = module.DESCRIPTOR.services_by_name[ours.name]
    for method in ours.methods:
        other = theirs.methods_by_name[method.name]
        names = lambda m: (m.input_type.name, m.output_type.name)
        assert names(method) == names(other)
        streams = lambda m: (m.client_streaming, m.server_streaming)
        assert streams(method) == streams(other)
