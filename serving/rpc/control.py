"""`peagle.v1.Control`: orders to the engine, of callers with the admin scope. `Guard` refuses the
others.
"""

from serving.frontend import Frontend
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc

_RUNNING = {
    pb.RUNNING_UNSPECIFIED: "keep",
    pb.RUNNING_KEEP: "keep",
    pb.RUNNING_FINISH: "finish",
    pb.RUNNING_ABORT: "abort",
}


class Control(peagle_v1_pb2_grpc.ControlServicer):
    """The service over one frontend."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context
    ) -> pb.UpdateWeightsResponse:
        """Replaces weights."""
        running = _RUNNING.get(request.running, str(request.running))
        given = request.folder, request.head, request.version, running
        return pb.UpdateWeightsResponse(version=await self._frontend.update_weights(*given))

    async def Pause(self, request: pb.PauseRequest, context) -> pb.PauseResponse:
        """Stops after the rounds in flight."""
        await self._frontend.control("pause")
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context) -> pb.ResumeResponse:
        """Ends a pause."""
        await self._frontend.control("resume")
        return pb.ResumeResponse()
