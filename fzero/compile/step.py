"""step: the road from a Spec to a program: the state's recipe, its plan, the captured step, the passes."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fzero import random, tree
from fzero._torch_compat import FakeTensorMode, is_fake
from fzero.capture import ambient, trace_step
from fzero.capture.graph import Graph, PerRank
from fzero.capture.joint import asks_key
from fzero.capture.leaves import check_leaf
from fzero.codegen import matmul
from fzero.cost import choose
from fzero.cost.autotune import Costs
from fzero.cost.memory import MemoryAccount, account
from fzero.cost.rates import Rates
from fzero.errors import FzeroError, SpecError, TreeError, at
from fzero.functional import forward
from fzero.ir import fx_nodes
from fzero.ir.program import Program, wire_bytes
from fzero.lowering.build import build
from fzero.passes import Options, optimise
from fzero.passes.prefetch import prefetch
from fzero.plan.layout import BUCKET_BYTES, Plan, layout
from fzero.precision import DTYPES, LOW
from fzero.random._check import is_key
from fzero.runtime.cuda_graphs import obstacle
from fzero.spec import DEFAULT_PARAMS, Spec
from fzero.state.first_state import Deferred, Recipe, bits
from fzero.state.source import Source, like
from fzero.training import Training


@dataclass(frozen=True)
class Lowered:
    """A step lowered for a world: what `fzero.lower` returns. Nothing is allocated and nothing has run."""

    graph: Graph
    plan: Plan
    program: Program
    choices: Mapping[str, str] = field(default_factory=dict)  # what was chosen, and why

    @cached_property
    def digest(self) -> str:
        """What every rank must agree on: the program, and the constants that the update reads."""
        fixed = fx_nodes.placeholders(self.graph.gm.graph)[len(self.plan.leaves) + len(self.graph.batch_paths) :]
        read = [any(u.target is not torch.ops.fzero.region.default for u in node.users) for node in fixed]
        values = [bits(x) for x, used in zip(self.graph.constants.values(), read, strict=True) if used]
        return hashlib.blake2b(" ".join([self.program.digest, *values]).encode(), digest_size=8).hexdigest()

    @cached_property
    def memory(self) -> MemoryAccount:
        """Bytes by kind at the planned peak, and the peak: per rank."""
        return account(self.program)


def training_of(spec: Spec) -> Training:
    """The step that a spec's `loss` and `optimizer` stand for."""
    assert spec.loss is not None
    assert spec.optimizer is not None
    return Training(
        spec.loss,
        spec.optimizer,
        precision=spec.policy,
        trainable=spec.trainable_rules,
        clip_norm=spec.clip_norm,
        clip_value=spec.clip_value,
        nonfinite=spec.nonfinite_policy,
    )


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's collector would walk the graphs of a lowering, hundreds of thousands of objects, again and again: a
    third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@collector_paused()
def recipe_for(spec: Spec, params: Any, key: torch.Tensor | None, device: torch.device) -> Recipe:
    ambient.check_trace()
    check_key("init", key)
    if key is not None and spec.step is not None and not callable(params):
        raise TreeError("fzero.init(key=...): with step= the state is yours: put the key into it, as {'key': key, ...}")
    wants = key is not None or _asks_key(spec)
    start = (random.key(0) if key is None else key).to(device)
    if callable(params) and not isinstance(params, torch.nn.Module):
        return Recipe(lambda k: _whole(spec, _not_empty(params(k)), k if wants else None), [start], device)
    if isinstance(params, torch.nn.Module):
        raise TreeError(
            "params is a module: take it apart with fzero.interop.from_module(module), which gives (params, "
            "buffers, apply)"
        )
    source = params if isinstance(params, Source) else None
    params = like(source) if source is not None else params
    paths, leaves, treedef = tree.flatten(_not_empty(params))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(getattr(leaf, "value", leaf), torch.Tensor)]

    def whole(*xs: torch.Tensor) -> Any:
        full = list(leaves)
        for i, x in zip(tensors, xs, strict=False):
            full[i] = PerRank(x) if isinstance(leaves[i], PerRank) else x
        return _whole(spec, tree.unflatten(treedef, full), xs[-1] if wants else None)

    if spec.loss is not None:
        _check_apart(paths, leaves)
    inputs = [getattr(leaves[i], "value", leaves[i]).detach() for i in tensors]
    for i, value in zip(tensors, inputs, strict=True):
        check_leaf(at("params", paths[i]), value)
    inputs = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in inputs]
    recipe = Recipe(whole, [*inputs, start] if wants else inputs, device)
    if source is not None:
        recipe.inputs[: len(paths)] = [Deferred(source, path) for path in paths]
    return recipe


