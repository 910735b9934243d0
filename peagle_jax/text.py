"""Text <-> token ids: tokenizer, chat template, incremental detokenisation, stop strings."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Backend

from peagle_jax.config import ConfigError

_BROKEN = "\ufffd"  # what a decoder emits for a UTF-8 sequence that is not complete


class Tokenizer:
    """A Hugging Face fast tokenizer, read from `tokenizer.json`."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder}: no tokenizer.json; text needs a fast tokenizer's file")
        try:
            self._backend = _Backend.from_file(str(path))
        except Exception as error:  # the Rust side raises plain Exception
            raise ConfigError(f"{path}: not a tokenizer file ({error})") from error
        settings = self.folder / "tokenizer_config.json"
        self._settings = json.loads(settings.read_text()) if settings.is_file() else {}

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the tokenizer's own template adds (such as a BOS token)."""
        return self._backend.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._backend.decode(list(tokens), skip_special_tokens=True)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation through the model's chat template, ready for the reply.

        Raises:
          ConfigError: the model has no chat template.
        """
        has_template = "chat_template" in self._settings
        if not has_template and not (self.folder / "chat_template.jinja").is_file():
            raise ConfigError(
                f"{self.folder}: this model has no chat template; send a plain prompt"
            )
        # Imported here: it takes seconds, and only chat needs it.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.encode(text, special=False)


class Detokenizer:
    """Incremental text of a growing token list; never emits a broken UTF-8 sequence.

    Only a short tail is decoded again for each token: text before `_prefix` is final. The tail keeps
    one finished piece of context since some tokenizers write a leading space by what stands before.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._prefix = 0
        self._read = 0
        self._shown = 0  # characters of the tail's text that were returned

    def add(self, tokens: Sequence[int]) -> str:
        """Appends tokens and returns the text that became certain: all but an unfinished character."""
        self._tokens += tokens
        text = self._tokenizer.decode(self._tokens[self._prefix :])
        certain = text.rstrip(_BROKEN)
        fresh = certain[self._shown :]
        if fresh and certain == text:
            self._prefix, self._read = self._read, len(self._tokens)
            self._shown = len(self._tokenizer.decode(self._tokens[self._prefix : self._read]))
        else:
            self._shown = max(self._shown, len(certain))
        return fresh

    def flush(self) -> str:
        """The rest at the end of a text, replacement characters included."""
        text = self._tokenizer.decode(self._tokens[self._prefix :])
        rest = text[self._shown :]
        self._prefix = self._read = len(self._tokens)
        self._shown = 0
        return rest


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
