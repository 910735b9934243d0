"""Health of the services; open to clients without a token, so the number of those who watch is bounded."""

import grpc
from grpc_health.v1 import health, health_pb2

from serving.errors import ServiceError

_MOST_WATCHES = 256
_RETRY_SECONDS = 10.0


class HealthServicer(health.aio.HealthServicer):
    """The usual service, with at most `_MOST_WATCHES` open streams of `Watch` in all."""

    def __init__(self):
        super().__init__()
        self._num_watches = 0

    async def Watch(self, request: health_pb2.HealthCheckRequest, context) -> None:
        """Writes the state now and at each change.

        Raises:
          ServiceError: RESOURCE_EXHAUSTED with a retry time; `Check` is answered all the same.
        """
        if self._num_watches >= _MOST_WATCHES:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_MOST_WATCHES} clients watch the health already; call Check instead",
                retry_after=_RETRY_SECONDS,
            )
        self._num_watches += 1
        try:
            await super().Watch(request, context)
        finally:
            self._num_watches -= 1
