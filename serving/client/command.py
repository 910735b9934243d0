"""Runs `peagle-client`: one request, or a conversation of several."""

import argparse
import contextlib
import json
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
from google.protobuf.message import Message

from peagle_jax.cli.command_line import writes_output
from serving.client.options import SAMPLED, ClientError, check, parser, sampling
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from serving.sampling_messages import GENERATE

_EXITS = {
    grpc.StatusCode.CANCELLED: 130,
    grpc.StatusCode.INVALID_ARGUMENT: 2,
    grpc.StatusCode.FAILED_PRECONDITION: 2,
    grpc.StatusCode.ALREADY_EXISTS: 2,
    grpc.StatusCode.UNAUTHENTICATED: 2,
    grpc.StatusCode.UNAVAILABLE: 3,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 3,
    grpc.StatusCode.DEADLINE_EXCEEDED: 4,
}
_FAILED = 1
_HEALTH_SECONDS = 5.0
_OPTIONS = (("grpc.max_receive_message_length", -1),)  # no limit: the request decides the size
_LOOPBACK = ("127.", "localhost:", "[::1]", "unix:")


@writes_output("peagle-client")
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = parser().parse_args(arguments)
    try:
        check(args)
        with _channel(args) as channel:
            return _run(args, channel)
    except ClientError as error:
        _write_err(f"peagle-client: error: {error}")
        return error.code
    except KeyboardInterrupt:
        _write_err("\npeagle-client: interrupted")
        return 130


def _channel(args: argparse.Namespace) -> grpc.Channel:
    if not (args.tls or args.tls_ca):
        return grpc.insecure_channel(args.address, options=_OPTIONS)
    ca, key, cert = (
        None if path is None else _read(path) for path in (args.tls_ca, args.tls_key, args.tls_cert)
    )
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return grpc.secure_channel(args.address, credentials, options=_OPTIONS)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ClientError(f"{path}: {error.strerror}") from error


def _metadata(args: argparse.Namespace) -> list[tuple[str, str]]:
    if args.token_file is None:
        return []
    token = _read(args.token_file).decode(errors="replace").partition("\n")[0].strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ClientError(f"{args.token_file}: its first line must be a token")
    if not (args.tls or args.tls_ca or args.address.startswith(_LOOPBACK)):
        _write_err("peagle-client: warning: the token travels unencrypted; use --tls or --tls-ca")
    return [("authorization", f"Bearer {token}")]


def _run(args: argparse.Namespace, channel: grpc.Channel) -> int:
    if args.health:
        return _health(args, channel)
    stub = peagle_v1_pb2_grpc.GenerationStub(channel)
    metadata = _metadata(args)
    if args.info:
        return _info(args, stub, metadata)
    is_terminal = args.prompt is None and sys.stdin.isatty()
    if args.chat and is_terminal:
        return _converse(args, stub, metadata)
    if is_terminal:
        _write_err("(reading the prompt from the terminal; Ctrl-D ends it)")
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    if args.chat:
        request = _request(args, chat=[dict(role="user", content=prompt)])
    else:
        request = _request(args, text=prompt)
    _answer(args, stub, metadata, request)
    return 0


def _health(args: argparse.Namespace, channel: grpc.Channel) -> int:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    timeout = args.timeout or _HEALTH_SECONDS
    with _translate_errors(args):
        stub = health_pb2_grpc.HealthStub(channel)
        status = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout).status
    _write(f"{health_pb2.HealthCheckResponse.ServingStatus.Name(status)}\n")
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 3


def _info(args: argparse.Namespace, stub, metadata: list) -> int:
    with _translate_errors(args):
        options = dict(timeout=args.timeout, metadata=metadata)
        model = stub.GetModelInfo(pb.GetModelInfoRequest(), **options)
        stats = stub.GetStats(pb.GetStatsRequest(), **options)
    _write(json.dumps({"model": fields(model), "stats": fields(stats)}) + "\n")
    return 0


def _converse(args: argparse.Namespace, stub, metadata: list) -> int:
    """Reads turns until the end of stdin. A turn that fails is not part of the conversation."""
    turns: list[dict] = []
    while True:
        _write_err("> ", end="")
        line = sys.stdin.readline()
        if not line:
            _write_err("")
            return 0
        if not line.strip():
            continue
        turn = dict(role="user", content=line.rstrip("\n"))
        try:
            text = _answer(args, stub, metadata, _request(args, chat=[*turns, turn]))
        except ClientError as error:
            _write_err(f"peagle-client: error: {error}")
        except KeyboardInterrupt:
            _write_err("\n(interrupted; this turn is dropped)")
        else:
            turns += [turn, dict(role="assistant", content=text)]


