"""step: the way from a user's step to a program: capture, lowering, passes, and the decisions between them.

A decision is a `Choice(value, reason)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero import backend, progress, tree
from fzero._torch_compat import FakeTensorMode, fake_empty
from fzero.capture import trace_step
from fzero.codegen import matmul
from fzero.compile import budgets
from fzero.compile.collector import collect, collector_paused
from fzero.compile.judged import local_step, naive
from fzero.compile.lowered import Lowered
from fzero.compile.plan_from_spec import check_rules
from fzero.compile.reduce_when import reduce_when
from fzero.compile.resolve import LoweringOptions, TrainStep, lowering_options, train_step
from fzero.compile.update_place import update_place
from fzero.cost import choose
from fzero.cost.choose import Choice
from fzero.cost.kept_costs import Costs
from fzero.cost.rates import Rates
from fzero.errors import SpecError
from fzero.ir.program import Program
from fzero.ir.records import DISK, HOST
from fzero.passes import BEFORE_ROLES, TILE_BYTES, UNTIL_PREFETCH, Options, PassRecord, optimise
from fzero.passes.pipeline.by_role import by_role
from fzero.passes.prefetch import prefetch
from fzero.pipeline import Schedule
from fzero.plan.state_plan import Plan
from fzero.runtime.cuda_graphs import obstacle
from fzero.spec import Spec


def lower_step(
    spec: Spec,
    state: Any,
    batch: Any,
    plan: Plan,
    transport: str,
    fn: Callable[..., Any] | None = None,
    costs: Costs | None = None,
    rates: Rates | None = None,
) -> Lowered:
    """The program of a spec's step, or of the evaluation of `fn` (`resolve.train_step`).

    state, batch: pytrees of tensors; only shapes and dtypes count. transport: "p2p", "shared" or "nccl". costs: kept
    measurements; without them no matrix product is measured. rates: the measured rates of the transport.
    """
    step = train_step(spec, fn)
    lowered = _lower(step, lowering_options(spec), state, batch, plan, transport, costs, rates)
    if fn is None:
        paths = [*lowered.graph.state_paths, *lowered.graph.batch_paths]
        ends = ["/".join(parts[i:]) for parts in (path.split("/") for path in paths) for i in range(len(parts))]
        check_rules(
            "Precision(keep=...)", step.precision.keep, ends
        )  # rules match the path within an argument of a loss
    return lowered


@collector_paused()
def _lower(
    step: TrainStep, wanted: LoweringOptions, state: Any, batch: Any, plan: Plan, transport: str,
    costs: Costs | None, rates: Rates | None,
) -> Lowered:  # fmt: skip
    """Captures the step, lowers it and runs the passes."""
    progress.now("capture")
    graph = trace_step.capture(
        step.user,
        state,
        batch,
        microbatches=step.microbatches,
        allow_unused=step.allow_unused,
        precision=step.precision,
        axis=plan.axis,
        per_rank=[leaf.path for leaf in plan.leaves if leaf.per_rank],
        fns=[step.loss],
    )
    choices: dict[str, str] = {}
    local, sharding = local_step(graph, plan, wanted.sequence)
    if wanted.matmul == "fastest":
        local, choices = matmul.choose(local, costs or Costs("products", measures=False))
    graph, sharding = (local, None) if sharding is None else (graph, replace(sharding, local=local))
    one_way = plan.data_ranks == 1 or all(region.microbatches == 1 for region in graph.regions)
    chosen = Choice(wanted.reduce or "end") if wanted.reduce or one_way else reduce_when(local, plan)
    collect()
    schedule = None
    if plan.cut is not None:
        schedule = wanted.pipeline.order(plan.mesh.roles, step.microbatches)
    try:
        roles = _roles(naive(local, plan, reduce=chosen.value, transport=transport), plan, wanted, schedule, rates)
    except SpecError as error:  # of a budget, which may not choose other bits
        if chosen.reason and chosen.value == "end" and wanted.device_bytes is not None:
            raise SpecError(
                f"{error}. Or say reduce='each', which holds no whole gradients and has other bits"
            ) from None
        raise
    for name, choice in (("reduce", chosen), ("prefetch", roles[0].prefetch), ("update_on", roles[0].update_on)):
        if choice.reason:
            choices[name] = choice.reason
    if wanted.gradients:
        choices["gradients"] = _gradients(roles[0].program)
    programs = {number: role.program for number, role in roles.items()}
    if lent := _lent(programs):
        choices["pipeline"] = lent
    known = backend.of_transport(transport)
    if known.records_graphs and wanted.cuda_graph:
        found = [why for program in programs.values() if (why := obstacle(program, torch.device(known.name)))]
        choices["cuda_graph"] = f"not one graph: {found[0]}" if found else "the step is one graph"
    options = {number: role.options for number, role in roles.items()}
    return Lowered(graph, plan, programs, choices, roles[0].records, chosen.value, options, schedule, sharding)


@dataclass(frozen=True)
class _RoleProgram:
    """The program of one role, how far ahead its gathers start, where its updates run, the options of the last passes,
    and what all passes changed."""

    program: Program
    prefetch: Choice[int]
    update_on: Choice[str]
    options: Options
    records: tuple[PassRecord, ...]


def _roles(
    program: Program, plan: Plan, wanted: LoweringOptions, schedule: Schedule | None, rates: Rates | None
) -> dict[int, _RoleProgram]:
    """The passes over a naive program; with a pipeline, from where it is cut on, over the program of each role."""
    chunk_of = {} if schedule is None else plan.chunk_of()
    first: tuple[PassRecord, ...] = ()
    for row in BEFORE_ROLES:
        program, record = optimise(program, replace(_options(wanted, 0), chunk_of=chunk_of), [row])
        first += record
        collect()
    parts = {0: program} if schedule is None else dict(by_role(program, schedule))
    roles = {}
    for number in list(parts):
        part = parts.pop(number)
        collect()
        if schedule is not None:
            cut = PassRecord.of(
                "by_role", f"from here on there is a program for each role: this is {number}", program, part
            )
            first = (*first[: len(BEFORE_ROLES)], cut)
        half, second = optimise(part, _options(wanted, 0), UNTIL_PREFETCH)
        ahead, on_host = _prefetch(half, wanted, rates), _update_on(half, wanted, rates)
        options = replace(_options(wanted, ahead.value), on_host=on_host.value == "cpu", ahead=_ahead(half))
        done, options, third = budgets.fitted(half, options, wanted.device_bytes, wanted.host_bytes)
        roles[number] = _RoleProgram(done, ahead, on_host, options, (*first, *second, *third))
    return roles


def _update_on(program: Program, wanted: LoweringOptions, rates: Rates | None) -> Choice[str]:
    """Where elementwise work on offloaded leaves runs: by the spec, else where it costs less."""
    if wanted.update_on is not None or not wanted.offloads:
        return Choice(wanted.update_on or "device")
    return update_place(program, rates)


def _ahead(program: Program) -> int:
    """How many runs before its use a fetch from the host starts."""
    return backend.of_transport(program.transport).fetch_ahead


def _gradients(program: Program) -> str:
    """What waits off the device of gradients that are clipped together, as text."""
    held = dict.fromkeys((HOST, DISK), 0)
    for b in program.buffers.values():
        held[b.space] = held.get(b.space, 0) + (b.nbytes if b.kind == "grad" else 0)
    shown = ", ".join(f"{held[space]:,} bytes on the {space}" for space in (HOST, DISK) if held[space])
    if shown:
        return f"gradients wait for the last of them off the device: {shown} of a rank, written and read once a step"
    return "no gradient waits for others: none leaves the device, whatever offload= says of grads/"


def _options(wanted: LoweringOptions, ahead: int) -> Options:
    return Options(
        prefetch=ahead,
        gather_bytes=wanted.gather_bytes,
        prefetch_bytes=wanted.prefetch_bytes,
        overlap=wanted.overlap,
        remat=wanted.remat,
        compile=wanted.compile,
        tile_bytes=TILE_BYTES,
        gradients=wanted.gradients,
    )


def _prefetch(program: Program, wanted: LoweringOptions, rates: Rates | None) -> Choice[int]:
    """How many segments ahead gathers start: by the spec, else by measurement, else by a rule."""
    if wanted.prefetch is not None:
        return Choice(wanted.prefetch)
    rule = 0 if program.transport == "shared" else 1
    if not any(op.gathers and program.buffers[op.target].kind == "gathered" for op in program.ops):
        return Choice(rule)
    if rates is not None and wanted.overlap:
        caps = wanted.gather_bytes, wanted.prefetch_bytes
        tried = {n: prefetch(program, n, *caps) for n in sorted({rule, *choose.DEPTHS})}
        return choose.prefetch_depth(tried, rule, rates)
    if rule:
        return Choice(rule, "prefetch=1: one segment ahead; nothing was measured")
    return Choice(rule, "prefetch=0: ranks copy from one another's memory when they wait, so nothing would be hidden")


def _lent(programs: Mapping[int, Program]) -> str:
    """What roles are sent of leaves that others keep, as text; "" if nothing."""
    lent = {b.name: b for p in programs.values() for b in p.buffers.values() if b.lent is not None}
    if not lent:
        return ""
    names = sorted({str(b.lent) for b in lent.values()})
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    nbytes = sum(b.nbytes for b in lent.values())
    return (
        f"pipeline: {nbytes:,} bytes of leaves are sent each step to a role that uses and does not keep "
        f"them ({shown}). So is a tied leaf; layers that run in another order than their numbers send it too"
    )


def fakes_on(like: Any, device: torch.device) -> Any:
    """The pytree with fake tensors on a device in place of its tensors."""

    mode = FakeTensorMode()
    return tree.map(lambda x: fake_empty(mode, x.shape, x.dtype, device) if isinstance(x, torch.Tensor) else x, like)
