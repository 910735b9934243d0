"""Text <-> token ids: tokenizer, chat template, incremental detokenisation, stop strings."""

import codecs
import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer as _Backend

from peagle_jax.config import ConfigError
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.text.chat_templates import ChatTemplate
from peagle_jax.text.token_bytes import Pieces, TokenBytes
from peagle_jax.word_patterns import RELEASED, patterns_of

Ending = Literal["reply", "continued", "closed"]
"""See `Tokenizer.chat_text`."""


def _read_settings(path: Path) -> dict:
    """tokenizer_config.json, checked at load time: transformers reads it only at the first chat
    request."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return settings


class Tokenizer:
    """A Hugging Face fast tokenizer, read from `tokenizer.json`, with the chat template of its
    folder.

    Raises:
      ConfigError: no such file, or one that cannot be read.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder}: no tokenizer.json; text needs a fast tokenizer's file")
        try:
            self._backend = _Backend.from_file(str(path))
        except Exception as error:  # the Rust side raises plain Exception
            raise ConfigError(f"{path}: not a tokenizer file ({error})") from error
        self._settings = _read_settings(self.folder / "tokenizer_config.json")
        # The file may contain truncation settings from training; prompts must not be truncated.
        self._backend.no_truncation()
        self._backend.no_padding()
        decoder = self._backend.decoder
        try:
            self._pieces = Pieces(decoder and json.loads(decoder.__getstate__()))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        added = self._backend.get_added_tokens_decoder()
        self._hidden = frozenset(token for token, one in added.items() if one.special)
        self._bytes = {frozenset(): TokenBytes(self._compute_bytes)}
        """Tables by the special tokens that they spell."""
        self._template = ChatTemplate(self.folder)
        self._opening = self._backend.encode("").ids[:1]

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, so n tokens encode at most n times as many characters
        (if the tokenizer drops none)."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @property
    def num_stripped(self) -> int:
        """Number of leading spaces that the tokenizer adds to a text and that decoding drops."""
        return self._pieces.num_stripped

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids. `special` adds the tokenizer's special tokens (such as BOS).

        A text that already begins with BOS gets no second one.

        Raises:
          ConfigError: the text contains a lone surrogate.
        """
        try:
            # `encode_batch` releases the GIL while it works; `encode` does not.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
            ids = encoding.ids
        except TypeError as error:
            raise ConfigError("the text is not a valid Unicode string") from error
        except BaseException as error:
            # of the Rust side, as of a WordLevel model without an unknown token; its panics, as of
            # a pattern that searches for too long, are no `Exception`s
            if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
                raise
            raise ConfigError(f"the tokenizer cannot encode the text: {error}") from error
        is_twice = special and self._opening and ids[:2] == self._opening * 2
        return ids[1:] if is_twice else ids

    @cached_property
    def may_take_forever(self) -> bool:
        """Whether it has patterns of an unknown author, whose searches may take any time."""
        parts = self._backend.normalizer, self._backend.pre_tokenizer
        found = patterns_of([json.loads(part.__getstate__()) for part in parts if part])
        return not found <= RELEASED

    def encode_in_time(self, text: str, *, special: bool = True) -> list[int]:
        """`encode` of a client's text: in a process with limits where it may take forever."""
        if self.may_take_forever:
            return self._template.encode(text, special=special)
        return self.encode(text, special=special)

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token; empty for special tokens and for ids outside the vocabulary."""
        return self._bytes[frozenset()][token]

    def bytes_table(self, shown: Collection[int] = frozenset()) -> Mapping[int, bytes]:
        """`bytes_of` as a table, which it fills when it is read: `table[token]`, not
        `table.get(token)`.

        Args:
          shown: ids of special tokens whose bytes are their spelling. Tables are kept, so there
            must be few different ones.
        """
        key = frozenset(shown)
        if key not in self._bytes:
            plain = self._bytes[frozenset()]
            spelled = lambda token: self.name_of(token).encode() if token in key else plain[token]
            self._bytes[key] = TokenBytes(spelled)
        return self._bytes[key]

    def special_id(self, name: str) -> int | None:
        """Id of a special token by its spelling, such as "<|end|>"; None if there is none."""
        token = self._backend.token_to_id(name)
        return token if token in self._hidden else None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens, which `decode` leaves out."""
        return self._hidden

    def shown(self, params: SamplingParams, eos_ids: Collection[int]) -> frozenset[int]:
        """Ids of the special tokens that are part of a request's text, given the model's
        end-of-sequence ids."""
        if params.skip_special_tokens:
            return frozenset()
        keeps_end = params.include_stop_str_in_output or params.ignore_eos
        return self._hidden - frozenset(() if keeps_end else eos_ids)

    @cached_property
    def added(self) -> dict[str, int]:
        """Ids of the tokens outside the tokenizer's model, special or not, by spelling
        ("</think>")."""
        added = self._backend.get_added_tokens_decoder()
        return {one.content: token for token, one in added.items()}

    def to_json(self) -> str:
        """The tokenizer as the content of a `tokenizer.json`."""
        return self._backend.to_str()

    def name_of(self, token: int) -> str:
        """A token as text for reports: its bytes decoded, or a special token's spelling."""
        if token in self._hidden:
            return self._backend.id_to_token(token)
        return self.bytes_of(token).decode("utf-8", "replace")

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens. Invalid UTF-8 becomes U+FFFD; valid neighbours are kept.

        Equal to the `tokenizers` library except for byte tokens (`<0xE2>`): there one invalid byte
        replaces all adjacent byte tokens, so text that was streamed already could change.
        """
        return self._decode(tokens, frozenset())

    def spell(self, tokens: Sequence[int]) -> str:
        """`decode` with special tokens as their spelling."""
        return self._decode(tokens, self._hidden)

    def _compute_bytes(self, token: int) -> bytes:
        text = None if token in self._hidden else self._backend.id_to_token(token)
        return b"" if text is None else self._pieces.of(text)

    def _decode(self, tokens: Sequence[int], shown: Collection[int]) -> str:
        detokenizer = Detokenizer(self, shown)
        return detokenizer.add(tokens) + detokenizer.flush()

    def chat(self, messages: Sequence[Mapping[str, object]], **variables) -> list[int]:
        """Token ids of `chat_text`; takes and raises the same."""
        # The template already contains the BOS token if the model needs one.
        return self.encode(self.chat_text(messages, **variables), special=False)

    def chat_text(
        self, messages: Sequence[Mapping[str, object]], *, ending: Ending = "reply", **variables
    ) -> str:
        """Text of a conversation through the model's chat template.

        Args:
          messages: `{"role": "system", "user" or "assistant", "content": text}`, oldest first; also
            "tool_calls" of the assistant, and the role "tool", if the template supports them.
          ending: "reply": ready for the reply; "continued": in the middle of the last message,
            which the model goes on with; "closed": after the last message.
          variables: further template variables, such as `tools`, `reasoning_effort="low"` (GPT-OSS)
            or `enable_thinking=False` (Qwen3, Gemma 4); templates ignore unknown ones. All are JSON
            values.

        Raises:
          ConfigError: the model has no chat template, or the template rejects the conversation or
            exceeds a limit (`chat_templates`).
        """
        end = dict(
            add_generation_prompt=ending == "reply", continue_final_message=ending == "continued"
        )
        return self._template.render(messages, variables | end)

    def prepare_chat(self) -> None:
        """Loads the chat template in advance: seconds of the first `chat` call. No effect without
        one."""
        with contextlib.suppress(ConfigError):
            self._template.prepare()

    @cached_property
    def template_source(self) -> str:
        """Source of the chat template, or of all of them; empty if there is none, or the file is
        broken."""
        given = self._settings.get("chat_template")
        named = given if isinstance(given, list) else [given]
        templates = [item.get("template") if isinstance(item, dict) else item for item in named]
        for path in (
            self.folder / "chat_template.jinja",
            *self.folder.glob("additional_chat_templates/*"),
        ):
            with contextlib.suppress(OSError, ValueError):
                templates.append(path.read_text(encoding="utf-8"))
        return "\n".join(template for template in templates if isinstance(template, str))

    @property
    def description(self) -> dict:
        """tokenizer_config.json with its chat template; special tokens are strings."""
        settings = {
            name: value["content"] if isinstance(value, dict) and "content" in value else value
            for name, value in self._settings.items()
        }
        if self.template_source:
            settings.setdefault("chat_template", self.template_source)
        return {"tokenizer_class": "PreTrainedTokenizerFast"} | settings


class Detokenizer:
    """Incremental detokenisation of a growing token list; never emits an incomplete UTF-8 sequence.

    Buffers up to three bytes of an incomplete character. Invalid bytes become U+FFFD at once. The
    concatenated pieces equal `Tokenizer.decode` of all tokens, independent of how they are split.
    `tokenizers.DecodeStream` emits other text for invalid bytes; lab/log.md has the comparison.

    Args:
      shown: ids of special tokens that are part of the text, as their spelling.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int] = frozenset()):
        self._bytes_of = tokenizer.bytes_table(shown).__getitem__
        self._rest = b""
        """The bytes of an incomplete character."""
        self._num_stripped = tokenizer.num_stripped

    def add(self, tokens: Sequence[int]) -> str:
        """Appends tokens and returns the new text, without an incomplete last character."""
        return self._decode(self._rest + b"".join(map(self._bytes_of, tokens)), is_final=False)

    def flush(self) -> str:
        """Ends the text: returns U+FFFD for an incomplete last character, else nothing."""
        return self._decode(self._rest, is_final=True)

    def _decode(self, written: bytes, *, is_final: bool) -> str:
        # What codecs.getincrementaldecoder does, without its layers.
        text, size = codecs.utf_8_decode(written, "replace", is_final)
        self._rest = written[size:]
        return self._strip(text) if self._num_stripped else text

    def _strip(self, text: str) -> str:
        while text and self._num_stripped:
            is_space = text[0] == " "
            self._num_stripped = self._num_stripped - 1 if is_space else 0
            text = text[is_space:]
        return text


