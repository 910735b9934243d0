"""Separates the text of a reply from its reasoning, for models that mark both.

GPT-OSS uses the harmony format: a reply is a list of messages, each with a header that names its channel.

    <|channel|>analysis<|message|>They greet me.<|end|><|start|>assistant<|channel|>final<|message|>Hi!<|return|>

The prompt ends in `<|start|>assistant`, so a reply begins within a header.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from peagle_jax.text import TextStream, Tokenizer


@dataclass(frozen=True)
class ReplyPart:
    """A piece of a reply: text for the user, and reasoning."""

    text: str = ""
    reasoning: str = ""

    def __add__(self, later: Self) -> Self:
        return ReplyPart(self.text + later.text, self.reasoning + later.reasoning)


class ReplyParser(Protocol):
    """Turns the tokens of one sequence into text and reasoning."""

    def add(self, tokens: Sequence[int]) -> ReplyPart:
        """Appends tokens; returns the new part that later tokens cannot change."""

    def finish(self) -> ReplyPart:
        """Returns the rest at the end of the sequence."""


@dataclass(frozen=True)
class HarmonyIds:
    """Ids of harmony's special tokens; `ends` are those that end a message."""

    start: int
    channel: int
    message: int
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> Self | None:
        """The ids in a vocabulary; None if one is missing: then the model does not use harmony."""
        if tokenizer is None:
            return None
        names = ("start", "channel", "message", "end", "return", "call")
        ids = [tokenizer.special_id(f"<|{name}|>") for name in names]
        return None if None in ids else cls(*ids[:3], frozenset(ids[3:]))


def parser_factory(
    tokenizer: Tokenizer | None, ids: HarmonyIds | None, stops: Sequence[str]
) -> Callable[[], ReplyParser | None]:
    """A function that returns a new `ReplyParser` for each sequence, or None without a tokenizer.

    Args:
      ids: of harmony's special tokens; None: all output is text.
      stops: stop strings, which are not part of the text.
    """
    if tokenizer is None:
        return lambda: None
    if ids is None:
        return partial(PlainParser, tokenizer, stops)
    return partial(HarmonyParser, tokenizer, stops, ids)


class PlainParser:
    """All output is text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._text = TextStream(tokenizer, stops)

    def add(self, tokens: Sequence[int]) -> ReplyPart:
        """See `ReplyParser`."""
        return ReplyPart(self._text.add(tokens))

    def finish(self) -> ReplyPart:
        """See `ReplyParser`."""
        return ReplyPart(self._text.finish())


class HarmonyParser:
    """Messages in the channel "analysis" and messages to a tool are reasoning: neither is meant for the
    user. Messages in other channels are text. Headers are dropped.

    Output before the first special token is text, because the prompt may contain the header. An
    incomplete header at the end of the sequence is dropped. The engine searches all output for stop
    strings, headers and reasoning included.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], ids: HarmonyIds):
        self._tokenizer, self._ids = tokenizer, ids
        self._new_text = partial(TextStream, tokenizer, stops)
        self._text = self._new_text()
        self._is_reasoning = False
        self._role: list[int] = []
        self._channel: list[int] = []
        self._state = self._body

    def add(self, tokens: Sequence[int]) -> ReplyPart:
        """See `ReplyParser`."""
        part = ReplyPart()
        for token in tokens:
            part += self._state(token)
        return part

    def finish(self) -> ReplyPart:
        """See `ReplyParser`."""
        return self._part(self._text.finish())

    # Three states, one method each. A special token changes the state.

    def _body(self, token: int) -> ReplyPart:
        ids = self._ids
        if token not in ids.ends | {ids.start, ids.channel, ids.message}:
            return self._part(self._text.add([token]))
        rest = self.finish()
        self._text, self._is_reasoning = self._new_text(), False
        if token == ids.start:
            self._role, self._channel, self._state = [], [], self._in_role
        elif token == ids.channel:
            self._role, self._channel, self._state = [], [], self._in_channel
        return rest

    def _in_role(self, token: int) -> ReplyPart:
        if token == self._ids.channel:
            self._state = self._in_channel
        elif not self._has_ended(token):
            self._role.append(token)
        return ReplyPart()

    def _in_channel(self, token: int) -> ReplyPart:
        if not self._has_ended(token):
            self._channel.append(token)
        return ReplyPart()

    def _has_ended(self, token: int) -> bool:
        """Whether `token` ends the header, with or without a message after it."""
        if token == self._ids.message:
            channel = self._tokenizer.decode(self._channel)
            header = self._tokenizer.decode(self._role) + channel
            # The recipient follows the role or the channel:
            # <|start|>assistant to=functions.f<|channel|>commentary
            self._is_reasoning = channel.split()[:1] == ["analysis"] or " to=" in header
        elif token not in self._ids.ends:
            return False
        self._state = self._body
        return True

    def _part(self, text: str) -> ReplyPart:
        return ReplyPart(reasoning=text) if self._is_reasoning else ReplyPart(text)
