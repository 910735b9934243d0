"""Text <-> token ids: tokenizer, chat template, incremental detokenisation, stop strings."""

import codecs
import contextlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as _Backend

from peagle_jax.config import ConfigError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_IMPORT_LOCK = threading.Lock()
"""Two threads that import transformers at once find it half made."""


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes a byte as its Latin-1 character if that is visible, else from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in visible} | shifted


_BYTE_LEVEL = _byte_level_alphabet()


class _Pieces:
    """What each token writes, as bytes: the decoder of tokenizer.json, applied to one token at a time.

    A decoder whose tokens depend on their neighbours has no place here; the text's start is the one
    exception: `num_stripped` spaces are dropped there.
    """

    def __init__(self, decoder: dict | None):
        """`decoder` is its JSON; without one, tokens are words with spaces between them."""
        self._replaced: list[tuple[str, str]] = []
        self._is_byte_level = self._has_byte_tokens = False
        self._prefix = "" if decoder else " "
        self.num_stripped = len(self._prefix)
        stages = [] if decoder is None else decoder.get("decoders", [decoder])
        is_fused = False
        for stage in stages:
            match stage:
                case {"type": "ByteLevel"}:
                    self._is_byte_level = True
                case {"type": "ByteFallback"}:
                    self._has_byte_tokens = True
                case {"type": "Fuse"}:
                    is_fused = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    self._replaced.append((old, new))
                case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                    self._replaced.append((old, " "))
                    self.num_stripped = int(scheme != "never")
                case {"type": "Strip", "content": " ", "start": count, "stop": 0} if is_fused:
                    self.num_stripped = count
                case _:
                    raise ConfigError(f"decoder {json.dumps(stage)} is not supported")

    def of(self, token: str) -> bytes:
        for old, new in self._replaced:
            token = token.replace(old, new)
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if self._is_byte_level and all(letter in _BYTE_LEVEL for letter in token):
            return bytes(_BYTE_LEVEL[letter] for letter in token)
        return (self._prefix + token).encode()


def _check_settings(path: Path) -> None:
    """Transformers reads this file for chat alone; a broken one shows at once, not with the first talk."""
    if not path.is_file():
        return
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: not a JSON object")


