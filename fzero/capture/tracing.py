"""tracing: a function traced on fake tensors, with every op watched: what it may not do is refused before it is done.

`trace` gives a pure graph of aten ops whose nodes carry the user's line. Nothing is baked in silently: in-place work on
inputs or closed-over tensors, draws from torch's ambient generator, branches on values that an input decides and
closed-over tensors that require grad are refused, with the line and what to write instead; values that no input decides
are known (`fzero.capture.known`). Other closed-over tensors become inputs (`lifted`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import fx

from fzero._torch_compat import (
    FakeTensorMode,
    TorchDispatchMode,
    compiled_functions_traced,
    distributions_unchecked,
    in_functorch,
    is_fake,
    jiterator_refused,
    make_fx,
    scatters_keep_overlap,
    tracing_graph,
)
from fzero.capture import ambient
from fzero.capture.known import READS, Known
from fzero.capture.provenance import describe, name_of, user_line
from fzero.capture.refuse import (
    SPARSE,
    NoExchange,
    Refused,
    ambient_draw,
    attribute,
    check_graph,
    closed_over_write,
    explained,
)
from fzero.errors import CaptureError, TreeError, at
from fzero.ir import as_strided, fx_nodes, fx_values
from fzero.ir.records import DTYPE_NAMES, buffer_name
from fzero.precision import Precision

aten = torch.ops.aten
_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define("region(Tensor[] inputs, int index) -> Tensor[]")
_LIBRARY.define("reduce(Tensor x, str op, str axis) -> Tensor")
_LIBRARY.define("axis_index(str axis, Device device) -> Tensor")


@torch.library.register_fake("fzero::region", lib=_LIBRARY)
def _region_fake(inputs: list[torch.Tensor], index: int) -> list[torch.Tensor]:
    return [torch.empty_like(value) for value in current().regions[index].values]


@torch.library.register_fake("fzero::reduce", lib=_LIBRARY)
def _reduce_fake(x: torch.Tensor, op: str, axis: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.impl("fzero::reduce", "CompositeExplicitAutograd", lib=_LIBRARY)
def _reduce_alone(x: torch.Tensor, op: str, axis: str) -> torch.Tensor:
    return x.clone()  # outside a step there is a world of one


@torch.library.register_fake("fzero::axis_index", lib=_LIBRARY)
def _axis_index_fake(axis: str, device: torch.device) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@torch.library.impl("fzero::axis_index", "CompositeExplicitAutograd", lib=_LIBRARY)
def _axis_index_alone(axis: str, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


@dataclass
class Tracing:
    """What a trace in progress knows; `value_and_grad` and the reductions ask for it."""

    mode: FakeTensorMode
    fns: tuple[Callable[..., Any], ...]
    microbatches: int = 1
    allow_unused: bool = False
    axis: str = "dp"
    precision: Precision = field(default_factory=Precision)
    depth: int = 0
    phase: str | None = None
    regions: list[Any] = field(default_factory=list)
    watching: list[Any] = field(default_factory=list)
    known: Known = field(default_factory=Known)


_active: ContextVar[Tracing | None] = ContextVar("fzero_tracing", default=None)


def current() -> Tracing:
    tracing = _active.get()
    assert tracing is not None, "no step is being captured"
    return tracing


@contextmanager
def while_active(tracing: Tracing) -> Iterator[None]:
    """Makes this the trace in progress."""
    token = _active.set(tracing)
    try:
        yield
    finally:
        _active.reset(token)


def active() -> Tracing | None:
    """The trace in progress, or None outside a step."""
    return _active.get()


def trace(
    tracing: Tracing, fn: Callable[..., Any], inputs: Sequence[torch.Tensor], names: Sequence[str]
) -> fx.GraphModule:
    """`fn(*inputs)` as a graph of aten ops without in-place work; `names` say what the inputs are in errors."""

    outermost = not tracing.depth
    if outermost:
        ambient.check_trace()

    def watched(*xs: torch.Tensor) -> Any:
        with ExitStack() as stack:
            if outermost:
                stack.enter_context(ambient.of_caller())
                stack.enter_context(NoExchange())
                stack.enter_context(distributions_unchecked())
                stack.enter_context(jiterator_refused(_no_jiterator))
            stack.enter_context(_Watch(tracing, user_line, known=tracing.known))
            stack.enter_context(torch.enable_grad())
            return fn(*xs)

    with explained(), tracing.mode, compiled_functions_traced():
        gm = make_fx(watched, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    check_graph(gm, names, tracing.fns, in_region=tracing.depth > 0)
    _without_failed(gm)
    as_strided.check_reach(gm)
    as_strided.rooted(gm)
    if any(fx_nodes.mutated(node) for node in gm.graph.nodes):
        gm = _functionalised(tracing, gm, inputs)
    return as_strided.rebased(gm)


def _without_failed(gm: fx.GraphModule) -> None:
    """Drops what the trace has of ops that raised, where the user's code went on: they have no value and no users."""
    for node in reversed(list(gm.graph.nodes)):
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if node.op == "call_function" and returns and not node.users and "val" not in node.meta:
            gm.graph.erase_node(node)
            gm.recompile()


