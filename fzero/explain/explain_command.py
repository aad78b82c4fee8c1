"""explain_command: `fzero explain`: memory, transfers, passes and leaves of a program, as text or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from fzero.compile.simulate import checked_rates
from fzero.cost.step_time import op_spans
from fzero.errors import SpecError
from fzero.explain.as_page import page
from fzero.explain.as_text import leaf_report, program_report, roles_of
from fzero.explain.exposure import Spans
from fzero.explain.leaf_road import road
from fzero.explain.subject import Subject, read
from fzero.hardware import load, presets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero explain`."""
    parser.add_argument(
        "subject",
        help="FILE.py:FUNCTION, which returns (spec, params_like, batch_like); or the text of a program, a folder with "
        "program.txt, a report of a fault",
    )
    parser.add_argument("--ranks", type=int, help="of the world, where the spec's mesh does not say it")
    parser.add_argument("--hardware", help=f"for seconds: a TOML file, or one of {', '.join(presets())}")
    parser.add_argument("--role", type=int, help="of a pipeline (default: the one that needs most memory)")
    parser.add_argument("--phase", default="", help="of a spec with fzero.Phases, which one (default: the first)")
    parser.add_argument("--leaf", help="the road of one leaf, as blocks/3/w")
    parser.add_argument("--html", type=Path, help="write one page that needs no other file, instead of text")


def command(arguments: argparse.Namespace) -> int:
    """Prints the explanation, or writes the page."""
    subject = read(arguments.subject, arguments.ranks, arguments.phase)
    spans = spans_of(subject, arguments.hardware)
    if arguments.leaf is not None and arguments.html is None:
        found = road(subject.programs, arguments.leaf)
        print(leaf_report(subject.programs[found.role], found, subject.lowered))
        return 0
    role = role_of(subject, arguments.role)
    program = subject.programs[role]
    if arguments.html is not None:
        text = page(subject, role, spans.get(role), arguments.hardware, arguments.leaf)
        arguments.html.write_text(text, encoding="utf-8")
        print(f"{arguments.html}: {len(text.encode()):,} bytes")
        return 0
    print(f"{subject.name}: {program_report(program, spans.get(role), subject.lowered, role)}")
    if len(subject.programs) > 1:
        print("\nROLES, at their peaks (--role shows one): " + roles_of(subject.accounts))
    return 0


def spans_of(subject: Subject, hardware: str | None) -> dict[int, Spans]:
    """By role, when each op begins and ends on a machine; nothing without one."""
    if hardware is None:
        return {}
    if subject.lowered is None:
        raise SpecError(
            f"{subject.name}: the text of a program holds no segments, so their seconds are not known. Leave out "
            "--hardware, or explain FILE.py:FUNCTION"
        )
    return op_spans(subject.programs, checked_rates(subject.lowered, load(hardware)))


def role_of(subject: Subject, role: int | None) -> int:
    """The role that is shown."""
    if role is None:
        return max(subject.programs, key=lambda number: subject.accounts[number].peak)
    if role not in subject.programs:
        raise SpecError(f"--role {role}: there are the roles {', '.join(map(str, subject.programs))}")
    return role
