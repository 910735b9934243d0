"""gRPC reflection as tools use it: services, messages, details of errors."""

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2 as pb

from tests.waiting import LIMIT

VERSIONS = ("grpc.reflection.v1", "grpc.reflection.v1alpha")


@pytest.fixture(params=VERSIONS)
def ask(live, request):
    """Asks one version of the service; the messages of both are the same."""
    with grpc.insecure_channel(live.address) as channel:
        call = channel.stream_stream(
            f"/{request.param}.ServerReflection/ServerReflectionInfo",
            pb.ServerReflectionRequest.SerializeToString,
            pb.ServerReflectionResponse.FromString,
        )

        def ask(**fields: str) -> pb.ServerReflectionResponse:
            (answer,) = call(iter([pb.ServerReflectionRequest(**fields)]), timeout=LIMIT)
            return answer

        yield ask


def test_both_versions_list_the_services(ask):
    found = {one.name for one in ask(list_services="").list_services_response.service}
    assert {f"{version}.ServerReflection" for version in VERSIONS} <= found
    assert {"peagle.v1.Generation", "inference.GRPCInferenceService"} <= found


SYMBOLS = ("google.rpc.BadRequest", "inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine")


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_files_of_a_symbol_are_complete(ask, symbol):
    """A tool that knows nothing builds its messages from them."""
    pool, waiting = DescriptorPool(), [ask(file_containing_symbol=symbol)]
    files: dict[str, FileDescriptorProto] = {}
    while waiting:
        answer = waiting.pop().file_descriptor_response
        assert answer.file_descriptor_proto
        for content in answer.file_descriptor_proto:
            file = FileDescriptorProto.FromString(content)
            files[file.name] = file
            missing = [name for name in file.dependency if name not in files]
            waiting += [ask(file_by_filename=name) for name in missing]
    for file in sorted(files.values(), key=lambda one: len(one.dependency)):
        pool.Add(file)
    found = pool.FindFileContainingSymbol(symbol)
    assert found.package == symbol.rpartition(".")[0]
