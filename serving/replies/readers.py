"""Readers of tool calls: each takes the pieces of a `Lexer` from the marker that opens a call to
its end.
"""

import json
import re
from typing import Protocol

from serving.replies.arguments import NoCall, Tools, read_json
from serving.replies.lexer import SPACE
from serving.replies.parts import ToolCall

_LONGEST_NAME = 256  # characters


class Reader(Protocol):
    """Reads one region of a reply that may hold calls."""

    def take(self, piece: str) -> int | None:
        """Takes the next piece, the opening marker first.

        Returns:
          None while the region goes on. Else the number of characters of `piece` that belong to it.
        """

    def calls(self, tools: Tools) -> tuple[ToolCall, ...]:
        """The calls, after the end of the region or of the reply.

        Raises:
          NoCall: the region is not complete, or holds something else.
        """


def _num_leading(text: str, letters: str) -> int:
    return len(text) - len(text.lstrip(letters))


class JsonReader:
    """JSON objects: {"name": ..., "arguments": {...}}. A marker within a JSON string is a part of
    the string.

    Args:
      opening: the marker before the objects; None: the first brace opens the region.
      closing: the marker after the objects; None: the region ends where no object follows.
      between: characters that may stand between objects.
      needs_arguments: whether an object without arguments is no call.
    """

    MARKERS = ("{", "}", "[", "]", '"', "\\")

    def __init__(
        self,
        opening: str | None,
        closing: str | None,
        *,
        between: str = SPACE,
        needs_arguments: bool = False,
    ):
        self._opening, self._closing = opening, closing
        self._between, self._needs_arguments = between, needs_arguments
        self._objects: list[str] = []
        self._pieces: list[str] = []
        self._depth = 0
        self._is_string = self._is_escaped = False

    def take(self, piece: str) -> int | None:
        if piece == self._opening:
            self._opening = None
            return None
        if self._depth:
            return self._within_object(piece)
        if piece == "{":
            self._pieces, self._depth = [piece], 1
            return None
        if piece == self._closing:
            return len(piece)
        size = _num_leading(piece, self._between)
        return None if size == len(piece) else size

    def calls(self, tools: Tools) -> tuple[ToolCall, ...]:
        if self._depth or not self._objects:
            raise NoCall
        return tuple(self._call(read_json(text), tools) for text in self._objects)

    def _within_object(self, piece: str) -> int | None:
        self._pieces.append(piece)
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_string:
            self._is_escaped = piece == "\\"
            self._is_string = piece != '"'
        elif piece == '"':
            self._is_string = True
        elif piece in ("{", "["):
            self._depth += 1
        elif piece in ("}", "]"):
            self._depth -= 1
            if not self._depth:
                self._objects.append("".join(self._pieces))
        elif piece == self._closing:
            return len(piece)  # within an object: not JSON
        return None

    def _call(self, value: dict, tools: Tools) -> ToolCall:
        named = [value[key] for key in ("arguments", "parameters") if key in value]
        if not named and self._needs_arguments:
            raise NoCall
        return tools.call(value.get("name"), named[0] if named else {})


