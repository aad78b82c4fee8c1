"""step: the way from a user's step to a program: capture, lowering, passes, and the decisions between them.

A decision is a `Choice(value, reason)`. If two programs are possible, both are lowered and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fzero import tree
from fzero._torch_compat import FakeTensorMode
from fzero.capture import trace_step
from fzero.codegen import matmul
from fzero.compile.collector import collector_paused
from fzero.compile.layout import check_rules
from fzero.compile.lowered import Lowered
from fzero.compile.resolve import LoweringOptions, TrainStep, lowering_options, train_step
from fzero.cost import choose
from fzero.cost.autotune import Costs
from fzero.cost.choose import Choice
from fzero.cost.memory import account
from fzero.cost.rates import Rates
from fzero.ir.program import Program, wire_bytes
from fzero.lowering.build import build
from fzero.passes import FROM_PREFETCH, UNTIL_PREFETCH, Options, PassRecord, optimise
from fzero.passes.prefetch import prefetch
from fzero.plan.layout import Plan
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
    """Captures the step, lowers it once for each way to reduce gradients, runs the passes, and keeps the better
    program."""
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
    if wanted.matmul == "fastest":
        graph, choices = matmul.choose(graph, costs or Costs("products", measures=False))
    one_way = plan.world_size == 1 or all(region.microbatches == 1 for region in graph.regions)
    ways = (wanted.reduce,) if wanted.reduce else ("end",) if one_way else ("end", "each")
    naive = {how: build(graph, plan, reduce=how, transport=transport) for how in ways}
    ahead: dict[str, Choice[int]] = {}
    programs: dict[str, Program] = {}
    records: dict[str, tuple[PassRecord, ...]] = {}
    for how in ways:
        half, first = optimise(naive[how], _options(wanted, 0), UNTIL_PREFETCH)
        ahead[how] = _prefetch(half, wanted, rates)
        programs[how], second = optimise(half, _options(wanted, ahead[how].value), FROM_PREFETCH)
        records[how] = (*first, *second)
    chosen = _reduce(programs)
    how, program = chosen.value, programs[chosen.value]
    for name, choice in (("reduce", chosen), ("prefetch", ahead[how])):
        if choice.reason:
            choices[name] = choice.reason
    if transport == "nccl" and wanted.cuda_graph:
        against = obstacle(program, torch.device("cuda"))
        choices["cuda_graph"] = f"not one graph: {against}" if against else "the step is one graph"
    return Lowered(graph, plan, program, choices, records[how], naive[how], _options(wanted, ahead[how].value))


def _options(wanted: LoweringOptions, ahead: int) -> Options:
    return Options(
        prefetch=ahead,
        gather_bytes=wanted.gather_bytes,
        overlap=wanted.overlap,
        remat=wanted.remat,
        compile=wanted.compile,
    )


def _prefetch(program: Program, wanted: LoweringOptions, rates: Rates | None) -> Choice[int]:
    """How many segments ahead gathers start: by the spec, else by measurement, else by a rule."""
    if wanted.prefetch is not None:
        return Choice(wanted.prefetch)
    rule = 0 if program.transport == "shared" else 1
    if not any(op.gathers and program.buffers[op.target].kind == "gathered" for op in program.ops):
        return Choice(rule)
    if rates is not None and wanted.overlap:
        tried = {n: prefetch(program, n, wanted.gather_bytes) for n in sorted({rule, *choose.DEPTHS})}
        return choose.prefetch_depth(tried, rule, rates)
    if rule:
        return Choice(rule, "prefetch=1: one segment ahead; nothing was measured")
    return Choice(rule, "prefetch=0: ranks copy from one another's memory when they wait, so nothing would be hidden")


def _reduce(programs: Mapping[str, Program]) -> Choice[str]:
    """How gradients are reduced. "end" sends the least; it is taken unless whole gradients raise the planned peak by a
    tenth."""
    if len(programs) == 1:
        return Choice(next(iter(programs)))
    peak = {how: account(program).peak for how, program in programs.items()}
    sent = {how: sum(wire_bytes(program, op) for op in program.ops) for how, program in programs.items()}
    how = "end" if peak["end"] <= 1.1 * peak["each"] else "each"
    shown = (f"{name}: peak {peak[name] / 1e9:.3g} GB, {sent[name] / 1e9:.3g} GB sent" for name in ("end", "each"))
    return Choice(how, f"reduce={how!r} by memory ({'; '.join(shown)}). Spec(reduce=...) chooses otherwise")


def fakes_on(like: Any, device: torch.device) -> Any:
    """The pytree with fake tensors on a device in place of its tensors."""

    def fake(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device=device) if isinstance(x, torch.Tensor) else x

    with FakeTensorMode():
        return tree.map(fake, like)
