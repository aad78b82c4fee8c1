"""lines: breaks single lines of a room of fzero, and asks whether the room's own tests see it.

    python -m lab.lines passes --count 10 --seed 0

The lines are drawn at random from those that compute; in one of them a comparison is turned round, a condition negated,
a number made one more, an operator exchanged or a statement left out. The broken module lies in a copy of the
repository. Its tests have `--seconds` of a core to fail there: the examples in its docstrings and the files of
`tests/<room>/`, that of the module's name first, then that of its folder's, then those that name the module. A survivor
is printed: either a test is missing, or nobody can see what the line does.

Left out are classes of lines that only a reader sees: text, errors, annotations, what is logged as information, which
step is shown as progress, and what a record's text leaves out. So is a number that has a name at the top of a module
(`MAX_PROGRAMS = 32`): a threshold, which was chosen, and of which a test could only say the same number; the length of
a digest or of a random name; and whether a moment itself is before or after it (`<` or `<=` of a clock's reading).
"""

from __future__ import annotations

import argparse
import ast
import compileall
import copy
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from py_compile import PycInvalidationMode

from lab import commands

ROOT = Path(__file__).parents[1]
ROOMS = ("passes", "lowering", "session", "shard", "comm", "plan")
LEFT_OUT = (".git", ".venv", "runs", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "build", "dist")
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)  # what only a reader or an error sees
SAID = ("log.info", "log.debug", "progress.now", "progress.shown")  # calls that only say something
UNSEEN = ("strict", "repr", "digest_size")  # arguments: zip's changes no result, field's only a text, a digest's length
TOKEN = "secrets.token_hex"  # of which the length is a choice too
CLOCK = re.compile(r"\bmonotonic\(\)|\b(now|began)\b")  # in a comparison: of two moments, which are never the same
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
WAITING = 3
OPTIONS = "doctest_optionflags=ELLIPSIS NORMALIZE_WHITESPACE"
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class BrokenLine:
    """A module with one line changed. number: of the line, from 1; before, after: its text."""

    path: Path
    number: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}\n    - {self.before.strip()}\n    + {self.after.strip()}"

    @property
    def source(self) -> str:
        """The text of the broken module."""
        lines = (ROOT / self.path).read_text().splitlines(keepends=True)
        lines[self.number - 1] = self.after
        return "".join(lines)


def broken_lines(source: str) -> dict[int, list[str]]:
    """By number, the lines of a module that compute, each with what it may become.

    >>> broken_lines("def f(x):\\n    return x + 1 if x > 0 else 2\\n")[2][:2]
    ['    return x - 1 if x > 0 else 2\\n', '    return x + 1 if x >= 0 else 2\\n']
    """
    lines = source.splitlines(keepends=True)
    found: dict[int, list[str]] = {}
    for node in _computing(ast.parse(source)):
        if node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1].encode()
        for changed in _changed(node):
            text = line[: node.col_offset] + ast.unparse(changed).encode() + line[node.end_col_offset :]
            if (after := text.decode()) != lines[node.lineno - 1]:
                found.setdefault(node.lineno, []).append(after)
    return found


