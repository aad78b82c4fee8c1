"""`python -m lab.mutate`: breaks programs at random and counts what verify catches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fzero import progress
from lab import commands
from lab.mutate import (
    AXES,
    CODED,
    HIERARCHY,
    KEPT,
    KINDS,
    MOVES,
    ROLES,
    WINDOWS,
    Report,
    draw,
    draw_coded,
    draw_hierarchy,
    draw_kept,
    draw_offloaded,
    draw_parallel,
    draw_pipeline,
    draw_windowed,
    run,
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `python -m lab.mutate`."""
    parser.add_argument("--count", type=int, default=1000, help="mutants that change meaning, at least (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn (default 0)")
    parser.add_argument("--each", type=int, default=50, help="of every kind, at least (default 50)")
    parser.add_argument("--unbroken", type=int, default=240, help="programs drawn, at least (default 240)")
    parser.add_argument(
        "--roles", action="store_true", help="pipelines alone, and the kinds of mutant that only they have"
    )
    parser.add_argument(
        "--moves", action="store_true", help="offloaded states alone, and the kinds of mutant that only they have"
    )
    parser.add_argument(
        "--hierarchy", action="store_true", help="two data axes alone, and the kinds of mutant that only they have"
    )
    parser.add_argument(
        "--axes", action="store_true", help="meshes with tp alone, and the kinds of mutant that only they have"
    )
    parser.add_argument(
        "--coded", action="store_true", help="messages of blocks alone, and the kinds of mutant that only they have"
    )
    parser.add_argument(
        "--kept", action="store_true", help="copies of parameters alone, and the kinds of mutant that only they have"
    )
    parser.add_argument(
        "--windows",
        action="store_true",
        help="block-sparse attention and losses by chunks alone, and the kinds of mutant that only they have",
    )


@progress.quietly()
def command(arguments: argparse.Namespace) -> int:
    """Prints the table, and on stderr, after every program, the counts and what was missed.
    Returns 1 if a mutant was missed or an unbroken program refused."""
    kinds, source = KINDS, draw
    if arguments.roles:
        kinds, source = ROLES, draw_pipeline
    elif arguments.moves:
        kinds, source = MOVES, draw_offloaded
    elif arguments.hierarchy:
        kinds, source = HIERARCHY, draw_hierarchy
    elif arguments.axes:
        kinds, source = AXES, draw_parallel
    elif arguments.coded:
        kinds, source = CODED, draw_coded
    elif arguments.kept:
        kinds, source = KEPT, draw_kept
    elif arguments.windows:
        kinds, source = WINDOWS, draw_windowed
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
