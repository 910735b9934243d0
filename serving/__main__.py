"""`peagle-serve`: the engine behind gRPC and HTTP."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from peagle_jax.config import ConfigError
from serving.settings import Settings, read_models
from serving.signals import exit_while_loading
from serving.sources import parser, resolve

if TYPE_CHECKING:
    from peagle_jax import Engine


def main(
    arguments: Sequence[str] | None = None,
    *,
    make_engine: "Callable[[Settings], Engine] | None" = None,
) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code.

    Args:
      make_engine: at the top level of a module; makes the engine without folders of models. None:
        `serving.app.make_engine`.
    """
    exit_while_loading()
    # A serving process reads certificates and tokens again at SIGHUP. Until then SIGHUP must not kill it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        settings, sources = resolve(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        parser().exit(2, f"peagle-serve: error: {' '.join(str(error).split())}\n")
    # By default gRPC writes a line for every handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        # Suppresses transformers' advice to install PyTorch, which nothing here needs.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        # Imported after the options are checked, so that help and mistakes show at once.
        from serving.access import prepare_access

        access = prepare_access(settings)
        listed = "\n".join(settings.lines(sources))  # with the model as it was given
        if make_engine is None:
            settings = read_models(settings)
        print(listed, flush=True)
        for warning in settings.warnings:
            print(f"peagle-serve: warning: {warning}", file=sys.stderr)
        from serving import app

        return app.serve(
            settings,
            access,
            cache_home=os.environ.get("XDG_CACHE_HOME"),
            say=partial(print, flush=True),
            make_engine=make_engine or app.make_engine,
        )
    except (ConfigError, OSError) as error:
        print("peagle-serve: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