def check_key(name: str, key: Any) -> None:
    if key is not None and not is_key(key):
        raise TreeError(f"fzero.{name}(key={key!r}): needed a key, as fzero.random.key(0)")


def _not_empty(params: Any) -> Any:
    if not tree.flatten(params)[1]:
        raise TreeError("params has no leaves: pass a pytree of tensors, or a function of a key that makes one")
    return params


def _check_apart(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuses one tensor as two parameters: they would start equal and drift apart."""
    seen: dict[int, str] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        real = isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and not is_fake(leaf) and leaf.numel()
        if not real:
            continue
        if id(leaf) in seen:
            raise TreeError(
                f"{at('params', seen[id(leaf)])} and {at('params', path)} are one tensor: as two leaves they would "
                "drift apart. Keep one and use it twice in the loss, or clone() it"
            )
        seen[id(leaf)] = path


def _asks_key(spec: Spec) -> bool:
    """Whether a step needs a key though none was given: the loss has a parameter for it, or rounding is stochastic."""
    return spec.loss is not None and (asks_key(spec.loss) or DTYPES.get(spec.policy.params or "") in LOW)


def _whole(spec: Spec, params: Any, key: torch.Tensor | None) -> Any:
    """The first state. A function that makes params and the training after it draw from different keys."""
    if spec.optimizer is None:
        return params
    return training_of(spec).init(params, None if key is None else random.fold_in(key, -2))


def plan_for(
    spec: Spec,
    paths: Sequence[str],
    values: Sequence[torch.Tensor],
    per_rank: Sequence[str],
    world_size: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """The layout of a state's leaves. `bucket_bytes` holds where the spec names none."""
    if spec.params != DEFAULT_PARAMS:
        _check_rules("Spec(params=...)", spec.param_rules, paths)
    of_params = [path.removeprefix("params/") for path in paths if path.startswith("params/")]
    _check_rules("Spec(trainable=...)", spec.trainable_rules or (), of_params)
    plan = layout(
        paths,
        values,
        world_size=world_size,
        zero=spec.zero,
        bucket_bytes=spec.bucket_bytes or bucket_bytes,
        params=spec.param_rules,
        per_rank=per_rank,
        compute=spec.policy.compute_dtype,
    )
    _check_rules(
        "Spec(remat=...)", spec.remat_rules, [*paths, *(s.path for b in plan.buckets.values() for s in b.slots)]
    )
    return plan


def by_flags(spec: Spec, params: Any) -> Spec:
    """The spec; where it does not say what trains and some of the parameters require grad and others do not, with
    `trainable` naming the former. What is wrong with the parameters is said later, where all ranks hear it."""
    if spec.loss is None or spec.trainable is not None or callable(params):
        return spec
    try:
        leaves = zip(*tree.flatten(params)[:2], strict=True)
    except FzeroError:
        return spec
    floats = [
        (path, leaf.requires_grad)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
    ]
    trained = [path for path, flag in floats if flag]
    return replace(spec, trainable=tuple(trained)) if 0 < len(trained) < len(floats) else spec


def _check_rules(what: str, rules: Iterable[str], paths: Iterable[str]) -> None:
    """A rule that matches nothing is a mistake in it, which would otherwise pass in silence."""
    paths = list(paths)
    for rule in rules:
        if rule != "**" and not any(tree.matches(rule, path) for path in paths):
            known = {path.rpartition("/")[0] + "/**" for path in paths if "/" in path} | set(paths)
            raise SpecError(f"{what}: the rule {rule!r} matches no leaf.{tree.suggest(rule, known)}")


def lower_step(
    spec: Spec,
    state: Any,
    batch: Any,
    plan: Plan,
    via: str,
    fn: Callable[..., Any] | None = None,
    costs: Costs | None = None,
    rates: Rates | None = None,
) -> Lowered:
    """The program of a step, or of the evaluation of `fn`: a step that changes nothing and has fn's result as metrics.

    The batch of an evaluation is {"batch", "key"}. Without `costs` nothing is measured: see `fzero.codegen.matmul`.
    `rates` are those of the transport where they were measured.
    """
    if fn is not None:
        return _lower(spec, _evaluation(spec, fn), fn, state, batch, plan, via, costs, rates)
    user, fn = (spec.step, spec.step) if spec.step is not None else (training_of(spec).step, spec.loss)
    assert user is not None
    assert fn is not None
    lowered = _lower(spec, user, fn, state, batch, plan, via, costs, rates)
    paths = [*lowered.graph.state_paths, *lowered.graph.batch_paths]
    ends = ["/".join(parts[i:]) for parts in (path.split("/") for path in paths) for i in range(len(parts))]
    _check_rules("Precision(keep=...)", spec.policy.keep, ends)  # a path within some argument of some loss
    return lowered


def _evaluation(spec: Spec, fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def step(state: Any, given: Any) -> Any:
        params = state if spec.loss is None else state["params"]
        return state, {"result": forward(fn, key=given["key"])(params, given["batch"])}

    return step


@collector_paused()
def _lower(
    spec: Spec, user: Callable[..., Any], fn: Callable[..., Any], state: Any, batch: Any, plan: Plan, via: str,
    costs: Costs | None, rates: Rates | None,
) -> Lowered:  # fmt: skip
    graph = trace_step.capture(
        user,
        state,
        batch,
        microbatches=spec.microbatches,
        allow_unused=spec.allow_unused,
        precision=spec.policy,
        axis=plan.axis,
        per_rank=[leaf.path for leaf in plan.leaves if leaf.per_rank],
        fns=[fn],
    )
    choices: dict[str, str] = {}
    if spec.products == "fastest":
        graph, choices = matmul.choose(graph, costs or Costs("products", measures=False))
    ahead: dict[str, str] = {}  # why, of the program lowered last
    options = Options(
        prefetch=spec.prefetch if spec.prefetch is not None else _prefetch(spec, via, rates, ahead),
        gather_bytes=spec.gather_bytes,
        overlap=spec.overlap,
        remat=spec.remat_rules,
        compile=spec.compile,
    )
    reductions = (spec.reduce,) if spec.reduce else ("end", "each")
    if plan.world_size == 1 or all(region.microbatches == 1 for region in graph.regions):
        reductions = reductions[:1]
    programs, reasons = {}, {}
    for how in reductions:
        programs[how] = optimise(build(graph, plan, reduce=how, transport=via), options)
        reasons[how] = dict(ahead)
    how, why = _choice_of_reduce(programs)
    if why:
        choices["reduce"] = why
    choices |= reasons[how]
    if via == "nccl" and spec.cuda_graph:
        against = obstacle(programs[how], torch.device("cuda"))
        choices["cuda_graph"] = f"not one graph: {against}" if against else "the step is one graph"
    return Lowered(graph, plan, programs[how], choices)


def _prefetch(spec: Spec, via: str, rates: Rates | None, why: dict[str, str]) -> Callable[[Program], int]:
    """How many segments ahead the gathers of a program start: by what was measured, else by a rule."""
    rule = 0 if via == "shared" else 1

    def depth(program: Program) -> int:
        if not any(op.gathers and program.buffers[op.writes[0].name].kind == "gathered" for op in program.ops):
            return rule
        if rates is not None:
            tried = {n: prefetch(program, n, spec.gather_bytes) for n in sorted({rule, *choose.DEPTHS})}
            chosen, why["prefetch"] = choose.prefetch_depth(tried, rule, rates)
            return chosen
        if rule:
            why["prefetch"] = "prefetch=1: one segment ahead; nothing was measured"
        else:
            why["prefetch"] = (
                "prefetch=0: ranks copy from one another's memory when they wait, so nothing would be hidden"
            )
        return rule

    return depth


def _choice_of_reduce(programs: Mapping[str, Program]) -> tuple[str, str]:
    """(how, the reason): "end" sends least; it is taken unless whole gradients raise the planned peak by a tenth."""
    if len(programs) == 1:
        return next(iter(programs)), ""
    peak = {how: account(program).peak for how, program in programs.items()}
    sent = {how: sum(wire_bytes(program, one) for one in program.ops) for how, program in programs.items()}
    how = "end" if peak["end"] <= 1.1 * peak["each"] else "each"
    shown = (f"{one}: peak {peak[one] / 1e9:.3g} GB, {sent[one] / 1e9:.3g} GB sent" for one in ("end", "each"))
    return how, f"reduce={how!r} by memory ({'; '.join(shown)}). Spec(reduce=...) chooses otherwise"


def fakes_on(like: Any, device: torch.device) -> Any:
    """The pytree with fake tensors on a device in the place of its tensors."""

    def one(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device=device) if isinstance(x, torch.Tensor) else x

    with FakeTensorMode():
        return tree.map(one, like)
