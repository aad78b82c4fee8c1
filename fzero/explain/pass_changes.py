"""pass_changes: what each pass did to the program: ops that it took away and made, and the bytes that are sent then."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fzero.compile.lowered import Lowered
from fzero.ir.program import Program, op_text, wire_bytes

MOST_OPS = 10_000  # of all roles


@dataclass(frozen=True)
class PassChange:
    """name, why: of the pass, and of its place in the order. removed, added: ops by kind that are no longer there, and
    that are new; an op that was only moved is neither. sent: bytes that one rank sends in a step after it; None: not
    known."""

    name: str
    why: str
    removed: Counter[str]
    added: Counter[str]
    sent: int | None


def pass_changes(lowered: Lowered, role: int = 0) -> list[PassChange]:
    """The changes of the passes that changed something, in their order.

    The passes run again for it. Of programs of more than `MOST_OPS` ops they do not: there the counts of the records
    are taken, which know neither the bytes nor an op that took the place of another of its kind.
    """
    if sum(len(program.ops) for program in lowered.programs.values()) > MOST_OPS:
        return [
            PassChange(r.name, r.why, Counter(r.before) - Counter(r.after), Counter(r.after) - Counter(r.before), None)
            for r in lowered.records[role]
            if r.before != r.after
        ]
    why = {record.name: record.why for record in lowered.records[role]}
    found: list[PassChange] = []
    before: Program | None = None
    for name, program in lowered.trail(role):
        if before is not None:
            old, new = ops_of(before), ops_of(program)
            removed, added = old - new, new - old
            if removed or added or [op.kind for op in before.ops] != [op.kind for op in program.ops]:
                found.append(PassChange(name, why.get(name, ""), kinds(removed), kinds(added), sent(program)))
        before = program
    return found


def ops_of(program: Program) -> Counter[tuple[str, str]]:
    """(kind, text) of each op, and how often."""
    return Counter((op.kind, op_text(op)) for op in program.ops)


def kinds(ops: Counter[tuple[str, str]]) -> Counter[str]:
    """How many ops there are of each kind."""
    found: Counter[str] = Counter()
    for (kind, _), count in ops.items():
        found[kind] += count
    return found


def sent(program: Program) -> int:
    """Bytes that one rank sends in a step."""
    return sum(wire_bytes(program, op) for op in program.ops)
