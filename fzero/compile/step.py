"""step: the way from a user's step to a program: capture, lowering, passes.

Between them stand decisions: the spec's, else those of `fzero.compile.decide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fzero import progress, tree
from fzero._torch_compat import FakeTensorMode, fake_empty
from fzero.capture import trace_step
from fzero.capture.graph import Graph
from fzero.capture.step_ops import FED_MEAN
from fzero.codegen import matmul, pad
from fzero.collector import collect, collector_paused
from fzero.compile import decide
from fzero.compile.captures import Captured
from fzero.compile.decide.budgets import fitted
from fzero.compile.judged import check_kept, local_step, naive
from fzero.compile.kept_lowerings import NOTHING
from fzero.compile.lowered import Lowered
from fzero.compile.lowering_context import LoweringContext
from fzero.compile.notes import notes
from fzero.compile.plan_from_spec import check_rules
from fzero.compile.resolve import LoweringOptions, TrainStep, lowering_options, train_step
from fzero.cost.coding import sentence
from fzero.errors import SpecError
from fzero.ir.code_ops import spelled_out
from fzero.ir.decisions import CHOSEN, IDLE, NO_COPIES, Choice, Decisions, RoleDecisions
from fzero.ir.program import Program
from fzero.lowering.chunk_loss import chunked, chunks_for
from fzero.lowering.localise import Sharding
from fzero.passes import BEFORE_ROLES, UNTIL_PREFETCH, Options, PassRecord, optimise
from fzero.passes.pipeline.by_role import by_role
from fzero.pipeline import Schedule
from fzero.plan.pipeline_cut import UNCUT
from fzero.plan.state_plan import Plan
from fzero.shard.coded_sums import coded_bytes, coded_sums
from fzero.shard.owned_operands import owned_operands
from fzero.spec import Spec

LARGE = 8  # logits that are more than one part of so many of a budget are worth a word


def lower_step(
    spec: Spec,
    state: Any,
    batch: Any,
    plan: Plan,
    context: LoweringContext,
    fn: Callable[..., Any] | None = None,
) -> Lowered:
    """The program of a spec's step, or of the evaluation of `fn` (`resolve.train_step`).

    state, batch: pytrees of tensors; only shapes and dtypes count.
    """
    step, asked = train_step(spec, fn), _Asked(lowering_options(spec), context)
    captured = _captured_once(spec, step, asked, state, batch, plan, fn is None)
    lowered = _lower(step, asked, captured, plan)
    if fn is None:
        paths = [*lowered.graph.state_paths, *lowered.graph.batch_paths]
        ends = ["/".join(parts[i:]) for parts in (path.split("/") for path in paths) for i in range(len(parts))]
        check_rules("Precision(keep=...)", step.precision.keep, ends)  # rules match within an argument of a loss
        check_rules("Precision(exact=...)", step.precision.exact_rules, ends)
    return lowered


def captured_step(spec: Spec, state: Any, batch: Any, plan: Plan, context: LoweringContext) -> Graph:
    """The graph of a spec's step, as it is captured for `lower_step`."""
    step, asked = train_step(spec), _Asked(lowering_options(spec), context)
    return _captured_once(spec, step, asked, state, batch, plan)[0]


@dataclass(frozen=True)
class _Asked:
    """What a spec wants of a program, and what there is to lower it with."""

    wanted: LoweringOptions
    context: LoweringContext


def _captured_once(
    spec: Spec, step: TrainStep, asked: _Asked, state: Any, batch: Any, plan: Plan, trains: bool = True
) -> Captured:
    """`_captured`, or what is known of the same training step."""
    make, captures = partial(_captured, step, asked, state, batch, plan), asked.context.captures
    return captures.of(spec, state, batch, plan, make) if captures is not None and trains else make()


@collector_paused()
def _captured(step: TrainStep, asked: _Asked, state: Any, batch: Any, plan: Plan) -> Captured:
    """The step, captured, and that of one rank of the axes that cut dims."""
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
    if step.loss_chunks is not None:
        graph = chunked(graph, step.loss_chunks)
    axes = plan.mesh.model_axes
    cuts = [[str(leaf.layout.on(axis)) for axis, _ in axes] for leaf in plan.leaves]
    kept = asked.context.kept if asked.context.deciders is decide.DECIDERS else NOTHING
    kept = kept.of_step(graph, axes, cuts, asked.wanted.sequence)
    local, sharding = local_step(graph, plan, asked.wanted.sequence, kept=kept)
    if sharding is not None and (codec := step.precision.sums) is not None:
        regions = [coded_bytes(region.gm, codec) for region in local.regions]
        sharding = sharding.coded(codec, {key: nbytes for sent in regions for key, nbytes in sent.items()})
    for rewrite in _rewrites(step, sharding):
        local = local.rewritten(rewrite)
    return graph, pad.padded(local), sharding, kept


