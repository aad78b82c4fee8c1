"""capture: a user's step, traced once on fake tensors into a `Graph`.

Two levels. The *outer* graph is everything done to the state. Each `fzero.value_and_grad` in it is one node, a
*region*, whose own joint graph (forward and backward of that loss, at the shape of one microbatch) is traced by
itself. Reductions over mesh axes are nodes too (`fzero::reduce`), put there by `value_and_grad` and `pmean`, so that
nothing that moves between ranks has to be guessed later. No device and no process group takes part.

Nothing is baked in silently: see `_refuse` for what is refused, `_lift` for what becomes a named constant.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fzero import segments, tree
from fzero._torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    disable_proxy_modes_tracing,
    is_fake,
    make_fx,
    real_tensors,
    tracing_graph,
)
from fzero.errors import CaptureError, TreeError, at
from fzero.plan.layout import buffer_name
from fzero.program import DTYPE_NAMES

aten = torch.ops.aten
_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define("region(Tensor[] inputs, int index) -> Tensor[]")
_LIBRARY.define("reduce(Tensor x, str op, str axis) -> Tensor")
REDUCE_OPS = ("mean", "sum", "max")


@torch.library.register_fake("fzero::region", lib=_LIBRARY)
def _region_fake(inputs: list[torch.Tensor], index: int) -> list[torch.Tensor]:
    return [torch.empty_like(value) for value in current().regions[index].values]


@torch.library.register_fake("fzero::reduce", lib=_LIBRARY)
def _reduce_fake(x: torch.Tensor, op: str, axis: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.impl("fzero::reduce", "CompositeExplicitAutograd", lib=_LIBRARY)
def _reduce_alone(x: torch.Tensor, op: str, axis: str) -> torch.Tensor:
    return x.clone()  # outside a step there is a world of one


@dataclass(frozen=True)
class Region:
    """One `value_and_grad`: its joint graph and what its inputs and outputs are.

    Outputs are the loss, one gradient per entry of `grad_of` (the index of the input it belongs to), then the aux
    leaves. Inputs marked in `sliced` carry the batch in dim 0 and are cut into `microbatches` parts.
    """

    gm: fx.GraphModule
    values: tuple[torch.Tensor, ...]
    grad_of: tuple[int, ...]
    sliced: tuple[bool, ...]
    microbatches: int
    num_aux: int
    source: str


@dataclass(frozen=True)
class Graph:
    """A captured step. Placeholders of `gm` are the state's leaves, the batch's leaves, then the constants."""

    gm: fx.GraphModule
    regions: tuple[Region, ...]
    state_paths: tuple[str, ...]
    batch_paths: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    metric_names: tuple[str, ...]
    metrics_spec: Any
    varying_metrics: tuple[str, ...]


@dataclass
class Tracing:
    """What a trace in progress knows; `value_and_grad` and the reductions ask for it."""

    mode: FakeTensorMode
    fns: tuple[Callable[..., Any], ...]
    microbatches: int = 1
    allow_unused: bool = False
    axis: str = "dp"
    depth: int = 0
    phase: str | None = None
    regions: list[Region] = field(default_factory=list)


_active: ContextVar[Tracing | None] = ContextVar("fzero_tracing", default=None)


def current() -> Tracing:
    tracing = _active.get()
    assert tracing is not None, "no step is being captured"
    return tracing


def active() -> Tracing | None:
    """The trace in progress, or None outside a step."""
    return _active.get()


def describe(value: Any) -> str:
    """`f32[2, 3]`: a tensor as errors and messages show it."""
    if isinstance(value, torch.Tensor):
        return f"{DTYPE_NAMES.get(value.dtype, str(value.dtype))}{list(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def check_names(what: str, paths: Sequence[str]) -> None:
    """Refuses leaves that a program would have to call by one name."""
    seen: dict[str, str] = {}
    for path in paths:
        name = buffer_name(path)
        if name in seen:
            raise TreeError(f"{at(what, seen[name])} and {at(what, path)} have one name in the program: rename a key")
        seen[name] = path


def check_leaf(name: str, value: torch.Tensor) -> None:
    """Refuses what no buffer can hold. (`value` may be fake.)"""
    if value.layout is not torch.strided or value.dtype not in DTYPE_NAMES or value.is_quantized:
        raise TreeError(
            f"{name} is a tensor of {value.dtype}, {value.layout}: needed a dense tensor of one of "
            f"{', '.join(DTYPE_NAMES.values())}. Convert it first"
        )


def capture(
    step: Callable[..., Any],
    state: Any,
    batch: Any,
    *,
    microbatches: int = 1,
    allow_unused: bool = False,
    axis: str = "dp",
    per_rank: Sequence[str] = (),
    fns: Sequence[Callable[..., Any]] = (),
) -> Graph:
    """The graph of `step(state, batch) -> (new state, metrics)`.

    `state` and `batch` are pytrees whose tensor leaves give shapes, dtypes and devices (fake or real, never read). A
    leaf of `batch` that is no tensor is passed to `step` as it is. Raises CaptureError or TreeError, naming leaf and
    line.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state_paths, state_leaves, state_spec = tree.flatten(state)
    batch_paths, batch_leaves, batch_spec = tree.flatten(batch)
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in batch_leaves]
    inputs = [fake_like(mode, leaf) for leaf in state_leaves]
    inputs += [fake_like(mode, leaf) for leaf, tensor in zip(batch_leaves, is_tensor, strict=True) if tensor]
    shown: dict[str, Any] = {}

    def flat(*flat_inputs: torch.Tensor) -> list[Any]:
        feed = iter(flat_inputs[len(state_leaves) :])
        full = [next(feed) if tensor else leaf for leaf, tensor in zip(batch_leaves, is_tensor, strict=True)]
        result = step(tree.unflatten(state_spec, flat_inputs[: len(state_leaves)]), tree.unflatten(batch_spec, full))
        new_leaves = _check_result(result, state_paths, state_leaves, state_spec, per_rank)
        names, metrics, spec = tree.flatten(result[1])
        check_names("metrics", names)
        for name, value in zip(names, metrics, strict=True):
            if not isinstance(value, torch.Tensor):
                raise CaptureError(
                    f"metric {name!r} is the Python value {value!r}: it would stay what it was at the first step. "
                    "Return a tensor computed from the state or the batch, or keep it out of the metrics"
                )
            check_leaf(at("metrics", name), value)
        shown.update(names=tuple(names), spec=spec)
        return [*new_leaves, *metrics]

    names = [at("state", p) for p in state_paths]
    names += [at("batch", p) for p, tensor in zip(batch_paths, is_tensor, strict=True) if tensor]
    tracing = Tracing(mode, (step, *fns), microbatches, allow_unused, axis)
    token = _active.set(tracing)
    try:
        gm = trace(tracing, flat, inputs, names)
        constants = _lift(tracing, gm)
    finally:
        _active.reset(token)
    _fold_updates(gm)
    segments.normalised(gm)
    num = len(state_leaves)
    graph = Graph(
        gm,
        tuple(tracing.regions),
        tuple(state_paths),
        tuple(p for p, tensor in zip(batch_paths, is_tensor, strict=True) if tensor),
        constants,
        shown["names"],
        shown["spec"],
        (),
    )
    varying = varying_nodes(graph, per_rank)
    outs = segments.outputs(gm.graph)
    for path, node in zip(state_paths, outs[:num], strict=True):
        if node in varying and path not in per_rank:
            where = node.meta.get("source") or "the step"
            raise CaptureError(
                f"{at('state', path)} would differ between ranks: it is computed at {where} from this rank's batch "
                "without a reduction. Reduce it with fzero.pmean, or keep one per rank with fzero.per_rank"
            )
    marked = tuple(name for name, node in zip(graph.metric_names, outs[num:], strict=True) if node in varying)
    return Graph(**{**graph.__dict__, "varying_metrics": marked})