def _request(
    args: argparse.Namespace, *, text: str | None = None, chat: Sequence[dict] = ()
) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    try:
        if text is None:
            first = [] if args.system is None else [dict(role="system", content=args.system)]
            request.chat.messages.extend(pb.ChatMessage(**turn) for turn in [*first, *chat])
            request.chat.variables_json = json.dumps(dict(args.chat_option))
        else:
            request.text = text
        request.n, request.priority = args.n, args.priority
        params = sampling(args)
        for name in SAMPLED:
            if (value := getattr(params, name)) is not None:
                _write_option(request, name, value)
        _constrain(request.structured, args)
    except ValueError as error:  # protobuf cannot represent it: half of a surrogate pair
        raise ClientError(f"cannot be sent: {error}") from error
    return request


def _write_option(request: pb.GenerateRequest, name: str, value: object) -> None:
    try:
        GENERATE.write(request, {name: value})
    except ValueError as error:  # outside of its field's range
        raise ClientError(f"--{name.replace('_', '-')} cannot be sent: {error}") from error


def _constrain(message: pb.Structured, args: argparse.Namespace) -> None:
    """Sets the constraint, which the server checks."""
    if args.json_object:
        message.json_object = True
    for name, path in (("json_schema", args.json_schema), ("grammar", args.grammar)):
        if path is not None:
            setattr(message, name, _read(path).decode("utf-8", "replace"))
    if args.regex is not None:
        message.regex = args.regex
    if args.choice is not None:
        message.choice.texts.extend(args.choice)


def _answer(args: argparse.Namespace, stub, metadata: list, request: pb.GenerateRequest) -> str:
    """Writes the answer and its statistics; returns the text of the first sequence."""
    whole = pb.GenerateResponse(sequences=[pb.Sequence() for _ in range(args.n)])
    is_streamed, is_reasoning = args.n == 1 and not args.json, False
    with _translate_errors(args):
        call = stub.Generate(request, timeout=args.timeout, metadata=metadata)
        with _received(call) as deltas:
            for delta in deltas:
                add(whole, delta)
                if is_streamed:
                    is_reasoning = _show(delta, is_reasoning)
        whole.request_id = dict(call.initial_metadata()).get("x-request-id", "")
    text = whole.sequences[0].text
    if args.json:
        _write(json.dumps(as_json(whole)) + "\n")
        return text
    if is_streamed:
        _write("\n")
    else:
        for number, sequence in enumerate(whole.sequences, start=1):
            if sequence.reasoning:
                _write_err(sequence.reasoning)
            _write(f"=== {number} of {args.n}\n{sequence.text}\n")
    _write_err("-" * 40)
    _write_err(statistics(whole))
    return text


def _show(delta: pb.GenerateDelta, is_reasoning: bool) -> bool:
    """Writes reasoning to stderr and text to stdout; returns whether the last line is
    reasoning."""
    if delta.reasoning:
        _write_err(delta.reasoning, end="")
        is_reasoning = True
    if delta.text and is_reasoning:
        _write_err("")
        is_reasoning = False
    _write(delta.text)
    return is_reasoning


@contextlib.contextmanager
def _received(call: grpc.Call) -> Iterator[Iterator[pb.GenerateDelta]]:
    """Yields the deltas of `call`, and cancels it on the server however the block ends.

    A thread waits for gRPC, because gRPC waits on a `threading.Condition`: an interrupt there can
    leave its lock released, and the KeyboardInterrupt becomes a RuntimeError.
    """
    deltas: queue.SimpleQueue = queue.SimpleQueue()
    thread = threading.Thread(target=_receive, args=(call, deltas), daemon=True)
    thread.start()
    try:
        yield _until_end(deltas)
    finally:
        call.cancel()  # no effect on a call that has ended
        thread.join()


def _receive(call: grpc.Call, deltas: queue.SimpleQueue) -> None:
    """Puts the deltas of `call` into `deltas`, then its error or None."""
    try:
        for delta in call:
            deltas.put(delta)
    except grpc.RpcError as error:
        deltas.put(error)
    else:
        deltas.put(None)


def _until_end(deltas: queue.SimpleQueue) -> Iterator[pb.GenerateDelta]:
    while (item := deltas.get()) is not None:
        if isinstance(item, grpc.RpcError):
            raise item
        yield item