@collector_paused()
def _lower(step: TrainStep, asked: _Asked, captured: Captured, plan: Plan) -> Lowered:
    """Lowers a captured step and runs the passes."""
    wanted, context, (graph, local, sharding, kept) = asked.wanted, asked.context, captured
    local, products = _products(local, asked)
    graph, sharding = (local, None) if sharding is None else (graph, replace(sharding, local=local))
    reduce = _reduce(local, plan, asked)
    collect()
    schedule = None
    if plan.cut is not None:
        schedule = wanted.pipeline.order(plan.mesh.roles, step.microbatches)
    options = _options(wanted)
    try:
        before = partial(
            naive, local, plan, reduce=reduce.value, transport=context.transport, verified=context.verified
        )
        read = (plan, reduce, products, context.transport, options, schedule, wanted, context.rates)
        kept = kept.at(*read, step.precision.sums)
        roles = kept.of(partial(_roles, before, plan, asked, options, schedule))
    except SpecError as error:  # of a budget, which may not choose other bits
        if not (more := _other_bits(step, graph, reduce, wanted)):
            raise
        raise SpecError(f"{error}{more}") from None
    programs = {number: role.program for number, role in roles.items()}
    if kept.key in kept.read:
        check_kept(programs, before())
    decided = {number: role.decided for number, role in roles.items()}
    cut = UNCUT if plan.cut is None else plan.cut.choice
    decisions = Decisions(plan.bucket_bytes, cut, _strategies(sharding), products, reduce, decided)
    choices = {question: choice.reason for question, choice in products.items()}
    first = roles[0].first
    for name, choice in (("reduce", reduce), ("prefetch", first.prefetch), ("update_on", first.update_on)):
        if choice.how == CHOSEN:
            choices[name] = choice.reason
    choices |= notes(programs, wanted)
    if said := sentence(programs, step.precision, asked.context.rates):
        choices["codec"] = said
    records = {number: role.records for number, role in roles.items()}
    return Lowered(graph, plan, programs, choices, records, decisions, options, schedule, sharding)


def _rewrites(step: TrainStep, sharding: Sharding | None) -> Iterator[Callable[[fx.GraphModule], fx.GraphModule]]:
    """What is rewritten in a rank's regions before anything is chosen for them, in this order: the sums that travel in
    codes, the codes as messages and what these say, and what transfers read."""
    codec = step.precision.sums
    if sharding is not None and codec is not None:
        yield lambda gm: coded_sums(gm, codec)
    yield spelled_out
    if sharding is not None:
        yield owned_operands


def _products(graph: Graph, asked: _Asked) -> tuple[Graph, dict[str, Choice[str]]]:
    """(the graph, by question the library of each matrix product), where the spec lets fzero choose them."""
    if asked.wanted.matmul != "fastest":
        return graph, {}
    products = matmul.products(graph)
    figures = matmul.figures_of(products, asked.context.costs)
    made = {question: asked.context.deciders.product(question, figures.get(question)) for question in products}
    chosen = {products[question] for question, choice in made.items() if choice.value != "torch"}
    return (matmul.rewritten(graph, chosen) if chosen else graph), made


def _reduce(graph: Graph, plan: Plan, asked: _Asked) -> Choice[str]:
    """When the gradients of microbatches are reduced."""
    if asked.wanted.reduce is not None:
        return Choice.given(asked.wanted.reduce, "Spec(reduce=)")
    if plan.data_ranks == 1 or all(region.microbatches == 1 for region in graph.regions):
        return Choice("end", "there is one microbatch, or one rank of the data", IDLE)
    if any(node.target is FED_MEAN for node in graph.gm.graph.nodes):
        return Choice("end", "what codes of gradients lose is kept once for a step", IDLE)
    return asked.context.deciders.reduce(graph, plan)


def _other_bits(step: TrainStep, graph: Graph, reduce: Choice[str], wanted: LoweringOptions) -> str:
    """What would need less of the device and has other bits, as text that ends an error of a budget."""
    ways = ""
    if wanted.device_bytes is None:
        return ways
    if reduce.how == CHOSEN and reduce.value == "end":
        ways += ". Or say reduce='each', which holds no whole gradients and has other bits"
    chunks, nbytes = chunks_for(graph) if step.loss_chunks is None else (1, 0)
    if nbytes * LARGE > wanted.device_bytes:
        ways += (
            f". Or say loss_chunks={chunks}, which has other bits and holds the logits of one chunk; those of all "
            f"tokens are {nbytes:,} bytes"
        )
    return ways


def _strategies(sharding: Sharding | None) -> dict[str, Choice[tuple[str, ...]]]:
    """By axis, outermost first, the transfers that values make over it."""
    if sharding is None:
        return {}
    sent = [move for move in sharding.moves if move.nbytes]
    reason = f"the fewest bytes, node after node: {len(sent)} transfers of a microbatch"
    total = sum(move.nbytes for move in sent)
    return {
        **_strategies(sharding.before),
        sharding.axis: Choice(tuple(map(str, sharding.moves)), reason, cost=total, unit="bytes sent by a rank"),
    }


