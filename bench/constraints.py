"""Constrained requests of a load: JSON schemas, and tools beside them."""

import json
from dataclasses import dataclass

from bench.structured import SCHEMAS
from peagle_jax.config import ConfigError
from serving.protos import peagle_v1_pb2 as pb

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
