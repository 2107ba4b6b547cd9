"""`python -m controller`: the same as `areal-like`."""

import sys

from controller.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
