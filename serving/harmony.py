"""Text of a reply, told apart from the reasoning before it where the model marks both.

GPT-OSS speaks harmony: a reply is messages, each with a header that names its channel.

    <|channel|>analysis<|message|>They greet me.<|end|><|start|>assistant<|channel|>final<|message|>Hi!<|return|>

The prompt ends in `<|start|>assistant`, so a reply begins inside of a header.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from peagle_jax.text import TextStream, Tokenizer


@dataclass(frozen=True)
class Spoken:
    """A piece of a reply."""

    text: str = ""
    reasoning: str = ""

    def __add__(self, later: Self) -> Self:
        return Spoken(self.text + later.text, self.reasoning + later.reasoning)


class Speech(Protocol):
    """Turns the tokens of one sequence into what is said by them."""

    def add(self, tokens: Sequence[int]) -> Spoken:
        """Takes in tokens; returns what no later token can take back."""

    def finish(self) -> Spoken:
        """The rest, at the end of the sequence."""


@dataclass(frozen=True)
class Channels:
    """Ids of the special tokens that frame messages; `ends` close one."""

    start: int
    channel: int
    message: int
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> Self | None:
        """A tokenizer's; None if it has not all of them, so that its model does not speak harmony."""
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
    """Makes a `Speech` for each sequence of a request: None without a tokenizer.

    Args:
      channels: None to take everything as text.
      stops: strings that end the text.
    """
    if tokenizer is None:
        return lambda: None
    if channels is None:
        return partial(PlainSpeech, tokenizer, stops)
    return partial(HarmonySpeech, tokenizer, stops, channels)


class PlainSpeech:
    """Everything is text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._text = TextStream(tokenizer, stops)

    def add(self, tokens: Sequence[int]) -> Spoken:
        """See `Speech`."""
        return Spoken(self._text.add(tokens))

    def finish(self) -> Spoken:
        """See `Speech`."""
        return Spoken(self._text.finish())


class HarmonySpeech:
    """Messages of the channel "analysis" are reasoning, and so are those to a tool: neither is meant for
    the user. Those of other channels are text. Headers are neither.

    Text before the first mark is text: a prompt may have begun the message itself. A header that the
    sequence's end cut off is dropped. The engine looks for stop strings in all that the model writes,
    headers and reasoning included.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], channels: Channels):
        self._tokenizer, self._channels = tokenizer, channels
        self._new_text = partial(TextStream, tokenizer, stops)
        self._text = self._new_text()
        self._is_reasoning = False
        self._role: list[int] = []
        self._channel: list[int] = []
        self._place = self._body

    def add(self, tokens: Sequence[int]) -> Spoken:
        """See `Speech`."""
        spoken = Spoken()
        for token in tokens:
            spoken += self._place(token)
        return spoken

    def finish(self) -> Spoken:
        """See `Speech`."""
        return self._said(self._text.finish())

    # The three places where a token may stand; a mark leads from one to another.

    def _body(self, token: int) -> Spoken:
        marks = self._channels
        if token not in marks.ends | {marks.start, marks.channel, marks.message}:
            return self._said(self._text.add([token]))
        said = self.finish()
        self._text, self._is_reasoning = self._new_text(), False
        if token == marks.start:
            self._role, self._channel, self._place = [], [], self._in_role
        elif token == marks.channel:
            self._role, self._channel, self._place = [], [], self._in_channel
        return said

    def _in_role(self, token: int) -> Spoken:
        if token == self._channels.channel:
            self._place = self._in_channel
        elif not self._has_ended(token):
            self._role.append(token)
        return Spoken()

    def _in_channel(self, token: int) -> Spoken:
        if not self._has_ended(token):
            self._channel.append(token)
        return Spoken()

    def _has_ended(self, token: int) -> bool:
        """Whether the header did: by its message, or by an end without one."""
        if token == self._channels.message:
            channel = self._tokenizer.decode(self._channel)
            header = self._tokenizer.decode(self._role) + channel
            # <|start|>assistant to=functions.f<|channel|>commentary, or the address after the channel.
            self._is_reasoning = channel.split()[:1] == ["analysis"] or " to=" in header
        elif token not in self._channels.ends:
            return False
        self._place = self._body
        return True

    def _said(self, text: str) -> Spoken:
        return Spoken(reasoning=text) if self._is_reasoning else Spoken(text)