class StopChecker:
    """Finds stop strings in a growing output, also across token boundaries.

    Args:
      shown: as `TextStream` takes it.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], shown: Collection[int] = frozenset()
    ):
        self._detokenizer = Detokenizer(tokenizer, shown)
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        self._seen = 0
        self._tail = ""

    def __call__(self, output: Sequence[int]) -> str | None:
        """The first stop string that ends in the new text of `output`, or None. `output` must only
        grow."""
        fresh = self._detokenizer.add(output[self._seen :])
        self._seen = len(output)
        text = self._tail + fresh
        matches = _stops_in(text, self._stops, len(self._tail))
        self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return min(matches)[1] if matches else None


def _stops_in(text: str, stops: Sequence[str], old: int) -> list[tuple[int, str]]:
    """(place, stop string) of each stop string of `text` that ends after its first `old`
    characters."""
    matches = [(text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in stops]
    return [(place, stop) for place, stop in matches if place >= 0]


class TextStream:
    """Streamed text of one request. Holds back stop strings and any suffix that may become one.

    Args:
      shown: ids of special tokens that are part of the text, as their spelling.
      min_tokens: a stop string within the text of the first `min_tokens` tokens does not end the
        text.
      includes_stop: whether the text includes the stop string that ends it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        shown: Collection[int] = frozenset(),
        min_tokens: int = 0,
        includes_stop: bool = False,
    ):
        self._detokenizer = Detokenizer(tokenizer, shown)
        self._stops, self._includes_stop = tuple(stops), includes_stop
        self._first_letters = frozenset(stop[:1] for stop in self._stops)
        self._num_early = min_tokens
        self._held = ""
        self._stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """Appends tokens and returns the new text that is final."""
        if not self._stops:
            return self._detokenizer.add(tokens)
        old = self._held
        if early := self._num_early:
            self._num_early = max(0, early - len(tokens))
            old += self._detokenizer.add(tokens[:early])
            tokens = tokens[early:]
        text = self._cut(old + self._detokenizer.add(tokens), len(old))
        self._held = "" if self._stopped else self._start_of_stop(text)
        return text[: len(text) - len(self._held)]

    def finish(self) -> str:
        """Ends the text: returns the rest, up to a stop string."""
        text = self._cut(self._held + self._detokenizer.flush(), len(self._held))
        self._held = ""
        return text

    def _cut(self, text: str, old: int) -> str:
        """`text` up to the first stop string that ends after its first `old` characters."""
        if self._stopped:
            return ""
        matches = _stops_in(text, self._stops, old)
        self._stopped = bool(matches)
        if not matches:
            return text
        place, stop = min(matches)
        return text[: place + len(stop) * self._includes_stop]

    def _start_of_stop(self, text: str) -> str:
        """Longest suffix of `text` that is a prefix of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        tail = text[-longest:] if longest else ""
        if self._first_letters.isdisjoint(tail):
            return ""
        for start, letter in enumerate(tail):
            end = tail[start:]
            if letter in self._first_letters and any(stop.startswith(end) for stop in self._stops):
                return end
        return ""
