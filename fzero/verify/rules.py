"""rules: rules that every rank's program keeps, checked before anything runs and, in tests, after every pass.

Each rule is a generator of faults in `RULES`: (op number, what is wrong). The first fault is raised as a VerifyError
that names the rule, the rank, the op's line and the last pass. Rules that need final lifetimes wait for the level that
has them (`Level.FREED`, `Level.CAPPED`). The last rule is the strongest: the program's meaning is that of the captured
step (`fzero.verify.terms`). It catches faults that the other rules miss. `lab.mutate` breaks programs to see what is
caught.

Cost: one walk over the ops a rule; a 12-layer model takes some tens of milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from fzero import progress
from fzero.cost.memory import account
from fzero.errors import FzeroError, VerifyError
from fzero.ir.liveness import gathered_bytes
from fzero.ir.mesh import PIPELINE, parts_of
from fzero.ir.op import Op
from fzero.ir.program import Level, Program, op_text
from fzero.ir.records import DTYPE_NAMES, GIVEN, PERSISTENT
from fzero.verify.abstract import program_meaning
from fzero.verify.circles import waiting_in_a_circle
from fzero.verify.form import MOST, aliasing, calls, form, inside, length, partition
from fzero.verify.lifetimes import Fault, lifetimes, needed, places, settled
from fzero.verify.message_order import unmatched
from fzero.verify.roles import RolesUndefined, joint_meaning, kept_by
from fzero.verify.spaces import spaces
from fzero.verify.terms import Undefined

Rule = Callable[[Program], Iterator[Fault]]


def verify(programs: Program | Mapping[int, Program], *, budget_bytes: int | None = None) -> None:
    """Raises VerifyError for the first rule that a program, or the ranks' programs together, break.

    programs: one program for every rank, or `{rank: program}`; of a pipeline, at least one rank of each role
    (`lowered.roles`), because the meaning is that of all roles together. budget_bytes: bounds the planned peak of a
    rank.
    """
    if not isinstance(programs, Program | Mapping):
        raise FzeroError(
            f"fzero.verify: needed a Program or {{rank: Program}}, got {type(programs).__name__}: lowered.program, "
            "lowered.roles, or fzero.parse(text)"
        )
    progress.now("verifying it")
    by_rank = {0: programs} if isinstance(programs, Program) else dict(programs)
    rules: dict[str, Rule] = {**RULES, "budget": partial(_budget, budget_bytes)}
    checked: list[Program] = []
    for rank, program in by_rank.items():
        if any(program is other for other in checked):
            continue
        checked.append(program)
        for name, rule in rules.items():
            try:
                fault = next(iter(rule(program)), None)
            except Exception as error:  # this program is none that fzero makes
                what = f"the rule cannot be checked on this program: {error!r}"
                raise VerifyError(_message(name, rank, program, -1, what, len(by_rank) > 1)) from error
            if fault is not None:
                raise VerifyError(_message(name, rank, program, fault[0], fault[1], len(by_rank) > 1))
    columns = _columns(by_rank)
    if len(by_rank) > 1:
        _messages(by_rank)
    _roles_together(columns)
    if len(by_rank) > 1:
        _together(by_rank)


def _budget(most: int | None, program: Program) -> Iterator[Fault]:
    if most is not None and (peak := account(program)).peak > most:
        yield peak.op, f"{peak.peak:,} bytes live, the budget is {most:,}"


def _message(rule: str, rank: int, program: Program, index: int, what: str, several: bool) -> str:
    where = f"op {index}" if 0 <= index < len(program.ops) else "the end"
    line = f" `{op_text(program.ops[index])}`" if 0 <= index < len(program.ops) else ""
    who = f" of rank {rank}" if several else ""
    return f"[{rule}] {where}{who}{line}: {what} (after pass {program.passes[-1] if program.passes else 'none'})"


# --- transfers --------------------------------------------------------------------------------------------------------


def transfers(program: Program) -> Iterator[Fault]:
    """Collectives run over an axis of the mesh, on whole buffers of sizes that fit."""
    for i, op in enumerate(program.ops):
        if not op.transfers or op.moves:
            continue
        if op.axis not in program.mesh:
            yield i, f"runs over axis {op.axis!r}: the mesh has {list(program.mesh.names)}"
            continue
        if alone := [part for part in parts_of(op.axis) if program.mesh.size(part) == 1]:
            yield i, f"runs over axis {op.axis!r}: along {alone[0]} there is one rank, and ranks open no group for it"
        n = program.mesh.size(str(op.axis))
        source, target = (program.buffers[ref.name] for ref in ((op.reads or op.writes)[0], (op.writes or op.reads)[0]))
        if op.gathers:
            cut, bucket = program.cut(op.reads[0]), program.buckets.get(source.bucket or "")
            if bucket is None:
                part = source.numel
            else:
                part = source.numel // n if cut is None else program.slice_length(bucket, cut) // source.per
            if part * n != target.numel:
                yield i, f"gathers {part} elements of {n} ranks into {target.numel}"
        elif op.reduces:
            yield from _reduction(program, i, op, n)
        elif (record := op.row.collective) and record.source == "value" and record.target == "whole":
            if source.numel * n != target.numel:
                yield i, f"gathers {source.numel} elements of each of {n} ranks into {target.numel}"
        elif record and (source.numel != target.numel or (record.source != "value" and source.numel % n)):
            yield i, f"exchanges {source.numel} elements of {n} ranks for {target.numel}: equal parts of equal sizes"
        dtypes = {ref.name: DTYPE_NAMES[program.buffers[ref.name].dtype] for ref in (*op.reads, *op.writes)}
        if len(set(dtypes.values())) > 1:
            yield i, f"moves {' to '.join(f'{name} ({dtype})' for name, dtype in dtypes.items())}: dtypes differ"


def _reduction(program: Program, i: int, op: Op, n: int) -> Iterator[Fault]:
    size, room = length(program, op.reads[0]), length(program, op.writes[0])
    needed_room = size // n if op.row.scatters else size
    dtype = program.buffers[op.reads[0].name].dtype
    if op.divisor != 1 and not (dtype.is_floating_point or dtype.is_complex):
        yield i, f"divides {DTYPE_NAMES[dtype]} by {op.divisor}: a sum of integers has no mean"
    if not op.row.small and size % n:
        yield i, f"reduces {size} elements: {n} ranks have no equal slices of them"
    elif op.row.small and op.reads[0].start is None and program.buffers[op.reads[0].name].bucket is not None:
        yield i, f"sends all of the bucket in {op.reads[0]} to every rank: all_reduce sends each rank its part"
    elif op.row.small and op.region and not size % n and n > 2:  # two ranks send as much either way
        yield i, f"sends all {size} elements to every rank: all_reduce sends each rank its part"
    elif room != needed_room:
        yield i, f"reduces {size} elements into {room}: {op.kind} needs {needed_room}"
    elif op.row.scratch(program.transport, size, n):
        scratch = length(program, op.writes[1]) if len(op.writes) > 1 else 0
        part = size if op.row.small else size // n
        if scratch < (n - 1) * part:
            yield i, f"receives {(n - 1) * part} elements into scratch of {scratch}"
    elif len(op.writes) > 1:
        yield i, f"has scratch {op.writes[1]}: transport {program.transport} receives into none"


# --- training ---------------------------------------------------------------------------------------------------------


def reduced_once(program: Program) -> Iterator[Fault]:
    """Every gradient bucket of every microbatch reaches exactly one reduction, every slot of it written once."""
    if all(program.mesh.size(bucket.axis) == 1 for bucket in program.buckets.values()):
        return
    into: dict[str, str] = {}
    reductions: Counter[str] = Counter()
    wrote: Counter[tuple[str, int | None, int | None]] = Counter()
    moved: set[str] = set()  # what gradients that wait elsewhere are brought to
    for i, op in enumerate(program.ops):
        grads = {ref.name for ref in op.reads if program.buffers[ref.name].kind == "grad" or ref.name in moved}
        if op.moves and grads:
            into[op.reads[0].name] = op.target
            moved.add(op.target)
        elif (op.reduces or op.exchanges) and op.reads[0].name in grads:
            reductions[op.reads[0].name] += 1
            if reductions[op.reads[0].name] > 1:
                yield i, f"reduces {op.reads[0].name} a second time"
        elif op.is_run and op.writes and op.is_flat and program.buffers[op.writes[0].name].kind == "grad":
            total = op.writes[0].name
            into.update({ref.name: total for ref in op.reads if ref.name != total})
        elif op.is_run and op.writes and op.is_flat and grads & moved:  # computed where they were brought to
            into.update(dict.fromkeys(grads & moved - {op.writes[0].name}, op.writes[0].name))
            moved.add(op.writes[0].name)
        elif op.is_run:
            for ref in op.writes:
                if program.buffers[ref.name].kind == "grad" and ref not in op.reads:  # else it is added to
                    into.update(dict.fromkeys(grads - {ref.name}, ref.name))
                    key = (ref.name, ref.start, ref.stop)
                    wrote[key] += 1
                    if wrote[key] > 1:
                        yield i, f"writes the gradient {ref} a second time"
    for name in {name for name, _, _ in wrote}:
        end, passed = name, set[str]()
        while end in into and end not in passed and reductions[end] == 0:
            passed.add(end)
            end = into[end]
        if reductions[end] == 0:
            yield -1, f"the gradients in {name} are never reduced"


def microbatches(program: Program) -> Iterator[Fault]:
    """Every region runs all its segments for every microbatch."""
    runs: dict[str, Counter[int]] = {}
    for op in program.ops:
        if op.in_region:
            runs.setdefault(str(op.region), Counter())[op.microbatch] += 1
    for region, counts in runs.items():
        if len(set(counts.values())) > 1 or sorted(counts) != list(range(max(counts) + 1)):
            yield -1, f"{region} runs {dict(sorted(counts.items()))} segments by microbatch: they must be equal"


def updated_once(program: Program) -> Iterator[Fault]:
    """Every trainable slot of a parameter is written by exactly one update; no state is written twice."""
    count: Counter[tuple[str, int, tuple[int, int] | None]] = Counter()
    updated: set[tuple[str, int]] = set()
    for i, op in enumerate(program.ops):
        if not op.is_update:
            continue
        for ref in op.writes:
            buffer = program.buffers[ref.name]
            bucket = program.buckets.get(buffer.bucket or "")
            start, stop = (0, MOST) if ref.start is None else (ref.start, ref.stop or 0)
            for slot in range(1) if bucket is None else bucket.inside(start, stop):
                count[(ref.name, slot, ref.tile)] += 1
                updated.add((ref.name, slot))
                if count[(ref.name, slot, ref.tile)] > 1:
                    yield i, f"updates {ref} a second time"
    columns: dict[str | None, list[str]] = {}
    for name, buffer in program.buffers.items():
        if buffer.kind in (*PERSISTENT, "staging"):
            columns.setdefault(buffer.bucket, []).append(name)
    if any(op.is_update for op in program.ops):
        for slot_key in program.trainable:
            own = columns.get(slot_key.bucket, [])
            if own and not any((name, slot_key.slot) in updated for name in own):
                path = program.buckets[slot_key.bucket].slots[slot_key.slot].path
                yield -1, f"{path} has a gradient and is never updated"


# --- bytes and meaning ------------------------------------------------------------------------------------------------


def cap(program: Program) -> Iterator[Fault]:
    """Gathered parameters alive at one time stay under the cap."""
    if program.level < Level.CAPPED:
        return
    for i, held in enumerate(gathered_bytes(program.ops, program.buffers)):
        if held > program.gather_cap_bytes:
            yield i, f"{held:,} bytes are gathered at once, the cap is {program.gather_cap_bytes:,}"


def meaning(program: Program) -> Iterator[Fault]:
    """The state it leaves behind is what the captured step computes. Of a role, see `_roles_together`."""
    if program.role is not None:
        return
    try:
        computed = program_meaning(program)
    except Undefined as error:
        yield error.op, str(error)
        return
    if computed != program.meaning:
        yield -1, f"the step computes something else than what was captured ({computed}, not {program.meaning})"


RULES: dict[str, Rule] = {
    "form": form,
    "lifetimes": lifetimes,
    "needed": needed,
    "partition": partition,
    "aliasing": aliasing,
    "calls": calls,
    "inside": inside,
    "transfers": transfers,
    "reduced once": reduced_once,
    "microbatches": microbatches,
    "updated once": updated_once,
    "cap": cap,
    "places": places,
    "spaces": spaces,
    "settled": settled,
    "meaning": meaning,
}


# --- all ranks --------------------------------------------------------------------------------------------------------


def _together(programs: Mapping[int, Program]) -> None:
    """All ranks issue the same collectives in the same order per axis, and none waits for itself over several."""
    known = {id(program): _collectives(program) for program in programs.values()}
    issued = {rank: known[id(program)] for rank, program in programs.items()}
    leaders: dict[tuple[str, int], int] = {}  # of each group of an axis, the first rank that is given
    for rank, calls_ in issued.items():
        mesh = programs[rank].mesh
        for axis in {*mesh.names, *calls_}:
            first = leaders.setdefault((axis, mesh.leader(rank, axis) if axis in mesh else 0), rank)
            if calls_ is issued[first]:
                continue
            ours, theirs = issued[first].get(axis, []), calls_.get(axis, [])
            for n, ((_, a), (j, b)) in enumerate(zip(ours, theirs, strict=False)):
                if a != b:
                    what = f"collective {n} over {axis} differs from rank {first}'s, `{a}`"
                    raise VerifyError(_message("same order", rank, programs[rank], j, what, True))
            if len(ours) != len(theirs):
                what = f"{len(theirs)} collectives over {axis}, rank {first} has {len(ours)}"
                raise VerifyError(_message("same order", rank, programs[rank], len(programs[rank].ops), what, True))
    for rank, index, what in waiting_in_a_circle(programs):
        raise VerifyError(_message("same order", rank, programs[rank], index, what, True))
    first = min(issued)
    for rank, program in programs.items():
        if program.mesh != programs[first].mesh:
            what = f"its mesh is {program.mesh}, rank {first}'s is {programs[first].mesh}"
            raise VerifyError(_message("same order", rank, program, -1, what, True))
        if (wanted := _given(programs[first])) != (given := _given(program)):
            what = f"it is given {given}, rank {first} is given {wanted}: every rank takes one form of batch"
            raise VerifyError(_message("same order", rank, program, -1, what, True))
    _one_layout(programs)


def _one_layout(programs: Mapping[int, Program]) -> None:
    """Ranks cut one layout into slices: else two of them may take one slice, and none another."""
    first: dict[tuple[int, str], tuple[int, object]] = {}  # by role and name, a rank, and how the thing lies there
    for rank, program in programs.items():
        buckets = {f"bucket {name}": bucket for name, bucket in program.buckets.items()}
        buffers = {name: (b.bucket, b.sharded) for name, b in program.buffers.items() if b.bucket is not None}
        for name, lies in {**buckets, **buffers}.items():
            other, known = first.setdefault((program.role or 0, name), (rank, lies))
            if known != lies:
                what = f"{name} lies as {lies}, on rank {other} as {known}: ranks cut one layout into slices"
                raise VerifyError(_message("same order", rank, program, -1, what, True))


def _messages(programs: Mapping[int, Program]) -> None:
    for rank, number, what in unmatched(programs):
        raise VerifyError(_message("sends", rank, programs[rank], number, what, True))


Column = dict[int, tuple[int, Program]]  # by role, a rank and its program


def _columns(programs: Mapping[int, Program]) -> list[Column]:
    """The ranks of a pipeline by columns along `pp`, each with all roles. Equal columns are given once."""
    columns: dict[int, Column] = {}
    for rank, program in programs.items():
        if program.role is None:
            continue
        if program.role != program.mesh.role(rank):
            what = (
                f"it is for role {program.role}, the rank's is {program.mesh.role(rank)}: programs are given by "
                "rank, as in fzero.verify(lowered.roles)"
            )
            raise VerifyError(_message("roles", rank, program, -1, what, True))
        columns.setdefault(program.mesh.leader(rank, PIPELINE), {})[program.role] = rank, program
    different = {tuple(id(column[role][1]) for role in sorted(column)): column for column in columns.values()}
    for column in different.values():
        rank, program = column[min(column)]
        if len(column) != program.mesh.roles:
            missing = sorted(set(range(program.mesh.roles)) - set(column))
            raise VerifyError(_message("roles", rank, program, -1, f"no program is given for roles {missing}", True))
    return list(different.values())


def _roles_together(columns: Iterable[Column]) -> None:
    """Each leaf has one owner, and the roles of a pipeline together compute what was captured."""
    for column in columns:
        for name, roles in kept_by({role: p for role, (_, p) in column.items()}).items():
            if len(roles) > 1:
                what = f"{name} is kept by roles {roles}: one alone owns it"
                raise VerifyError(_message("roles", column[roles[1]][0], column[roles[1]][1], -1, what, True))
        try:
            computed = joint_meaning({role: p for role, (_, p) in column.items()})
        except RolesUndefined as error:
            rank, program = column[error.role]
            raise VerifyError(_message("meaning", rank, program, error.op, str(error), True)) from None
        for rank, program in column.values():
            if computed != program.meaning:
                what = f"the roles compute something else than what was captured ({computed}, not {program.meaning})"
                raise VerifyError(_message("meaning", rank, program, -1, what, True))


def _given(program: Program) -> str:
    """What a step is given and never changes, in its order, as text."""
    given = [b for b in program.buffers.values() if b.kind in GIVEN]
    return ", ".join(f"{b.name} {DTYPE_NAMES[b.dtype]}[{'x'.join(map(str, b.shape))}]" for b in given) or "nothing"


def _collectives(program: Program) -> dict[str, list[tuple[int, str]]]:
    """By axis, each collective as text, buffers named: two of one size must not meet each other."""
    by_axis: dict[str, list[tuple[int, str]]] = {}
    for i, op in enumerate(program.ops):
        if op.is_collective:
            by_axis.setdefault(str(op.axis), []).append((i, op_text(op)))
    return by_axis
