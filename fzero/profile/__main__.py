"""Merges the traces of the ranks in a folder: `python -m fzero.profile runs/profile`."""

import sys

from fzero.profile.chrome_trace import merge

if __name__ == "__main__":
    try:
        print(merge(sys.argv[1] if len(sys.argv) > 1 else "runs/profile"))
    except ValueError as error:
        sys.exit(f"fzero.profile: {error}")
