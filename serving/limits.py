"""Limits of one request. They are checked before its parts become Python objects."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request, in addition to those of the engine.

    Args:
      max_seconds: longest time of a request from its arrival; None is no limit.
      max_n: most sequences of one request.
      min_priority: lowest priority of a request, the one that comes first.
      max_prompt_chars: most characters of a prompt; fewer where `max_model_len` tokens cannot hold them.
      max_messages: most messages of a chat, and most parts of a message.
      max_tools: most tools of a chat.
      max_stops, max_stop_chars: most stop strings, and most characters of each.
      max_stop_ids: most stop ids.
      max_json_depth: deepest nesting of objects and lists.
      tokenizer_threads: most long prompts that are tokenised at once.
      unknown_fields: what becomes of unknown fields in a client's JSON.
    """

    max_seconds: float | None = None
    max_n: int = 16
    min_priority: int = -100
    max_prompt_chars: int = 1_000_000
    max_messages: int = 2048
    max_tools: int = 128
    max_stops: int = 16
    max_stop_chars: int = 512
    max_stop_ids: int = 256
    max_json_depth: int = 32
    tokenizer_threads: int = 2
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
