"""Parses replies by the template that a model's own tokenizer_config.json has
(`response_template`).
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from serving.replies.arguments import NoCall, Tools
from serving.replies.parts import ReplyPart, ToolCall
from serving.replies.spacing import Spacing

_REASONING = ("reasoning_content", "reasoning", "thinking")


class Parser(Protocol):
    """The part of transformers' ResponseParser that is used here."""

    initial_events: list[dict]

    def feed(self, text: str) -> list[dict]:
        """Appends text; returns events about fields."""

    def finalize(self) -> tuple[dict, list[dict]]:
        """Ends the text; returns all fields, and the last events."""


class TemplateText:
    """Turns the growing text of a reply into its parts, as `marked.MarkedText` does.

    The text is fed a character at a time: where a field cannot be parsed, the parser raises and
    drops the events of the piece that it was fed. Then the text since the last event is text of the
    reply, and a new parser takes the rest.

    Args:
      new_parser: makes transformers' parser after a prompt, or after "" within a reply.
      prompt: the text before the reply.
      tools: the request's tools; None: fields of calls are text.
    """

    def __init__(self, new_parser: Callable[[str], Parser], prompt: str, *, tools: Tools | None):
        self._new_parser, self._tools = new_parser, tools
        self._parser = new_parser(prompt)
        self._pending: list[str] = []
        """Text since the last event."""
        self._spacing = Spacing()
        self._take(self._parser.initial_events)

    def add(self, text: str) -> ReplyPart:
        """Appends text; returns the new part that later text cannot change."""
        return ReplyPart.joined([self._add_letter(letter) for letter in text])

    def finish(self) -> ReplyPart:
        """Returns the rest at the end of the reply."""
        try:
            _, events = self._parser.finalize()
        except Exception:
            rest = self._as_text()
        else:
            rest = self._take(events)
        return rest + ReplyPart(self._spacing.finish())

    def _add_letter(self, letter: str) -> ReplyPart:
        self._pending.append(letter)
        try:
            events = self._parser.feed(letter)
        except TimeoutError:  # the rest of the reply is text, or each letter would take as long
            self._parser = _NoParser()
            return self._as_text()
        except Exception:  # templates name parsers that raise errors of many kinds
            if not isinstance(self._parser, _NoParser):
                self._parser = self._new_parser("")
            return self._as_text()
        return self._take(events) if events else ReplyPart()

    def _as_text(self) -> ReplyPart:
        text, self._pending = "".join(self._pending), []
        return ReplyPart(self._spacing.add(text))

    def _take(self, events: Iterable[dict]) -> ReplyPart:
        return ReplyPart.joined([self._event(**event) for event in events])

    def _event(
        self, type: str, field: str, text: str = "", value: object = None, dirty: bool = False
    ) -> ReplyPart:
        if field == "tool_calls":
            return self._calls(value) if type == "region_close" else ReplyPart()
        is_reasoning = field in _REASONING
        if type == "region_chunk":
            pending = "".join(self._pending)
            self._pending = [pending[len(text) :]] if pending.startswith(text) else []
            certain = self._spacing.add(text)
            return ReplyPart(reasoning=certain) if is_reasoning else ReplyPart(certain)
        if is_reasoning:
            self._pending = []
            self._spacing.restart()
        return ReplyPart()

    def _calls(self, value: object) -> ReplyPart:
        try:
            calls = _calls(value, self._tools)
        except NoCall:
            return self._as_text()
        self._pending = []
        self._spacing.region()
        return ReplyPart(calls=calls)


class _NoParser:
    """Parses nothing: all is text."""

    def feed(self, text: str = "") -> list[dict]:
        """Fails."""
        raise ValueError

    finalize = feed


def _calls(value: object, tools: Tools | None) -> tuple[ToolCall, ...]:
    """The calls in the value of a field."""
    calls = []
    for one in value if isinstance(value, list) else [value]:
        function = one.get("function", one) if isinstance(one, dict) else None
        if tools is None or not isinstance(function, dict):
            raise NoCall
        calls.append(tools.call(function.get("name"), function.get("arguments", {})))
    return tuple(calls)