class Tokenizer:
    """A Hugging Face fast tokenizer, read from `tokenizer.json`; chat templates lie beside it.

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
        _check_settings(self.folder / "tokenizer_config.json")
        # A file may keep the limits of the training run that wrote it; prompts must not be cut.
        self._backend.no_truncation()
        self._backend.no_padding()
        decoder = self._backend.decoder
        try:
            self._pieces = _Pieces(decoder and json.loads(decoder.__getstate__()))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        added = self._backend.get_added_tokens_decoder()
        self._hidden = {token for token, one in added.items() if one.special}
        self._bytes: dict[int, bytes] = {}
        self._opening = self._backend.encode("").ids[:1]

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: n tokens stand for at most n times as many characters, where
        the tokenizer drops none."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @property
    def num_stripped(self) -> int:
        """Spaces that are dropped at the start of a text, where the tokenizer put them itself."""
        return self._pieces.num_stripped

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the tokenizer's own template adds (such as a BOS token).

        A text that begins with that token already gets no second one.

        Raises:
          ConfigError: the text holds half of a surrogate pair.
        """
        try:
            # A batch releases Python's global lock, so other threads run meanwhile; `encode` would not.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
            ids = encoding.ids
        except TypeError as error:
            raise ConfigError("the text is not a valid Unicode string") from error
        is_twice = special and self._opening and ids[:2] == self._opening * 2
        return ids[1:] if is_twice else ids

    def bytes_of(self, token: int) -> bytes:
        """What a token writes; nothing for special tokens and for ids beyond the vocabulary."""
        known = self._bytes.get(token)
        if known is None:
            text = None if token in self._hidden else self._backend.id_to_token(token)
            known = self._bytes[token] = b"" if text is None else self._pieces.of(text)
        return known

    def special_id(self, name: str) -> int | None:
        """Id of a special token by its spelling, such as "<|end|>"; None if there is none."""
        token = self._backend.token_to_id(name)
        return token if token in self._hidden else None

    def name_of(self, token: int) -> str:
        """A token for the eye: what it writes, or a special token's spelling; for reports."""
        if token in self._hidden:
            return self._backend.id_to_token(token)
        return self.bytes_of(token).decode("utf-8", "replace")

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no UTF-8 become U+FFFD, their neighbours stay.

        The `tokenizers` library agrees except on byte tokens (`<0xE2>`): there one bad byte spoils all
        byte tokens beside it, and text that was shown could change when it comes.
        """
        detokenizer = Detokenizer(self)
        return detokenizer.add(tokens) + detokenizer.flush()

    def chat(self, messages: Sequence[Mapping[str, str]], **variables) -> list[int]:
        """Token ids of `chat_text`; takes and raises the same."""
        # The template wrote the BOS token itself if the model wants one.
        return self.encode(self.chat_text(messages, **variables), special=False)

    def chat_text(self, messages: Sequence[Mapping[str, str]], **variables) -> str:
        """Text of a conversation through the model's chat template, ready for the reply.

        Args:
          messages: `{"role": "system", "user" or "assistant", "content": text}`, oldest first.
          variables: what the template takes beside them, such as `reasoning_effort="low"` (GPT-OSS) or
            `enable_thinking=False` (Qwen3, Gemma 4); templates ignore what they do not know.

        Raises:
          ConfigError: the model has no chat template, or it refuses the conversation.
        """
        with _IMPORT_LOCK:
            template = self._chat_template
        try:
            return template.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **variables
            )
        except Exception as error:  # a template is a program of the model's author
            raise ConfigError(f"{self.folder}: the chat template failed: {error}") from error

    def prepare_chat(self) -> None:
        """Does what the first `chat` would take seconds for; without a template, nothing."""
        with _IMPORT_LOCK, contextlib.suppress(ConfigError):
            _ = self._chat_template

    @cached_property
    def _chat_template(self):
        """Transformers' tokenizer: it finds the template and the tokens that templates name.

        Not AutoTokenizer, which wants a model_type and a tokenizer class that it knows.
        """
        # Imported here: it takes seconds, and only chat needs it.
        from transformers import PreTrainedTokenizerFast

        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # whatever broken files make it raise
            raise ConfigError(f"{self.folder}: cannot read the chat template ({error})") from error
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{self.folder}: this model has no chat template; send a plain prompt"
            )
        return tokenizer


class Detokenizer:
    """Incremental text of a growing token list; never emits a broken UTF-8 sequence.

    At most three bytes wait, for the rest of their character. What cannot become a character is
    U+FFFD at once, so the pieces join to `Tokenizer.decode` of all tokens however they are cut.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_stripped = tokenizer.num_stripped

    def add(self, tokens: Sequence[int]) -> str:
        """Appends tokens and returns the text that became certain: all but an unfinished character."""
        return self._strip(self._utf8.decode(b"".join(map(self._tokenizer.bytes_of, tokens))))

    def flush(self) -> str:
        """The rest at the end of a text: U+FFFD for a character that stayed unfinished."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while text and self._num_stripped:
            is_space = text[0] == " "
            self._num_stripped = self._num_stripped - 1 if is_space else 0
            text = text[is_space:]
        return text


class StopChecker:
    """Says which stop string a growing output ends in; sees across token borders."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        self._seen = 0
        self._tail = ""

    def __call__(self, output: Sequence[int]) -> str | None:
        """The first stop string found in the new text of `output`, which only ever grows."""
        fresh = self._detokenizer.add(output[self._seen :])
        self._seen = len(output)
        text = self._tail + fresh
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return min(found)[1] if found else None


class TextStream:
    """Text of one request for the eye: a stop string, and what may become one, is held back."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """Appends tokens; returns the text that no later token can take back."""
        text = self._cut(self._held + self._detokenizer.add(tokens))
        self._held = "" if self._stopped else self._start_of_stop(text)
        return text[: len(text) - len(self._held)]

    def finish(self) -> str:
        """The rest, up to a stop string."""
        text = self._cut(self._held + self._detokenizer.flush())
        self._held = ""
        return text

    def _cut(self, text: str) -> str:
        if self._stopped:
            return ""
        found = [text.find(stop) for stop in self._stops if stop in text]
        self._stopped = bool(found)
        return text[: min(found)] if found else text

    def _start_of_stop(self, text: str) -> str:
        """Longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return text[-size:]
        return ""
