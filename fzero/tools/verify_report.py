"""verify_report: `fzero verify FILE`, which verifies the programs of a report of a fault again."""

from __future__ import annotations

import argparse

from fzero.compile import fault_report
from fzero.errors import VerifyError, printable
from fzero.verify.rules import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero verify`."""
    parser.add_argument("file", help="a report that the message of a VerifyError names")


def command(arguments: argparse.Namespace) -> int:
    """Prints what was said then and what is said now. Returns 1 where the programs are refused, else 0."""
    report = fault_report.read(arguments.file)
    print(*(printable(f"{name}: {value}") for name, value in report.facts.items()), sep="\n")
    print(printable(f"then: {report.what}"))
    if not report.programs:
        print("now: the fault came before there was a program")
        return 1
    try:
        verify(report.programs)
    except VerifyError as error:
        print(printable(f"now: {error}"))
        return 1
    print("now: the programs are accepted")
    return 0