class XmlReader:
    """Qwen3-Coder's calls. Values are texts; a newline after the opening and one before the end are
    no part of them.

    <tool_call>
    <function=read>
    <parameter=path>
    a.py
    </parameter>
    </function>
    </tool_call>

    A value ends at the first </parameter> that is followed by another parameter or by </function>.
    The outer marker may be missing at both ends, because models leave it out.
    """

    MARKERS = (
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
    )

    def __init__(self):
        self._calls: list[tuple[str, dict[str, str]]] = []
        self._name: list[str] = []
        self._value: list[str] = []
        self._gap: list[str] = []
        self._key = ""
        self._arguments: dict[str, str] = {}
        self._state = self._outside

    def take(self, piece: str) -> int | None:
        return self._state(piece)

    def calls(self, tools: Tools) -> tuple[ToolCall, ...]:
        if self._state != self._outside or not self._calls:
            raise NoCall
        return tuple(tools.call(name, arguments) for name, arguments in self._calls)

    # Each state is a method that takes a piece.

    def _outside(self, piece: str) -> int | None:
        """Before the first function, or after one."""
        if piece == "<function=":
            self._name, self._arguments = [], {}
            self._state = self._in_name
            return None
        if piece == "<tool_call>" and not self._calls:
            return None
        if piece == "</tool_call>":
            return len(piece)
        size = _num_leading(piece, SPACE)
        return None if size == len(piece) else size

    def _in_name(self, piece: str) -> int | None:
        """Within `<function=NAME>`."""
        name = self._read_name(piece)
        if name is None:
            return self._end_of_name(piece)
        self._calls.append((name, self._arguments))
        self._state = self._between_parameters
        return self._rest_of_name(piece)

    def _in_key(self, piece: str) -> int | None:
        """Within `<parameter=NAME>`."""
        name = self._read_name(piece)
        if name is None:
            return self._end_of_name(piece)
        self._key, self._value, self._state = name, [], self._in_value
        return self._rest_of_name(piece)

    def _read_name(self, piece: str) -> str | None:
        """The name, once its closing bracket has come."""
        self._name.append(piece.partition(">")[0])
        name = "".join(self._name)
        is_name = ">" in piece and "<" not in name and "\n" not in name
        return name.strip() or None if is_name and len(name) <= _LONGEST_NAME else None

    def _end_of_name(self, piece: str) -> int | None:
        """Ends the region if the name cannot be one any more."""
        name = "".join(self._name)
        if ">" in piece or "<" in name or "\n" in name or len(name) > _LONGEST_NAME:
            return 0
        return None

    def _rest_of_name(self, piece: str) -> int | None:
        start = piece.index(">") + 1
        if start == len(piece):
            return None
        size = self._state(piece[start:])
        return None if size is None else start + size

    def _between_parameters(self, piece: str) -> int | None:
        if piece == "<parameter=":
            self._name, self._state = [], self._in_key
            return None
        if piece == "</function>":
            self._state = self._outside
            return None
        return 0 if piece.strip(SPACE) else None

    def _in_value(self, piece: str) -> int | None:
        if piece == "</parameter>":
            self._gap, self._state = [piece], self._after_value
        else:
            self._value.append(piece)
        return None

    def _after_value(self, piece: str) -> int | None:
        """After a `</parameter>`, which may be a part of the value."""
        if piece in ("<parameter=", "</function>"):
            value = "".join(self._value)
            self._arguments[self._key] = value.removeprefix("\n").removesuffix("\n")
            return self._between_parameters(piece)
        if not piece.strip(SPACE):
            self._gap.append(piece)
            return None
        self._value += self._gap
        self._state = self._in_value
        return self._in_value(piece)


class GemmaReader:
    """Gemma 4's calls: keys have no quotes, and texts stand between two markers.

    <|tool_call>call:read{path:<|"|>a.py<|"|>,lines:[1,2]}<tool_call|>
    """

    OPENING, CLOSING, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
    MARKERS = (OPENING, CLOSING, QUOTE)
    _HEAD = re.compile(r"\s*call:([\w.:-]+)\s*(?=\{)")
    _KEY = re.compile(r"([{,]\s*)([\w.$-]+)(\s*:)")

    def __init__(self):
        self._pieces: list[list[str]] = []
        """Text outside of quotes and within them, in turn."""
        self._is_quoted = False

    def take(self, piece: str) -> int | None:
        if piece == self.OPENING and not self._pieces:
            self._pieces.append([])
        elif piece == self.QUOTE:
            self._is_quoted = not self._is_quoted
            self._pieces.append([])
        elif piece == self.CLOSING and not self._is_quoted:
            return len(piece)
        else:
            self._pieces[-1].append(piece)
        return None

    def calls(self, tools: Tools) -> tuple[ToolCall, ...]:
        texts = ["".join(pieces) for pieces in self._pieces]
        head = self._HEAD.match(texts[0])
        if head is None or self._is_quoted:
            raise NoCall
        outside = [texts[0][head.end() :], *texts[2::2]]
        written = [self._KEY.sub(r'\1"\2"\3', piece) for piece in outside]
        for place, text in enumerate(texts[1::2]):
            written[place] += json.dumps(text)
        return (tools.call(head[1], read_json("".join(written))),)
