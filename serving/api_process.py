"""A further process that serves clients: python -m serving.api_process ENGINE CONTROL INDEX.

The first two are descriptors of sockets, to the process of the engine and to the first process; `children` starts this one.
"""

import socket
import sys

from serving.family import follow_parent
from serving.frames import Channel


def main() -> int:
    """Serves until the first process ends it; returns the exit code."""
    follow_parent()
    engine, control = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    from serving.app import serve_further

    return serve_further(int(sys.argv[3]), engine, Channel(control))


if __name__ == "__main__":
    sys.exit(main())