def varying_nodes(graph: Graph, per_rank: Sequence[str]) -> set[fx.Node]:
    """The nodes whose value may differ between ranks: what depends on the batch without a reduction in between."""
    inputs = segments.placeholders(graph.gm.graph)
    num = len(graph.state_paths)
    varying = {n for path, n in zip(graph.state_paths, inputs, strict=False) if path in per_rank}
    varying |= set(inputs[num : num + len(graph.batch_paths)])
    for node in graph.gm.graph.nodes:
        if node.op != "call_function" or node.target is torch.ops.fzero.reduce.default:
            continue
        if any(argument in varying for argument in node.all_input_nodes):
            varying.add(node)
    return varying


def trace(
    tracing: Tracing, fn: Callable[..., Any], inputs: Sequence[torch.Tensor], names: Sequence[str]
) -> fx.GraphModule:
    """`fn(*inputs)` as a graph of aten ops without in-place work; `names` say what the inputs are in errors."""

    def watched(*xs: torch.Tensor) -> Any:
        with _Watch(tracing, user_line), torch.enable_grad():
            return fn(*xs)

    with _explained(), tracing.mode:
        gm = make_fx(watched, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    _refuse(tracing, gm, names)
    if any(segments.mutated(node) for node in gm.graph.nodes):
        gm = _functionalised(tracing, gm, inputs)
    return gm


def fake_like(mode: FakeTensorMode, leaf: torch.Tensor) -> torch.Tensor:
    """A contiguous fake tensor of this shape, dtype and device."""
    with mode:
        return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device=leaf.device)


