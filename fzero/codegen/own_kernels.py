"""own_kernels: the stretches for which fzero has a kernel of its own, by what their graphs compute.

A compiler sums rows in a second pass over what the first one wrote, or adds partial sums up by torch's own reduction.
`fzero.kernels.row_sums` does it in the pass that makes the rows:

    gelu_backward, and the sum of its rows
    stack of three, permute, clone, and the sum of its rows
    native_layer_norm_backward, what is added to its first result, and the sum of those rows

A compiler reads the rows of a vocabulary's loss twice for their sum of exponentials, and does not know that their
gradient may lie where they lay. `fzero.kernels.softmax_loss` is

    log_softmax, nll_loss, and the gradient of both

A stretch that is not exactly one of them is compiled as others are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from fzero.codegen import cross_entropy
from fzero.ir import fx_nodes
from fzero.kernels import FLOATS, NORM_ROWS, TALL, WIDEST, Kernel

aten = torch.ops.aten
FLAT = (aten.view.default, aten._unsafe_view.default)  # views that keep the order of elements
FILES = {"softmax_loss": "softmax_loss"}  # of functions that are not in `row_sums`


@dataclass(frozen=True)
class OwnKernel:
    """What runs a stretch: called with the tensors of its graph.

    name: the function of `fzero.kernels`. places: which tensor each of its operands is, None where it has none.
    options: its other arguments. heap: bytes that it allocates. over: the tensor that it reads, and the one that it may
    write in the same memory.
    """

    name: str
    places: Sequence[int | None]
    options: Mapping[str, Any] = field(default_factory=dict)
    heap: int = 0
    over: tuple[int, int] | None = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Runs it."""
        _run(self.name, self.places, self.options, *tensors)


def kernel_for(gm: fx.GraphModule) -> OwnKernel | None:
    """What does all that the graph of a stretch does; None where there is none.

    It is for a device that has Triton. The file of the kernels is imported at the first call.
    """
    shape = _Shape(gm)
    for target, match in MATCHES.items():
        node = shape.only(target)
        if node is not None:
            return match(shape, node)
    return None


def _run(name: str, places: Sequence[int | None], options: Mapping[str, Any], *tensors: torch.Tensor) -> None:
    _function(name)(*(None if place is None else tensors[place] for place in places), **options)


@cache
def _function(name: str) -> Callable[..., None]:
    return Kernel(FILES.get(name, "row_sums"), name, fits=bool).launch


class _Shape:
    """The graph of a stretch, read for matching: which placeholder a value comes from, and which it is written to."""

    def __init__(self, gm: fx.GraphModule) -> None:
        holders = fx_nodes.placeholders(gm.graph)
        self.place = {node: number for number, node in enumerate(holders)}
        computes = [n for n in gm.graph.nodes if fx_nodes.is_compute(n) and n.target is not operator.getitem]
        self.ops = [n for n in computes if not fx_nodes.is_view(n) and n.target is not aten.copy_.default]
        self.into: dict[fx.Node, int] = {}
        for copy in (n for n in computes if n.target is aten.copy_.default):
            into, source = (fx_nodes.operand(copy, i) for i in (0, 1))
            made = self.flat(source)
            if into in self.place and _alike(into, source) and made not in self.place and made not in self.into:
                self.into[made] = self.place[into]
            else:
                self.ops.append(copy)  # which no kernel does

    def only(self, target: Any) -> fx.Node | None:
        """The node that calls an op, if it is the only one."""
        found = [node for node in self.ops if node.target is target]
        return found[0] if len(found) == 1 else None

    def flat(self, node: fx.Node) -> fx.Node:
        """What a value is a view of, in the same order of elements."""
        while node.target in FLAT:
            node = fx_nodes.operand(node)
        return node

    def given(self, node: Any) -> int | None:
        """The number of the placeholder whose elements a value has."""
        return self.place.get(self.flat(node)) if isinstance(node, fx.Node) else None

    def written(self, node: fx.Node) -> int | None:
        """The number of the placeholder that a value is written to."""
        return self.into.get(node)

    def total_of(self, node: fx.Node, width: int | None = None) -> fx.Node | None:
        """The sum over the rows of a value, if the graph has one: over all dims but those of one row, of `width`
        elements."""
        found = self.only(aten.sum.dim_IntList)
        if found is None or self.flat(fx_nodes.operand(found)) is not node or found.kwargs:
            return None
        rows = fx_nodes.operand(found).meta["val"]
        fits = rows.ndim == 2 and width in (None, rows.shape[1])
        return found if fits and found.args[1] == [0] else None

    def is_whole(self, *nodes: fx.Node) -> bool:
        """Whether these are all that the graph computes and writes."""
        return set(self.ops) == {n for n in nodes if n.target is not operator.getitem} and set(self.into) <= set(nodes)

    def is_plain(self, places: Sequence[int | None]) -> bool:
        """Whether the tensors are of one dtype that kernels take, but for a norm's fp32 numbers by row; all taken."""
        vals = {place: node.meta["val"] for node, place in self.place.items()}
        used = [vals[place] for place in places if place is not None]
        small = {t.dtype for t in used} - {used[0].dtype}
        return used[0].dtype in FLOATS and small <= {torch.float32}


