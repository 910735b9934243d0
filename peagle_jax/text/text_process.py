"""The process of `chat_templates`, which renders chats and tokenises texts.

python -m peagle_jax.text.text_process
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from peagle_jax.errors import ConfigError
from peagle_jax.text.bounded_process import answer_all, limit_memory, limit_time
from peagle_jax.text.tokenizer import Tokenizer

MEMORY = 512 << 20
"""Bytes that chats may add to the memory of the idle process."""
MOST_CHARS = 16 << 20
"""Characters of a rendered chat."""
_LOAD_SECONDS, _LOAD_MEMORY = (
    60,
    16 << 30,
)  # to read the files: as many bytes as the parent has read already
_MOST_LOADED = 4  # models; a server has one


class _Templates:
    """The templates that this process has read."""

    def __init__(self):
        self._loaded: OrderedDict[str, object] = OrderedDict()

    def answer(self, question: Mapping) -> dict[str, object]:
        """The text of a chat or the ids of a text, or the error."""
        try:
            return {"result": self._result(**question)}
        except ConfigError as error:
            return {"error": str(error)}

    def _result(
        self,
        key: str,
        folder: str,
        *,
        seconds: int = 0,
        messages: list[dict] | None = None,
        arguments: Mapping | None = None,
        text: str | None = None,
        special: bool = True,
    ) -> str | list[int]:
        if text is not None:
            tokenizer = self._tokenizer(f"{key} without a template", folder, Tokenizer)
            limit_time(seconds)
            return tokenizer.encode(text, special=special)
        tokenizer = self._tokenizer(key, folder, _read)
        if messages is None:
            return ""
        limit_time(seconds)
        return _rendered(tokenizer, messages, arguments)

    def _tokenizer(self, key: str, folder: str, read: Callable[[str], Any]) -> Any:
        if key not in self._loaded:
            limit_time(_LOAD_SECONDS)
            limit_memory(_LOAD_MEMORY)
            self._loaded[key] = read(folder)
            limit_memory(MEMORY)
            if len(self._loaded) > _MOST_LOADED:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(key)
        return self._loaded[key]


def _read(folder: str):
    """Transformers' tokenizer, which holds the template and the special tokens for it.

    Not AutoTokenizer, which needs a known model_type and tokenizer class.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever broken files make it raise
        raise ConfigError(f"{folder}: cannot read the chat template ({error})") from error
    if not tokenizer.chat_template:
        raise ConfigError("this model has no chat template; send a plain prompt")
    return tokenizer


def _rendered(tokenizer, messages: list[dict], arguments: dict) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except MemoryError as error:
        raise ConfigError("the chat template failed: it took too much memory") from error
    except Exception as error:
        raise ConfigError(f"the chat template failed: {error}") from error
    if len(text) > MOST_CHARS:
        raise ConfigError(
            f"the chat template failed: its text has more than {MOST_CHARS} characters"
        )
    return text


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # a folder is enough
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    answer_all(_Templates().answer)
