"""The `fzero` command: one table of subcommands.

A subcommand is one row of `COMMANDS`: its help, a function that adds its arguments, and a function that runs it and
returns the exit status. An `FzeroError`, `OSError`, `ValueError` or `TypeError` of a command is a message for the user.
It is printed without a traceback, and the exit status is 2.
"""

import argparse
import importlib.metadata
import io
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fzero._version import __version__
from fzero.errors import FzeroError, printable
from fzero.explain import explain_command
from fzero.interop import commands
from fzero.interop.config import command as config
from fzero.log import plot
from fzero.planner import plan_command
from fzero.tools import doctor, fake_cuda_command, verify_report
from fzero.tree import suggest

STARTS = ("launch", "run", "train", "torchrun", "deepspeed")  # words of other launchers
STARTED = " Scripts are started by torchrun: torchrun --nproc-per-node 8 train.py (docs/launching.md)."


CLOSED = 141  # the status of a program that SIGPIPE ends


@dataclass(frozen=True)
class Command:
    """One row of the table."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """For a command that takes none."""


class _Parser(argparse.ArgumentParser):
    """Names the nearest command where it is given one that it does not have."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        named = [word for word in (args or ())[:1] if not word.startswith("-")]
        if self.prog == "fzero" and named and named[0] not in COMMANDS:
            known = ", ".join(COMMANDS)
            near = STARTED if named[0] in STARTS or named[0].endswith(".py") else suggest(named[0], COMMANDS)
            self.error(f"there is no command {named[0]!r}.{near} Commands are {known}")
        return super().parse_known_args(args, namespace)


def _version(_: argparse.Namespace) -> int:
    packages = ("fzero", "torch", "triton", "optree", "numpy")
    print(f"python {platform.python_version()}")
    for package in packages:
        try:
            print(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} not installed")
    return 0


COMMANDS: dict[str, Command] = {
    "version": Command("print the versions of fzero and of what it stands on", _no_arguments, _version),
    "doctor": Command("try what fzero needs of this machine", doctor.add_arguments, doctor.command),
    "config": Command(
        "say what becomes of each key of a ds_config or an accelerate config", config.arguments, config.command
    ),
    "convert": Command(
        "turn a checkpoint into safetensors, torch DCP, or one of fzero", commands.convert_arguments, commands.convert
    ),
    "import-deepspeed": Command(
        "turn a DeepSpeed ZeRO checkpoint (pickles, read in a child process) into one of fzero",
        commands.deepspeed_arguments,
        commands.import_deepspeed,
    ),
    "explain": Command(
        "explain a program: memory, transfers, passes, the road of a leaf; as text or as a page",
        explain_command.add_arguments,
        explain_command.command,
    ),
    "fake-cuda": Command(
        "start Python where fzero.lower gives CUDA's program without a device",
        fake_cuda_command.add_arguments,
        fake_cuda_command.command,
    ),
    "plan": Command("choose what a Spec leaves open", plan_command.add_arguments, plan_command.command),
    "plot": Command("draw loss, throughput and memory of runs (fzero.Log)", plot.arguments, plot.command),
    "verify": Command(
        "verify the program of a report again, that an error named", verify_report.add_arguments, verify_report.command
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fzero", description="Plan, check and inspect fzero's training programs.")
    parser.add_argument("--version", action="version", version=f"fzero {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        command.add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    given = [*(sys.argv[1:] if argv is None else argv)]
    if given[:1] == ["fake-cuda"] and given[1:2] not in ([], ["-h"], ["--help"], ["--"]):
        given.insert(1, "--")  # what follows is Python's; argparse takes a leading -m for an option of its own
    arguments = _parser().parse_args(given)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of ASCII has no micro sign
    try:
        status = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has all that it wanted, as `head`; what is left has no place
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except (FzeroError, OSError, ValueError, TypeError) as error:
        print(printable(f"fzero {arguments.command}: {error}"), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
