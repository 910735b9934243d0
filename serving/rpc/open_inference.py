"""`inference.GRPCInferenceService`: the Open Inference Protocol; its proto documents
the tensors.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import grpc

from serving import caller, request_ids
from serving.errors import Code, ServiceError, invalid
from serving.frontend import Frontend, State
from serving.params import refuse_unless_neutral
from serving.protos import open_inference_pb2 as pb
from serving.protos import open_inference_pb2_grpc
from serving.rpc import calls, json_params, tensors
from serving.rpc.foreign import handler, refuse_unknown
from serving.stream import Ask, Usage
from serving.version import NAME, VERSION

_log = logging.getLogger(__name__)
PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
_VERSION = "1"
_MAX_OPEN = 256  # open requests of one stream; the next message is read when one ends
_MAX_OUTPUTS = 16  # names of outputs in a request; the model has one output
_UNREAD = 64  # responses of one stream that wait for the client

_NEUTRAL = {
    "sequence_id": (0, ""),
    "sequence_start": (False,),
    "sequence_end": (False,),
    # No effect: the last response always has the flag that this parameter asks for.
    "triton_enable_empty_final_response": (False, True),
}
"""Request parameters that are not supported, with the values that have no effect."""
_MOST = {"timeout": 2**64 - 1, "priority": 2**31 - 1}
"""Request parameters that are numbers, with their largest values."""
_TYPES = {"BYTES": pb.TYPE_STRING, "BOOL": pb.TYPE_BOOL}


def make_handler(frontend: Frontend) -> grpc.GenericRpcHandler:
    """The service over one frontend, under its foreign name."""
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    return handler(OpenInference(frontend), service, PACKAGE)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A request that has been read."""

    ask: Ask
    client_id: str
    is_streamed: bool
    is_raw: bool


