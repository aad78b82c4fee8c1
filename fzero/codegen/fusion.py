"""fusion: the stretches of a segment that a compiler makes faster than aten, each as one call.

A stretch (clusters.py) becomes a `Fused` node: a graph that reads its inputs and writes its results into given memory.
It is compiled once for each hash. Views are made again on either side of one. The other ops keep their order, but for
loops that move where no more memory is held (neighbours.py).

    m = mm(x, w);  a = add(r, m);  n = layer_norm(a, g, b);  q = mm(n, u)
    becomes   m = mm(x, w);  a, n, mean, rstd = fused(r, m, g, b);  q = mm(n, u)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fzero import backend
from fzero._torch_compat import function_schema
from fzero.codegen import clusters
from fzero.codegen.own_kernels import OwnKernel, kernel_for
from fzero.ir import fx_nodes, fx_values, segments
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import HOST, Ref

AUTO_BYTES = 1 << 18  # the least that a stretch moves for how="auto": below it the time is not in the loops


class Fused:
    """A stretch as something to call: `fused(*inputs)` returns its results in fresh memory, `fused.out(*inputs, *outs)`
    writes them into `outs`, which overlap no input but those of `over`. Inputs numbered in `writes` are written in
    place.

    graph: the stretch, with its outs as trailing placeholders.
    like: a fake tensor for each result.
    run: executes the graph: its aten ops, until `fzero.runtime.compile_segments` sets what it has compiled.
    own: fzero's own kernel for it on its device, if there is one.
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

    @cached_property
    def own(self) -> OwnKernel | None:
        """The kernel."""
        return kernel_for(self.graph) if backend.of(device_of(self.graph)).has_kernels else None

    @property
    def over(self) -> tuple[int, int] | None:
        """(the number of an input, that of the result that may lie in its memory), if its kernel allows it."""
        if self.own is None or self.own.over is None:
            return None
        return self.own.over[0], self.own.over[1] - self.num_inputs

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


def how_of(gm: fx.GraphModule, how: str | None) -> str:
    """`Spec.compile` of a segment: what its device makes of None."""
    return how if how is not None else backend.of(device_of(gm)).compiles


def fuse(program: Program, how: str | None) -> tuple[dict[str, fx.GraphModule], dict[str, Fused]]:
    """(by hash, the segments that have stretches, with `Fused` nodes for them; the stretches by hash).

    how: "none"; "inductor": every stretch; "auto": those that move `AUTO_BYTES` or more, a slice counted as all of it:
    all stages choose alike. None: as the device has it.
    """
    stretches: dict[str, Fused] = {}
    with_stretches: dict[str, fx.GraphModule] = {}
    hows = {key: this for key, gm in program.segments.items() if (this := how_of(gm, how)) != "none"}
    ranks = {op.segment: _ranks(program, op) for op in program.ops if op.is_flat and op.segment in hows}
    for key, same in aliased(program).items() if hows else ():
        if key not in hows:
            continue
        least = AUTO_BYTES // ranks.get(key, 1) if hows[key] == "auto" else 0
        segment, own = fused(program.segments[key], same, least, known=stretches)
        if segment is not None:
            with_stretches[key] = segment
        stretches |= own
    return with_stretches, stretches


def _ranks(program: Program, op: Op) -> int:
    """Of how many ranks each has a slice of what an op works on."""
    axes = filter(None, map(program.cut, (*op.reads, *op.writes)))
    return max(map(program.mesh.size, axes), default=1)


def always_fused(program: Program) -> dict[str, fx.GraphModule]:
    """By hash, the segments that run with their stretches whatever happens: those of ops that say so (`compile=`)."""
    asked = {how: {op.segment for op in program.ops if op.get("compile") == how} for how in ("auto", "inductor")}
    found: dict[str, fx.GraphModule] = {}
    for how, keys in asked.items():
        if keys and keys <= set(program.segments):
            found |= {key: gm for key, gm in fuse(program, how)[0].items() if key in keys}
    return found


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
            away = program.space(op) == HOST and device_of(program.segments[op.segment]) != "cpu"
            if away or any(_is_part(program, ref) for ref in (*op.reads, *op.writes)):
                uneven.add(op.segment)
    return {
        key: seen[0]
        for key, seen in same_of.items()
        if key not in uneven and all(op == seen[0] for op in seen) and -1 not in seen[0].values()
    }


def device_of(gm: fx.GraphModule) -> str:
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
        if fx_nodes.mutated(node) and clusters.is_fusible(node):  # its value is the memory that it wrote
            node.replace_all_uses_with(fx_nodes.mutated(node)[0])
    stretches: dict[str, Fused] = {}
    for stretch in [s for s in clusters.stretches(graph) if _moved(s) >= min_bytes]:
        call = _replace(graph, stretch, {**(known or {}), **stretches})
        stretches[call.digest] = call
    return segments.module(graph) if stretches else None, stretches


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
        if node in inside or clusters.is_aten_view(node):
            for operand in node.all_input_nodes:
                visit(operand)
            order.append(node)
        else:
            inputs.append(node)

    for node in stretch:
        visit(node)
    return segments.extract(order, inputs, results, results, from_buffers=False), inputs
