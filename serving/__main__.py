"""`peagle-serve`: the engine behind gRPC and HTTP."""

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial

from peagle_jax.config import ConfigError
from serving.settings import parser, resolve


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    try:
        settings, sources = resolve(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        parser().exit(2, f"peagle-serve: error: {error}\n")
    # Until the server takes it: as process 1 of a container a signal without a handler is lost.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print("\n".join(settings.lines(sources)), flush=True)
        for warning in settings.warnings:
            print(f"peagle-serve: warning: {warning}", file=sys.stderr)
        # Its advice to install PyTorch would stand between the log's lines; nothing here needs it.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        # Imported once the options are known to be good: help and mistakes answer at once.
        from serving.app import serve

        cache_home = os.environ.get("XDG_CACHE_HOME")
        return serve(settings, cache_home=cache_home, say=partial(print, flush=True))
    except (ConfigError, OSError) as error:
        print(f"peagle-serve: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while it loads; later the server takes the signal and drains
        return 130


if __name__ == "__main__":
    sys.exit(main())
