"""commands: what `python -m lab.fuzz` and `lab.mutate` share: an error of the user is one line, with no traceback.

What was imported is frozen: each of a thousand lowerings would have the garbage collector walk torch again.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence

from fzero.errors import FzeroError, printable


def main(
    prog: str,
    about: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    command: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Parses `argv` (default: the process's own) and returns the command's exit status; 2 after a user's error."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)  # a lowering makes more than 700 objects
    try:
        return command(arguments)
    except (FzeroError, OSError, ValueError, TypeError) as error:
        print(printable(f"{prog}: {error}"), file=sys.stderr)
        return 2
