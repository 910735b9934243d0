"""Chooses the parser of a model's replies, and makes one for each sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from peagle_jax.config import ConfigError
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.structured import Structured
from peagle_jax.text.tokenizer import TextStream, Tokenizer
from serving.harmony import HarmonyIds, HarmonyParser
from serving.replies.arguments import Tools
from serving.replies.forced import harmony_calls
from serving.replies.formats import FORMATS, Format, detected
from serving.replies.marked import MarkedText
from serving.replies.parts import ReplyParser, ReplyPart

_TAIL = 2048
"""Tokens of the prompt's end that show where in a reply it ends."""


class PlainParser:
    """All output is text."""

    def __init__(self, text: TextStream):
        self._text = text

    def add(self, tokens: Sequence[int]) -> ReplyPart:
        return ReplyPart(self._text.add(tokens))

    def finish(self) -> ReplyPart:
        return ReplyPart(self._text.finish())


class DecodedParser:
    """A parser of text, fed with tokens."""

    def __init__(self, text: TextStream, parser: MarkedText):
        self._text, self._parser = text, parser

    def add(self, tokens: Sequence[int]) -> ReplyPart:
        return self._parser.add(self._text.add(tokens))

    def finish(self) -> ReplyPart:
        return self._parser.add(self._text.finish()) + self._parser.finish()


@dataclass(frozen=True)
class Reply:
    """Properties of a request that decide how its replies are parsed.

    Args:
      prompt: token ids.
      is_chat: whether reasoning and calls are separated from the text.
      tools: the tools that may be called, as `Tools` takes them; none: calls are text.
      params: its stop strings, and which special tokens are text.
    """

    prompt: Sequence[int]
    is_chat: bool
    tools: Sequence[dict] = ()
    params: SamplingParams = field(default_factory=SamplingParams)


class Replies:
    """Makes parsers for the replies of one model.

    Args:
      tokenizer: None if the model is served without one.
      choice: name of a format, "harmony", "none", or "auto": the format whose signs the chat
        template has.
      end_ids: the model's end-of-sequence ids.

    Attributes:
      name: the format of the replies; "none": all output is text.

    Raises:
      ConfigError: the model has no tokens for the format.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, choice: str = "auto", end_ids: Sequence[int] = ()
    ):
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self._format: Format | None = None
        self._shown: frozenset[int] = frozenset()
        self._channels: HarmonyIds | None = None
        self.name = "none"
        if tokenizer is not None and choice != "none":
            self._choose(tokenizer, choice)

    @property
    def has_reasoning(self) -> bool:
        """Whether replies may have reasoning."""
        if self._channels is not None:
            return True
        return self._format is not None and self._format.reasoning is not None

    @property
    def has_calls(self) -> bool:
        """Whether replies may have tool calls."""
        if self._channels is not None:
            return True
        return self._format is not None and bool(self._format.readers)

    def calls(
        self,
        tools: Sequence[dict],
        *,
        is_parallel: bool,
        must_call: bool,
        text: Structured | None = None,
    ) -> Structured | None:
        """The constraint of a reply that must be a call of one of the tools, or of one that may be.

        Arguments satisfy the schemas of the tools. None if this format has no such constraint.

        Args:
          text: what a reply that is no call must match; None: any text.
        """
        grammars = None if self._format is None else self._format.grammars
        grammars = grammars if self._channels is None else harmony_calls
        if grammars is None:
            return None
        given = (self._tokenizer, tools, is_parallel)
        if text is not None and not must_call:
            constraint = replace(text, around=grammars.either(*given))
        else:
            constraint = Structured.grammar((grammars.must if must_call else grammars.may)(*given))
        return constraint if self._channels is None else replace(constraint, reasoning="none")

    def shown(self, params: SamplingParams) -> frozenset[int]:
        """Ids of special tokens that are part of a request's text."""
        tokenizer = self._tokenizer
        return frozenset() if tokenizer is None else tokenizer.shown(params, self._end_ids)

    def parsers(self, reply: Reply) -> Callable[[], ReplyParser | None]:
        """A function that returns a new parser for each sequence; None without a tokenizer."""
        tokenizer, params = self._tokenizer, reply.params
        if tokenizer is None:
            return lambda: None
        stops = dict(min_tokens=params.min_tokens, includes_stop=params.include_stop_str_in_output)
        shown = self.shown(params)
        new_stream = lambda more=frozenset(): TextStream(
            tokenizer, params.stop, shown | more, **stops
        )
        if not reply.is_chat or self.name == "none":
            return lambda: PlainParser(new_stream())
        tools = Tools(reply.tools) if reply.tools else None
        if self._channels is not None:
            return partial(HarmonyParser, tokenizer, params.stop, self._channels, tools, **stops)
        prompt = tokenizer.spell(reply.prompt[-_TAIL:])
        opening = (self._format.reasoning or ("",))[0].rstrip()
        is_reasoning = bool(opening) and prompt.rstrip().endswith(opening)
        new_text = partial(MarkedText, self._format, tools=tools, is_reasoning=is_reasoning)
        return lambda: DecodedParser(new_stream(self._shown), new_text())

    def _choose(self, tokenizer: Tokenizer, choice: str) -> None:
        if choice in ("auto", "harmony"):
            self._channels = HarmonyIds.of(tokenizer)
            if self._channels is not None:
                self.name = "harmony"
                return
            if choice == "harmony":
                raise ConfigError("reply_format='harmony': the model has no harmony tokens")
            self._format = detected(tokenizer.template_source)
        else:
            self._format = next(one for one in FORMATS if one.name == choice)
        if self._format is not None:
            self.name = self._format.name
            ids = map(tokenizer.special_id, self._format.special)
            self._shown = frozenset(one for one in ids if one is not None)
