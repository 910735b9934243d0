"""`grpc.health.v1.Health`: whether each service takes requests.

It is open to clients without a token, so the number of watches is bounded. The servicer of
grpcio-health-checking is not used: when one watcher leaves, it can lose later updates of the
others.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.errors import Code, ServiceError

Status = health_pb2.HealthCheckResponse.ServingStatus
_MOST_WATCHES = 256
_RETRY_SECONDS = 10.0


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Health of some services, all of which have the same status.

    Args:
      services: full names. The empty name, which stands for the server, is always known.
    """

    def __init__(self, services: Iterable[str]):
        self._services = frozenset(("", *services))
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()
        self._is_closed = False
        self._num_watches = 0

    def set(self, status: Status) -> None:
        """Sets the status of all services and sends it to all watchers."""
        self._status = status
        self._wake()

    def close(self) -> None:
        """Ends all watches; a watcher that has not read the last status still gets it."""
        self._is_closed = True
        self._wake()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context
    ) -> health_pb2.HealthCheckResponse:
        """The status of a service.

        Raises:
          ServiceError: NOT_FOUND for a service that is not known.
        """
        if request.service not in self._services:
            raise ServiceError(Code.NOT_FOUND, f"there is no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Sends the status of a service, and sends it again after each change.

        A slow reader gets the newest status only.

        Raises:
          ServiceError: RESOURCE_EXHAUSTED if too many watches are open; `Check` is not limited.
        """
        if self._num_watches >= _MOST_WATCHES:
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED,
                f"{_MOST_WATCHES} clients watch the health already; call Check instead",
                retry_after=_RETRY_SECONDS,
            )
        self._num_watches += 1
        try:
            sent = None
            while True:
                # Taken before the status is read: a change from here on sets this event.
                changed = self._changed
                status = self._status
                if request.service not in self._services:
                    status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if status != sent:
                    yield health_pb2.HealthCheckResponse(status=status)
                    sent = status
                elif self._is_closed:
                    return
                else:
                    await changed.wait()
        finally:
            self._num_watches -= 1

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
