"""`python -m lab.mutate`: breaks programs at random and counts what verify catches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fzero import progress
from lab import commands
from lab.mutate import ANY, PARTS, Report, draw, run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `python -m lab.mutate`."""
    parser.add_argument("--count", type=int, default=1000, help="mutants that change meaning, at least (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn (default 0)")
    parser.add_argument("--each", type=int, default=50, help="of every kind, at least (default 50)")
    parser.add_argument("--unbroken", type=int, default=240, help="programs drawn, at least (default 240)")
    for name, part in PARTS.items():
        parser.add_argument(
            f"--{name}", action="store_true", help=f"{part.of} alone, and the kinds of mutant that only they have"
        )


@progress.quietly()
def command(arguments: argparse.Namespace) -> int:
    """Prints the table, and on stderr, after every program, the counts and what was missed.
    Returns 1 if a mutant was missed or an unbroken program refused."""
    part = next((part for name, part in PARTS.items() if getattr(arguments, name)), None)
    kinds, source = (ANY, draw) if part is None else (part.kinds, part.draw)
    shown: list[str] = []

    def show(report: Report) -> None:
        for missed in report.missed[len(shown) :]:
            print(f"missed in program {report.unbroken}: {missed}", file=sys.stderr)
            shown.append(missed)
        print(report.progress, file=sys.stderr, flush=True)

    report = run(
        arguments.count,
        arguments.seed,
        each=arguments.each,
        unbroken=arguments.unbroken,
        kinds=tuple(kinds),
        source=source,
        after_program=show,
    )
    print(report)
    return 0 if report.good else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, and on stderr, after every program, the counts and what was missed.
    Returns 1 if a mutant was missed or an unbroken program refused."""
    about = "Break programs at random and count what verify catches."
    return commands.main("python -m lab.mutate", about, add_arguments, command, argv)


if __name__ == "__main__":
    sys.exit(main())
