"""fusion: the stretches of a segment that a compiler makes faster than aten, each as one call.

1. A node is *fusible* where it is a loop over elements: pointwise ops, reductions, norms, softmax, losses, lookups,
   copies. Matrix products, attention, convolutions, draws, scatters and fzero's own kernels stay as they are. Outside a
   stretch they are as fast, write into given memory without a copy, and keep their bits.
2. Consecutive fusible nodes make a *stretch*. Views are no border: they are made again on either side of one. The order
   of the other ops does not change. So the peak changes only by the values that the stretch no longer makes.
3. A stretch of which two or more ops compute something becomes a `Fused` node. On CUDA one op is enough, if aten would
   copy its result, as a norm's, or if it packs several values into one, which are then copied. It is a graph that reads
   its inputs and writes its results into given memory. It is compiled once for each hash. On the processor one op alone
   gains little (docs/compile.md).

    m = mm(x, w);  a = add(r, m);  n = layer_norm(a, g, b);  q = mm(n, u)
    becomes   m = mm(x, w);  a, n, mean, rstd = fused(r, m, g, b);  q = mm(n, u)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fzero import backend
from fzero._torch_compat import function_schema, inductor_rounds
from fzero.codegen import out_forms
from fzero.ir import fx_nodes, fx_values, segments
from fzero.ir.op import Op
from fzero.ir.op_info import of
from fzero.ir.program import Program
from fzero.ir.records import HOST, Ref

aten = torch.ops.aten
PACKS = frozenset({aten.stack.default, aten.cat.default})
AUTO_BYTES = 1 << 18  # the least that a stretch moves for how="auto": below it the time is not in the loops

_LOW = (torch.bfloat16, torch.float16)
_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)


class Fused:
    """A stretch as something to call: `fused(*inputs)` returns its results in fresh memory, `fused.out(*inputs, *outs)`
    writes them into `outs`, which overlap no input. Inputs numbered in `writes` are written in place.

    graph: the stretch, with its outs as trailing placeholders.
    like: a fake tensor for each result.
    run: executes the graph: its aten ops, until `fzero.runtime.compile_segments` sets what it has compiled.
    """

    __module__ = namespace = "fzero"

    def __init__(self, graph: fx.GraphModule, writes: Sequence[int], like: Sequence[torch.Tensor]) -> None:
        self.graph, self.writes, self.like = graph, tuple(writes), tuple(like)
        self.digest = segments.digest(graph)
        self.__name__ = self.__qualname__ = f"fused_{self.digest}"
        self.num_inputs = len(fx_nodes.placeholders(graph.graph)) - len(like)
        self._layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in like]
        self.run: Callable[..., Any] = graph.forward
        self._schema = function_schema(self.__name__, self.num_inputs, self.writes)  # fx keeps ops that have effects

    def out(self, *tensors: torch.Tensor) -> None:
        """Writes the results into the last tensors; the first are the inputs."""
        self.run(*tensors)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        device = inputs[0].device if inputs else self.like[0].device.type
        outs = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in self._layouts
        ]
        self.run(*inputs, *outs)
        return outs

    def __repr__(self) -> str:
        return self.__name__


def fuse(program: Program, how: str) -> tuple[dict[str, fx.GraphModule], dict[str, Fused]]:
    """(by hash, the segments that have stretches, with `Fused` nodes for them; the stretches by hash).

    how: "none"; "inductor": every stretch; "auto": those that move `AUTO_BYTES` or more.
    """
    stretches: dict[str, Fused] = {}
    with_stretches: dict[str, fx.GraphModule] = {}
    for key, same in aliased(program).items() if how != "none" else ():
        segment, own = fused(program.segments[key], same, AUTO_BYTES if how == "auto" else 0, known=stretches)
        if segment is not None:
            with_stretches[key] = segment
        stretches |= own
    return with_stretches, stretches


def aliased(program: Program) -> dict[str, dict[int, int]]:
    """{segment: {destination: the read that is the same memory}}, both as numbers of placeholders.

    Left out are segments whose ops differ in it, where memory overlaps in part, where a rank's own part may be shorter
    than another's (shapes are compiled in), and that run on the host of another device.
    """
    same_of: dict[str, list[dict[int, int]]] = {}
    uneven: set[str] = set()
    for op in program.ops:
        if op.segment:
            same_of.setdefault(op.segment, []).append(_same(op))
            away = program.space(op) == HOST and _device(program.segments[op.segment]) != "cpu"
            if away or any(_is_part(program, ref) for ref in (*op.reads, *op.writes)):
                uneven.add(op.segment)
    return {
        key: seen[0]
        for key, seen in same_of.items()
        if key not in uneven and all(op == seen[0] for op in seen) and -1 not in seen[0].values()
    }


def _device(gm: fx.GraphModule) -> str:
    """The type of device that a segment was captured for."""
    return next((node.meta["val"].device.type for node in fx_nodes.placeholders(gm.graph)), "cpu")


def _is_part(program: Program, ref: Ref) -> bool:
    """Whether a reference is a rank's slice of some of a bucket: of all of it, slices are equal."""
    buffer = program.buffers[ref.name]
    cut = ref.start is not None and (ref.mine or buffer.sharded is not None) and program.is_shared(buffer.bucket or "")
    return cut and (ref.start, ref.stop) != (0, program.buckets[buffer.bucket or ""].length)


