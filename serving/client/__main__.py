"""`python -m serving.client`."""

import sys

from serving.client import main

if __name__ == "__main__":
    sys.exit(main())
