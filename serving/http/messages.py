"""`/v1/messages`: Anthropic's route for conversations, as an adapter over chats."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence

from serving.errors import Code, ServiceError
from serving.frontend import Frontend
from serving.http.blocks import Block, Blocks, Change
from serving.http.chat import Chat
from serving.http.dialect import ANTHROPIC
from serving.http.messages_fields import MessagesFields, PromptFields
from serving.http.route import Call, Caller, Encode, Route
from serving.http.structured import format_names
from serving.stream import Delta, Finish, Stream

_SPELLING = {"stop": "stop_sequences", **format_names("output_config.format")}
_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class Messages(Route[MessagesFields]):
    path = "/v1/messages"
    dialect = ANTHROPIC
    fields = MessagesFields

    def __init__(self, frontend: Frontend):
        super().__init__(frontend)
        self._chat = Chat(frontend)

    def _prepare(self, fields: MessagesFields, caller: Caller) -> Encode:
        talk = self._chat.converted(fields.as_chat(), caller, method=self.path, names=_SPELLING)
        model, is_parallel, is_stream = self._frontend.name, talk.is_parallel, fields.stream

        async def encode() -> Call:
            ask = await talk.encode()
            blocks = Blocks(is_parallel=is_parallel)
            answer = _Answer(f"msg_{caller.request_id}", model, blocks, is_stream=is_stream)
            return Call(asks=[ask], answer=answer)

        return encode


class CountTokens(Route[PromptFields]):
    """`/v1/messages/count_tokens`: the tokens of a prompt; see `Route`."""

    path = "/v1/messages/count_tokens"
    dialect = ANTHROPIC
    fields = PromptFields

    def __init__(self, frontend: Frontend):
        super().__init__(frontend)
        self._chat = Chat(frontend)

    def _prepare(self, fields: PromptFields, caller: Caller) -> Encode:
        talk = self._chat.converted(fields.as_chat(), caller, method=self.path)

        async def encode() -> dict:
            return {"input_tokens": len((await talk.encode()).prompt)}

        return encode


class _Answer:
    def __init__(self, answer_id: str, model: str, blocks: Blocks, *, is_stream: bool):
        self.n, self.is_stream = 1, is_stream
        self._id, self._model, self._blocks = answer_id, model, blocks
        self._finish: Finish | None = None
        self._has_begun = False

    def part(self, index: int, delta: Delta, streams: Sequence[Stream]) -> list[dict]:
        events = []
        if not self._has_begun:
            self._has_begun = True
            usage = _usage(streams) | {"output_tokens": 0}
            events.append({"type": "message_start", "message": self._message([], usage)})
        events += [_event(change) for change in self._changes(delta)]
        return events

    def end(self, streams: Sequence[Stream]) -> list[dict]:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": _usage(streams)}
        return [delta, {"type": "message_stop"}]

    def whole(self, deltas: Mapping[int, Delta], streams: Sequence[Stream]) -> dict:
        for _ in self._changes(deltas[0]):
            pass
        content = [_content(block, block.text) for block in self._blocks.all]
        return self._message(content, _usage(streams)) | self._stop()

    def _changes(self, delta: Delta) -> Iterator[Change]:
        yield from self._blocks.add(delta)
        if delta.finish is not None:
            self._finish = delta.finish
            yield from self._blocks.finish()

    def _message(self, content: list[dict], usage: dict) -> dict:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self) -> dict:
        reason, stopped_by = self._finish.reason, self._finish.stop_reason
        if reason == "abort":  # no reason of the API says that an answer is not complete
            raise ServiceError(Code.CANCELLED, "the request was aborted")
        if reason == "stop" and isinstance(stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        if reason == "stop" and self._blocks.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": _REASONS[reason], "stop_sequence": None}


def _usage(streams: Sequence[Stream]) -> dict:
    """Tokens found in the prefix cache do not count as input."""
    usage = streams[0].usage()
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _content(block: Block, text: str) -> dict:
    """A block with the given text, arguments or reasoning."""
    if block.kind == "call":
        tool = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": block.call.name}
        return tool | {"input": json.loads(text) if text else {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _event(change: Change) -> dict:
    kind, block, text = change
    if kind == "open":
        return {
            "type": "content_block_start",
            "index": block.index,
            "content_block": _content(block, ""),
        }
    if kind == "close":
        return {"type": "content_block_stop", "index": block.index}
    name, field = {
        "text": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }[block.kind]
    delta = {"type": name, field: text}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}