def _same(op: Op) -> dict[int, int]:
    """For each destination placeholder, by number, the read that is the same memory, or -1 if it only overlaps."""
    dests = list(enumerate(op.writes[op.num_outputs :], len(op.reads)))
    over = {d: [i for i, read in enumerate(op.reads) if read.overlaps(dest)] for d, dest in dests}
    equal = {d: [i for i in over[d] if op.reads[i] == dest] for d, dest in dests}
    return {d: (reads[0] if reads == over[d] else -1) for d, reads in equal.items() if over[d]}


def fused(
    gm: fx.GraphModule, same: Mapping[int, int], min_bytes: int = 0, known: Mapping[str, Fused] | None = None
) -> tuple[fx.GraphModule | None, dict[str, Fused]]:
    """(the segment with a `Fused` node for each stretch, or None where it has none; its stretches by hash).

    same: maps a destination's placeholder number to that of the read that is the very same memory. To the compiler they
    become one input, or it might write the one before it has read the other.
    min_bytes: a stretch that moves fewer stays as it is.
    known: stretches by hash that other segments have; an equal one is used again.
    """
    graph = segments.copied(gm.graph)
    holders = fx_nodes.placeholders(graph)
    for dest, read in same.items():
        holders[read].replace_all_uses_with(holders[dest])
    for node in graph.nodes:
        if fx_nodes.mutated(node) and is_fusible(node):  # its value is the memory that it wrote
            node.replace_all_uses_with(fx_nodes.mutated(node)[0])
    stretches: dict[str, Fused] = {}
    for stretch in [s for s in _stretches(graph) if _moved(s) >= min_bytes]:
        call = _replace(graph, stretch, {**(known or {}), **stretches})
        stretches[call.digest] = call
    return segments.module(graph) if stretches else None, stretches


def is_fusible(node: fx.Node) -> bool:
    """Whether a node is a loop over elements that a compiler may fuse with others."""
    if node.target is operator.getitem:
        return is_fusible(fx_nodes.operand(node))
    schema = fx_nodes.schema(node)
    how = of(node.target).fusion or (_packs(node) and "move")
    if schema is None or not how:
        return False
    values = [t for n in (node, *node.all_input_nodes) for t in fx_values.tensors(n.meta.get("val"))]
    devices = {t.device.type for t in values}
    if len(devices) != 1 or any(t.dtype not in _DTYPES or t.numel() == 0 for t in values):
        return False
    if any(t.dtype in _LOW for t in values) and not inductor_rounds(*devices):
        return False
    tags = node.target.tags  # type: ignore[union-attr]
    if torch.Tag.nondeterministic_seeded in tags or (devices == {"cpu"} and how == "not on cpu" and not _is_tanh(node)):
        return False
    return not schema.is_mutable or all(fx_nodes.base(d).op == "placeholder" for d in fx_nodes.mutated(node))


def _is_tanh(node: fx.Node) -> bool:
    return node.kwargs.get("approximate") == "tanh"


def _stretches(graph: fx.Graph) -> list[list[fx.Node]]:
    """Maximal runs of fusible nodes of which two or more compute something, or one that is worth it alone."""
    runs: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if not fx_nodes.is_compute(node) or _is_aten_view(node):
            continue
        if is_fusible(node) and not _lies_elsewhere(node, runs[-1]):
            runs[-1].append(node)
        elif runs[-1] and not (_lies_elsewhere(node, runs[-1]) and _may_pass(node, runs[-1])):
            runs.append([])
    return [run for run in runs if sum(_computes(n) for n in run) > 1 or any(map(_is_worth_it, run))]


def _lies_elsewhere(node: fx.Node, run: Sequence[fx.Node]) -> bool:
    """Whether a node copies what is made outside of a run: it may lie in its destination already (`inplace`)."""
    if node.target is not aten.copy_.default:
        return False
    into, source = (fx_nodes.operand(node, i) for i in (0, 1))
    return fx_nodes.base(source) not in run and into.meta["val"].dtype == source.meta["val"].dtype


def _may_pass(node: fx.Node, run: Sequence[fx.Node]) -> bool:
    """Whether a copy may be made before a run that begins in front of it: the run neither reads nor writes where it
    writes, and does not write what it reads."""
    into, source = (fx_nodes.base(fx_nodes.operand(node, i)) for i in (0, 1))
    used = {fx_nodes.base(n) for member in run for n in member.all_input_nodes}
    return into not in used and all(fx_nodes.base(n) is not source for member in run for n in fx_nodes.mutated(member))


