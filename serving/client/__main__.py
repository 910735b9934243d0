"""`python -m serving.client`."""

import sys

from serving.client.command import main

if __name__ == "__main__":
    sys.exit(main())