class OpenInference(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """The service over one frontend."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def ServerLive(self, request: pb.ServerLiveRequest, context) -> pb.ServerLiveResponse:
        """Whether the engine is alive."""
        return pb.ServerLiveResponse(live=self._frontend.state is not State.DEAD)

    async def ServerReady(self, request: pb.ServerReadyRequest, context) -> pb.ServerReadyResponse:
        """Whether requests are accepted."""
        return pb.ServerReadyResponse(ready=self._frontend.state is State.SERVING)

    async def ModelReady(self, request: pb.ModelReadyRequest, context) -> pb.ModelReadyResponse:
        """Whether the model of that name accepts requests; models that are not served never do."""
        is_ours = request.name == self._frontend.name and request.version in ("", _VERSION)
        is_ready = is_ours and self._frontend.state is State.SERVING
        return pb.ModelReadyResponse(ready=is_ready)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context
    ) -> pb.ServerMetadataResponse:
        """Name and version of the server."""
        return pb.ServerMetadataResponse(name=NAME, version=VERSION)

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context
    ) -> pb.ModelMetadataResponse:
        """Inputs and outputs of the model."""
        self._check_model(request.name, request.version)
        metadata = pb.ModelMetadataResponse(
            name=self._frontend.name, versions=[_VERSION], platform=NAME
        )
        for name, kind in tensors.KINDS.items():
            metadata.inputs.add(name=name, datatype=kind, shape=[1])
        metadata.outputs.add(name=tensors.OUTPUT, datatype="BYTES", shape=[-1])
        return metadata

    async def ModelConfig(self, request: pb.ModelConfigRequest, context) -> pb.ModelConfigResponse:
        """Inputs and outputs in Triton's form."""
        self._check_model(request.name, request.version)
        config = pb.ModelConfig(name=self._frontend.name, platform=NAME, backend=NAME)
        for name, kind in tensors.KINDS.items():
            is_optional = name != "text_input"
            config.input.add(name=name, data_type=_TYPES[kind], dims=[1], optional=is_optional)
        config.output.add(name=tensors.OUTPUT, data_type=_TYPES["BYTES"], dims=[-1])
        config.model_transaction_policy.decoupled = True
        return pb.ModelConfigResponse(config=config)

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest, context
    ) -> pb.ModelStatisticsResponse:
        """Counts and times of the requests of all protocols, since the start."""
        self._check_model(request.name or self._frontend.name, request.version)
        total = self._frontend.metrics.total
        of_time = lambda name: pb.StatisticDuration(
            count=int(total(f"vllm:{name}_seconds_count")),
            ns=int(1e9 * total(f"vllm:{name}_seconds_sum")),
        )
        requests = total("peagle:requests_total")
        succeeded = int(total("peagle:requests_total", code=Code.OK.name))
        model = pb.ModelStatistics(
            name=self._frontend.name,
            version=_VERSION,
            inference_count=succeeded,
            execution_count=self._frontend.load.rounds,
        )
        stats = model.inference_stats
        stats.success.count, stats.fail.count = succeeded, int(requests) - succeeded
        stats.success.ns = of_time("e2e_request_latency").ns
        stats.queue.CopyFrom(of_time("request_queue_time"))
        stats.compute_infer.CopyFrom(of_time("request_inference_time"))
        return pb.ModelStatisticsResponse(model_stats=[model])

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, context
    ) -> pb.RepositoryIndexResponse:
        """The model, and whether it accepts requests."""
        response, state = pb.RepositoryIndexResponse(), self._frontend.state
        is_ready = state is State.SERVING
        if is_ready or not request.ready:
            response.models.add(
                name=self._frontend.name,
                version=_VERSION,
                state="READY" if is_ready else "UNAVAILABLE",
                reason="" if is_ready else state.value,
            )
        return response

    async def ModelInfer(self, request: pb.ModelInferRequest, context) -> pb.ModelInferResponse:
        """Answers with one response."""
        work = await self._work(request, context, "ModelInfer")
        if work.is_streamed:
            raise invalid("inputs['stream']", "true is for ModelStreamInfer; leave it out here")
        return await self._infer(work)

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Answers many requests in one call; responses of different requests may alternate."""
        replies: asyncio.Queue = asyncio.Queue(_UNREAD)
        reader = asyncio.create_task(self._read(request_iterator, context, replies))
        try:
            while (reply := await replies.get()) is not None:
                if isinstance(reply, Exception):
                    raise reply
                yield reply
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator, context, replies: asyncio.Queue) -> None:
        """Starts each request of the stream. The last reply is None, or the error that broke the
        call.
        """
        room = asyncio.Semaphore(_MAX_OPEN)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        request = await anext(requests, None)
                    except ServiceError as error:  # the message is refused, others may follow
                        await replies.put(self._failed(pb.ModelInferRequest(), error))
                        continue
                    if request is None:
                        break
                    caller.arrive()
                    await room.acquire()
                    task = group.create_task(self._answer(request, context, replies))
                    task.add_done_callback(lambda _: room.release())
        except ExceptionGroup as group:
            # Only reading can fail here: `_answer` turns the errors of a request into a reply.
            await replies.put(group.exceptions[0])
        else:
            await replies.put(None)

    async def _answer(self, request: pb.ModelInferRequest, context, replies: asyncio.Queue) -> None:
        try:
            work = await self._work(request, context, "ModelStreamInfer")
            if work.is_streamed:
                await self._stream(work, replies)
                return
            response = await self._infer(work)
            response.parameters["triton_final_response"].bool_param = True
            await replies.put(pb.ModelStreamInferResponse(infer_response=response))
        except Exception as error:
            await replies.put(self._failed(request, error))

    def _failed(
        self, request: pb.ModelInferRequest, error: Exception
    ) -> pb.ModelStreamInferResponse:
        """The last response to a request of a stream, with an error message.

        A status would end the other requests of the stream too.
        """
        if isinstance(error, ServiceError):
            self._frontend.refused("grpc", f"{SERVICE}/ModelStreamInfer", error)
        failed = pb.ModelInferResponse(id=request.id, model_name=request.model_name)
        failed.parameters["triton_final_response"].bool_param = True
        return pb.ModelStreamInferResponse(
            error_message=_error_message(error), infer_response=failed
        )

    async def _infer(self, work: _Work) -> pb.ModelInferResponse:
        async with self._frontend.open(work.ask) as stream:
            texts: list[list[str]] = [[] for _ in range(stream.n)]
            reasons = [""] * stream.n
            async for delta in stream:
                texts[delta.index].append(delta.text)
                if delta.finish is not None:
                    reasons[delta.index] = delta.finish.reason
            usage = stream.usage()
        response = self._response(work, ["".join(pieces) for pieces in texts])
        response.parameters["finish_reason"].string_param = ",".join(reasons)
        _finish(response, usage)
        return response

    async def _stream(self, work: _Work, replies: asyncio.Queue) -> None:
        async with self._frontend.open(work.ask) as stream:
            left = stream.n
            async for delta in stream:
                response = self._response(work, [delta.text])
                if delta.finish is not None:
                    left -= 1
                    response.parameters["finish_reason"].string_param = delta.finish.reason
                if left == 0:
                    _finish(response, stream.usage())
                response.parameters["index"].int64_param = delta.index
                response.parameters["triton_final_response"].bool_param = left == 0
                await replies.put(pb.ModelStreamInferResponse(infer_response=response))

    def _response(self, work: _Work, texts: list[str]) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(
            model_name=self._frontend.name, model_version=_VERSION, id=work.client_id
        )
        return tensors.text_output(response, texts, is_raw=work.is_raw)

    async def _work(self, request: pb.ModelInferRequest, context, method: str) -> _Work:
        refuse_unknown(request, "")
        self._check_model(request.model_name, request.model_version)
        client_id = request_ids.request_id(request.id, field="id") if request.id else ""
        deadline = calls.deadline(context)
        given = _numbers(request.parameters)
        if timeout := given.get("timeout"):
            latest = caller.arrival() + timeout / 1e6
            deadline = latest if deadline is None else min(deadline, latest)
        _check_outputs(request)
        inputs = tensors.read_inputs(request)
        if "text_input" not in inputs:
            raise invalid("inputs['text_input']", "is missing")
        if not inputs.get("exclude_input_in_output", True):
            raise invalid(
                "inputs['exclude_input_in_output']",
                "the output never repeats the prompt; send true",
            )
        sampling = json_params.read_sampling(
            inputs.get(json_params.FIELD, b""),
            self._frontend.limits,
            max_tokens=self._frontend.config.max_model_len,
        )
        where = "inputs['text_input']"
        try:
            text = inputs["text_input"].decode()
        except UnicodeDecodeError as error:
            raise invalid(where, f"not valid UTF-8 ({error})") from error
        ask = Ask(
            # Clients of this protocol number their requests from 1, so ids of several clients are
            # equal.
            request_id=f"{client_id}-{uuid.uuid4().hex}" if client_id else uuid.uuid4().hex,
            prompt=await self._frontend.encode(text, field=where, deadline=deadline),
            params=sampling.params,
            n=sampling.n,
            priority=given.get("priority", 0),
            deadline=deadline,
            cache_salt=calls.cache_salt(context),
            method=f"{SERVICE}/{method}",
            trace=calls.trace(context),
            spelling=json_params.SPELLING | {"prompt": where, "priority": "parameters['priority']"},
        )
        return _Work(
            ask=ask,
            client_id=client_id,
            is_streamed=inputs.get("stream", False),
            is_raw=bool(request.raw_input_contents),
        )

    def _check_model(self, name: str, version: str) -> None:
        ours = self._frontend.name
        if name != ours:
            raise ServiceError(
                Code.NOT_FOUND, f"there is no model {name!r}; this server has {ours!r}"
            )
        if version not in ("", _VERSION):
            raise ServiceError(
                Code.NOT_FOUND, f"model {ours!r} has no version {version!r}; it has {_VERSION!r}"
            )


def _numbers(parameters: Mapping[str, pb.InferParameter]) -> dict[str, int]:
    """`timeout` and `priority` of a request; refuses parameters that are not supported."""
    numbers = {}
    for name, parameter in parameters.items():
        where = f"parameters[{name!r}]"
        kind = parameter.WhichOneof("parameter_choice")
        value = getattr(parameter, kind) if kind else None
        if name in _NEUTRAL:
            refuse_unless_neutral(where, value, (*_NEUTRAL[name], None), name)
        elif name not in _MOST:
            raise invalid(where, f"is not known; sampling parameters go into {json_params.FIELD}")
        elif kind not in ("int64_param", "uint64_param") or not 0 <= value <= _MOST[name]:
            raise invalid(where, f"must be a whole number from 0 to {_MOST[name]}")
        else:
            numbers[name] = value
    return numbers


def _check_outputs(request: pb.ModelInferRequest) -> None:
    if len(request.outputs) > _MAX_OUTPUTS:
        raise invalid("outputs", f"{len(request.outputs)} are more than {_MAX_OUTPUTS}")
    for output in request.outputs:
        where = f"outputs[{output.name!r}]"
        if output.name != tensors.OUTPUT:
            raise invalid(where, f"is not an output of this model; it has {tensors.OUTPUT}")
        if output.parameters:
            names = ", ".join(sorted(output.parameters))
            raise invalid(where, f"parameters are not supported ({names}); leave them out")


def _finish(response: pb.ModelInferResponse, usage: Usage) -> None:
    """Adds token counts and acceptance to the last response of a request."""
    parameters = response.parameters
    parameters["prompt_tokens"].int64_param = usage.prompt_tokens
    parameters["completion_tokens"].int64_param = usage.completion_tokens
    parameters["spec_draft_tokens"].int64_param = usage.acceptance.drafted
    parameters["spec_accepted_tokens"].int64_param = usage.acceptance.accepted


def _error_message(error: Exception) -> str:
    if isinstance(error, ServiceError):
        return f"{error.code.name}: {error.message}"
    _log.exception("a request failed", exc_info=error)
    return f"INTERNAL: the server failed ({type(error).__name__}); its log says why"
