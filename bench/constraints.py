"""Constrained requests of a load: JSON schemas, and tools beside them, for a server and for a bare engine."""

import json
from dataclasses import dataclass, replace

from bench.structured import SCHEMAS
from peagle_jax.config import ConfigError
from peagle_jax.engine.engine import Engine
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.structured import Structured
from serving.protos import peagle_v1_pb2 as pb
from serving.replies.parser import Replies
from serving.tools import loose, tool

_FUNCTION = "look_up"


@dataclass(frozen=True)
class Mix:
    """Which requests of a load are constrained: a share of them, evenly spread, every second of these with a tool.

    A reply to a request with a tool is JSON of the schema, or calls of the tool.
    """

    share: float

    def schema(self, index: int) -> dict | None:
        """The schema of request `index`; None if it is free."""
        number = self._number(index)
        return None if number is None else SCHEMAS[number // 2 % len(SCHEMAS)]

    def has_tool(self, index: int) -> bool:
        """Whether the constrained request `index` may call a tool."""
        return self._number(index) % 2 == 1

    def _number(self, index: int) -> int | None:
        before, now = int(index * self.share), int((index + 1) * self.share)
        return before if now > before else None

    def constrain(self, request: pb.GenerateRequest, index: int) -> None:
        """Adds the constraint of request `index` to a request with a text.

        Raises:
          ConfigError: its prompt is no text.
        """
        if (schema := self.schema(index)) is None:
            return
        if request.WhichOneof("prompt") != "text":
            raise ConfigError("--constrained needs prompts that are texts: choose another --set")
        request.structured.json_schema = json.dumps(schema)
        if self.has_tool(index):
            prompt = request.text
            request.chat.messages.add(role="user", content=prompt)
            request.chat.tools.add(name=_FUNCTION, parameters_json=json.dumps({"type": "object"}))

    def params(
        self, params: SamplingParams, index: int, engine: Engine, reply_format: str
    ) -> SamplingParams:
        """The constraint of request `index` as the server compiles it, for a bare engine.

        Raises:
          ConfigError: the model's replies have no format of calls.
        """
        if (schema := self.schema(index)) is None:
            return params
        text = Structured.json_schema(schema)
        if self.has_tool(index):
            replies = Replies(engine.tokenizer, reply_format, engine.target_config.eos_ids)
            tools = loose([tool(_FUNCTION, None, {"type": "object"})])
            text = replies.calls(tools, is_parallel=True, must_call=False, text=text)
            if text is None:
                raise ConfigError("--constrained has tools: add -- --reply-format qwen3")
        return replace(params, structured=text)


def prompt_of(request: pb.GenerateRequest) -> str | list[int]:
    """The prompt of a request that `Mix.constrain` has seen. The template of a chat must add nothing."""
    match request.WhichOneof("prompt"):
        case "chat":
            return request.chat.messages[0].content
        case "text":
            return request.text
    return list(request.tokens.ids)
