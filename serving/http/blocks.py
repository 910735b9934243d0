"""A reply as a list of blocks: reasoning, text and calls in the order in which the model writes them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from serving.replies.parts import Kind, ToolCall
from serving.stream import Delta


@dataclass
class Block:
    """One block.

    Args:
      index: its position in the reply.
      call: of a block of the kind "call".
      pieces: its text so far.
    """

    index: int
    kind: Kind
    call: ToolCall | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text; of a call, the arguments."""
        return self.call.arguments if self.call else "".join(self.pieces)


Change = tuple[Literal["open", "text", "close"], Block, str]
"""A change of a block: its kind, the block, and its new text."""


class Blocks:
    """Divides the output of a sequence into blocks.

    Args:
      is_parallel: whether further calls follow the first one; else they are left out.

    Attributes:
      all: the blocks so far.
    """

    def __init__(self, *, is_parallel: bool = True):
        self.all: list[Block] = []
        self._is_parallel = is_parallel
        self._open: Block | None = None

    @property
    def has_calls(self) -> bool:
        """Whether a block is a call."""
        return any(block.kind == "call" for block in self.all)

    def add(self, delta: Delta) -> Iterator[Change]:
        """Appends output."""
        for kind, item in delta.reply.items:
            if kind != "call":
                yield from self._text(kind, item)
            elif self._is_parallel or not self.has_calls:
                yield from self.finish()
                block = self._new("call", item)
                yield "open", block, ""
                yield "text", block, item.arguments
                yield "close", block, ""

    def finish(self) -> Iterator[Change]:
        """Ends the last block."""
        if self._open is not None:
            yield "close", self._open, ""
            self._open = None

    def _text(self, kind: Kind, text: str) -> Iterator[Change]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self.finish()
            self._open = self._new(kind)
            yield "open", self._open, ""
        self._open.pieces.append(text)
        yield "text", self._open, text

    def _new(self, kind: Kind, call: ToolCall | None = None) -> Block:
        self.all.append(Block(len(self.all), kind, call))
        return self.all[-1]
