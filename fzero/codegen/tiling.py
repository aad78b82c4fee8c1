"""tiling: chains of ops that run a strip at a time, so that what lies between them is never whole.

The gradient of a cross entropy is a matrix as large as the logits, nearly all zeros, that the next op reads once; the
gradient of an embedding in 16 bits is made in the allocator's memory and then added and cast. Cut into strips of rows
or columns, which do not meet in any op of the chain, such a value needs the memory of one strip, which stays in the
cache. The same kernels run on the strips: the bits are the same. That holds for ops that round once, or not at all: of
others (a sigmoid, a gelu, a power) torch has a vector form and a scalar one for the last few elements of what it is
given, which round differently, and a strip ends elsewhere than the whole.

    a = nll_loss_backward(g, x, y)        for rows of x: a = nll_loss_backward(g, x[rows], y[rows])
    b = _log_softmax_backward(a, x)                      b[rows] = _log_softmax_backward(a, x[rows])
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fzero.codegen.inplace import by_rows
from fzero.ir import fx_nodes

aten = torch.ops.aten
BYTES = {0: 1 << 20, 1: 4 << 20}  # of a strip, by the dim that is cut
# the same bits whatever the number of elements; of 0 and -0 a maximum takes the one or the other
_EXACT = frozenset(str.split("add sub mul div neg abs sqrt where threshold_backward"))
# the head's op: the dim of its result that is cut, and the dim of each operand that is cut with it
_HEADS: dict[Any, tuple[int, dict[int, int]]] = {
    aten.nll_loss_backward.default: (0, {1: 0, 2: 0}),
    aten.embedding_dense_backward.default: (1, {0: -1}),
}


@dataclass(frozen=True)
class Chain:
    """`nodes`: the head, then each the only user of the one before. Strips are `step` wide along `dim`."""

    nodes: tuple[fx.Node, ...]
    dim: int
    step: int

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]

    @cached_property
    def made(self) -> list[tuple[fx.Node, torch.Tensor]]:
        """What lies between the ops: one strip of it, on the meta device."""
        found = []
        for node in self.nodes[:-1]:
            value = node.meta["val"]
            shape = [self.step if d == self.dim else n for d, n in enumerate(value.shape)]
            found.append((node, torch.empty(shape, dtype=value.dtype, device="meta")))
        return found

    def is_cut(self, operand: fx.Node) -> bool:
        """Whether a strip of the results needs the same strip of an operand alone."""
        value = operand.meta["val"]
        return value.shape == self.nodes[0].meta["val"].shape and bool(value.is_contiguous())

    def cuts(self, env: Mapping[fx.Node, Any], blocks: Mapping[fx.Node, torch.Tensor]) -> Iterator[dict[fx.Node, Any]]:
        """For each strip what every operand of the chain is. `blocks` are 1-D memory for what lies between."""
        _, head = _HEADS[self.nodes[0].target]
        along = {operand: self.dim for node in self.nodes[1:] for operand in node.all_input_nodes}
        along |= {fx_nodes.operand(self.nodes[0], index): dim for index, dim in head.items()}
        outer = {n: env[n] for node in self.nodes for n in node.all_input_nodes if n not in self.nodes}
        size = self.nodes[0].meta["val"].shape[self.dim]
        for start in range(0, size, self.step):
            width = min(self.step, size - start)
            found = {n: x.narrow(along[n], start, width) if n in along else x for n, x in outer.items()}
            for node, strip in self.made:
                shape = [width if d == self.dim else n for d, n in enumerate(strip.shape)]
                found[node] = blocks[node][: strip.numel() // strip.shape[self.dim] * width].view(shape)
            yield found


def chains(gm: fx.GraphModule, apart: frozenset[int]) -> list[Chain]:
    """The chains of a segment that are worth it. `apart` as in `fzero.codegen.inplace`."""
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    holders = fx_nodes.placeholders(gm.graph)
    free = {holders[i] for i in apart}
    found: list[Chain] = []
    for node in gm.graph.nodes:
        taken = {n for one in found for n in one.nodes}  # two chains may meet: the second ends before
        one = _chain(node, taken) if node.target in _HEADS and _is_head(node) else None
        if one is not None and _undisturbed(one, list(gm.graph.nodes), position, free):
            found.append(one)
    return found


def _is_head(node: fx.Node) -> bool:
    value = node.meta["val"]
    if value.device.type != "cpu" or value.ndim != 2 or not value.is_contiguous():
        return False
    if node.target is aten.nll_loss_backward.default:
        return node.args[4] in (1, 2)  # a mean or a sum: the gradient of the loss is one number
    return value.dtype.itemsize < 4 and not node.args[4]


def _chain(head: fx.Node, taken: Collection[fx.Node]) -> Chain | None:
    dim, _ = _HEADS[head.target]
    value = head.meta["val"]
    step = max(1, BYTES[dim] * value.shape[dim] // max(value.numel() * value.element_size(), 1))
    nodes = [head]
    while not fx_nodes.mutated(nodes[-1]) and len(nodes[-1].users) == 1:
        user = next(iter(nodes[-1].users))
        if user in taken or not _follows(user, nodes[-1], dim):
            break
        nodes.append(user)
    return Chain(tuple(nodes), dim, step) if len(nodes) > 1 and step < value.shape[dim] else None


def _follows(node: fx.Node, before: fx.Node, dim: int) -> bool:
    """Whether an op's strips depend on the same strips of its operands alone."""
    shape = before.meta["val"].shape
    cast = node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype"}
    copied = node.target is aten.copy_.default and node.args[1] is before
    fits = cast or copied or _exact(node) or (dim == 0 and by_rows(node))
    alike = all(isinstance(x := n.meta["val"], torch.Tensor) and x.shape == shape for n in node.all_input_nodes)
    return fits and alike and all(n.meta["val"].is_contiguous() for n in node.all_input_nodes)


