"""Parts of a reply: text, reasoning and tool calls."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: its name, which the client may not know, and its arguments as a JSON
    object.
    """

    name: str
    arguments: str


Kind = Literal["reasoning", "text", "call"]
Item = tuple[Kind, str | ToolCall]
"""One item of a reply, with its kind."""


# Not frozen, and with `items` only when read: a part is made for every delta, and both would triple
# its time.
@dataclass(slots=True)
class ReplyPart:
    """A piece of a reply: text for the user, reasoning, and complete tool calls. It is not changed.

    Args:
      order: `items`, where they are not reasoning, text, calls.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    order: tuple[Item, ...] = field(default=(), compare=False)

    @property
    def items(self) -> tuple[Item, ...]:
        """Text, reasoning and calls in the order in which the model wrote them."""
        if self.order:
            return self.order
        texts = (("reasoning", self.reasoning), ("text", self.text))
        return *(one for one in texts if one[1]), *(("call", one) for one in self.calls)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All parts as one, in linear time; adjacent texts of one kind become one item."""
        parts = [part for part in parts if part]
        if len(parts) == 1:
            return parts[0]
        items: list[Item] = []
        each = (item for part in parts for item in part.items)
        for kind, some in itertools.groupby(each, key=lambda item: item[0]):
            if kind == "call":
                items += some
            else:
                items.append((kind, "".join(text for _, text in some)))
        return cls(
            "".join(part.text for part in parts),
            "".join(part.reasoning for part in parts),
            tuple(call for part in parts for call in part.calls),
            tuple(items),
        )

    def __add__(self, later: Self) -> Self:
        return ReplyPart.joined((self, later))


class ReplyParser(Protocol):
    """Turns the tokens of one sequence into parts of a reply."""

    def add(self, tokens: Sequence[int]) -> ReplyPart:
        """Appends tokens; returns the new part that later tokens cannot change."""

    def finish(self) -> ReplyPart:
        """Returns the rest at the end of the sequence."""
