"""Parses replies in the harmony format of GPT-OSS: messages, each with a header that names its
channel.

    <|channel|>analysis<|message|>They greet
    me.<|end|><|start|>assistant<|channel|>final<|message|>Hi!<|return|>

A message to `functions.NAME` is a call of that tool:

    <|channel|>commentary to=functions.read <|constrain|>json<|message|>{"path": "a.py"}<|call|>

The prompt ends in `<|start|>assistant`, so a reply begins within a header.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from peagle_jax.text.tokenizer import TextStream, Tokenizer
from serving.replies.arguments import NoCall, Tools, read_json
from serving.replies.parts import ReplyPart

_RECIPIENT = re.compile(r"\bto=functions\.(\S+)")


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


class HarmonyParser:
    """Messages in the channel "analysis" are reasoning, messages in other channels are text.
    Headers are dropped.

    A complete message to a function is a call. If it is cut off, or no JSON object, it is text.
    Without tools, and to other recipients, it is reasoning: it is not meant for the user.

    Output before the first special token is text, because the prompt may contain the header. An
    incomplete header at the end of the sequence is dropped. The engine searches all output for stop
    strings, headers and reasoning included.

    Args:
      tools: the request's tools; None: no message is a call.
      min_tokens: output tokens before which no stop string ends the text.
      includes_stop: whether the text includes the stop string that ends it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        ids: HarmonyIds,
        tools: Tools | None = None,
        min_tokens: int = 0,
        includes_stop: bool = False,
    ):
        self._tokenizer, self._ids, self._tools = tokenizer, ids, tools
        self._special = ids.ends | {ids.start, ids.channel, ids.message}
        self._stops, self._num_early, self._includes_stop = stops, min_tokens, includes_stop
        self._text = self._new_text()
        self._is_reasoning = False
        self._function: str | None = None
        self._arguments: list[str] = []
        self._role: list[int] = []
        self._channel: list[int] = []
        self._state = self._body

    def add(self, tokens: Sequence[int]) -> ReplyPart:
        # Stop strings that overlap end the text by the token that completes the first.
        if not self._stops and self._state == self._body and self._special.isdisjoint(tokens):
            return self._part(self._text.add(tokens))
        return ReplyPart.joined([self._next(token) for token in tokens])

    def finish(self) -> ReplyPart:
        rest = self._part(self._text.finish())
        return rest if self._function is None else ReplyPart("".join(self._arguments))

    def _next(self, token: int) -> ReplyPart:
        self._num_early = max(0, self._num_early - 1)
        return self._state(token)

    def _new_text(self) -> TextStream:
        return TextStream(
            self._tokenizer,
            self._stops,
            min_tokens=self._num_early,
            includes_stop=self._includes_stop,
        )

    # Three states, one method each. A special token changes the state.

    def _body(self, token: int) -> ReplyPart:
        ids = self._ids
        if token not in self._special:
            return self._part(self._text.add([token]))
        rest = self._end_of_message()
        self._text, self._is_reasoning, self._function = self._new_text(), False, None
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
            header = f"{self._tokenizer.decode(self._role)} {channel}"
            # The recipient follows the role or the channel:
            # <|start|>assistant to=functions.f<|channel|>commentary
            self._is_reasoning = channel.split()[:1] == ["analysis"] or " to=" in header
            recipient = _RECIPIENT.search(header)
            if recipient is not None and self._tools is not None:
                self._function, self._arguments = recipient[1], []
        elif token not in self._ids.ends:
            return False
        self._state = self._body
        return True

    def _end_of_message(self) -> ReplyPart:
        rest = self._part(self._text.finish())
        if self._function is None:
            return rest
        text = "".join(self._arguments)
        try:
            return ReplyPart(calls=(self._tools.call(self._function, read_json(text)),))
        except NoCall:
            return ReplyPart(text)

    def _part(self, text: str) -> ReplyPart:
        if self._function is not None:
            self._arguments.append(text)
            return ReplyPart()
        return ReplyPart(reasoning=text) if self._is_reasoning else ReplyPart(text)