@dataclass(frozen=True)
class _RoleProgram:
    """The program of one role, what was decided for it at first and, under budgets, in the end, and what all passes
    changed."""

    program: Program
    first: RoleDecisions
    decided: RoleDecisions
    records: tuple[PassRecord, ...]


def _roles(
    make: Callable[[], Program], plan: Plan, asked: _Asked, options: Options, schedule: Schedule | None
) -> dict[int, _RoleProgram]:
    """The programs. Under a budget of the device the copies of parameters that stay between steps go before all else.

    make: makes the program before all passes.
    """
    budget, tried = asked.wanted.device_bytes, asked.context.deciders.copies()
    *others, last = tried if budget is not None else tried[:1]
    for stay in others:
        options = _with(options, stay)
        whole, first = _before_roles(make(), plan, options, schedule)
        if not whole.copies:  # nothing else would be tried
            return _each_role(whole, first, asked, _with(options, NO_COPIES), schedule)
        try:
            return _each_role(whole, first, asked, options, schedule, as_wanted=True)
        except SpecError:
            collect()
            last = replace(last, reason=f"Spec(device_bytes={budget}): with them what was wanted does not fit")
    options = _with(options, last)
    whole, first = _before_roles(make(), plan, options, schedule)
    none = last.value and not whole.copies
    return _each_role(whole, first, asked, _with(options, NO_COPIES if none else last), schedule)


def _with(options: Options, copies: Choice[bool]) -> Options:
    return replace(options, decided=RoleDecisions(copies=copies))


def _before_roles(
    program: Program, plan: Plan, options: Options, schedule: Schedule | None
) -> tuple[Program, tuple[PassRecord, ...]]:
    """The program of all roles after the first passes, and their records."""
    chunk_of = {} if schedule is None else plan.chunk_of()
    records: tuple[PassRecord, ...] = ()
    for row in BEFORE_ROLES:
        program, record = optimise(program, replace(options, chunk_of=chunk_of), [row])
        records += record
        collect()
    return program, records


def _each_role(
    program: Program,
    first: tuple[PassRecord, ...],
    asked: _Asked,
    options: Options,
    schedule: Schedule | None,
    *,
    as_wanted: bool = False,
) -> dict[int, _RoleProgram]:
    """The further passes; with a pipeline, over the program of each role.

    program, first: after the first passes, and their records. as_wanted: where what was wanted does not fit the device,
    less is not tried. Roles share equal segments: what is known of one is known of all.
    """
    parts = {0: program} if schedule is None else dict(by_role(program, schedule))
    roles, segments = {}, dict[str, fx.GraphModule]()
    for number in list(parts):
        part = parts.pop(number)
        collect()
        if schedule is not None:
            cut = PassRecord.of(
                "by_role", f"from here on there is a program for each role: this is {number}", program, part
            )
            first = (*first[: len(BEFORE_ROLES)], cut)
        half, second = optimise(part, options, UNTIL_PREFETCH)
        half = replace(half, segments={key: segments.setdefault(key, gm) for key, gm in half.segments.items()})
        decided = _of_role(half, asked, options)
        read, attempts = replace(options, decided=decided), asked.context.deciders.tighter(half, decided)
        device, host = asked.wanted.device_bytes, asked.wanted.host_bytes
        if as_wanted and host is not None:
            fitted(half, read, device, None, iter([decided]))
        elif as_wanted:
            attempts = iter([decided])
        done, taken, third = fitted(half, read, device, host, attempts)
        roles[number] = _RoleProgram(done, decided, taken, (*first, *second, *third))
    return roles


def _of_role(program: Program, asked: _Asked, options: Options) -> RoleDecisions:
    """What the last passes of a role's program read. program: before them."""
    wanted, deciders, copies = asked.wanted, asked.context.deciders, options.decided.copies
    if wanted.prefetch is not None:
        ahead = Choice.given(wanted.prefetch, "Spec(prefetch=)")
    else:
        ahead = deciders.prefetch(program, options, asked.context.rates)
    if wanted.update_on is not None:
        place = Choice.given(wanted.update_on, "Spec(update_on=)")
    elif wanted.offloads:
        place = deciders.update_on(program, asked.context.rates)
    else:
        place = Choice("device", "nothing is held off the device", IDLE)
    return RoleDecisions(ahead, deciders.fetch_ahead(program), place, deciders.tile_bytes(program), copies)


def _options(wanted: LoweringOptions) -> Options:
    return Options(
        gather_bytes=wanted.gather_bytes,
        prefetch_bytes=wanted.prefetch_bytes,
        overlap=wanted.overlap,
        remat=wanted.remat,
        compile=wanted.compile,
        gradients=wanted.gradients,
    )


def fakes_on(like: Any, device: torch.device) -> Any:
    """The pytree with fake tensors on a device in place of its tensors."""

    mode = FakeTensorMode()
    return tree.map(lambda x: fake_empty(mode, x.shape, x.dtype, device) if isinstance(x, torch.Tensor) else x, like)