def _is_aten_view(node: fx.Node) -> bool:
    """Whether a node is a view that a compiler knows; `fzero.strided` is not, and ends a stretch."""
    return fx_nodes.is_view(node) and node.target is not torch.ops.fzero.strided.default


def _computes(node: fx.Node) -> bool:
    """Whether a node counts as work.

    Casts and copies are not counted: ZeRO stages differ in them, and every stage must make the same fusion decision.
    Packing several values into one is the step's own.
    """
    if node.target is operator.getitem:
        return False
    return of(node.target).fusion != "move" and (bool(of(node.target).fusion) or _packs(node))


def _packs(node: fx.Node) -> bool:
    """Whether a node packs several values into one on a device: a compiler writes what is made of it in one pass."""
    return node.target in PACKS and _on_device(node)


def _on_device(node: fx.Node) -> bool:
    """Whether a node's kernels are launched on a device, where each copy is a pass over memory of its own."""
    return backend.of(fx_values.tensors(node.meta["val"])[0].device).on_streams


def _is_worth_it(node: fx.Node) -> bool:
    """Whether one node alone is worth a kernel of its own, on a device: aten would copy its results, it packs, or it
    sums rows, for which aten's kernel takes three times the time of its bytes."""
    if node.target is aten.sum.dim_IntList and _on_device(node):
        last = fx_nodes.operand(node).meta["val"].ndim - 1
        return bool(node.args[1]) and not {last, -1} & set(node.args[1])  # type: ignore[arg-type]
    return _is_copied(node) or _packs(node)


def _is_copied(node: fx.Node) -> bool:
    """Whether aten would copy the results of an op, on a device where a copy is a kernel and a pass over memory."""
    if node.target is operator.getitem or not _computes(node) or not fx_values.results(node):
        return False
    return _on_device(node) and not (out_forms.special_form(node) or out_forms.form_of(node))


def _moved(stretch: Sequence[fx.Node]) -> int:
    """The bytes that the ops of a stretch read and write when they run one by one."""
    values = [t for n in stretch for m in (n, *n.all_input_nodes) for t in fx_values.tensors(m.meta.get("val"))]
    return sum(t.numel() * t.element_size() for t in values)


def _replace(graph: fx.Graph, stretch: Sequence[fx.Node], known: Mapping[str, Fused]) -> Fused:
    """Puts one node in the place of a stretch, in place; returns what the node calls, an equal one of `known`."""
    inside, views = set(stretch), _views_of(stretch)
    results = [n for n in stretch if _is_result(n, inside)]
    body, inputs = _body(stretch, results)
    written = {fx_nodes.base(d) for n in stretch for d in fx_nodes.mutated(n)}
    fused_call = Fused(body, [i for i, n in enumerate(inputs) if n in written], [n.meta["val"] for n in results])
    fused_call = known.get(fused_call.digest, fused_call)
    order = [n for n in graph.nodes if n in inside or n in views]
    with graph.inserting_after(stretch[-1]):
        end = call = graph.call_function(fused_call, tuple(inputs))
    call.meta["val"] = fused_call.like
    for number, node in enumerate(results):
        with graph.inserting_after(end):
            end = graph.call_function(operator.getitem, (call, number))
        end.meta = dict(node.meta)
        node.replace_all_uses_with(end)
    for node in order:
        if node in views:  # outside they follow the call
            end.append(node)
            end = node
    for node in reversed(order):
        if node in inside or not node.users:
            graph.erase_node(node)
    return fused_call


def _is_result(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether something outside reads a node's own memory: directly, or through views."""
    if fx_nodes.mutated(node) or (not isinstance(node.meta.get("val"), torch.Tensor)):
        return False
    return any(u not in inside and (not fx_nodes.is_view(u) or _is_result(u, inside)) for u in node.users)


def _views_of(stretch: Sequence[fx.Node]) -> set[fx.Node]:
    """The views of a stretch's values, and views of those."""
    views: set[fx.Node] = set()
    pending = [u for node in stretch for u in node.users]
    while pending:
        node = pending.pop()
        if fx_nodes.is_view(node) and node not in views:
            views.add(node)
            pending += node.users
    return views


def _body(stretch: Sequence[fx.Node], results: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The stretch as a graph of its own: inputs by first use, then a destination for each result."""
    inside, order, inputs = set(stretch), [], []
    seen: set[fx.Node] = set()

    def visit(node: fx.Node) -> None:
        if node in seen:
            return
        seen.add(node)
        if node in inside or _is_aten_view(node):
            for operand in node.all_input_nodes:
                visit(operand)
            order.append(node)
        else:
            inputs.append(node)

    for node in stretch:
        visit(node)
    return segments.extract(order, inputs, results, results, from_buffers=False), inputs
