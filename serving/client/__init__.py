"""`peagle-client`: sends requests from the terminal. Imports only gRPC and the stubs, so it starts
fast.
"""

import sys
from collections.abc import Sequence

from peagle_jax.errors import ConfigError
from peagle_jax.extras import check_installed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        check_installed("serve", "peagle-client")
    except ConfigError as error:
        sys.stderr.write(f"peagle-client: error: {error}\n")
        return 2
    from serving.client import command

    return command.main(arguments)