def _gelu(shape: _Shape, node: fx.Node) -> OwnKernel | None:
    total = shape.total_of(node)
    if total is None or not shape.is_whole(node, total):
        return None
    places = [shape.given(node.args[0]), shape.given(node.args[1]), shape.written(node), shape.written(total)]
    if None in places or not _contiguous(node, node.args[0], node.args[1]) or not shape.is_plain(places):
        return None
    options = {"approximate": node.kwargs.get("approximate", "none")}
    return OwnKernel("gelu_backward_sum", places, options, _partial_bytes(node, total, TALL))


def _pack(shape: _Shape, node: fx.Node) -> OwnKernel | None:
    stack: Any = node.args[0]
    clone, permute = shape.only(aten.clone.default), next(iter(node.users), None)
    total = None if clone is None else shape.total_of(clone, clone.meta["val"].shape[2:].numel())
    if clone is None or permute is None or total is None or shape.written(node) is not None:
        return None
    if not shape.is_whole(node, clone, total):
        return None
    turned = permute.target is aten.permute.default and permute.args[1] == [1, 3, 0, 2, 4]
    first = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not turned or first != 0 or fx_nodes.operand(clone) is not permute or len(stack) != 3:
        return None
    vals = [x.meta["val"] for x in stack]
    same = len({(x.shape, x.stride(), x.dtype) for x in vals}) == 1 and vals[0].stride(-1) == 1
    places = [shape.place.get(x) for x in stack] + [shape.written(clone), shape.written(total)]
    if not same or None in places or not _contiguous(clone) or not shape.is_plain(places):
        return None
    return OwnKernel("pack_sum", places, heap=_partial_bytes(clone, total, TALL))


def _norm(shape: _Shape, node: fx.Node) -> OwnKernel | None:
    args: Any = node.args
    grad, x, width, mean, rstd, weight, _, wanted = args
    parts = {user.args[1]: user for user in node.users}
    if set(parts) != {0, 1, 2} or wanted != [True] * 3 or len(width) != 1 or width[0] > WIDEST:
        return None
    if x.meta["val"].itemsize * width[0] % 16:  # rows are read in vectors
        return None
    made, added = parts[0], shape.only(aten.add.Tensor)
    residual: Any = None
    if added is not None:
        others = [arg for arg in added.args if arg is not made]
        if len(others) != 1 or added.kwargs or list(made.users) != [added]:
            return None
        residual, made = others[0], added
    total = shape.total_of(made, width[0])
    inside = [node, *([added] if added is not None else []), *([total] if total is not None else [])]
    values = (parts[1], parts[2], made, *([total] if total is not None else []))
    if not shape.is_whole(*inside, *values):
        return None
    places = [shape.given(one) for one in (grad, x, mean, rstd, weight)]
    places += [None if residual is None else shape.given(residual), *map(shape.written, (made, parts[1], parts[2]))]
    places += [] if total is None else [shape.written(total)]
    lacking = [place for number, place in enumerate(places) if place is None and (number != 5 or residual is not None)]
    if lacking or any(one.meta["val"].shape != x.meta["val"].shape for one in (made, residual or x)):
        return None
    numbers = mean.meta["val"].dtype == torch.float32 and _contiguous(mean, rstd)
    like = _contiguous(made, grad, x, weight, residual or x)
    if not numbers or not like or not shape.is_plain(places):
        return None
    sums = 2 if total is None else 3
    return OwnKernel("layer_norm_backward_sums", places, heap=sums * _partial_bytes(made, weight, NORM_ROWS))


