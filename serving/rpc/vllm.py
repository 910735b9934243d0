"""`vllm.grpc.engine.VllmEngine`: the service that gateways for vLLM call. Its proto documents all
fields.
"""

import asyncio
import dataclasses
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc

from peagle_jax import SamplingParams
from peagle_jax.checkpoint.target_writer import ARCHITECTURES
from peagle_jax.engine.host.request import PromptLogprob, TokenLogprob
from peagle_jax.engine.host.stats import Acceptance
from serving import request_ids, turns
from serving.errors import Code, ServiceError, invalid
from serving.frontend import Frontend, State
from serving.params import prompt_ids, refuse_unless_neutral, sampling_params
from serving.protos import vllm_engine_pb2 as pb
from serving.protos import vllm_engine_pb2_grpc
from serving.rpc import calls
from serving.rpc.foreign import handler, refuse_unknown
from serving.sampling_messages import Places
from serving.stream import Ask, Delta
from serving.version import NAME, VERSION

PACKAGE = "vllm.grpc.engine"
SERVICE = f"{PACKAGE}.VllmEngine"
DRAFTS = "x-spec-k"
"""Metadata key: drafts per round of a request."""
_NOWHERE = f"/{NAME}/served"
"""Prefix of model paths. A gateway looks for the tokenizer on its disk, then on the Hugging Face
hub, then asks this server. A bare name could be another model's name on the hub; the hub has no
names of three parts."""
_MAX_ABORTS = 1024
_LEAST_TOKENS = 64  # of a measurement of speed
_CHUNK = 64 << 10  # bytes of the tokenizer's archive per message


