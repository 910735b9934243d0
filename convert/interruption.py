"""Ctrl-C during a conversion."""

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ends_at_once(message: str) -> Iterator[None]:
    """Within the block SIGINT writes `message` to stderr and ends the process with exit code 130.

    A KeyboardInterrupt would close the event loops of Orbax while its threads still call them, and each
    such call prints a traceback. A conversion can be ended anywhere, also by SIGKILL (`convert.partial`).
    Main thread only.
    """

    def end(*_) -> None:
        os.write(2, f"\n{message}\n".encode())  # print() cannot be called while it is interrupted
        os._exit(128 + signal.SIGINT)

    previous = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
