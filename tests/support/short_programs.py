"""short_programs: programs of a few lines, written by hand for a pass that looks at no segment, and what it makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

import fzero
from fzero._torch_compat import FakeTensorMode
from fzero.ir.op import Op
from fzero.ir.program import Program, op_text
from fzero.ir.recorder import record

RECORDS = ("bucket", "buffer", "metric")
FACTS = "axis=dp updates=slices gathered=dropped reduced=produced"
DETAILS = re.compile(r"  (fresh|segment|region|phase|microbatch|op|divisor|flat)=\S+")


def written(
    text: str, *, mesh: str = "dp=2", transport: str = "p2p", segments: Mapping[str, Any] | None = None
) -> Program:
    """The program of these lines: its records as in its text, and ops without numbers. Behind `#` stands the reason of
    an op. Of a bucket FACTS holds what it does not say."""
    lines = [f"mesh {mesh}", f"transport {transport}"]
    for line in filter(None, map(str.strip, text.splitlines())):
        body, _, why = line.partition("  # ")
        if body.startswith("bucket "):
            _, name, rest = body.split(" ", 2)
            body = f"bucket {name} {FACTS} {rest}"
        ops = not body.startswith(RECORDS)
        lines.append((f"0 {body}" + (f"  # | {why}" if why else "")) if ops else body)
    return fzero.parse("\n".join([*lines, "ops"]), segments)


def shown(ops: Sequence[Op]) -> list[str]:
    """The ops without the attributes that say how a segment runs."""
    return [DETAILS.sub("", op_text(op)) for op in ops]


def lines(text: str) -> list[str]:
    """The lines of a text that is written as `shown` gives it."""
    return [line.strip() for line in text.strip().splitlines()]


def buffer_lines(program: Program) -> dict[str, str]:
    """The record of each buffer, as the program's text has it."""
    records = (line for line in str(program).splitlines() if line.startswith("buffer "))
    return {line.split()[1]: line for line in records}


def segment(body: Callable[..., Sequence[Tensor] | None], *likes: Tensor | int | tuple[int, ...]) -> fx.GraphModule:
    """A segment of what `body` does with inputs like these (a shape is of fp32): what it returns, and writes."""
    with FakeTensorMode():
        fakes = [torch.empty(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else torch.empty(x) for x in likes]
        return record(lambda *xs: list(body(*xs) or ()), fakes)
