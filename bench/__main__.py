"""`peagle-bench`: measurements, and the tables and plots of their rows."""

import logging
import sys
from collections.abc import Sequence

from bench.commands import COMMANDS, parser
from peagle_jax.config import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    values = vars(parser().parse_args(argv))
    command = COMMANDS[values["command"]]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        options = command.options.of(values)
        options.check()
        return command.run(options)
    except ConfigError as error:
        print("peagle-bench: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the rows so far are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