def fake_like(mode: FakeTensorMode, leaf: torch.Tensor) -> torch.Tensor:
    """A contiguous fake tensor of this shape, dtype and device."""
    with mode:
        return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device=leaf.device)


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
    if value.layout is not torch.strided:
        raise TreeError(f"{name} is a tensor of {value.layout}. {SPARSE}")
    if value.dtype not in DTYPE_NAMES or value.is_quantized:
        raise TreeError(
            f"{name} is a tensor of {value.dtype}: needed one of {', '.join(DTYPE_NAMES.values())}. Convert it first"
        )


def lifted(gm: fx.GraphModule, graph_inputs: int) -> list[torch.Tensor]:
    """Turns every closed-over tensor of a region into one more placeholder; the tensors, in order.

    A tensor made in the trace from a literal (`torch.tensor(0.5)`) of one element becomes a `full` instead.
    """
    after = fx_nodes.placeholders(gm.graph)[graph_inputs - 1] if graph_inputs else None
    found: dict[int, fx.Node] = {}
    values: list[torch.Tensor] = []
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        value = attribute(gm, node)
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


_LITERAL = (aten.lift_fresh.default, aten.lift_fresh_copy.default)


def _functionalised(tracing: Tracing, gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The same graph with in-place work on its own intermediates made pure."""
    kept: set[fx.Node] = set()
    while True:
        replay = _Replay(gm, frozenset(kept))
        try:
            pure = _replayed(tracing, gm, inputs, replay)
            break
        except CaptureError:
            if replay.moved <= kept:
                raise
            kept |= replay.moved  # further on there may be more
    left = [node for node in pure.graph.nodes if fx_nodes.mutated(node)]
    if left:
        raise CaptureError(f"{left[0].target} works in place where it cannot be made pure: use its pure form")
    return pure


def _replayed(tracing: Tracing, gm: fx.GraphModule, inputs: Sequence[torch.Tensor], replay: _Replay) -> fx.GraphModule:
    shared = [n for n in gm.graph.nodes if n.op == "get_attr" and not all(u.target in _LITERAL for u in n.users)]
    constants = {str(n.target): x for n in shared if isinstance(x := attribute(gm, n), torch.Tensor)}

    def watched(*xs: torch.Tensor) -> Any:
        with _Watch(tracing, lambda: replay.node.meta.get("source", ""), lambda: replay.node.meta.get("phase")):
            return torch.func.functionalize(replay.with_constants)(constants, *xs)

    with explained(), tracing.mode, compiled_functions_traced():
        try:
            return make_fx(watched, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        except (RuntimeError, ValueError) as error:  # what the traced ops did, their pure forms do not
            line, said = replay.node.meta.get("source") or "the step", str(error).partition("\n")[0]
            raise CaptureError(
                f"{replay.node.target} at {line} follows in-place work that cannot be made pure ({said}). Write "
                "x = x.op(...) instead of x.op_(...)"
            ) from error


class _Replay(fx.Interpreter):
    """Runs a graph and tells at which node it is. `functionalize` must be given closed-over tensors to wrap them.

    `moved` are the in-place nodes whose pure form has other strides than their operand, of which the graph may take
    views that those strides do not allow. What nodes in `kept` make is copied into the old value, which keeps its
    strides."""

    node: fx.Node

    def __init__(self, gm: fx.GraphModule, kept: Collection[fx.Node]) -> None:
        super().__init__(gm)
        self.kept, self.moved = kept, set[fx.Node]()

    def with_constants(self, constants: Mapping[str, torch.Tensor], *xs: torch.Tensor) -> Any:
        self.constants = constants
        return self.run(*xs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.constants[target] if target in self.constants else super().get_attr(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        if as_strided.takes_offset(n):
            self.check_layout(n)
        if n in self.kept:
            target = fx_nodes.operand(n)
            old, self.env[target] = self.env[target], self.env[target].clone()
            made = super().run_node(n)
            self.env[target] = old
            return old.copy_(made)
        result = super().run_node(n)
        if self._moves(n, result):
            self.moved.add(n)
        return result

    def _moves(self, n: fx.Node, result: Any) -> bool:
        """Whether an in-place op on its first operand left it with other strides than when it was traced."""
        source = None if fx_nodes.is_view(n) else fx_nodes.source(n)
        if source is None or source is not n.args[0] or not isinstance(result, torch.Tensor):
            return False
        return torch.Tag.inplace_view not in n.target.tags and fx_values.steps(result) != fx_values.steps(n.meta["val"])  # type: ignore[union-attr]

    def check_layout(self, n: fx.Node) -> None:
        """Refuses an offset into a tensor whose strides changed when a write to it was made pure."""
        operand = fx_nodes.operand(n)
        traced, now = operand.meta["val"], self.env[operand]
        if (traced.stride(), traced.storage_offset()) != (now.stride(), now.storage_offset()):
            raise CaptureError(
                f"{n.target} at {n.meta.get('source') or 'the step'} follows an in-place change that makes its tensor "
                f"one of strides {now.stride()} instead of {traced.stride()}: write x = x.op(...) instead of x.op_(...)"
            )


# what scatters_keep_overlap() is about; gaps in the operand are closed with it
_SCATTERS = {
    aten.as_strided_scatter.default,
    aten.diagonal_scatter.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
}
# ops that refuse mixed dtypes when they run, but not on fake tensors
_ONE_DTYPE = {
    aten.mm.default,
    aten.mv.default,
    aten.addmm.default,
    aten.addmv.default,
    aten.convolution.default,
}


def _no_jiterator() -> Exception:
    return Refused(
        f"torch.cuda.jiterator at {user_line()} is no op that a trace sees. Write it in torch ops: they are fused"
    )


def _has_gradient(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether autograd follows an op that changes its operand's shape in place; it need not be known of others."""
    return torch.Tag.inplace_view not in func.tags or args[0].requires_grad or in_functorch()


class _Watch(TorchDispatchMode):
    """Sees every op before it is traced: refuses writes to real tensors before they happen, and notes on each new node
    the user's line and, in the backward, its phase."""

    def __init__(
        self, tracing: Tracing, line: Callable[[], str], phase: Callable[[], str | None] | None = None,
        *, known: Known | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tracing, self.line, self.known = tracing, line, known
        self.phase = phase or (lambda: tracing.phase)

    def __enter__(self) -> _Watch:
        self.tracing.watching.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.tracing.watching.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.native_batch_norm.default and args[5] and args[3] is not None:
            func = aten._native_batch_norm_legit.default  # the same, with a schema that tells what it writes
        if func._schema.is_mutable:
            self.refuse_real(func, args, kwargs or {})
        if sparse := [x for x in args if isinstance(x, torch.Tensor) and x.layout is not torch.strided]:
            name = name_of(sparse[0], self.tracing.fns)
            raise Refused(f"{func} at {self.line()} reads {name}, of {sparse[0].layout}. {SPARSE}")
        if func in _ONE_DTYPE and len({value.dtype for value in args if isinstance(value, torch.Tensor)}) > 1:
            given = " and ".join(describe(value) for value in args if isinstance(value, torch.Tensor))
            raise Refused(
                f"{func} at {self.line()} is given {given}: it needs one dtype. Cast one, as in x.to(w.dtype)"
            )
        if func in _SCATTERS and not fx_values.is_dense(args[0]) and scatters_keep_overlap():
            args = (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        if any(isinstance(value, torch.Generator) for value in (kwargs or {}).values()):
            raise Refused(str(ambient_draw(func, user_line())))
        if func is aten._efficientzerotensor.default:
            func = aten.zeros.default  # forward mode's zero tangents, which have no memory
        innermost = self is self.tracing.watching[-1]  # a region is traced inside a step
        result = self._result(func, args, kwargs or {}, self.known if innermost else None)
        if odd := [value.layout for value in fx_values.tensors(result) if value.layout is not torch.strided]:
            raise Refused(f"{func} at {self.line()} makes a tensor of {odd[0]}. {SPARSE}")
        graph = tracing_graph()
        if graph is not None and innermost:
            line = None
            for node in reversed(graph.nodes):
                if "source" in node.meta or node.op in ("placeholder", "root"):
                    break
                line = self.line() if line is None else line
                node.meta["source"] = line
                node.meta["no_grad"] = not torch.is_grad_enabled() or not _has_gradient(func, args)
                if phase := self.phase():
                    node.meta["phase"] = phase
        return result

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known | None) -> Any:
        """The result of an op; of one that asks for values that depend on no input, a literal."""
        if known is None:
            return func(*args, **kwargs)
        if func is aten.index.Tensor:
            args = (args[0], known.places(args[1]))
        elif func is aten.masked_select.default and args[0].shape == args[1].shape:
            places = known.places([args[1]])
            func, args = (func, args) if places[0] is args[1] else (aten.index.Tensor, (args[0], places))
        if READS.intersection(func.tags) and (found := known.value(func, args, kwargs)) is not None:
            device = next((x.device for x in fx_values.tensors(args)), torch.device("cpu"))
            return optree.tree_map(lambda x: known.literal(x, device), found[0])
        result = func(*args, **kwargs)
        known.follow(func, args, kwargs, result)
        return result

    def refuse_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = named.get(argument.name)
            for value in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(value, torch.Tensor) and not is_fake(value):
                    raise Refused(str(closed_over_write(self.tracing.fns, value, func, user_line())), written=value)
