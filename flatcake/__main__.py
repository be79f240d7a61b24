"""`python -m flatcake` is the `flatcake` command."""

import sys

from flatcake.cli import main

if __name__ == "__main__":
    sys.exit(main())
