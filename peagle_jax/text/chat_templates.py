"""Renders chats by the chat template of a model's folder, in a process of its own.

    python -m peagle_jax.text.chat_templates

A template is a program of the model's author: it can loop for hours, or make a text of any size.
All `Tokenizer`s of a process share one such process.
"""

import atexit
import itertools
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from peagle_jax.errors import ConfigError
from peagle_jax.text import child_python
from peagle_jax.text.bounded_process import BoundedProcess, answer_all, limit_memory, limit_time

SECONDS = 5
"""Processor time of a chat."""
MEMORY = 512 << 20
"""Bytes that chats may add to the memory of the idle process."""
MOST_CHARS = 16 << 20
"""Characters of a rendered chat."""
_LOAD_SECONDS, _LOAD_MEMORY = (
    60,
    16 << 30,
)  # to read the files: as many bytes as the parent has read already
_WALL_SECONDS = 60.0  # on a busy machine
_MOST_LOADED = 4  # models; a server has one

_renderer = BoundedProcess(
    "the process that renders chats",
    child_python.command("peagle_jax.text.chat_templates"),
    seconds=_WALL_SECONDS,
)
atexit.register(_renderer.end)
_numbers = itertools.count()


class ChatTemplate:
    """The chat template of a folder, which is read at the first chat."""

    def __init__(self, folder: Path):
        self._key = f"{next(_numbers)} {folder.absolute()}"
        self._folder = folder

    def render(
        self, messages: Sequence[Mapping[str, object]], arguments: Mapping[str, object]
    ) -> str:
        """The text of a chat.

        Args:
          arguments: of transformers' function that applies a chat template, and variables of the
            template.

        Raises:
          ConfigError: there is no template, it rejects the chat, or it exceeds a limit.
            `UnavailableError` is another reason.
        """
        chat = {"messages": list(messages), "arguments": dict(arguments)}
        return self._ask(chat | {"seconds": SECONDS})

    def prepare(self) -> None:
        """Reads the template; raises as `render` does."""
        self._ask({})

    def _ask(self, chat: dict) -> str:
        question = {"key": self._key, "folder": str(self._folder)} | chat
        try:
            answer = _renderer.ask(question)
        except TypeError as error:
            raise ConfigError(f"the chat template failed: {error}") from error
        if answer is None:
            raise ConfigError(
                f"the chat template failed: it took more than {SECONDS} s, or too much memory"
            )
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer["text"]


def interrupt() -> None:
    """Ends a chat that is rendered: its thread gets an `UnavailableError`."""
    _renderer.interrupt()


class _Templates:
    """The templates that this process has read."""

    def __init__(self):
        self._loaded: OrderedDict[str, object] = OrderedDict()

    def answer(self, question: Mapping) -> dict[str, str]:
        """The text of a chat, or the error."""
        try:
            tokenizer = self._tokenizer(question["key"], question["folder"])
            if "messages" not in question:
                return {"text": ""}
            limit_time(question["seconds"])
            return {"text": _rendered(tokenizer, question["messages"], question["arguments"])}
        except ConfigError as error:
            return {"error": str(error)}

    def _tokenizer(self, key: str, folder: str):
        if key not in self._loaded:
            limit_time(_LOAD_SECONDS)
            limit_memory(_LOAD_MEMORY)
            self._loaded[key] = _read(folder)
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
