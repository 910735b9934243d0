"""`/v1/responses`: OpenAI's newer route, as an adapter over chats. It stores nothing."""

import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from peagle_jax.text.tokenizer import Tokenizer
from serving.http.blocks import Adapter, Block, BlockAnswer
from serving.http.chat import Conversation
from serving.http.errors import RESPONSES
from serving.http.reports import chat_logprobs
from serving.http.responses_fields import Function, ResponsesFields
from serving.http.route import Caller
from serving.stream import Delta, Stream
from serving.tools import call_id

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_STATUS = {"length": "incomplete", "abort": "cancelled"}
"""Status of an answer by the reason of its end; of others "completed"."""
_LAST_EVENTS = {"cancelled": "failed"}
"""Name of the last event by this status, where it is another: the API has no event for cancelled
answers.
"""
_ABORTED = {"code": "server_error", "message": "the request was aborted"}
_TEXT_EVENTS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class Responses(Adapter[ResponsesFields]):
    """A conversation, as OpenAI's newer API has it."""

    path = "/v1/responses"
    dialect = RESPONSES
    fields = ResponsesFields
    names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "messages*": "input",
    }

    def _answer(
        self, fields: ResponsesFields, caller: Caller, talk: Conversation
    ) -> BlockAnswer | None:
        envelope = _envelope(fields, f"resp_{caller.request_id}", self._frontend.name)
        form = dict(is_stream=fields.stream, is_parallel=talk.is_parallel)
        given = (caller.request_id, envelope, fields.namespaces(), self._frontend.tokenizer)
        return _Answer(*given, **form)


class CountInputTokens(Responses):
    """The number of tokens of a prompt."""

    path = "/v1/responses/input_tokens"

    def _answer(self, fields: ResponsesFields, caller: Caller, talk: Conversation) -> None:
        return None

    def _counted(self, num_tokens: int) -> dict:
        return {"object": "response.input_tokens", "input_tokens": num_tokens}


def _envelope(fields: ResponsesFields, response_id: str, model: str) -> dict:
    """The response without its output; it repeats what the client asked for, the input aside."""
    tools = [_tool(one) for one in fields.tools if not one.is_hosted]
    text = {} if fields.text is None else fields.text.model_dump(exclude_none=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": fields.reasoning and fields.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": fields.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": fields.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": fields.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }


def _tool(one: Function) -> dict:
    tool = {"type": one.type, "name": one.name, "description": one.description}
    if one.type == "namespace":
        return tool | {"tools": [_tool(inner) for inner in one.tools]}
    return tool | {"parameters": one.parameters, "strict": one.strict}