# --- what a trace may not contain -----------------------------------------------------------------------------------


def _check_result(result: Any, paths: list[str], leaves: list[Any], spec: Any, per_rank: Sequence[str]) -> list[Any]:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise CaptureError(
            f"a step returns (new state, metrics), this one returned {type(result).__name__}. "
            "Without metrics, return (state, {})"
        )
    new_paths, new_leaves, _ = tree.flatten(result[0])
    if new_paths != paths:
        lost, extra = sorted(set(paths) - set(new_paths)), sorted(set(new_paths) - set(paths))
        first = (
            f"{at('state', lost[0])} is missing"
            if lost
            else f"{at('state', extra[0])} is new"
            if extra
            else "its order differs"
        )
        raise TreeError(f"the step's new state has another structure than its state: {first}. Return the same pytree")
    for path, old, new in zip(paths, leaves, new_leaves, strict=True):
        if isinstance(new, PerRank):
            if path not in per_rank:
                raise CaptureError(f"{at('state', path)} became per_rank in the step: make it so in fzero.init too")
            new = new.value
        name = at("state", path)
        if not isinstance(new, torch.Tensor):
            raise CaptureError(
                f"{name} became the Python value {new!r}: it would stay what it was at the first step. "
                f"Compute it from the state, as in {name} + 1"
            )
        if tuple(new.shape) != tuple(old.shape) or new.dtype != old.dtype:
            raise TreeError(
                f"{name} was {describe(old)} and the step made it {describe(new)}: "
                "a step keeps shapes and dtypes. Cast or reshape it back"
            )
        if new.device != old.device or new.layout is not torch.strided:
            raise TreeError(
                f"{name} was a dense tensor on {old.device} and the step made it {new.layout} on {new.device}: "
                "a step keeps devices and layouts"
            )
    return [new.value if isinstance(new, PerRank) else new for new in new_leaves]


@dataclass(frozen=True)
class PerRank:
    """A leaf of which every rank keeps its own: made by `fzero.per_rank`."""

    value: Any


def _refuse(tracing: Tracing, gm: fx.GraphModule, names: Sequence[str]) -> None:
    inputs = dict(zip(segments.placeholders(gm.graph), names, strict=False))
    for node in gm.graph.nodes:
        where = node.meta.get("source") or "the step"
        for argument in segments.mutated(node):
            root = segments.base(argument)
            if root in inputs:
                raise CaptureError(
                    f"{inputs[root]} is changed in place by {node.target} at {where}: a step is pure. "
                    "Return a new value instead"
                )
            if root.op == "get_attr":
                raise _closed_over_write(tracing, _attribute(gm, root), node.target, where)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _no_dropout(node):
            raise _ambient(node.target, where)
        if node.op == "get_attr":
            value = _attribute(gm, node)
            if is_fake(value) and not tracing.depth:
                raise CaptureError(
                    f"a tensor {describe(value)} at {where} was made inside a loss, or in another trace, and kept: it "
                    "has no value here. Return it from the loss as aux (has_aux=True)"
                )
            wanted = [u for u in node.users if not (u.meta.get("no_grad") or u.target in _NO_GRAD)]
            if isinstance(value, torch.Tensor) and not is_fake(value) and value.requires_grad and wanted:
                raise CaptureError(
                    f"{_name_of(value, tracing.fns)} is closed over at {wanted[0].meta.get('source') or where} and "
                    "requires grad: it would get no gradient and never change. Pass it in through the parameters, or "
                    "detach() it"
                )


# ops that ask for no gradient of what they read; a region's own graph has been looked at
_NO_GRAD = (aten.detach.default, torch.ops.fzero.region.default)


