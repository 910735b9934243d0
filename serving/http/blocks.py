"""A reply as a list of blocks: reasoning, text and calls in the order in which the model writes
them; and the routes whose answers are such lists, as adapters over chats."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from serving.frontend import Frontend
from serving.http.chat import Chat, Conversation
from serving.http.fields import Fields
from serving.http.route import Call, Caller, Encode, Route
from serving.replies.parts import Kind, ToolCall
from serving.stream import Delta, Finish, Stream


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
      open: the block that may get more text.
    """

    def __init__(self, *, is_parallel: bool = True):
        self.all: list[Block] = []
        self._is_parallel = is_parallel
        self.open: Block | None = None

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
        if self.open is not None:
            yield "close", self.open, ""
            self.open = None

    def _text(self, kind: Kind, text: str) -> Iterator[Change]:
        if not text:
            return
        if self.open is None or self.open.kind != kind:
            yield from self.finish()
            self.open = self._new(kind)
            yield "open", self.open, ""
        self.open.pieces.append(text)
        yield "text", self.open, text

    def _new(self, kind: Kind, call: ToolCall | None = None) -> Block:
        self.all.append(Block(len(self.all), kind, call))
        return self.all[-1]


class BlockAnswer(ABC):
    """See `Answer`; the base of answers that are lists of blocks."""

    n = 1

    def __init__(self, *, is_stream: bool, is_parallel: bool):
        self.is_stream, self._blocks = is_stream, Blocks(is_parallel=is_parallel)
        self._finish: Finish | None = None
        self._last_open: Block | None = None
        """At the end of the output: what an answer that was cut lacks a part of."""

    def whole(self, deltas: Mapping[int, Delta], streams: Sequence[Stream]) -> dict:
        for _ in self._changes(deltas[0]):
            pass
        return self._whole(streams)

    @abstractmethod
    def _whole(self, streams: Sequence[Stream]) -> dict:
        """The content of the answer with all blocks."""

    def _changes(self, delta: Delta) -> Iterator[Change]:
        yield from self._blocks.add(delta)
        if delta.finish is not None:
            self._finish, self._last_open = delta.finish, self._blocks.open
            yield from self._blocks.finish()


class Adapter[F: Fields](Route[F]):
    """See `Route`: one whose requests are chats in another form (`as_chat` of its fields).

    Attributes:
      names: see `Chat.converted`.
    """

    names: ClassVar[Mapping[str, str]]

    def __init__(self, frontend: Frontend):
        super().__init__(frontend)
        self._chat = Chat(frontend)

    def _prepare(self, fields: F, caller: Caller) -> Encode:
        content = fields.as_chat()
        talk = self._chat.converted(content, caller, method=self.path, names=self.names)
        answer = self._answer(fields, caller, talk)

        async def encode() -> Call | dict:
            ask = await talk.encode()
            if answer is None:
                return self._counted(len(ask.prompt))
            return Call(asks=[ask], answer=answer)

        return encode

    def _answer(self, fields: F, caller: Caller, talk: Conversation) -> BlockAnswer | None:
        """The answer to be formed; None: the number of tokens."""

    def _counted(self, num_tokens: int) -> dict:
        """The answer with the number of tokens of the prompt."""
        raise NotImplementedError
