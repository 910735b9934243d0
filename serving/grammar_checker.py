"""The server's side of `grammar_process`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

from peagle_jax.text import child_python
from peagle_jax.text.bounded_process import BoundedProcess, UnavailableError
from serving.errors import unavailable
from serving.grammar_process import Vocabulary

_MAX_SECONDS = 30.0
"""Longest wait for one check, on a busy machine; `grammar_process` limits its processor time."""


class Process(BoundedProcess):
    """A process that checks constraints.

    Args:
      vocabulary: returns the first message to the process.
      command: starts the process; None: that of `grammar_process`.
      seconds: maximum time of a check, including the start.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        command: Sequence[str] | None = None,
        seconds: float = _MAX_SECONDS,
    ):
        super().__init__(
            "the process that checks constraints",
            command or child_python.command("serving.grammar_process"),
            seconds=seconds,
            greeting=lambda: asdict(vocabulary()),
        )

    def ask(self, question: dict) -> dict | None:
        """The result of a check; None if the process exceeded a limit or took too long.

        Raises:
          ServiceError: UNAVAILABLE; the process cannot be started, was killed twice, or the server ends.
        """
        try:
            return super().ask(question)
        except UnavailableError as error:
            raise unavailable(error) from error
