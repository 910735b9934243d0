"""Answers of chats and completions: choices in an envelope."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from peagle_jax.text.tokenizer import Tokenizer
from serving.http import reports
from serving.http.errors import dump
from serving.http.options import Options
from serving.rounds import RoundReports
from serving.stream import Delta, Stream

TextField = Literal["text", "reasoning"]
"""A field of `Delta`."""


class ChoiceReports:
    """What a client may ask for beside the text of a choice. One object per request."""

    def __init__(self, options: Options, tokenizer: Tokenizer | None):
        self._options, self._rounds = options, RoundReports(tokenizer)

    def of(self, index: int, delta: Delta, prompt: list[int] | None) -> dict:
        """Fields of a choice.

        Args:
          prompt: its token ids, with the first delta.
        """
        found = {}
        if self._options.with_rounds:
            found["rounds"] = reports.rounds(self._rounds.of(index, delta))
        if self._options.with_ids:
            found["token_ids"] = delta.tokens
            if prompt is not None:
                found["prompt_token_ids"] = prompt
        return found


class Choices(Protocol):
    """Formats `Delta`s as OpenAI's choices. One object per request, because it keeps state."""

    def part(self, index: int, delta: Delta) -> dict:
        """A choice in a chunk of a stream."""

    def only_text(self, index: int, delta: Delta) -> TextField | None:
        """The field in which the choice differs from others of its sequence, if it does in this one
        alone.
        """

    def whole(self, index: int, delta: Delta) -> dict:
        """A choice of a complete answer; `delta` is all of it."""


MARK = "\0text\0"
"""Stands for the text in the object that a template is made from."""


class Template:
    """The JSON of an object, with a gap for a text: what stands around it is encoded once.

    Args:
      content: the object, as `dump` takes it, with `MARK` as the text. Nothing behind the text
        comes from a client, so the last mark is it.
    """

    def __init__(self, content: dict):
        self._before, _, self._after = dump(content).rpartition(dump(MARK))

    def filled(self, text: str) -> bytes:
        """`dump` of the object with `text`."""
        return b"".join((self._before, dump(text), self._after))


class OpenAiAnswer:
    """See `Answer`.

    Args:
      request_id: the answer's id.
      model: the name of the model.
      objects: the "object" of a whole answer, and of a chunk of a stream.
      num_prompt: tokens of all prompts.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        objects: tuple[str, str],
        options: Options,
        choices: Choices,
        num_prompt: int,
    ):
        self.n, self.is_stream = options.n, options.is_stream
        self._options, self._choices = options, choices
        self._envelope = {
            "id": request_id,
            "object": objects[self.is_stream],
            "created": int(time.time()),
            "model": model,
        }
        self._num_prompt, self._num_tokens = num_prompt, 0
        has_fixed_form = not (options.with_ids or options.with_rounds or options.with_running_usage)
        self._templates: dict[tuple[int, TextField], Template] | None = (
            {} if has_fixed_form else None
        )

    def part(self, index: int, delta: Delta, streams: Sequence[Stream]) -> list[dict | bytes]:
        self._num_tokens += len(delta.tokens)
        if self._templates is not None and (field := self._choices.only_text(index, delta)):
            return [self._template(index, field, delta).filled(getattr(delta, field))]
        chunk = self._chunk(index, delta)
        if self._options.with_running_usage:
            chunk["usage"] = reports.running_usage(self._num_prompt, self._num_tokens)
        return [chunk]

    def _chunk(self, index: int, delta: Delta) -> dict:
        chunk = self._envelope | {"choices": [self._choices.part(index, delta)]}
        return chunk | {"usage": None} if self._options.with_usage else chunk

    def _template(self, index: int, field: TextField, delta: Delta) -> Template:
        """The template of a chunk that has no other text than `field`."""
        found = self._templates.get((index, field))
        if found is None:
            found = Template(self._chunk(index, replace(delta, **{field: MARK})))
            self._templates[index, field] = found
        return found

    def end(self, streams: Sequence[Stream]) -> list[dict]:
        """If the client asked for it, the usage, without choices."""
        if not self._options.with_usage:
            return []
        usage = {"choices": [], "usage": reports.final_usage(streams)}
        return [self._envelope | usage | reports.speculation(streams)]

    def whole(self, deltas: Mapping[int, Delta], streams: Sequence[Stream]) -> dict:
        choices = [self._choices.whole(index, deltas[index]) for index in sorted(deltas)]
        usage = {"usage": reports.final_usage(streams)}
        return self._envelope | {"choices": choices} | usage | reports.speculation(streams)
