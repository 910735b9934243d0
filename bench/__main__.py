"""`peagle-bench`: measurements, and the tables and plots of their rows."""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.command import RowFileOptions
from bench.commands import COMMANDS, parser
from peagle_jax.config import ConfigError


def check_out(out: Path) -> None:
    """Raises ConfigError if rows cannot be written to `out`: before anything is measured."""
    existing = next(one for one in (out, *out.absolute().parents) if one.exists())
    is_in_place = existing.is_file() if existing == out else existing.is_dir()
    if not is_in_place or not os.access(existing, os.W_OK):
        raise ConfigError(f"--out {out}: cannot be written")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if argv is None:  # the end by `timeout` too keeps rows and ends servers, as an interrupt does
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    values = vars(parser().parse_args(argv))
    command = COMMANDS[values["command"]]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        options = command.options.of(values)
        options.check()
        if isinstance(options, RowFileOptions):
            check_out(options.out)
        return command.run(options)
    except ConfigError as error:
        print("peagle-bench: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the rows so far are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
