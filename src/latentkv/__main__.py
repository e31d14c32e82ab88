"""`python -m latentkv`: the `latentkv` command."""

import sys

from latentkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