def _ambient(op: Any, where: str) -> CaptureError:
    return CaptureError(
        f"{op} at {where} draws from torch's ambient generator: the step would not be a function of its state. "
        "Use fzero.random with a key from the state or the batch"
    )


def _closed_over_write(tracing: Tracing, value: Any, op: Any, where: str) -> CaptureError:
    return CaptureError(
        f"{_name_of(value, tracing.fns)} is closed over and changed in place by {op} at {where}: put it in the state "
        "and return its new value"
    )


def _no_dropout(node: fx.Node) -> bool:
    """Attention kernels carry the tag for their dropout; with probability 0 they draw nothing."""
    schema = segments.schema(node)
    named = dict(node.kwargs)
    if schema is not None:
        named.update({a.name: v for a, v in zip(schema.arguments, node.args, strict=False)})
        named = {**{a.name: a.default_value for a in schema.arguments}, **named}
    return bool(named.get("dropout_p", 1.0) == 0.0)


def _attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    return getattr(gm, str(node.target))


def lifted(gm: fx.GraphModule, graph_inputs: int) -> list[torch.Tensor]:
    """Turns every closed-over tensor of a region into one more placeholder; the tensors, in order.

    A tensor made in the trace from a literal (`torch.tensor(0.5)`) of one element becomes a `full` instead.
    """
    after = segments.placeholders(gm.graph)[graph_inputs - 1] if graph_inputs else None
    found: dict[int, fx.Node] = {}
    values: list[torch.Tensor] = []
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        value = _attribute(gm, node)
        fresh = node.users and all(u.target is aten.lift_fresh_copy.default for u in node.users)
        if fresh and value.numel() == 1 and not is_fake(value):
            for user in list(node.users):
                with gm.graph.inserting_before(user):
                    options = {"dtype": value.dtype, "device": user.meta["val"].device}
                    full = gm.graph.call_function(aten.full.default, (list(value.shape), value.item()), options)
                full.meta = dict(user.meta)
                user.replace_all_uses_with(full)
                gm.graph.erase_node(user)
        elif id(value) in found:
            node.replace_all_uses_with(found[id(value)])
        else:
            with gm.graph.inserting_after(after) if after else gm.graph.inserting_before():
                after = gm.graph.placeholder(f"lifted_{len(values)}")
            after.meta["val"] = value
            node.replace_all_uses_with(after)
            found[id(value)] = after
            values.append(value)
        gm.graph.erase_node(node)
    gm.recompile()
    return values


