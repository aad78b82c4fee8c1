"""own_kernels: the stretches for which fzero has a kernel of its own, by what their graphs compute.

A compiler sums rows in a second pass over what the first one wrote, or adds partial sums up by torch's own reduction.
`fzero.kernels.row_sums` does it in the pass that makes the rows:

    gelu_backward, and the sum of its rows
    stack of three, permute, clone, and the sum of its rows
    native_layer_norm_backward, what is added to its first result, and the sum of those rows

A stretch that is not exactly one of them is compiled as others are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from fzero.ir import fx_nodes
from fzero.kernels import FLOATS, WIDEST, Kernel

aten = torch.ops.aten
FLAT = (aten.view.default, aten._unsafe_view.default)  # views that keep the order of elements


def kernel_for(gm: fx.GraphModule) -> Callable[..., None] | None:
    """The function that does what the graph of a stretch does, with its tensors as arguments; None where there is none.

    It is for a device that has Triton. The file of the kernels is imported at the first call.
    """
    shape = _Shape(gm)
    for target, match in MATCHES.items():
        node = shape.only(target)
        if node is not None:
            found = match(shape, node)
            return partial(_run, *found) if found is not None and shape.is_plain(found[1]) else None
    return None


def _run(name: str, places: Sequence[int | None], options: dict[str, Any], *tensors: torch.Tensor) -> None:
    _function(name)(*(None if place is None else tensors[place] for place in places), **options)


@cache
def _function(name: str) -> Callable[..., None]:
    return Kernel("row_sums", name, fits=bool).launch


Found = tuple[str, list[int | None], dict[str, Any]]  # a function of `row_sums`, which tensors it takes, its options


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


def _gelu(shape: _Shape, node: fx.Node) -> Found | None:
    total = shape.total_of(node)
    if total is None or not shape.is_whole(node, total):
        return None
    places = [shape.given(node.args[0]), shape.given(node.args[1]), shape.written(node), shape.written(total)]
    whole = None not in places and _contiguous(node, node.args[0], node.args[1])
    approximate = node.kwargs.get("approximate", "none")
    return ("gelu_backward_sum", places, {"approximate": approximate}) if whole else None


def _pack(shape: _Shape, node: fx.Node) -> Found | None:
    stack: Any = node.args[0]
    clone, permute = shape.only(aten.clone.default), next(iter(node.users), None)
    total = None if clone is None else shape.total_of(clone, clone.meta["val"][0, 0].numel())
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
    return ("pack_sum", places, {}) if same and None not in places and _contiguous(clone) else None


def _norm(shape: _Shape, node: fx.Node) -> Found | None:
    args: Any = node.args
    grad, x, width, mean, rstd, weight, _, wanted = args
    parts = {user.args[1]: user for user in node.users}
    if set(parts) != {0, 1, 2} or wanted != [True] * 3 or len(width) != 1 or width[0] > WIDEST:
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
    return ("layer_norm_backward_sums", places, {}) if numbers and like else None


def _alike(into: fx.Node, source: fx.Node) -> bool:
    """Whether a copy writes each element of a value once, in order, as it is."""
    to, of = into.meta["val"], source.meta["val"]
    return (to.shape, to.dtype) == (of.shape, of.dtype) and bool(to.is_contiguous())


def _contiguous(node: fx.Node, *others: Any) -> bool:
    """Whether values are contiguous and of one dtype."""
    vals = [n.meta["val"] for n in (node, *others)]
    return all(v.is_contiguous() and v.dtype == vals[0].dtype for v in vals)


MATCHES: dict[Any, Callable[[_Shape, fx.Node], Found | None]] = {
    aten.native_layer_norm_backward.default: _norm,
    aten.gelu_backward.default: _gelu,
    aten.stack.default: _pack,
}