def _exact(node: fx.Node) -> bool:
    """Not with a factor (`alpha`) of the second operand, either."""
    name, factor = fx_nodes.op_name(node), {"alpha", "rounding_mode"} & set(node.kwargs)
    return name in _EXACT and not factor and not (name in ("add", "sub") and len(node.args) > 2)


def _undisturbed(one: Chain, nodes: list[fx.Node], position: dict[fx.Node, int], free: set[fx.Node]) -> bool:
    """Whether nothing writes to what the chain reads: between the head and the last op, for it all runs at the last;
    nor the last op in one strip to what a later one needs, as far as a destination may share memory with operands."""
    operands = [n for node in one.nodes for n in node.all_input_nodes if n not in one.nodes]
    reads = {fx_nodes.base(n) for n in operands}
    between = nodes[position[one.nodes[0]] : position[one.last]]
    written = [fx_nodes.base(w) for node in between if node not in one.nodes for w in fx_nodes.mutated(node)]
    into = {fx_nodes.base(w).meta["val"].dtype for w in fx_nodes.mutated(one.last) if fx_nodes.base(w) not in free}
    whole = {b.meta["val"].dtype for n in operands if (b := fx_nodes.base(n)).op == "placeholder" and not one.is_cut(n)}
    return all(w in free and w not in reads for w in written) and not into & whole


Writing = Callable[[fx.Node, Any, Any, dict[int, torch.Tensor]], Iterator[Callable[[], Any]]]


def calls(
    one: Chain, env: Mapping[fx.Node, Any], blocks: Mapping[fx.Node, torch.Tensor], into: torch.Tensor | None,
    writing: Writing,
) -> Iterator[Callable[[], Any]]:  # fmt: skip
    """The calls of a chain, strip by strip. `into` is where the last op's result goes, unless a destination is one of
    its operands; `writing` gives the calls of one node."""
    start = 0
    for given in one.cuts(env, blocks):
        for node in one.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
            if node is not one.last:
                yield from writing(node, args, kwargs, {0: given[node]})
            elif into is None:
                yield from writing(node, args, kwargs, {})
            else:
                width = given[one.nodes[0]].shape[one.dim]
                yield from writing(node, args, kwargs, {0: into.narrow(one.dim, start, width)})
                start += width
