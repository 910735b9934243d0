"""Services of other people's packages, served without their symbols.

A process holds each protobuf name once, so a second definition of somebody's messages cannot be imported
beside theirs. Ours live in packages of our own; on the wire only field numbers count, and what a service
is called is up to the server.
"""

from collections.abc import Mapping, Sequence

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from serving.errors import invalid


def handler(servicer: object, service: ServiceDescriptor, package: str) -> grpc.GenericRpcHandler:
    """The methods that `service` declares, under the same name in another package."""
    methods = {method.name: _method(servicer, method) for method in service.methods}
    return grpc.method_handlers_generic_handler(f"{package}.{service.name}", methods)


def pool(
    own: Sequence[FileDescriptor], renamed: Mapping[str, FileDescriptor]
) -> descriptor_pool.DescriptorPool:
    """Descriptors for reflection: files as they are, and others as if they were written for a package.

    Args:
      own: files without dependencies.
      renamed: the same, by package.
    """
    made = descriptor_pool.DescriptorPool()
    for file in own:
        made.AddSerializedFile(file.serialized_pb)
    for package, file in renamed.items():
        made.Add(_moved(FileDescriptorProto.FromString(file.serialized_pb), package))
    return made


def refuse_unknown(message: Message, field: str) -> None:
    """Refuses fields that a later version of a message has: a client that sets one wants something.

    Args:
      field: where the message stands in the request, empty for the request itself.

    Raises:
      ServiceError: INVALID_ARGUMENT that names the field's number.
    """
    for one in UnknownFieldSet(message):
        name = f"{field}.{one.field_number}" if field else str(one.field_number)
        raise invalid(name, "this server knows no field of that number; leave it out")


def _method(servicer: object, method: MethodDescriptor) -> grpc.RpcMethodHandler:
    requests = "stream" if method.client_streaming else "unary"
    responses = "stream" if method.server_streaming else "unary"
    make = getattr(grpc, f"{requests}_{responses}_rpc_method_handler")
    read = GetMessageClass(method.input_type).FromString
    write = GetMessageClass(method.output_type).SerializeToString
    return make(getattr(servicer, method.name), read, write)


def _moved(file: FileDescriptorProto, package: str) -> FileDescriptorProto:
    """The file in another package, all references to its own types included."""
    old, new = f".{file.package}.", f".{package}."
    file.package = package
    file.name = f"{package.replace('.', '/')}/{file.name.rpartition('/')[2]}"
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            if field.type_name:
                field.type_name = _renamed(field.type_name, old, new)
    for service in file.service:
        for method in service.method:
            method.input_type = _renamed(method.input_type, old, new)
            method.output_type = _renamed(method.output_type, old, new)
    return file


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