@contextlib.contextmanager
def _translate_errors(args: argparse.Namespace) -> Iterator[None]:
    """Translates gRPC statuses to messages and exit codes."""
    try:
        yield
    except grpc.RpcError as error:
        raise ClientError(
            _message(error, args.address), _EXITS.get(error.code(), _FAILED)
        ) from error


def _message(error: grpc.Call, address: str) -> str:
    code, details = error.code(), error.details()
    keys = {key for key, _ in error.trailing_metadata() or ()}
    is_from_server = "grpc-status-details-bin" in keys
    if code is grpc.StatusCode.UNAVAILABLE and not is_from_server:
        if "Expected SETTINGS" in details or "ALPN" in details:
            return f"{address} does not speak gRPC: give the --port of peagle-serve ({details})"
        return (
            f"no answer from {address}: is peagle-serve running there, and do both sides use TLS "
            f"or neither? ({details})"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not is_from_server:
        return f"no answer from {address} in time (--timeout)"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"the server on {address} is no peagle-serve ({details})"
    return f"{details} [{code.name}]"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _write_err(text: str, end: str = "\n") -> None:
    sys.stderr.write(text + end)
    sys.stderr.flush()


def add(whole: pb.GenerateResponse, delta: pb.GenerateDelta) -> None:
    """Appends a delta to its sequence in `whole`, which has all sequences of the request."""
    sequence = whole.sequences[delta.index]
    sequence.text += delta.text
    sequence.reasoning += delta.reasoning
    sequence.token_ids.extend(delta.token_ids)
    sequence.logprobs.extend(delta.logprobs)
    sequence.prompt_logprobs.extend(delta.prompt_logprobs)
    if delta.HasField("finish"):
        sequence.finish.CopyFrom(delta.finish)
    if delta.HasField("usage"):
        whole.usage.CopyFrom(delta.usage)


def statistics(whole: pb.GenerateResponse) -> str:
    """A line about speed and, if there were drafts, a line about their acceptance."""
    usage, counts = whole.usage, whole.usage.acceptance
    speed = usage.completion_tokens / usage.duration if usage.duration else 0.0
    reasons = ", ".join(_reason(sequence.finish) for sequence in whole.sequences)
    lines = [
        f"{speed:.1f} tokens/s ({usage.completion_tokens} tokens in {usage.duration:.2f} s), "
        f"time to first token {usage.time_to_first_token:.3f} s; ended by {reasons}"
    ]
    if counts.drafted:
        pairs = zip(counts.accepted_per_position, counts.drafted_per_position, strict=True)
        rates = " ".join(f"{n / drafted if drafted else 0:.2f}" for n, drafted in pairs)
        lines.append(
            f"acceptance length {counts.acceptance_length:.2f} over {counts.rounds} rounds; "
            f"accepted at position 1, 2, ...: {rates}"
        )
    return "\n".join(lines)


def as_json(whole: pb.GenerateResponse) -> dict:
    """All of the answer as a JSON object."""
    usage = fields(whole.usage)
    return {
        "request_id": whole.request_id,
        "sequences": [_sequence(sequence) for sequence in whole.sequences],
        "usage": usage | usage.pop("acceptance"),
    }


def fields(message: Message) -> dict:
    """All fields of a message, including those that are zero."""
    content = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            content[field.name] = list(value)
        else:
            content[field.name] = fields(value) if isinstance(value, Message) else value
    return content


def _sequence(sequence: pb.Sequence) -> dict:
    stopped_by = sequence.finish.WhichOneof("stopped_by")
    content = {
        "text": sequence.text,
        "token_ids": list(sequence.token_ids),
        "finish_reason": _reason(sequence.finish),
        "stopped_by": getattr(sequence.finish, stopped_by) if stopped_by else None,
    }
    if sequence.reasoning:
        content["reasoning"] = sequence.reasoning
    if sequence.logprobs:
        content["logprobs"] = [_scores(token) for token in sequence.logprobs]
    if sequence.prompt_logprobs:  # the first token has none
        scores = [_scores(token) | {"rank": token.rank} for token in sequence.prompt_logprobs]
        content["prompt_logprobs"] = [None, *scores]
    return content


def _scores(token: pb.TokenLogprob | pb.PromptLogprob) -> dict:
    alternatives = [[other.token_id, other.logprob] for other in token.alternatives]
    return {"logprob": token.logprob, "alternatives": alternatives}


def _reason(finish: pb.Finish) -> str:
    return pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
