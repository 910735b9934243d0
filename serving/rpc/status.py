"""The outcome of a call as a gRPC status, with details for programs (google.rpc)."""

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from serving.errors import ServiceError


async def abort(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    """Ends a call with the error's status. `Code` has the names of gRPC's status codes."""
    message = error.message
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code.name), message=message)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        delay = Duration()
        delay.FromMilliseconds(int(1000 * error.retry_after))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    await context.abort_with_status(rpc_status.to_status(status))
