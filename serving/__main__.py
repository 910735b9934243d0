"""`peagle-serve`: the engine behind gRPC and HTTP."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from peagle_jax.errors import ConfigError
from peagle_jax.extras import check_address_space, check_installed
from serving.background_stream import BackgroundStream, open_standard_streams
from serving.engine_child import DEFAULT, Begin, EngineChild, function_name
from serving.signals import exit_while_loading

if TYPE_CHECKING:
    from peagle_jax import Engine
    from serving.settings import Settings


def main(
    arguments: Sequence[str] | None = None,
    *,
    make_engine: "Callable[[Settings], Engine] | None" = None,
) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code.

    Args:
      make_engine: makes the engine without folders of models, in a process of its own that imports
        the module of this function. None: `serving.engines.make_engine`.
    """
    exit_while_loading()
    open_standard_streams()
    # A serving process reads certificates and tokens again at SIGHUP. Until then SIGHUP must not
    # kill it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # By default gRPC writes a line for every handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Suppresses transformers' advice to install PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    words = sys.argv[1:] if arguments is None else arguments
    child = None
    try:
        check_installed("serve", "peagle-serve")
        check_address_space()
        # Before the options are read: it imports jax meanwhile.
        child = None if {"-h", "--help"} & set(words) else EngineChild()
        return _resolve_and_run(words, make_engine, child)
    except (ConfigError, OSError) as error:
        print("peagle-serve: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    finally:
        if child is not None:
            child.end(0.0)
            child.keep_this_process()


def _resolve_and_run(
    words: Sequence[str],
    make_engine: "Callable[[Settings], Engine] | None",
    child: EngineChild | None,
) -> int:
    from serving.sources import parser, resolve

    try:
        settings, sources = resolve(words)
    except ConfigError as error:
        parser().exit(2, f"peagle-serve: error: {' '.join(str(error).split())}\n")
    return _run(settings, sources, make_engine, child)


def _run(
    settings: "Settings",
    sources: dict[str, str],
    make_engine: "Callable[[Settings], Engine] | None",
    child: EngineChild,
) -> int:
    # Imported after the options are checked, so that help and mistakes show at once.
    from serving.access import prepare_access
    from serving.settings import read_models

    access = prepare_access(settings)
    listed = "\n".join(settings.lines(sources))  # with the model as it was given
    if make_engine is None:
        settings = read_models(settings)
    output = BackgroundStream(sys.stdout)
    output.write(f"{listed}\n")
    for warning in settings.warnings:
        print(f"peagle-serve: warning: {warning}", file=sys.stderr)
    name = DEFAULT if make_engine is None else function_name(make_engine)
    begin = Begin(settings, name, os.environ.get("XDG_CACHE_HOME"))
    if settings.compile_only:
        child.end(0.0)
        output.flush()
        from serving.engine_process import compile_only

        return compile_only(begin)
    child.begin(begin)
    from serving.app import serve

    try:
        return serve(settings, access, child, say=lambda line: output.write(f"{line}\n"))
    finally:
        output.flush()


if __name__ == "__main__":
    sys.exit(main())
