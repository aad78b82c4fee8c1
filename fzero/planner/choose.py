"""choose: `fzero.plan`: the fastest candidate that fits, as a concrete Spec, and the reason of each of its fields.

The default, what the Spec means as it stands, is always among the candidates. Another is taken only where it is
predicted to save more than the model's own error (`GAIN`), or where the default does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from fzero.capture.short_tracebacks import short_tracebacks
from fzero.collector import collector_paused
from fzero.compile.lowered import Lowered
from fzero.compile.traced_device import traced_device
from fzero.errors import FzeroError, SpecError
from fzero.hardware import Hardware
from fzero.ir.decisions import CHOSEN, Choice, RunnerUp
from fzero.planner.candidates import Candidate, default, named
from fzero.planner.codec_choice import fastest_codec
from fzero.planner.kept_plans import answered
from fzero.planner.nothing_fits import nothing_fits
from fzero.planner.planned import Planned, Row, size
from fzero.planner.problem import Problem, problem_of
from fzero.planner.programs import lowered_of, step_seconds
from fzero.planner.schedule_choice import OPS, fastest_schedule
from fzero.planner.search import Search, search
from fzero.planner.sketch import sketched
from fzero.planner.some_layers import fewest_layers
from fzero.planner.tensor_rules import tensor_rules
from fzero.spec import Spec, check_spec

GAIN = 0.03  # of the default's seconds; what a preset's figures are worth
ELSEWHERE = "; traced on the processor, by the device's ops: what the loss asks of its device, the processor answered"


@short_tracebacks
@collector_paused()
def plan(
    spec: Spec,
    params_like: Any,
    batch_like: Any,
    *,
    world_size: int,
    hardware: str | Hardware,
    memory: int | None = None,
    most: int | None = None,
    codecs: Sequence[str] = (),
    phase: str = "",
) -> Planned:
    """Chooses what the spec leaves open, before anything runs: no device is needed.

    Open are the fields `mesh`, `zero`, `microbatches`, `remat`, `offload`, `sequence` and `pipeline` that were not
    given, and `reduce`, `prefetch`, `bucket_bytes` and `update_on` where they are None. A field that was given is
    pinned, also where it equals the default. Of tensor parallelism the width is chosen, along the axis that `shard`
    names. A spec without `shard` gets rules over an axis `tp` where they save time (`fzero.planner.tensor_rules`).

    spec: fields that it leaves out are open. params_like: as in `fzero.lower`. batch_like: the *global* batch, whose
    tensors have the rows of all ranks along dim 0. world_size: the ranks. hardware: a preset's name, a TOML file or a
    `Hardware`. memory: bytes a rank may use of its device; None: `Spec(device_bytes=)`, else what the hardware has less
    its headroom. most: how many candidates are lowered, about; None: ten, or more of small programs. codecs: those of
    `Precision(gather=, reduce=)` that may be taken, for they change the numbers; each is planned for, and taken where
    it saves more than the model's error. phase: of a spec with `fzero.Phases`, whose programs are compared; "" for the
    first.

    The answer is kept on this machine: the same question has it without a search, and its programs are lowered when
    `planned.lowered` is read. `FZERO_KEEP_LOWERINGS=0` turns that off.

    Raises `NothingFitsError` (a SpecError) where nothing fits: it has the least that was found, and what would fit.

    >>> import torch, fzero
    >>> spec = fzero.Spec(loss=lambda p, b: (b @ p["w"]).square().mean(), optimizer=fzero.optim.adamw(1e-3), zero=1)
    >>> meta = torch.empty(1024, 1024, device="meta")
    >>> planned = fzero.plan(spec, {"w": meta}, torch.empty(64, 1024, device="meta"), world_size=8, hardware="h100")
    >>> planned.spec.zero, dict(planned.spec.mesh), planned.peak <= planned.memory
    (1, {'dp': 8}, True)
    """

    check_spec("plan", spec)
    if most is not None and (type(most) is not int or most < 1):
        raise SpecError(f"fzero.plan(most={most!r}): needed a positive int")

    def planned(one: Spec) -> Planned:
        problem = problem_of(one.in_phase(phase), params_like, batch_like, world_size, hardware, memory)
        found = answered(problem, most, partial(_planned, problem, most))
        if problem.spec.device != one.device:
            how = ELSEWHERE if traced_device(problem.spec.device)[1] else ""
            device = Choice(problem.spec.device, f"the type of {problem.hardware.name}{how}", CHOSEN)
            found = replace(found, choices={**found.choices, "device": device})
        return found if one.phases is None else _in_phase(found, one, phase or one.phases.first)

    found = fastest_codec(spec, codecs, GAIN, planned) if codecs else planned(spec)
    chosen = found.choices.keys() - {"device"}  # the machine says it, no plan: another start may find another
    return replace(found, spec=found.spec.but(planned=chosen))


def _in_phase(found: Planned, spec: Spec, phase: str) -> Planned:
    """The plan of a phase as one of the spec with all phases."""
    concrete = replace(found.spec, optimizer=spec.optimizer, step=spec.step)
    return replace(found, spec=concrete, programs=lambda: replace(found.lowered, phase=phase))


def _planned(problem: Problem, most: int | None) -> Planned:
    """The plan of a problem."""
    problem = replace(problem, rules=tensor_rules(problem))
    sketch = sketched(problem)
    found = search(problem, sketch, most)
    best = fewest_layers(found) or found.best()
    if best is None:
        raise nothing_fits(problem, sketch, found)
    best = fastest_schedule(found, best)
    own = found.rows[default(problem.spec, problem.world_size)]
    if found.fits(own) and own.seconds <= best.seconds / (1 - GAIN):
        best = found.rows[own.candidate] = found.whole(own.candidate)
    table = tuple(sorted(found.rows.values(), key=lambda row: (not found.fits(row), row.order, str(row.candidate))))
    idle = {"pipeline"} if best.candidate.ranks.roles == 1 else set()
    idle |= {"reduce"} if best.candidate.reduce is None else set()
    idle |= {"sequence"} if not best.candidate.ranks.model_axes else set()
    open_ = [f.name for f in fields(Candidate) if f.name not in problem.given | idle]
    choices = {name: _reason(name, best, table, found) for name in open_}
    if named(problem.rules.shard) & dict(best.candidate.mesh).keys():
        choices["shard"] = Choice(problem.rules.shard, "found by what a rank's part of the forward would take", CHOSEN)
    concrete, lowered, rest = _concrete(problem, best.candidate, found)
    seconds = step_seconds(lowered, problem.machine)
    if concrete.device_bytes != problem.spec.device_bytes:
        rest = {**rest, "device_bytes": Choice(concrete.device_bytes, "the program fits only under it", CHOSEN)}
    return Planned(
        concrete, seconds, lowered.memory.peak, {**choices, **rest}, table, problem.machine, problem.budget,
        problem.world_size, lambda: lowered,
    )  # fmt: skip


def _concrete(problem: Problem, one: Candidate, found: Search) -> tuple[Spec, Lowered, Mapping[str, Choice[Any]]]:
    """(the spec with nothing left to a measurement, its programs, what was decided for these fields). A pipeline's
    roles may have been decided apart: then all take the depth of one, the one that is fastest for all."""
    lowered = found.programs[one]
    decided, role = lowered.decisions, lowered.decisions.roles[0]
    rest: dict[str, Choice[Any]] = {"prefetch": role.prefetch, "bucket_bytes": decided.bucket_bytes}
    if one.microbatches > 1 and one.reduce is None:
        rest["reduce"] = decided.reduce
    if one.offload is not None:
        rest["update_on"] = role.update_on
    rest = {name: choice for name, choice in rest.items() if getattr(problem.spec, name) is None}
    values = {name: choice.value for name, choice in rest.items()}
    base = replace(one.spec(problem.spec, problem.rules.shard), **values, device_bytes=problem.spec.device_bytes)
    by_role = [each.prefetch.value for each in decided.roles.values()] if "prefetch" in values else []
    if len({*by_role}) <= 1 and one not in found.pressed:
        return base, lowered, rest  # what was decided is what it says
    depths: set[int | None] = {*by_role} or {None}
    if by_role and found.ops(one) > OPS:  # each takes as long as all that was lowered so far: that of the most roles
        depths = {max(by_role, key=by_role.count)}
    tried = []
    for depth in sorted(depths, key=str):
        try:
            spec = base if depth is None else replace(base, prefetch=depth)
            tried.append((spec, lowered_of(problem, spec, one.ranks)))
        except FzeroError:
            continue
    spec, again = min(tried, key=lambda x: step_seconds(x[1], problem.machine), default=(base, lowered))
    if again.memory.peak > problem.budget:
        spec = replace(spec, device_bytes=problem.budget, prefetch=problem.spec.prefetch)
        again = lowered_of(problem, spec, one.ranks)
    if "prefetch" in rest:  # role 0 may have had another
        rest["prefetch"] = replace(rest["prefetch"], value=spec.prefetch)
    return spec, again, rest


def _reason(name: str, best: Row, table: Sequence[Row], found: Search) -> Choice[Any]:
    """Why a field has its value: the best row with another one, or else what the sketch says of it."""
    budget = found.problem.budget
    value = getattr(best.candidate, name)
    shown = dict(value) if name == "mesh" else getattr(value, "rules", value)
    others = [row for row in table if getattr(row.candidate, name) != value and not row.refused]
    if fitting := [row for row in others if found.fits(row)]:
        other = min(fitting, key=lambda row: row.seconds)
        more = other.seconds / best.seconds - 1
        slower = f"{more:.1%} slower" if more >= 0 else f"{-more:.1%} faster, less than the model's error of {GAIN:.0%}"
        second = RunnerUp(_value(other.candidate, name), other.seconds)
        return Choice(shown, f"{other.candidate} is {slower}", CHOSEN, best.seconds, second, "s")
    if others:
        other = min(others, key=lambda row: row.peak)
        reason = f"{other.candidate} needs {size(other.peak)} of {size(budget)}"
        return Choice(shown, reason, CHOSEN, None, RunnerUp(_value(other.candidate, name)))
    said = zip(found.estimates, found.alike.corrected([*found.rows.values()]).tolist(), strict=True)
    rest = {one: cost for one, cost in said if getattr(one, name) != value}
    if not rest:
        large = name == "pipeline" and best.candidate.ranks.roles > 1
        return Choice(shown, "no other was lowered: programs are large" if large else "there is no other value here")
    near = min(rest, key=lambda one: (rest[one][1] > budget, rest[one]))
    seconds, peak = rest[near]
    reason = (
        f"{near} was not lowered: by the sketch, and what others were found to take, {seconds:.4g} s and {size(peak)}"
    )
    return Choice(shown, reason, CHOSEN, None, RunnerUp(_value(near, name)))


def _value(one: Candidate, name: str) -> Any:
    return dict(one.mesh) if name == "mesh" else getattr(one, name)