class _Answer(BlockAnswer):
    """See `Answer`.

    Args:
      namespaces: of `ResponsesFields.namespaces`.
    """

    def __init__(
        self,
        request_id: str,
        envelope: dict,
        namespaces: Mapping[str, tuple[str, str]],
        tokenizer: Tokenizer | None,
        **form: bool,
    ):
        super().__init__(**form)
        self._tokenizer = tokenizer
        self._scores: list[dict] = []  # of all tokens so far, reasoning and calls included
        self._num_sent = 0
        self._request_id, self._envelope, self._namespaces = request_id, envelope, namespaces
        self._call_ids: dict[int, str] = {}
        self._num_events = 0

    def whole(self, deltas: Mapping[int, Delta], streams: Sequence[Stream]) -> dict:
        self._score(deltas[0])
        return super().whole(deltas, streams)

    def _score(self, delta: Delta) -> None:
        if delta.logprobs is not None:
            new = chat_logprobs(self._tokenizer, delta.tokens, delta.logprobs)
            self._scores += new["content"]

    def part(self, index: int, delta: Delta, streams: Sequence[Stream]) -> list[dict]:
        self._score(delta)
        events = []
        if not self._num_events:
            for name in ("response.created", "response.in_progress"):
                events.append(self._event(name, response=self._response("in_progress")))
        for kind, block, text in self._changes(delta):
            if kind == "open":
                events += self._opening(block)
            elif kind == "text":
                name = f"{_TEXT_EVENTS[block.kind]}.delta"
                logprobs = self._logprobs(block, self._num_sent)
                self._num_sent += len(logprobs.get("logprobs", ()))
                events.append(self._event(name, **self._place(block), delta=text, **logprobs))
            else:
                events += self._closing(block)
        return events

    def end(self, streams: Sequence[Stream]) -> list[dict]:
        response = self._whole(streams)
        status = response["status"]
        return [self._event(f"response.{_LAST_EVENTS.get(status, status)}", response=response)]

    def _whole(self, streams: Sequence[Stream]) -> dict:
        status = _STATUS.get(self._finish.reason, "completed")
        response = self._response(status)
        output = [self._item(block, self._status(block)) for block in self._blocks.all]
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        if status == "cancelled":
            response["error"] = _ABORTED
        usage = _usage(streams)
        return response | {"output": output, "incomplete_details": details, "usage": usage}

    def _response(self, status: str) -> dict:
        empty = {"output": [], "incomplete_details": None, "usage": None}
        return self._envelope | {"status": status} | empty

    def _event(self, kind: str, /, **fields) -> dict:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _opening(self, block: Block) -> list[dict]:
        item = self._item(Block(block.index, block.kind, block.call), "in_progress")
        if block.kind == "call":
            item["arguments"] = ""
        else:
            item["content"] = []
        name = "response.output_item.added"
        events = [self._event(name, output_index=block.index, item=item)]
        if block.kind != "call":
            part = self._part(Block(block.index, block.kind))
            part |= {"logprobs": []} if block.kind == "text" else {}
            events.append(
                self._event("response.content_part.added", **self._place(block), part=part)
            )
        return events

    def _closing(self, block: Block) -> list[dict]:
        place, name = self._place(block), f"{_TEXT_EVENTS[block.kind]}.done"
        if block.kind == "call":
            call = self._named(block) | {"arguments": block.text}
            events = [self._event(name, **place, **call)]
        else:
            part = self._part(block)
            events = [
                self._event(name, **place, text=block.text, **self._logprobs(block)),
                self._event("response.content_part.done", **place, part=part),
            ]
        item = self._item(block, self._status(block))
        done = self._event("response.output_item.done", output_index=block.index, item=item)
        return [*events, done]

    def _place(self, block: Block) -> dict:
        place: dict[str, object] = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind == "call" else place | {"content_index": 0}

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._request_id}_{block.index}"

    def _named(self, block: Block) -> dict:
        """The name of a call, with its namespace if it has one."""
        name = block.call.name
        if name not in self._namespaces:
            return {"name": name}
        return dict(zip(("namespace", "name"), self._namespaces[name], strict=True))

    def _status(self, block: Block) -> str:
        """Of a block that has ended."""
        is_cut = block is self._last_open and self._finish.reason in _STATUS
        return "incomplete" if is_cut else "completed"

    def _item(self, block: Block, status: str) -> dict:
        item = {"id": self._id(block), "status": status}
        if block.kind == "call":
            known = self._call_ids.setdefault(block.index, call_id())
            call = {"call_id": known, "arguments": block.text} | self._named(block)
            return item | {"type": "function_call"} | call
        content = [self._part(block)]
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block) -> dict:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        part = {"type": "output_text", "text": block.text, "annotations": []}
        return part | self._logprobs(block)

    def _logprobs(self, block: Block, first: int = 0) -> dict:
        """Those of all tokens so far but the `first` ones, in the first text alone: a delta of
        several blocks does not say which token is whose."""
        if block.kind != "text":
            return {}
        is_first = block.index == next(one.index for one in self._blocks.all if one.kind == "text")
        return {"logprobs": self._scores[first:] if is_first else []}


def _usage(streams: Sequence[Stream]) -> dict:
    usage = streams[0].usage()
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
