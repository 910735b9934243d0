"""Serves services of foreign protobuf packages without defining their symbols.

A process can define each protobuf name once, so a copy of foreign messages cannot be imported
beside the originals. Ours are in packages of our own. On the wire only field numbers count, and the
server chooses the name of a service.
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
    """A handler for the methods of `service`, under the same name in another package."""
    methods = {method.name: _method(servicer, method) for method in service.methods}
    return grpc.method_handlers_generic_handler(f"{package}.{service.name}", methods)


def pool(
    own: Sequence[FileDescriptor], renamed: Mapping[str, FileDescriptor]
) -> descriptor_pool.DescriptorPool:
    """Descriptors for reflection.

    Args:
      own: files that are added unchanged, each after those that it depends on.
      renamed: files by the package that they are moved into; they have no dependencies.
    """
    descriptors = descriptor_pool.DescriptorPool()
    for file in own:
        descriptors.AddSerializedFile(file.serialized_pb)
    for package, file in renamed.items():
        descriptors.Add(_moved(FileDescriptorProto.FromString(file.serialized_pb), package))
    return descriptors


def refuse_unknown(message: Message, field: str) -> None:
    """Refuses fields of a later version of a message: the server would ignore what the client asks
    for.

    Args:
      field: path of the message in the request; empty for the request itself.

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
    """The file in another package; references to its own types are changed too."""
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
