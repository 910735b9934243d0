"""Parts of a reply: text, reasoning and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: its name, which the client may not know, and its arguments as a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ReplyPart:
    """A piece of a reply: text for the user, reasoning, and complete tool calls."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All parts as one, in linear time."""
        return cls(
            "".join(part.text for part in parts),
            "".join(part.reasoning for part in parts),
            tuple(call for part in parts for call in part.calls),
        )

    def __add__(self, later: Self) -> Self:
        return ReplyPart.joined((self, later))


class ReplyParser(Protocol):
    """Turns the tokens of one sequence into parts of a reply."""

    def add(self, tokens: Sequence[int]) -> ReplyPart:
        """Appends tokens; returns the new part that later tokens cannot change."""

    def finish(self) -> ReplyPart:
        """Returns the rest at the end of the sequence."""
