"""`peagle.v1.Generation`: the engine's own service. Its proto documents all fields."""

import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence

from peagle_jax import SamplingParams
from peagle_jax.engine.host.request import PromptLogprob, TokenLogprob
from peagle_jax.engine.host.stats import Acceptance
from peagle_jax.structured import Structured
from serving import request_ids, turns
from serving.errors import invalid
from serving.frontend import Frontend
from serving.json_input import parse_small_object
from serving.params import cache_salt, prompt_ids, sampling_params
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from serving.replies.parts import ReplyPart
from serving.rounds import RoundReport, RoundReports
from serving.rpc import calls
from serving.sampling_messages import GENERATE
from serving.stream import Ask, Delta, Finish, Usage
from serving.tools import (
    NO_FORMAT,
    NOT_BESIDE_TOOLS,
    Arguments,
    call_id,
    loose,
    refuse_equal_names,
    tool,
)

_MAX_ABORTS = 1024


class Generation(peagle_v1_pb2_grpc.GenerationServicer):
    """The service over one frontend."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def Generate(
        self, request: pb.GenerateRequest, context
    ) -> AsyncIterator[pb.GenerateDelta]:
        """Streams deltas; the last one has the usage."""
        ask = await self._ask(request, context, "Generate")
        async with self._frontend.open(ask) as stream:
            await calls.accepted(context, ask.request_id)
            left, rounds = stream.n, self._rounds(request.output)
            async for delta in stream:
                message = _delta(delta)
                if delta.prompt_logprobs:
                    async for some in _prompt_logprobs(delta.prompt_logprobs):
                        message.prompt_logprobs.extend(some)
                if request.output.return_rounds:
                    message.rounds.extend(rounds(delta))
                if delta.finish is not None:
                    left -= 1
                    if left == 0:
                        message.usage.CopyFrom(_usage(stream.usage()))
                yield message

    async def GenerateOnce(self, request: pb.GenerateRequest, context) -> pb.GenerateResponse:
        """Answers with one message."""
        ask = await self._ask(request, context, "GenerateOnce")
        response = pb.GenerateResponse(request_id=ask.request_id)
        async with self._frontend.open(ask) as stream:
            await calls.accepted(context, ask.request_id)
            response.sequences.extend(pb.Sequence() for _ in range(stream.n))
            replies = [ReplyPart()] * stream.n
            rounds = self._rounds(request.output)
            async for delta in stream:
                sequence = response.sequences[delta.index]
                if request.output.return_rounds:
                    sequence.rounds.extend(rounds(delta))
                replies[delta.index] += ReplyPart(delta.text, delta.reasoning)
                sequence.tool_calls.extend(calls_of(delta))
                sequence.token_ids.extend(delta.tokens)
                sequence.logprobs.extend(_logprobs(delta.logprobs))
                if delta.prompt_logprobs:
                    async for some in _prompt_logprobs(delta.prompt_logprobs):
                        sequence.prompt_logprobs.extend(some)
                if delta.finish is not None:
                    sequence.finish.CopyFrom(_finish(delta.finish))
            response.usage.CopyFrom(_usage(stream.usage()))
        for sequence, reply in zip(response.sequences, replies, strict=True):
            sequence.text, sequence.reasoning = reply.text, reply.reasoning
        return response

    async def Abort(self, request: pb.AbortRequest, context) -> pb.AbortResponse:
        """Ends requests of the caller by id; the ids of other callers count as unknown."""
        if len(request.request_ids) > _MAX_ABORTS:
            raise invalid("request_ids", f"more than {_MAX_ABORTS}")
        return pb.AbortResponse(aborted=sum(map(self._frontend.abort, request.request_ids)))

    async def FlushCache(self, request: pb.FlushCacheRequest, context) -> pb.FlushCacheResponse:
        """Forgets cached prefixes of the caller."""
        return pb.FlushCacheResponse(pages=await self._frontend.flush_prefix_cache())

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context
    ) -> pb.GetModelInfoResponse:
        """The model and its limits."""
        frontend = self._frontend
        config, target = frontend.config, frontend.target_config
        return pb.GetModelInfoResponse(
            name=frontend.name,
            max_model_len=config.max_model_len,
            vocab_size=target.vocab_size,
            eos_token_ids=target.eos_ids,
            method=frontend.method,
            num_speculative_tokens=config.num_draft,
            dtype=config.dtype,
            has_tokenizer=frontend.tokenizer is not None,
            max_num_seqs=config.max_num_seqs,
            max_logprobs=config.max_logprobs,
            tensor_parallel=config.tensor_parallel,
            weights_version=frontend.load.version,
        )

    async def GetStats(self, request: pb.GetStatsRequest, context) -> pb.GetStatsResponse:
        """The state and the load of the engine."""
        load = self._frontend.load
        return pb.GetStatsResponse(
            state=self._frontend.state.value,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_pages_used=load.pages_used,
            kv_pages_total=load.pages_total,
            kv_pages_idle=load.pages_idle,
            prefix_tokens_queried=load.prefix_queried,
            prefix_tokens_found=load.prefix_found,
            preemptions=load.num_preemptions,
            uptime_seconds=self._frontend.uptime,
            acceptance=_acceptance(load.acceptance),
            batch_sizes_pending=self._frontend.batch_sizes_pending,
            num_speculative_tokens_per_batch_size=load.num_draft,
            num_speculative_tokens_changes=load.num_draft_changes,
            predicted_tokens_per_second=load.predicted_rate,
            is_paused=load.is_paused,
        )

    async def _ask(self, request: pb.GenerateRequest, context, method: str) -> Ask:
        request_id = request_ids.request_id(request.request_id)
        params = self._params(request)
        salt = None
        if request.HasField("cache_salt"):
            salt = cache_salt(request.cache_salt, field="cache_salt")
        tools = tools_of(request.chat, self._frontend)
        field, text = calls.constraint_of(request.structured, "structured")
        params = dataclasses.replace(params, structured=self._beside_calls(text, tools, field))
        prompt = await self._prompt(request, tools)
        ask = Ask(
            request_id=request_id,
            prompt=prompt,
            params=params,
            n=request.n or 1,
            priority=request.priority,
            deadline=calls.deadline(context),
            cache_salt=salt,
            wants_text=not request.output.tokens_only,
            is_chat=request.WhichOneof("prompt") == "chat",
            tools=tools,
            method=f"peagle.v1.Generation/{method}",
            trace=calls.trace(context),
            spelling=GENERATE.spelling
            | {"prompt": request.WhichOneof("prompt"), "structured": field},
        )
        return await self._frontend.constrain(ask, address=calls.address(context))

    def _rounds(self, output: pb.Output) -> Callable[[Delta], list[pb.Round]]:
        """A function that makes the messages about the rounds of the next delta."""
        with_text = not output.tokens_only
        reports = RoundReports(self._frontend.tokenizer if with_text else None)
        return lambda delta: [_round(one, with_text) for one in reports.of(delta.index, delta)]

    def _beside_calls(
        self, text: Structured | None, tools: list[dict], field: str
    ) -> Structured | None:
        """The constraint of a reply that may also be calls of the tools."""
        if text is None or not tools:
            return text
        calls = self._frontend.replies.calls
        constraint = calls(loose(tools), is_parallel=True, must_call=False, text=text)
        if constraint is None:
            raise invalid(field, NOT_BESIDE_TOOLS)
        return constraint

    async def _prompt(self, request: pb.GenerateRequest, tools: list[dict]) -> list[int]:
        match request.WhichOneof("prompt"):
            case "text":
                return await self._frontend.encode(request.text, field="text")
            case "tokens":
                most = self._frontend.config.max_model_len
                return prompt_ids(request.tokens.ids, field="tokens", max_model_len=most)
            case "chat":
                return await self._chat(request.chat, tools)
        raise invalid("prompt", "set one of text, tokens and chat")

    async def _chat(self, chat: pb.Chat, tools: list[dict]) -> list[int]:
        limits = self._frontend.limits
        if not 1 <= len(chat.messages) <= limits.max_messages:
            raise invalid("chat.messages", f"must be between 1 and {limits.max_messages}")
        objects = Arguments(limits)
        messages = [message_of(one, place, objects) for place, one in enumerate(chat.messages)]
        text, variables = chat.variables_json.encode(), {}
        if text:
            variables = parse_small_object(text, field="chat.variables_json", limits=limits)
        names = dict(field="chat", variables_field="chat.variables_json")
        return await self._frontend.chat(messages, variables, tools=tools, **names)

    def _params(self, request: pb.GenerateRequest) -> SamplingParams:
        values = GENERATE.read(request)
        values.setdefault("max_tokens", self._frontend.config.max_model_len)
        return sampling_params(GENERATE.spelling, self._frontend.limits, **values)


def _round(one: RoundReport, with_text: bool) -> pb.Round:
    message = pb.Round(tokens=len(one.texts), accepted=one.accepted, draft_ids=one.draft_ids)
    if with_text:
        message.drafts.extend(one.drafts)
        message.texts.extend(one.texts)
    return message


_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        acceptance=_acceptance(usage.acceptance),
        time_to_first_token=usage.time_to_first_token,
        duration=usage.duration,
        weights_versions=usage.versions,
    )


def _delta(delta: Delta) -> pb.GenerateDelta:
    # Fields that most messages lack are not named: each takes time, empty or not.
    message = pb.GenerateDelta(index=delta.index, text=delta.text, token_ids=delta.tokens)
    if delta.reasoning:
        message.reasoning = delta.reasoning
    if delta.calls:
        message.tool_calls.extend(calls_of(delta))
    if delta.logprobs:
        message.logprobs.extend(_logprobs(delta.logprobs))
    if delta.finish is not None:
        message.finish.CopyFrom(_finish(delta.finish))
    return message


def _prompt_logprobs(
    logprobs: Sequence[PromptLogprob | None],
) -> AsyncIterator[list[pb.PromptLogprob]]:
    """Messages of the prompt's log-probabilities in pieces, see `turns`; the first
    token has none.
    """
    return turns.pieces(
        pb.PromptLogprob(
            logprob=one.logprob,
            alternatives=[pb.Alternative(token_id=token, logprob=x) for token, x in one.top],
            rank=one.rank,
        )
        for one in logprobs[1:]
    )


def _logprobs(logprobs: Sequence[TokenLogprob] | None) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            logprob=one.logprob,
            alternatives=[pb.Alternative(token_id=t, logprob=value) for t, value in one.top],
        )
        for one in logprobs or ()
    ]


def _finish(finish: Finish) -> pb.Finish:
    message = pb.Finish(reason=_REASONS[finish.reason])
    if isinstance(finish.stop_reason, str):
        message.stop_string = finish.stop_reason
    elif finish.stop_reason is not None:
        message.stop_token_id = finish.stop_reason
    return message


def _acceptance(counts: Acceptance) -> pb.Acceptance:
    return pb.Acceptance(
        rounds=counts.rounds,
        emitted=counts.emitted,
        drafted=counts.drafted,
        accepted=counts.accepted,
        accepted_per_position=counts.per_position,
        drafted_per_position=counts.drafted_per_position,
        acceptance_length=counts.length,
    )


def tools_of(chat: pb.Chat, frontend: Frontend) -> list[dict]:
    """The tools of a chat, as chat templates take them.

    Raises:
      ServiceError: INVALID_ARGUMENT; they are too many or not valid, or the model has no format of
        calls.
    """
    limits, objects = frontend.limits, Arguments(frontend.limits)
    if len(chat.tools) > limits.max_tools:
        raise invalid("chat.tools", f"{len(chat.tools)} are more than {limits.max_tools}")
    if chat.tools and not frontend.replies.has_calls:
        raise invalid("chat.tools", NO_FORMAT)
    tools = [_tool(one, place, objects) for place, one in enumerate(chat.tools)]
    refuse_equal_names(tools, field="chat.tools")
    return tools


def calls_of(delta: Delta) -> list[pb.ToolCall]:
    """New calls."""
    return [
        pb.ToolCall(id=call_id(), name=call.name, arguments_json=call.arguments)
        for call in delta.calls
    ]


def _tool(given: pb.Tool, place: int, objects: Arguments) -> dict:
    field, parameters = f"chat.tools[{place}]", None
    if given.parameters_json:
        parameters = objects.parse(given.parameters_json, field=f"{field}.parameters_json")
    try:
        return tool(given.name, given.description or None, parameters)
    except ValueError as error:
        raise invalid(f"{field}.name", str(error)) from error


def message_of(given: pb.ChatMessage, place: int, objects: Arguments) -> dict:
    """A message as chat templates take it.

    Raises:
      ServiceError: INVALID_ARGUMENT; the arguments of a call are not a JSON object.
    """
    message: dict[str, object] = {"role": given.role, "content": given.content}
    if given.tool_call_id:
        message["tool_call_id"] = given.tool_call_id
    if given.tool_calls:
        message["tool_calls"] = [
            objects.call(
                call.id,
                call.name,
                call.arguments_json,
                field=f"chat.messages[{place}].tool_calls[{number}].arguments_json",
            )
            for number, call in enumerate(given.tool_calls)
        ]
    return message
