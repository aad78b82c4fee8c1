"""scan_bodies: one step of a scan as the bodies of its op, traced once.

The step is traced alone, and with its gradients, which is cut into two bodies (`_Cut`). The forward's gives, beside
its results, the values that the backward reads; the op stacks them over time. Of those it keeps no views, and nothing
that depends on closed-over tensors alone: the backward makes these again. With remat it keeps the carry alone. The
backward's body is that of a scan of its own: its carry is the carry's gradient, and the sums of the gradients of
closed-over tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fzero._torch_compat import real_tensors, unrecorded
from fzero.capture.ambient_rng import draws_so_far
from fzero.capture.context import Tracing
from fzero.capture.leaves import fake_like
from fzero.capture.provenance import user_line
from fzero.capture.tracing import lifted, trace
from fzero.errors import CaptureError
from fzero.ir import forms, fx_nodes, segments
from fzero.ir.scan_op import text_of

Step = Callable[..., list[Tensor]]  # (*carry, *x of a step) -> [*carry, *y]


@dataclass(frozen=True)
class Body:
    """A traced step: its graph, whose last placeholders stand for the closed-over tensors `closed`."""

    gm: fx.GraphModule
    closed: list[Tensor]


@dataclass(frozen=True)
class Both:
    """The bodies of a scan's forward and backward, as text.

    forward: (carry, x, closed) -> (carry, y, kept). backward: (gradients of the floating carry, sums of the gradients
    of the closed ones in `sums`; kept, the xs in `reads`, gradients of the floating ys; closed) -> (both carries;
    gradients of the xs in `of_xs`). counts: of carry, xs and ys. floats: the floating leaves of carry and of ys.
    """

    forward: str
    backward: str
    closed: list[Tensor]
    counts: tuple[int, int, int]
    floats: tuple[list[int], list[int]]
    sums: list[int]
    reads: list[int]
    of_xs: list[int]


def of_step(tracing: Tracing, step: Step, carry: Sequence[Tensor], rows: Sequence[Tensor]) -> Body:
    """A step's body without gradients. Raises CaptureError where the step draws from the loss's key."""
    before = draws_so_far()
    body = _traced(tracing, step, [*carry, *(row[0] for row in rows)])
    if draws_so_far() != before:
        raise CaptureError(
            f"fzero.scan at {user_line()}: f draws random numbers from the loss's key, and is captured once: every "
            "step would draw the same. Pass keys in xs, fzero.random.split(key, T), and draw by fzero.random"
        )
    return body


def with_gradients(
    tracing: Tracing, step: Step, carry: Sequence[Tensor], rows: Sequence[Tensor], plain: Body, needed: Sequence[bool],
    remat: bool,
) -> Both:  # fmt: skip
    """Both bodies of a step. needed: whether carry, rows and `plain.closed` get gradients."""
    count, width = len(carry), len(rows)
    ends = [node.meta["val"] for node in fx_nodes.outputs(plain.gm.graph)]
    own = [i for i, x in enumerate(carry) if x.is_floating_point()]
    of_ys = [i for i, y in enumerate(ends[count:]) if y.is_floating_point()]
    summed = [x for x, asked in zip(plain.closed, needed[count + width :], strict=True) if asked]
    of_xs: list[int] = []
    leaves_at = [*own, *(i for i in range(count, count + width) if needed[i])]

    def joint(*operands: Tensor) -> list[Tensor]:
        head, d_carry, d_ys, sums = _parts(operands, count + width, len(own), len(of_ys), len(summed))
        head = [x.detach().requires_grad_(i in leaves_at) for i, x in enumerate(head)]
        outs = step(*head)
        tops = zip([outs[i] for i in (*own, *(count + i for i in of_ys))], [*d_carry, *d_ys], strict=True)
        tracing.phase = "backward"
        grads = _grads([(out, d) for out, d in tops if out.requires_grad], [*(head[i] for i in leaves_at), *summed])
        grad_of = dict(zip(leaves_at, grads, strict=False))
        before = [torch.zeros_like(head[i]) if (g := grad_of[i]) is None else g for i in own]
        added = [s if g is None else s + g for s, g in zip(sums, grads[len(leaves_at) :], strict=True)]
        of_xs[:] = [i - count for i, g in grad_of.items() if i >= count and g is not None]
        return [*outs, *before, *added, *(grad_of[count + i] for i in of_xs)]

    like = [*carry, *(row[0] for row in rows), *(carry[i] for i in own), *(ends[count + i] for i in of_ys), *summed]
    body = _traced(tracing, joint, like)
    at = {id(x): i for i, x in enumerate(body.closed)}
    cut = _Cut(body.gm, count, width, (len(own), len(of_ys), len(summed)), len(ends), remat)
    with unrecorded():
        forward, backward = cut.bodies()
    return Both(
        text_of(forward), text_of(backward), body.closed, (count, width, len(ends) - count), (own, of_ys),
        [at[id(x)] for x in summed], cut.reads, of_xs,
    )  # fmt: skip


def _grads(tops: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    if not tops or not leaves:
        return [None] * len(leaves)
    outs, incoming = zip(*tops, strict=True)
    return list(torch.autograd.grad(outs, leaves, incoming, allow_unused=True))


def _parts(values: Sequence[Any], *counts: int) -> list[list[Any]]:
    feed = iter(values)
    return [[next(feed) for _ in range(count)] for count in counts]


def _traced(tracing: Tracing, fn: Callable[..., Any], like: Sequence[Tensor]) -> Body:
    """`fn` as a body: pure, on contiguous placeholders of the forms of `like`."""
    phase, tracing.phase = tracing.phase, None
    tracing.depth += 1
    try:
        with unrecorded(), tracing.mode:
            inputs = [_empty(x) for x in like]
            gm = trace(tracing, fn, inputs, [f"operand {i} of fzero.scan" for i in range(len(inputs))])
            with real_tensors():
                closed = lifted(gm, len(inputs))
    finally:
        tracing.depth -= 1
        tracing.phase = phase
    segments.normalised(gm)
    with unrecorded():
        closed_like = [fake_like(tracing.mode, x) for x in closed]
        with tracing.mode:
            forms.propagate(gm, [_empty(x) for x in (*inputs, *closed_like)])
    return Body(gm, closed)


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@dataclass
class _Cut:
    """A step with its gradients, cut in two. `bodies` writes the last three fields, and is called once.

    counts of the graph's placeholders: carry, xs, then incoming (of carry, of ys, sums), then closed. kept: values of
    the forward that the backward reads; reads: the xs that it reads.
    """

    gm: fx.GraphModule
    count: int
    width: int
    incoming: tuple[int, int, int]
    num_ends: int
    remat: bool
    kept: list[fx.Node] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)

    def bodies(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        holders, outs = fx_nodes.placeholders(self.gm.graph), fx_nodes.outputs(self.gm.graph)
        head, d_carry, d_ys, sums = _parts(holders, self.count + self.width, *self.incoming)
        closed = holders[len(head) + sum(self.incoming) :]
        late = _after(self.gm.graph, {*d_carry, *d_ys, *sums})
        fixed = _after(self.gm.graph, set(head)) | late  # all but these depends on closed-over tensors alone
        inside: set[fx.Node] = set()  # of the backward's body
        todo = list(outs[self.num_ends :])
        while todo:
            node = todo.pop()
            if node in inside or node in self.kept:
                continue
            again = node in late or node not in fixed or fx_nodes.is_view(node) or self.remat
            if node.op == "placeholder" and node not in head[: self.count]:
                inside.add(node)
            elif node.op != "placeholder" and again:
                inside.add(node)
                todo += node.all_input_nodes
            elif fx_nodes.is_compute(node) and not isinstance(node.meta["val"], Tensor):
                raise AssertionError(f"{node} of several results is read whole")
            else:
                self.kept.append(node)
        xs = head[self.count :]
        self.reads = [i for i, x in enumerate(xs) if x in inside]
        forward = _graph(self.gm, [*head, *closed], [*outs[: self.num_ends], *self.kept], None)
        read = [*self.kept, *(xs[i] for i in self.reads)]
        backward = _graph(self.gm, [*d_carry, *sums, *read, *d_ys, *closed], outs[self.num_ends :], inside)
        return forward, backward


def _after(graph: fx.Graph, starts: set[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on some of these, themselves included."""
    found = set(starts)
    for node in graph.nodes:
        if any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


def _graph(
    gm: fx.GraphModule, inputs: Sequence[fx.Node], results: Sequence[fx.Node], nodes: set[fx.Node] | None
) -> fx.GraphModule:
    """A body with these inputs and results, of `nodes`, or of all that the results need."""
    nodes = fx_nodes.ancestors(*results) if nodes is None else nodes
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, node in enumerate(inputs):
        env[node] = graph.placeholder(f"x{i}")
        env[node].meta["val"] = _contiguous(node.meta["val"])
    for node in gm.graph.nodes:
        if node in nodes and node not in env and node.op == "call_function":
            env[node] = fx_nodes.copy_node(graph, node, env.__getitem__)
    graph.output([env[node] for node in results])
    body = segments.module(graph)
    return forms.propagate(body, [n.meta["val"] for n in fx_nodes.placeholders(body.graph)])


def _contiguous(value: Tensor) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)