def make_handler(frontend: Frontend) -> grpc.GenericRpcHandler:
    """The service over one frontend, under its foreign name."""
    return handler(VllmEngine(frontend), pb.DESCRIPTOR.services_by_name["VllmEngine"], PACKAGE)


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The service over one frontend."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend
        tokenizer = frontend.tokenizer
        self._files = None if tokenizer is None else TokenizerFiles(tokenizer.folder)
        self._last_request = 0.0
        self._pace = _Pace(frontend)

    async def Generate(
        self, request: pb.GenerateRequest, context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Sends chunks if the client wants a stream, and each sequence as a whole at its end."""
        self._last_request = time.time()
        ask = await self._ask(request, context)
        async with self._frontend.open(ask) as stream:
            await calls.accepted(context, ask.request_id)
            wholes = [pb.GenerateComplete(index=index) for index in range(stream.n)]
            async for delta in stream:
                whole = wholes[delta.index]
                whole.cached_tokens = stream.cached_tokens
                await _extend(whole, delta, ask.prompt)
                if request.stream and delta.tokens:
                    yield pb.GenerateResponse(chunk=_chunk(whole, delta))
                if delta.finish is not None:
                    yield pb.GenerateResponse(complete=whole)
            context.set_trailing_metadata(_figures(stream.usage().acceptance))

    async def HealthCheck(self, request: pb.HealthCheckRequest, context) -> pb.HealthCheckResponse:
        """Whether requests are accepted."""
        state = self._frontend.state
        return pb.HealthCheckResponse(healthy=state is State.SERVING, message=state.value)

    async def Abort(self, request: pb.AbortRequest, context) -> pb.AbortResponse:
        """Ends requests of the caller by id."""
        if len(request.request_ids) > _MAX_ABORTS:
            raise invalid("request_ids", f"more than {_MAX_ABORTS}")
        for one in request.request_ids:
            self._frontend.abort(one)
        return pb.AbortResponse()

    async def FlushCache(self, request: pb.FlushCacheRequest, context) -> pb.FlushCacheResponse:
        """Forgets cached prefixes of the caller."""
        pages = await self._frontend.flush_prefix_cache()
        return pb.FlushCacheResponse(success=True, message=f"{pages} pages forgotten")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context
    ) -> pb.GetModelInfoResponse:
        """The model and its limits."""
        frontend, target = self._frontend, self._frontend.target_config
        limit, path = frontend.config.max_model_len, f"{_NOWHERE}/{frontend.name}"
        return pb.GetModelInfoResponse(
            model_path=path,
            is_generation=True,
            max_context_length=limit,
            vocab_size=target.vocab_size,
            served_model_name=frontend.name,
            tokenizer_path=path if frontend.tokenizer else "",
            model_type=target.family,
            architectures=[ARCHITECTURES[target.family]],
            eos_token_ids=target.eos_ids,
            bos_token_id=target.bos_id or 0,
            max_req_input_len=limit - 1,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context
    ) -> pb.GetServerInfoResponse:
        """The server and its settings."""
        frontend = self._frontend
        return pb.GetServerInfoResponse(
            active_requests=frontend.num_open,
            is_paused=frontend.load.is_paused,
            last_receive_timestamp=self._last_request,
            uptime_seconds=frontend.uptime,
            server_type=NAME,
            data_parallel_size=1,
            kv_cache_dtype=frontend.config.cache_dtype,
            block_size=frontend.config.page_size,
            model_dtype=frontend.config.dtype,
            max_num_seqs=frontend.config.max_num_seqs,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context) -> pb.GetLoadsResponse:
        """The current load of the engine."""
        config, load = self._frontend.config, self._frontend.load
        one = pb.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=load.pages_used * config.page_size,
            max_total_num_tokens=load.pages_total * config.page_size,
            token_usage=load.kv_usage,
            cache_hit_rate=load.prefix_found / max(1, load.prefix_queried),
            gen_throughput=self._pace.measure(),
            utilization=load.num_running / config.max_num_seqs,
            max_running_requests=config.max_num_seqs,
            num_waiting_uncached_tokens=load.waiting_tokens,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=VERSION,
            dp_rank_count=1,
            loads=[] if request.dp_rank else [one],
        )

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context
    ) -> AsyncIterator[pb.GetTokenizerChunk]:
        """Sends the archive of the tokenizer in pieces; the last has its SHA-256."""
        if self._files is None:
            raise ServiceError(Code.FAILED_PRECONDITION, "this model is served without a tokenizer")
        archive = await self._files.archive()
        size = len(archive.content)
        for start in range(0, size, _CHUNK):
            end = start + _CHUNK
            sha256 = archive.sha256 if end >= size else ""
            yield pb.GetTokenizerChunk(data=archive.content[start:end], sha256=sha256)

    async def _ask(self, request: pb.GenerateRequest, context) -> Ask:
        _refuse_unsupported(request)
        request_id = request_ids.request_id(request.request_id)
        params = self._params(request, _drafts(context))
        field, constraint = calls.constraint_of(request.sampling_params, "sampling_params")
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid("input", "set one of tokenized and text")
        if kind == "text":
            prompt = await self._frontend.encode(request.text, field="text")
        else:
            ids, most = request.tokenized.input_ids, self._frontend.config.max_model_len
            prompt = prompt_ids(ids, field="tokenized.input_ids", max_model_len=most)
        ask = Ask(
            request_id=request_id,
            prompt=prompt,
            params=dataclasses.replace(params, structured=constraint),
            n=request.sampling_params.n or 1,
            deadline=calls.deadline(context),
            cache_salt=calls.cache_salt(context),
            wants_text=False,
            method=f"{SERVICE}/Generate",
            trace=calls.trace(context),
            spelling=_SPELLING
            | {"prompt": "text" if kind == "text" else "tokenized.input_ids", "structured": field},
        )
        # A gateway has put chats into the template.
        is_chat = kind == "tokenized" and not request.sampling_params.grammar_from_first_token
        return await self._frontend.constrain(ask, is_chat=is_chat, address=calls.address(context))

    def _params(self, request: pb.GenerateRequest, drafts: int | None) -> SamplingParams:
        defaults = dict(max_tokens=self._frontend.config.max_model_len, temperature=1.0)
        values = defaults | _PLACES.read(request) | {"num_speculative_tokens": drafts}
        if values.get("seed") == -1:
            del values["seed"]
        return sampling_params(_SPELLING, self._frontend.limits, **values)


class _Pace:
    """Measures tokens per second of a running sequence, times the slots.

    Gateways divide the tokens that wait by this rate. The rate of all sequences would be higher
    where more of them run, and a busy server would get more requests than an idle one. Time without
    requests does not count.
    """

    def __init__(self, frontend: Frontend):
        self._frontend = frontend
        self._seconds, self._tokens, self._rate = 0.0, 0, 0.0

    def measure(self) -> float:
        """The latest rate, 0 before the first; frequent calls do not make the
        measurement shorter.
        """
        seconds = self._frontend.load.sequence_seconds - self._seconds
        tokens = self._frontend.load.num_tokens - self._tokens
        if tokens >= _LEAST_TOKENS and seconds > 0:
            self._rate = self._frontend.config.max_num_seqs * tokens / seconds
            self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        return self._rate


# The client makes the text, so it cuts it too.
_OF_TEXT = ("include_stop_str_in_output", "skip_special_tokens")
_PLACES = Places(pb.GenerateRequest.DESCRIPTOR, "sampling_params", without=_OF_TEXT)
_SPELLING = _PLACES.spelling | {"n": "sampling_params.n", "num_speculative_tokens": DRAFTS}

_UNSUPPORTED = {
    "kv_transfer_params": "KV transfer",
    "kv_transfer_params_json": "KV transfer",
    "mm_inputs": "multimodal input",
    "media_refs": "multimodal input",
}
"""Optional fields of a request that are not supported."""


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    given = request.sampling_params
    refuse_unknown(request, "")
    refuse_unknown(given, "sampling_params")
    for name, what in _UNSUPPORTED.items():
        refuse_unless_neutral(name, request.HasField(name), (False,), what)
    refuse_unless_neutral("extra_mm_inputs", len(request.extra_mm_inputs), (0,), "multimodal input")
    if request.data_parallel_rank != 0:
        raise invalid("data_parallel_rank", f"{request.data_parallel_rank}: there is only rank 0")
    cut = given.HasField("truncate_prompt_tokens")
    field = "sampling_params.truncate_prompt_tokens"
    refuse_unless_neutral(field, cut, (False,), "cutting prompts")
    tag = given.HasField("structural_tag")
    refuse_unless_neutral("sampling_params.structural_tag", tag, (False,), "a structural tag")


def _drafts(context) -> int | None:
    """Drafts per round, from the metadata of the call."""
    text = dict(context.invocation_metadata() or ()).get(DRAFTS)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise invalid(DRAFTS, f"{text!r} must be a number, 0 or more")
    return int(text)


async def _extend(whole: pb.GenerateComplete, delta: Delta, prompt: Sequence[int]) -> None:
    """Appends a delta to the whole sequence."""
    whole.output_ids.extend(delta.tokens)
    whole.prompt_tokens = len(prompt)
    whole.completion_tokens = len(whole.output_ids)
    if delta.prompt_logprobs is not None:
        whole.input_logprobs.CopyFrom(await _prompt_logprobs(prompt, delta.prompt_logprobs))
    if delta.logprobs:
        whole.output_logprobs.MergeFrom(_logprobs(delta.tokens, delta.logprobs))
    finish = delta.finish
    if finish is None:
        return
    whole.finish_reason = finish.reason
    whole.spec_accepted_tokens = finish.acceptance.accepted
    whole.spec_draft_tokens = finish.acceptance.drafted
    if isinstance(finish.stop_reason, str):
        whole.matched_stop_str = finish.stop_reason
    elif finish.stop_reason is not None:
        whole.matched_token_id = finish.stop_reason


def _chunk(whole: pb.GenerateComplete, delta: Delta) -> pb.GenerateStreamChunk:
    chunk = pb.GenerateStreamChunk(
        token_ids=delta.tokens,
        prompt_tokens=whole.prompt_tokens,
        cached_tokens=whole.cached_tokens,
        completion_tokens=whole.completion_tokens,
        index=whole.index,
    )
    if delta.prompt_logprobs is not None:
        chunk.input_logprobs.CopyFrom(whole.input_logprobs)
    if delta.logprobs:
        chunk.output_logprobs.CopyFrom(_logprobs(delta.tokens, delta.logprobs))
    return chunk


async def _prompt_logprobs(
    prompt: Sequence[int], logprobs: Sequence[PromptLogprob | None]
) -> pb.InputLogProbs:
    message = pb.InputLogProbs(token_ids=prompt)
    has_top = any(one is not None and one.top for one in logprobs)
    async for some in turns.pieces(logprobs):
        for one in some:
            message.token_logprobs.add(value=None if one is None else one.logprob)
            if has_top:
                top = () if one is None else one.top
                ids, values = [token for token, _ in top], [value for _, value in top]
                message.top_logprobs.add(values=values, token_ids=ids)
    return message


def _logprobs(tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> pb.OutputLogProbs:
    message = pb.OutputLogProbs(token_logprobs=[one.logprob for one in logprobs], token_ids=tokens)
    if any(one.top for one in logprobs):
        for one in logprobs:
            values = [value for _, value in one.top]
            message.top_logprobs.add(values=values, token_ids=[token for token, _ in one.top])
    return message


def _figures(counts: Acceptance) -> tuple[tuple[str, str], ...]:
    return (
        ("x-spec-rounds", str(counts.rounds)),
        ("x-spec-draft-tokens", str(counts.drafted)),
        ("x-spec-accepted-tokens", str(counts.accepted)),
        ("x-spec-accepted-per-position", ",".join(map(str, counts.per_position))),
        ("x-spec-acceptance-length", f"{counts.length:.4f}"),
    )


_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json", "config.json", "generation_config.json"),
)
_DATE = (1980, 1, 1, 0, 0, 0)  # fixed, so that the same files make the same archive on every server


@dataclass(frozen=True)
class Archive:
    """A zip file and its fingerprint."""

    content: bytes
    sha256: str


class TokenizerFiles:
    """The archive of a folder; it is made at the first request."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = asyncio.Lock()
        self._archive: Archive | None = None

    async def archive(self) -> Archive:
        """The archive.

        Raises:
          OSError: a file cannot be read.
        """
        async with self._lock:
            if self._archive is None:
                self._archive = await asyncio.to_thread(_pack, self._folder)
            return self._archive


def _pack(folder: Path) -> Archive:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _NAMES:
            if (folder / name).is_file():
                info = zipfile.ZipInfo(name, _DATE)
                info.external_attr = 0o644 << 16
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, (folder / name).read_bytes())
    content = buffer.getvalue()
    return Archive(content, hashlib.sha256(content).hexdigest())
