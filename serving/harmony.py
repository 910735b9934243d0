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
class Spoken:
    """A piece of a reply: text for the user, and reasoning."""

    text: str = ""
    reasoning: str = ""

    def __add__(self, later: Self) -> Self:
        return Spoken(self.text + later.text, self.reasoning + later.reasoning)


class Speech(Protocol):
    """Turns the tokens of one sequence into text and reasoning."""

    def add(self, tokens: Sequence[int]) -> Spoken:
        """Appends tokens; returns the new part that later tokens cannot change."""

    def finish(self) -> Spoken:
        """Returns the rest at the end of the sequence."""


@dataclass(frozen=True)
class Channels:
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
        if None in ids:
            return None
        return cls(*ids[:3], frozenset(ids[3:]))


def listener(
    tokenizer: Tokenizer | None, channels: Channels | None, stops: Sequence[str]
) -> Callable[[], Speech | None]:
    """A function that returns a new `Speech` for each sequence, or None without a tokenizer.

    Args:
      channels: harmony's ids; None: all output is text.
      stops: stop strings, which are not part of the text.
    """
    if tokenizer is None:
        return lambda: None
    if channels is None:
        return partial(PlainSpeech, tokenizer, stops)
    return partial(HarmonySpeech, tokenizer, stops, channels)


class PlainSpeech:
    """All output is text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._text = TextStream(tokenizer, stops)

    def add(self, tokens: Sequence[int]) -> Spoken:
        """See `Speech`."""
        return Spoken(self._text.add(tokens))

    def finish(self) -> Spoken:
        """See `Speech`."""
        return Spoken(self._text.finish())


class HarmonySpeech:
    """Messages in the channel "analysis" and messages to a tool are reasoning: neither is meant for the
    user. Messages in other channels are text. Headers are dropped.

    Output before the first special token is text, because the prompt may contain the header. An
    incomplete header at the end of the sequence is dropped. The engine searches all output for stop
    strings, headers and reasoning included.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], channels: Channels):
        self._tokenizer, self._channels = tokenizer, channels
        self._new_text = partial(TextStream, tokenizer, stops)
        self._text = self._new_text()
        self._is_reasoning = False
        self._role: list[int] = []
        self._channel: list[int] = []
        self._state = self._body

    def add(self, tokens: Sequence[int]) -> Spoken:
        """See `Speech`."""
        spoken = Spoken()
        for token in tokens:
            spoken += self._state(token)
        return spoken

    def finish(self) -> Spoken:
        """See `Speech`."""
        return self._spoken(self._text.finish())

    # Three states, one method each. A special token changes the state.

    def _body(self, token: int) -> Spoken:
        marks = self._channels
        if token not in marks.ends | {marks.start, marks.channel, marks.message}:
            return self._spoken(self._text.add([token]))
        rest = self.finish()
        self._text, self._is_reasoning = self._new_text(), False
        if token == marks.start:
            self._role, self._channel, self._state = [], [], self._in_role
        elif token == marks.channel:
            self._role, self._channel, self._state = [], [], self._in_channel
        return rest

    def _in_role(self, token: int) -> Spoken:
        if token == self._channels.channel:
            self._state = self._in_channel
        elif not self._has_ended(token):
            self._role.append(token)
        return Spoken()

    def _in_channel(self, token: int) -> Spoken:
        if not self._has_ended(token):
            self._channel.append(token)
        return Spoken()

    def _has_ended(self, token: int) -> bool:
        """Whether `token` ends the header, with or without a message after it."""
        if token == self._channels.message:
            channel = self._tokenizer.decode(self._channel)
            header = self._tokenizer.decode(self._role) + channel
            # The recipient follows the role or the channel:
            # <|start|>assistant to=functions.f<|channel|>commentary
            self._is_reasoning = channel.split()[:1] == ["analysis"] or " to=" in header
        elif token not in self._channels.ends:
            return False
        self._state = self._body
        return True

    def _spoken(self, text: str) -> Spoken:
        return Spoken(reasoning=text) if self._is_reasoning else Spoken(text)
