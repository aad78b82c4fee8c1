"""held: what holds the memory at the fullest op, equal layers together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fzero.cost.memory import SHOWN, account
from fzero.ir.liveness import live_names
from fzero.ir.program import Program
from fzero.ir.records import DEVICE, Buffer


@dataclass(frozen=True)
class HeldTogether:
    """Buffers of one kind whose names differ in numbers only.

    name: theirs, with `*` for a number that differs. kind: as in `fzero.cost.memory`. count: how many. nbytes: of all.
    """

    name: str
    kind: str
    count: int
    nbytes: int


def at_fullest(program: Program, space: str = DEVICE) -> list[HeldTogether]:
    """What a space holds at its fullest op, the largest first; what the op needs while it runs is a row too."""
    index = account(program).ops.get(space, -1)
    live = live_names(program.ops, program.buffers, index)
    found = folded(program.buffers[name] for name in live if program.buffers[name].space == space)
    if index >= 0:
        op = program.ops[index]
        for name, nbytes in (("workspace", op.workspace), ("heap", op.heap)):
            if nbytes and program.space(op) == space:
                found.append(HeldTogether(f"{name} of op {index}", "activations", 1, nbytes))
    return sorted(found, key=lambda held: (-held.nbytes, held.name))


def folded(buffers: Iterable[Buffer]) -> list[HeldTogether]:
    """Buffers of one kind and of names that differ in numbers only, as one row.

    >>> import torch
    >>> layers = [Buffer(f"params:blocks.{n}", torch.float32, (8,), "param") for n in range(3)]
    >>> [(held.name, held.count, held.nbytes) for held in folded(layers)]
    [('params:blocks.*', 3, 96)]
    >>> [held.name for held in folded(layers[:1])]
    ['params:blocks.0']
    """
    groups: dict[tuple[str, str], list[Buffer]] = {}
    for buffer in sorted(buffers, key=lambda b: b.name):
        groups.setdefault((SHOWN.get(buffer.kind, "other"), pattern(buffer.name)), []).append(buffer)
    return [
        HeldTogether(common([b.name for b in group]), kind, len(group), sum(b.nbytes for b in group))
        for (kind, _), group in groups.items()
    ]


def pattern(name: str) -> str:
    """A name with `*` for each of its numbers.

    >>> pattern("r0.grad:blocks.11.0")
    'r*.grad:blocks.*.*'
    """
    return re.sub(r"\d+", "*", name)


def common(names: list[str]) -> str:
    """Names of one pattern as one, with `*` for the numbers in which they differ."""
    columns = [set(numbers) for numbers in zip(*(re.findall(r"\d+", name) for name in names), strict=True)]
    texts = iter(column.pop() if len(column) == 1 else "*" for column in columns)
    return re.sub(r"\d+", lambda _: next(texts), names[0])