def _lift(tracing: Tracing, gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    before = len(segments.placeholders(gm.graph))
    constants: dict[str, torch.Tensor] = {}
    values = lifted(gm, before)
    for node, value in zip(segments.placeholders(gm.graph)[before:], values, strict=True):
        name = _found_name(value, tracing.fns) or f"{describe(value)}"
        name = name if name not in constants else f"{name}#{len(constants)}"
        constants[name] = value.detach()
        node.meta["val"] = fake_like(tracing.mode, value)
    return constants


def _fold_updates(gm: fx.GraphModule) -> None:
    """apply_delta(p, delta(new, p)) is new: the optimizer's kernel makes parameters, optax's shape asks for updates."""
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.fzero.apply_delta.default:
            old, update = node.args
            if update.target is torch.ops.fzero.delta.default and update.args[1] is old:
                node.replace_all_uses_with(update.args[0])
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _functionalised(tracing: Tracing, gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The same graph with in-place work on its own intermediates made pure."""
    replay = _Replay(gm)

    def watched(*xs: torch.Tensor) -> Any:
        with _Watch(tracing, lambda: replay.node.meta.get("source", ""), lambda: replay.node.meta.get("phase")):
            return torch.func.functionalize(replay.run)(*xs)

    with _explained(), tracing.mode:
        pure = make_fx(watched, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    left = [node for node in pure.graph.nodes if segments.mutated(node)]
    if left:
        raise CaptureError(f"{left[0].target} works in place where it cannot be made pure: use its pure form")
    return pure


class _Replay(fx.Interpreter):
    """Runs a graph and tells which of its nodes it is at."""

    node: fx.Node

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        return super().run_node(n)


def _name_of(value: Any, fns: Sequence[Callable[..., Any]]) -> str:
    """A closed-over tensor as messages name it: as the user's code does where that is found."""
    name = _found_name(value, fns)
    return f"tensor {name!r}" if name else f"a tensor {describe(value)}"


def _found_name(value: Any, fns: Sequence[Callable[..., Any]]) -> str | None:
    """The name a closed-over tensor goes by in the user's code."""
    seen: set[int] = set()

    def look(item: Any, name: str, depth: int) -> str | None:
        if item is value:
            return name
        if depth == 0 or id(item) in seen:
            return None
        seen.add(id(item))
        children: list[tuple[str, Any]] = []
        if isinstance(item, torch.nn.Module):
            children = [(f"{name}.{n}", t) for n, t in [*item.named_parameters(), *item.named_buffers()]]
        elif isinstance(item, dict):
            children = [(f"{name}[{k!r}]", v) for k, v in item.items()]
        elif isinstance(item, (list, tuple)):
            children = [(f"{name}[{k}]", v) for k, v in enumerate(item)]
        elif isinstance(item, types.FunctionType):
            children = list(_variables(item))
        elif isinstance(item, functools.partial):
            given = [*enumerate(item.args), *item.keywords.items()]
            children = [(name, item.func), *((f"{name}({key})", v) for key, v in given)]
        elif isinstance(item, types.MethodType):
            children = [("self", item.__self__), (name, item.__func__)]
        elif hasattr(item, "__dict__"):
            children = [(f"{name}.{k}", v) for k, v in vars(item).items()]
        return next((hit for n, child in children if (hit := look(child, n, depth - 1))), None)

    for fn in fns:
        if name := look(fn, getattr(fn, "__name__", "fn"), 4):
            return name
    return None


def _variables(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over: free variables, globals (of functions inside it too) and defaults."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    codes = [fn.__code__]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        yield from ((name, fn.__globals__[name]) for name in code.co_names if name in fn.__globals__)
    arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    yield from zip(reversed(arguments), reversed(fn.__defaults__ or ()), strict=False)
    yield from (fn.__kwdefaults__ or {}).items()


# --- where in the user's code -----------------------------------------------------------------------------------------

_OURS = tuple(f"{path}{os.sep}" for path in (torch.__path__[0], os.path.dirname(__file__), tree.optree.__path__[0]))


def _is_users(filename: str) -> bool:
    """Whether a frame is of the user's code: not of torch, fzero or optree, and not generated."""
    return not filename.startswith((*_OURS, "<")) or filename.startswith(("<stdin>", "<ipython"))


def user_line(frame: types.FrameType | None = None) -> str:
    """`file.py:12` of the innermost caller outside torch, fzero and optree."""
    frame = frame or sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def defined_at(fn: Callable[..., Any]) -> str:
    """`loss_fn (file.py:12)`: a user's function, as messages name it."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(inspect.unwrap(fn), "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    name = getattr(fn, "__name__", type(fn).__name__)
    return f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code else name


class _Refused(Exception):
    """A CaptureError on its way out of torch: torch takes a TypeError in an operator for "try the other operand"."""


# ops that refuse mixed dtypes when they run, but not on fake tensors
_ONE_DTYPE = {
    aten.mm.default,
    aten.mv.default,
    aten.addmm.default,
    aten.addmv.default,
    aten.convolution.default,
}


class _Watch(TorchDispatchMode):
    """Sees every op before it is traced: refuses writes to real tensors before they happen, and notes on each new node
    the user's line and, in the backward, its phase."""

    def __init__(
        self, tracing: Tracing, line: Callable[[], str], phase: Callable[[], str | None] | None = None
    ) -> None:
        super().__init__()
        self.tracing, self.line = tracing, line
        self.phase = phase or (lambda: tracing.phase)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            self.refuse_real(func, args, kwargs or {})
        if func in _ONE_DTYPE and len({value.dtype for value in args if isinstance(value, torch.Tensor)}) > 1:
            given = " and ".join(describe(value) for value in args if isinstance(value, torch.Tensor))
            raise _Refused(
                f"{func} at {self.line()} is given {given}: it needs one dtype. Cast one, as in x.to(w.dtype)"
            )
        if any(isinstance(value, torch.Generator) for value in (kwargs or {}).values()):
            raise _Refused(str(_ambient(func, user_line())))
        result = func(*args, **(kwargs or {}))
        graph = tracing_graph()
        if graph is not None:
            line = None
            for node in reversed(graph.nodes):
                if "source" in node.meta or node.op in ("placeholder", "root"):
                    break
                line = self.line() if line is None else line
                node.meta["source"] = line
                node.meta["no_grad"] = not torch.is_grad_enabled()
                if phase := self.phase():
                    node.meta["phase"] = phase
        return result

    def refuse_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = named.get(argument.name)
            for value in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(value, torch.Tensor) and not is_fake(value):
                    raise _Refused(str(_closed_over_write(self.tracing, value, func, user_line())))


@contextmanager
def _explained() -> Iterator[None]:
    """Turns torch's errors about values that a trace does not have into one with the user's line and what to do."""
    try:
        yield
    except _Refused as error:
        raise CaptureError(str(error)) from None
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _data_dependent(error, str(error.func)) from None
    except (RuntimeError, TypeError) as error:
        if isinstance(error, CaptureError):
            raise
        if "tracing tensor" in str(error) or "data-dependent" in str(error).lower():
            raise _data_dependent(error, "a tensor's value") from None
        for part, why in _TORCH_SAYS.items():
            if part in str(error):
                raise CaptureError(f"{_raised_at(error) or 'in the step'}: {why}") from None
        raise


_TORCH_SAYS = {
    "leaf Variable that requires grad": "a parameter is changed in place: a step is pure. Return a new value instead",
    "supported for tensor subclasses": "numpy would need a tensor's values, which are known only when the program "
    "runs. Use the torch function, or compute it outside the step and pass it in the batch",
    "data is not allocated yet": "a tensor's values are needed, which are known only when the program runs. Instead "
    "of torch.tensor([x, y]) write torch.stack([x, y])",
    "passed to FakeTensor.__format__": "a tensor's value would be printed, which is known only when the program runs. "
    "Return it as a metric",
    "a dynamo-optimized function": "a torch.compiled function is called. Pass the plain one: fzero compiles the step",
}


def _data_dependent(error: Exception, what: str) -> CaptureError:
    return CaptureError(
        f"{_raised_at(error)}: the program would depend on {what}, which is known only when it runs. "
        "Instead of `if x > 0:` write torch.where(x > 0, a, b); instead of x.item() keep the 0-d tensor; "
        "instead of x[mask] multiply by the mask"
    )


def _raised_at(error: Exception) -> str:
    """The innermost line outside torch, fzero and optree of an error's traceback."""
    line, trace_back = "", error.__traceback__
    while trace_back is not None:
        code = trace_back.tb_frame.f_code
        if _is_users(code.co_filename):
            line = f"{code.co_filename.rsplit('/', 1)[-1]}:{trace_back.tb_lineno}"
        trace_back = trace_back.tb_next
    return line


# --- regions ----------------------------------------------------------------------------------------------------------


def add_region(
    fn: Callable[..., Any],
    leaves: Sequence[torch.Tensor],
    names: Sequence[str],
    others: Sequence[torch.Tensor],
    **how: Any,
) -> list[torch.Tensor]:
    """Traces `fn(*leaves, *others) -> [loss, *grads, *aux]` as a region and puts its one node into the outer graph."""
    tracing = current()
    microbatches, sliced = how["microbatches"], how["sliced"]
    inputs = [*leaves, *(x.contiguous() if cut else x for x, cut in zip(others, sliced, strict=True))]
    tracing.depth += 1
    try:
        with disable_proxy_modes_tracing(), tracing.mode:
            own = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in leaves]
            for x, cut in zip(inputs[len(leaves) :], sliced, strict=True):
                shape = (x.shape[0] // microbatches, *x.shape[1:]) if cut else x.shape
                own.append(torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=x.device))
            marks: dict[str, Any] = {}
            gm = trace(tracing, lambda *xs: fn(marks, *xs), own, names)
            with real_tensors():
                extra = lifted(gm, len(own))
    finally:
        tracing.depth -= 1
        tracing.phase = None
    for node in segments.placeholders(gm.graph)[len(own) :]:
        node.meta["val"] = fake_like(tracing.mode, node.meta["val"])
    segments.normalised(gm)
    values = tuple(node.meta["val"] for node in segments.outputs(gm.graph))
    grad_of = tuple(marks["grad_of"])
    num_aux = len(values) - 1 - len(grad_of)
    flags = (*(False for _ in leaves), *sliced, *(False for _ in extra))
    index = len(tracing.regions)
    tracing.regions.append(Region(gm, values, grad_of, flags, microbatches, num_aux, user_line()))
    return torch.ops.fzero.region([*inputs, *extra], index)