def _loss(shape: _Shape, node: fx.Node) -> OwnKernel | None:
    forward, back, end = (shape.only(target) for target in LOSS)
    if not forward or not back or not end or not cross_entropy.is_loss(node) or node.meta["val"].dtype != torch.float32:
        return None
    names: dict[Any, fx.Node] = {user.args[1]: user for user in forward.users}
    _, target, _, reduction, ignored = forward.args
    same = back.args[2:6] == (target, None, reduction, ignored) and back.args[6] is names.get(1)
    before, after = _before(fx_nodes.operand(node)), _after(shape, end)
    if not same or 0 not in names or before is None or after is None:
        return None
    (rows, *casts), (*pads, last) = before, after
    grad: Any = back.args[0]
    ones = grad.target is aten.ones_like.default
    if not shape.is_whole(node, forward, back, end, *casts, *pads, last, names[0], *([grad] if ones else [])):
        return None
    places = [shape.place.get(rows), shape.given(target), None if ones else shape.given(grad)]
    places += [shape.written(names[0]), shape.written(last)]
    (number, columns), wide, out = node.meta["val"].shape, rows.meta["val"], last.meta["val"]
    alike = wide.ndim == 2 and len(wide) == number and _contiguous(rows, last)
    alike = alike and (wide.numel(), wide.shape[1]) == (out.numel(), out.shape[-1])
    first, into = places[0], places[4]
    if first is None or into is None or None in (places[1], places[3]) or (places[2] is None and not ones) or not alike:
        return None
    if not shape.is_plain([first, into]):
        return None
    options = {"columns": columns, "mean": reduction == 1, "ignored": ignored}
    return OwnKernel("softmax_loss", places, options, 12 * len(wide) + 4, (first, into))


def _before(x: fx.Node) -> list[fx.Node] | None:
    """The matrix that logits are read from, and their one cast, if they have one; None where they have more."""
    wide, casts = cross_entropy.uncut(x), []
    while x is not wide and (x.target in cross_entropy.CHAIN or wide is not None):
        casts += [x] if x.target is aten._to_copy.default else []
        x = fx_nodes.operand(x)
    return [x, *casts] if len(casts) < 2 else None


def _after(shape: _Shape, end: fx.Node) -> list[fx.Node] | None:
    """The ops from a gradient to what is written: one cast at most, and a pad."""
    ops = [end]
    node: fx.Node | None = end
    while shape.written(ops[-1]) is None:
        node = _only_reader(node) if node is not None else None
        if node is None or node.target not in (*cross_entropy.CHAIN, aten.constant_pad_nd.default):
            return None
        ops += [] if fx_nodes.is_view(node) else [node]
    casts = [n for n in ops if n.target is aten._to_copy.default]
    pads = [n for n in ops if n.target is aten.constant_pad_nd.default]
    behind = all(_pads_columns(pad) for pad in pads)
    return ops if len(casts) < 2 and len(pads) < 2 and behind else None


def _pads_columns(pad: fx.Node) -> bool:
    """Whether a pad puts zeros behind the rows of a matrix."""
    more: Any = pad.args[1]
    return len(pad.args) == 2 and not pad.kwargs and more[0] == 0 and not any(more[2:])


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _partial_bytes(made: fx.Node, total: fx.Node, rows: int) -> int:
    """Bytes of the fp32 sums of blocks of rows."""
    width = total.meta["val"].numel()
    return 4 * width * -(-made.meta["val"].numel() // (width * rows))


def _alike(into: fx.Node, source: fx.Node) -> bool:
    """Whether a copy writes each element of a value once, in order, as it is."""
    to, of = into.meta["val"], source.meta["val"]
    return (to.shape, to.dtype) == (of.shape, of.dtype) and bool(to.is_contiguous())


def _contiguous(node: fx.Node, *others: Any) -> bool:
    """Whether values are contiguous and of one dtype."""
    vals = [n.meta["val"] for n in (node, *others)]
    return all(v.is_contiguous() and v.dtype == vals[0].dtype for v in vals)


LOSS = (aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten._log_softmax_backward_data.default)
MATCHES: dict[Any, Callable[[_Shape, fx.Node], OwnKernel | None]] = {
    aten.native_layer_norm_backward.default: _norm,
    aten.gelu_backward.default: _gelu,
    aten.stack.default: _pack,
    aten._log_softmax.default: _loss,
}