def _computing(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The statements and expressions of a tree that do something: no annotation, docstring or text of an error."""
    if isinstance(node, ast.keyword) and node.arg in UNSEEN:
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) == TOKEN:
        return
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in field if isinstance(field, list) else [field]:
            if (
                not isinstance(child, ast.AST)
                or isinstance(child, SKIPPED)
                or _is_threshold(child)
                or _only_says(child)
            ):
                continue
            if isinstance(child, (ast.expr, ast.stmt)):
                yield child
            yield from _computing(child)


def _is_threshold(node: ast.AST) -> bool:
    """Whether a statement gives a number a name of a module, in capitals."""
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=value)
        ):
            return name.isupper() and isinstance(value, (ast.Constant, ast.BinOp))
    return False


def _only_says(node: ast.AST) -> bool:
    """Whether a statement, or the context of one, calls one of `SAID`."""
    call = node.value if isinstance(node, ast.Expr) else node.context_expr if isinstance(node, ast.withitem) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) in SAID


def _changed(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    """What a node may become; nothing for most."""
    match node:
        case ast.Compare(ops=[op]) if isinstance(op, ORDER) and CLOCK.search(ast.unparse(node)):
            return
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            yield _with(node, ops=[OTHER[type(op)]()])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in OTHER:
            yield _with(node, op=OTHER[type(op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.IfExp():
            yield _with(node, body=node.orelse, orelse=node.body)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return ast.fix_missing_locations(changed)


def drawn(room: str, count: int, seed: int) -> list[BrokenLine]:
    """`count` broken lines of a room, each line once."""
    numbers = random.Random(f"{room} {seed}")
    every = []
    for path in sorted((ROOT / "fzero" / room).rglob("*.py")):
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        for number, ways in sorted(broken_lines(source).items()):
            every.append((path.relative_to(ROOT), number, lines[number - 1], ways))
    return [
        BrokenLine(path, number, before, numbers.choice(ways))
        for path, number, before, ways in numbers.sample(every, min(count, len(every)))
    ]


def copy_of_all(folder: Path) -> Path:
    """A copy of the repository, whose bytecode holds the hash of its source: what is broken is compiled anew, even
    within the second, and nothing else is."""
    copied = Path(shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(*LEFT_OUT)))
    for name in ("fzero", "lab", "tests/support"):
        compileall.compile_dir(copied / name, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return copied


def tests_of(room: str, module: Path) -> list[str]:
    """The files of a room's tests: that of a module first, then that of its folder, then those that name it."""
    files = sorted((ROOT / "tests" / room).rglob("test_*.py"))
    own, folder = f"test_{module.stem}", f"test_{module.parent.name}"
    named = {file: re.search(rf"\b{module.stem}\b", file.read_text()) is not None for file in files}
    files.sort(key=lambda file: (file.stem != own, file.stem != folder, not named[file]))
    return [str(file.relative_to(ROOT)) for file in files]


def caught(line: BrokenLine, room: str, folder: Path, seconds: float) -> str:
    """How the tests of a room end in a copy of the repository with this line broken: "failed", "passed", or "too slow"
    where they are not at their end after `seconds` of a core. Other work on the machine does not count; but where they
    wait, as for processes that they start, they have at most `WAITING` times as long by the clock."""
    target = folder / line.path
    kept = target.read_text()
    target.write_text(line.source)
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--doctest-modules", "-o", OPTIONS, str(line.path), *tests_of(room, line.path)]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, timeout=WAITING * seconds, env=environment,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_CPU, (ceil(seconds), ceil(seconds))),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "too slow"
    finally:
        target.write_text(kept)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return "too slow"
    return "passed" if done.returncode == 0 else "failed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `python -m lab.lines`."""
    parser.add_argument("rooms", nargs="*", default=list(ROOMS), help=f"folders of fzero/ (default {' '.join(ROOMS)})")
    parser.add_argument("--count", type=int, default=10, help="lines of each room (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a core that the tests may take (default 30)")


def command(arguments: argparse.Namespace) -> int:
    """Prints each survivor and the counts. Returns 1 where a room's tests caught less than 90 % of its lines."""
    few = False
    with tempfile.TemporaryDirectory() as folder:
        copied = copy_of_all(Path(folder))
        for room in arguments.rooms:
            lines, began = drawn(room, arguments.count, arguments.seed), time.monotonic()
            ends: list[str] = []
            if lines and caught(replace(lines[0], after=lines[0].before), room, copied, arguments.seconds) == "failed":
                print(f"{room}: its tests fail as they are: nothing is told by what they catch", flush=True)
                few = True
                continue
            for line in lines:
                ends.append(caught(line, room, copied, arguments.seconds))
                if ends[-1] != "failed":
                    print(f"{ends[-1]}: {line}", flush=True)
            share = ends.count("failed") / max(len(ends), 1)
            print(f"{room}: {share:.0%} of {len(ends)} caught, {time.monotonic() - began:.0f} s", flush=True)
            few |= share < 0.9
    return int(few)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return commands.main("python -m lab.lines", __doc__.partition("\n")[0], add_arguments, command, argv)


if __name__ == "__main__":
    sys.exit(main())
