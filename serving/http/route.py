"""What the two generating routes have in common, seen from `Generation`, which runs them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from serving.http.options import Options
from serving.stream import Ask, Delta


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks: the request's id, and headers of the client's trace (W3C)."""

    request_id: str
    trace: Mapping[str, str] = field(default_factory=dict)


class Choices(Protocol):
    """Formats `Delta`s as OpenAI's choices. One object per request, because it keeps state."""

    def part(self, index: int, delta: Delta) -> dict:
        """A choice in a chunk of a stream."""

    def whole(self, index: int, delta: Delta) -> dict:
        """A choice of a complete answer; `delta` is all of it."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request that was understood: one ask for each prompt."""

    asks: Sequence[Ask]
    options: Options
    choices: Choices


Encode = Callable[[], Awaitable[Call]]
"""Tokenises the prompts of a request that was read."""


class Route(Protocol):
    """One of OpenAI's generating routes.

    Attributes:
      path: as in the URL.
      prefix: what ids of answers begin with.
      whole_object, part_object: the "object" of an answer and of a stream's chunk.
    """

    path: str
    prefix: str
    whole_object: str
    part_object: str

    def read(self, content: dict[str, object], caller: Caller) -> Encode:
        """Understands a request, its prompts as they came; may run in any thread.

        What it returns must not hold `content`, which may be large.

        Raises:
          ServiceError: it asks for what is not there, or is no request.
        """


def one_ask_each(ask: Ask, prompts: Sequence[list[int]]) -> list[Ask]:
    """`ask` for every prompt; of several each gets an id of its own, "ID-0" and so on."""
    if len(prompts) == 1:
        return [replace(ask, prompt=prompts[0])]
    return [
        replace(ask, prompt=prompt, request_id=f"{ask.request_id}-{place}")
        for place, prompt in enumerate(prompts)
    ]
