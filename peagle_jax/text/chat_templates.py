"""Renders chats by the chat template of a model's folder, and tokenises by its patterns, in a
process of its own (`text_process`).

A template is a program of the model's author: it can loop for hours, or make a text of any size. So
can a pattern of its tokenizer. All `Tokenizer`s of a process share one such process.
"""

import atexit
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle_jax.errors import ConfigError
from peagle_jax.text import child_python
from peagle_jax.text.bounded_process import BoundedProcess

SECONDS = 5
"""Processor time of a chat, or of a text."""
_WALL_SECONDS = 60.0  # on a busy machine

_renderer = BoundedProcess(
    "the process that renders chats",
    child_python.command("peagle_jax.text.text_process"),
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
        return self._ask("the chat template", chat | {"seconds": SECONDS})

    def prepare(self) -> None:
        """Reads the template; raises as `render` does."""
        self._ask("the chat template", {})

    def encode(self, text: str, *, special: bool) -> list[int]:
        """`Tokenizer.encode` of the folder; raises as `render` does."""
        return self._ask("the tokenizer", {"text": text, "special": special, "seconds": SECONDS})

    def _ask(self, what: str, task: dict) -> Any:
        question = {"key": self._key, "folder": str(self._folder)} | task
        try:
            answer = _renderer.ask(question)
        except TypeError as error:
            raise ConfigError(f"{what} failed: {error}") from error
        if answer is None:
            raise ConfigError(f"{what} failed: it took more than {SECONDS} s, or too much memory")
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer["result"]


def interrupt() -> None:
    """Ends a chat that is rendered: its thread gets an `UnavailableError`."""
    _renderer.interrupt()
