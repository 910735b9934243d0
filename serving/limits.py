"""Limits of one request. They are checked before its parts become Python objects."""

from dataclasses import dataclass
from typing import Literal

from peagle_jax.options import Rule, at_least, option

SECONDS = Rule("0 or more seconds", lambda seconds: 0 <= seconds < float("inf"))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request, in addition to those of the engine."""

    max_request_seconds: float = option(
        0.0,
        "time limit of a request from its arrival, queue included; 0 sets none",
        SECONDS,
        metavar="S",
    )
    max_n: int = option(16, "most sequences of one request", at_least(1), metavar="N")
    min_priority: int = option(
        -100,
        "lowest priority of a request; with 0 no client can pass those that ask for none",
        metavar="N",
    )
    max_prompt_chars: int = option(
        1_000_000,
        "most characters of a prompt or chat; fewer if max-model-len tokens cannot hold them",
        at_least(1),
        metavar="N",
    )
    max_messages: int = option(
        2048, "most messages of a chat and most parts of a message", at_least(1), metavar="N"
    )
    max_tools: int = option(128, "most tools of a chat", at_least(1), metavar="N")
    max_stops: int = option(16, "most stop strings of a request", at_least(1), metavar="N")
    max_stop_chars: int = option(512, "most characters of a stop string", at_least(1), metavar="N")
    max_stop_ids: int = option(256, "most stop ids of a request", at_least(1), metavar="N")
    max_json_depth: int = option(
        32, "deepest nesting of lists and objects in a client's JSON", at_least(1), metavar="N"
    )
    tokenizer_threads: int = option(
        2, "most long prompts tokenised at once", at_least(1), metavar="N"
    )
    unknown_fields: Literal["ignore", "refuse"] = option(
        "ignore", "what becomes of fields in an HTTP request's JSON that the server does not know"
    )
