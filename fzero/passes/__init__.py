"""passes: pure functions Program → Program, one per file, in the order of `PASSES` with the reason beside each.

All of these keep the program's meaning (`fzero.verify.terms`) and its bits. What changes numerics, as a gradient that
travels in fewer bits, is part of the layout of a bucket (`fzero.plan.wires`), and lowering writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fzero import progress
from fzero.ir.decisions import RoleDecisions
from fzero.ir.program import Program
from fzero.passes.accumulate import accumulate
from fzero.passes.assign_memory import assign_memory
from fzero.passes.cast_before_gather import cast_before_gather
from fzero.passes.free import free
from fzero.passes.keep_copies import keep_copies
from fzero.passes.narrow import narrow
from fzero.passes.narrow_gradients import narrow_gradients
from fzero.passes.offload.offload_activations import offload_activations
from fzero.passes.offload.offload_gradients import offload_gradients
from fzero.passes.offload.place_moves import place_moves
from fzero.passes.offload.schedule_updates import schedule_updates
from fzero.passes.offload.tile_updates import tile_updates
from fzero.passes.offload.to_spaces import to_spaces
from fzero.passes.order_updates import order_updates
from fzero.passes.pipeline.chunks import crossing
from fzero.passes.prefetch import prefetch
from fzero.passes.recompute import recompute
from fzero.passes.rematerialise_views import rematerialise_views
from fzero.passes.schedule_gathers import schedule_gathers
from fzero.passes.schedule_reductions import schedule_reductions
from fzero.passes.segment import segment
from fzero.passes.settle import settle
from fzero.passes.shard_update import shard_update
from fzero.passes.share import share
from fzero.passes.size_workspaces import size_workspaces
from fzero.passes.split_gathers import split_gathers
from fzero.passes.write_in_place import write_in_place


@dataclass(frozen=True)
class Options:
    """What the passes read: the fields of the same names in `fzero.Spec`, and what was decided for the program's role.
    chunk_of: of each bucket of a numbered layer, its chunk of a pipeline; empty without one. gradients: path rules of
    gradients that wait for all others to the space where they do."""

    gather_bytes: int | None = None
    prefetch_bytes: int | None = None
    overlap: bool = True
    remat: Mapping[str, str] = field(default_factory=dict)
    compile: str | None = "none"
    chunk_of: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, str] = field(default_factory=dict)
    decided: RoleDecisions = field(default_factory=RoleDecisions)


def _moves_placed(program: Program, decided: RoleDecisions) -> Program:
    ahead, tile_bytes = decided.fetch_ahead.value, decided.tile_bytes.value
    return place_moves(program, on_host=decided.update_on.value == "cpu", ahead=ahead, tile_bytes=tile_bytes)


Pass = Callable[[Program, Options], Program]
Passes = Sequence[tuple[str, Pass, str]]

BEFORE_ROLES: Passes = (
    ("shard_update", lambda p, o: shard_update(p), "elementwise work on slices, while new leaves still have names"),
    ("narrow", lambda p, o: narrow(p), "then what only slices are read of need not be gathered"),
    ("cast_before_gather", lambda p, o: cast_before_gather(p), "fewer bytes travel; before segments hide the casts"),
    (
        "keep_copies",
        lambda p, o: keep_copies(p, o.decided.copies.value),
        "what casts are made is known; before their ops are moved to uses",
    ),
    (
        "narrow_gradients",
        lambda p, o: narrow_gradients(p),
        "a cast moves into the update; before segments hide it, and behind what decides what is sent",
    ),
    (
        "order_updates",
        lambda p, o: order_updates(p),
        "what works on the state is known; before roles exchange values, each in this order",
    ),
    ("share", lambda p, o: share(p, o.chunk_of), "equal values in layers; before views are made for each use"),
    ("rematerialise_views", lambda p, o: rematerialise_views(p), "only owned memory may cross the cuts made next"),
    (
        "segment",
        lambda p, o: segment(p, o.chunk_of),
        "uses of parameters become separate ops, to place transfers between",
    ),
    (
        "recompute",
        lambda p, o: recompute(p, o.remat, crossing(p)),
        "whole segments run again, before their gathers are placed",
    ),
)

UNTIL_PREFETCH: Passes = (
    (
        "to_spaces",
        lambda p, o: to_spaces(p),
        "each role brings what it holds; what follows sees nothing but the device",
    ),
    ("schedule_gathers", lambda p, o: schedule_gathers(p), "whole parameters only around their uses"),
    ("schedule_reductions", lambda p, o: schedule_reductions(p, o.overlap), "reductions where gradients are complete"),
    ("accumulate", lambda p, o: accumulate(p), "sums over microbatches have their places; before results get theirs"),
    (
        "offload_gradients",
        lambda p, o: offload_gradients(p, o.gradients),
        "where gradients are complete is known; before updates are written in place, which read what waits",
    ),
    ("write_in_place", lambda p, o: write_in_place(p), "after all moves, so that what reads old values is known"),
    (
        "schedule_updates",
        lambda p, o: schedule_updates(p),
        "state is written in place: a gradient ends with its update",
    ),
)

FROM_PREFETCH: Passes = (
    (
        "prefetch",
        lambda p, o: prefetch(p, o.decided.prefetch.value if o.overlap else 0, o.gather_bytes, o.prefetch_bytes),
        "hide gathers, under a cap",
    ),
    (
        "split_gathers",
        lambda p, o: split_gathers(p, o.overlap),
        "where gathers start is final; every axis has its link",
    ),
    (
        "offload_activations",
        lambda p, o: offload_activations(p, o.remat, o.decided.fetch_ahead.value),
        "where segments and gathers are is final",
    ),
    (
        "tile_updates",
        lambda p, o: tile_updates(p, o.decided.tile_bytes.value),
        "segments are final; before copies are made of a size",
    ),
    (
        "place_moves",
        lambda p, o: _moves_placed(p, o.decided),
        "all uses have their places; copies of what lies elsewhere only around them",
    ),
    ("free", lambda p, o: free(p, o.decided.fetch_ahead.value - 1), "lifetimes are final now"),
    ("size_workspaces", lambda p, o: size_workspaces(p, o.compile), "the account needs the final segments"),
    ("assign_memory", lambda p, o: assign_memory(p), "lives and sizes are final: all of a step's memory in one arena"),
    ("settle", lambda p, o: settle(p), "where memory lies is known: until when other ranks may read it"),
)


# Between the first two a pipeline's program is cut into one for each role (`passes.pipeline`), between the last two it
# is decided how far ahead gathers start.
PASSES = (*BEFORE_ROLES, *UNTIL_PREFETCH, *FROM_PREFETCH)


def counted(program: Program) -> Mapping[str, int]:
    """How many ops of each kind a program has."""
    return Counter(op.kind for op in program.ops)


@dataclass(frozen=True)
class PassRecord:
    """The change that one pass made: ops by kind, before and after, and the reason for the pass's place in the
    order."""

    name: str
    why: str
    before: Mapping[str, int]
    after: Mapping[str, int]

    @classmethod
    def of(cls, name: str, why: str, before: Program, after: Program) -> PassRecord:
        """The record of a pass, from the programs before and after it."""
        return cls(name, why, counted(before), counted(after))

    def __str__(self) -> str:
        kinds = [kind for kind in {**self.before, **self.after} if self.before.get(kind, 0) != self.after.get(kind, 0)]
        changed = ", ".join(f"{kind} {self.before.get(kind, 0)} -> {self.after.get(kind, 0)}" for kind in kinds)
        return f"{self.name}: {changed or 'as many ops of each kind'}  # {self.why}"


def trail(program: Program, options: Options, passes: Passes = PASSES) -> Iterator[tuple[PassRecord, Program]]:
    """Runs passes in order; yields the record of each and the program after it."""
    before = counted(program)
    for name, run, why in passes:
        progress.now(f"pass {name}")
        program = run(program, options)
        after = counted(program)
        yield PassRecord(name, why, before, after), program
        before = after


def optimise(program: Program, options: Options, passes: Passes = PASSES) -> tuple[Program, tuple[PassRecord, ...]]:
    """The program after all of these passes, and the record of each."""
    steps = list(trail(program, options, passes))
    return steps[-1][1], tuple(record for record, _ in steps)
