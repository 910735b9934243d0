"""`/v1/messages`: Anthropic's route for conversations, as an adapter over chats."""

import json
import uuid
from collections.abc import Sequence

from serving.errors import Code, ServiceError
from serving.http.blocks import Adapter, Block, BlockAnswer, Change
from serving.http.chat import Conversation
from serving.http.errors import ANTHROPIC
from serving.http.messages_fields import MessagesFields, PromptFields
from serving.http.route import Caller
from serving.stream import Delta, Stream

_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "messages*": "messages",
}
_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class Messages(Adapter[MessagesFields]):
    """A conversation, as Anthropic's API has it."""

    path = "/v1/messages"
    dialect = ANTHROPIC
    fields = MessagesFields
    names = _NAMES

    def _answer(self, fields: MessagesFields, caller: Caller, talk: Conversation) -> BlockAnswer:
        form = dict(is_stream=fields.stream, is_parallel=talk.is_parallel)
        return _Answer(f"msg_{caller.request_id}", self._frontend.name, **form)


class CountTokens(Adapter[PromptFields]):
    """The number of tokens of a prompt."""

    path = "/v1/messages/count_tokens"
    dialect = ANTHROPIC
    fields = PromptFields
    names = _NAMES

    def _counted(self, num_tokens: int) -> dict:
        return {"input_tokens": num_tokens}


class _Answer(BlockAnswer):
    def __init__(self, answer_id: str, model: str, **form: bool):
        super().__init__(**form)
        self._id, self._model = answer_id, model
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

    def _whole(self, streams: Sequence[Stream]) -> dict:
        content = [_content(block, block.text) for block in self._blocks.all]
        return self._message(content, _usage(streams)) | self._stop()

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
