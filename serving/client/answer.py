"""Joins the deltas of an answer; shows its statistics, or all of it as JSON."""

import json

from google.protobuf.message import Message

from serving.protos import peagle_v1_pb2 as pb


def add(whole: pb.GenerateResponse, delta: pb.GenerateDelta) -> None:
    """Appends a delta to its sequence in `whole`, which has all sequences of the request."""
    sequence = whole.sequences[delta.index]
    sequence.text += delta.text
    sequence.reasoning += delta.reasoning
    sequence.tool_calls.extend(delta.tool_calls)
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
    usage, counts = whole.usage, whole.usage.acceptance
    return {
        "request_id": whole.request_id,
        "sequences": [_sequence(sequence) for sequence in whole.sequences],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "time_to_first_token": usage.time_to_first_token,
            "duration": usage.duration,
            "rounds": counts.rounds,
            "emitted": counts.emitted,
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "accepted_per_position": list(counts.accepted_per_position),
            "drafted_per_position": list(counts.drafted_per_position),
            "acceptance_length": counts.acceptance_length,
        },
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


def as_call(call: pb.ToolCall) -> dict:
    """A call as a JSON object."""
    return {"id": call.id, "name": call.name, "arguments": json.loads(call.arguments_json)}


def _sequence(sequence: pb.Sequence) -> dict:
    stopped_by = sequence.finish.WhichOneof("stopped_by")
    content = {
        "text": sequence.text,
        "token_ids": list(sequence.token_ids),
        "finish_reason": _reason(sequence.finish),
        "stopped_by": getattr(sequence.finish, stopped_by) if stopped_by else None,
    }
    if sequence.tool_calls:
        content["tool_calls"] = [as_call(call) for call in sequence.tool_calls]
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
