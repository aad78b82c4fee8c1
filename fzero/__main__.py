"""`python -m fzero COMMAND`: the `fzero` command."""

import sys

from fzero.cli import main

if __name__ == "__main__":
    sys.exit(main())
