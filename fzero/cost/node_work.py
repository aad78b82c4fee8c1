"""node_work: what one call of a segment does: its kernels, the bytes that it moves, its operations; and its seconds.

A call reads each operand once and writes each result once. Of a tensor that was expanded the bytes are those that it
has in memory. A lookup reads the rows that it returns, not its table.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from fzero.cost.flops import flops, product_of
from fzero.cost.rates import Rates
from fzero.cost.tensor_cores import Product
from fzero.ir import fx_nodes, fx_values
from fzero.ir.op_info import of

LOOKUPS = {
    torch.ops.aten.embedding.default: 1,
    torch.ops.aten.index_select.default: 2,
}  # the place of the rows' numbers
PLAIN = {"_to_copy": "cast", "clone": "copy", "copy_": "copy", "stack": "copy", "cat": "copy"}


@dataclass(frozen=True)
class CallWork:
    """What a call does.

    kind: what it is counted as: "product", "attention", "cast", "copy", "update" (of an optimizer), "cluster", or the
    name of its op or of fzero's kernel. kernels: how many are launched. read, written, copied: bytes; `copied` are
    those of results that are computed elsewhere and then copied, read and written. flops: operations. width: bytes of
    an element of its first result.
    """

    kind: str
    kernels: int
    read: int
    written: int
    copied: int = 0
    flops: int = 0
    width: int = 4
    product: Product | None = None

    @property
    def moved(self) -> int:
        """All bytes."""
        return self.read + self.written + self.copied


def works(graph: fx.Graph) -> Iterator[CallWork]:
    """What each call of a graph does, in order."""
    for node in graph.nodes:
        if fx_nodes.is_compute(node) and not fx_nodes.is_view(node) and node.target is not operator.getitem:
            yield work_of(node)


def work_of(node: fx.Node) -> CallWork:
    """What a node of a segment does; its results are written where they belong. A view does nothing."""
    kind, work, product = kind_of(node), flops(node), product_of(node)
    written = _written(node)
    into = node.kwargs.get("out")
    sources = dict.fromkeys(n for n in node.all_input_nodes if n is not into)
    if fx_nodes.op_name(node) == "copy_":
        sources.pop(fx_nodes.operand(node), None)
    read = sum(in_memory(x) for n in sources for x in fx_values.tensors(n.meta.get("val")))
    done = sum(map(in_memory, written))
    if node.target in LOOKUPS:
        read = done + sum(
            in_memory(x) for x in fx_values.tensors(fx_nodes.operand(node, LOOKUPS[node.target]).meta.get("val"))
        )
    width = written[0].element_size() if written else 4
    return CallWork(kind, 1, read, done, 0, work, width, product)


def kind_of(node: fx.Node) -> str:
    """What a node is counted as."""
    name, row = fx_nodes.op_name(node), of(node.target)
    if product_of(node) is not None:
        return "product"
    if row.attends:
        return "attention"
    if row.kernel is not None and "adam" in name:
        return "update"
    return PLAIN.get(name, name)


def seconds(work: CallWork, rates: Rates) -> float:
    """The seconds of a call on a machine of these rates."""
    return max(rates.launch, _busy(work, rates)) + work.kernels * rates.overhead


def _busy(work: CallWork, rates: Rates) -> float:
    if not work.flops:
        return work.moved / rates.memory_bytes
    speed = rates.flops[min(4, max(2, work.width))]
    copied = work.copied / rates.memory_bytes
    if work.kind == "attention":
        return work.flops / (min(speed, rates.attention) if rates.attention else speed) + copied
    if (product := work.product) is not None:
        if rates.tensor_cores is not None and product.itemsize == 2:
            return rates.tensor_cores.seconds(product, rates.memory_bytes) + copied
        side = min(product.m, product.n, product.k)
        speed = speed * side / (side + rates.small_side) if side else speed
    return work.flops / speed + copied


def with_copies(work: CallWork, results: int, nbytes: int) -> CallWork:
    """The work of a call of which so many results, of so many bytes in all, are then copied to their places."""
    return replace(work, kernels=work.kernels + results, copied=2 * nbytes) if results else work


def _written(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a call writes: its results, and what it writes over."""
    over = [x for n in fx_nodes.mutated(node) for x in fx_values.tensors(n.meta.get("val"))]
    return [*(x for _, x in fx_values.results(node)), *over]


def in_memory(x: torch.Tensor) -> int:
    """The bytes that a tensor has in memory: of one that was expanded, those of what it is a view of."""
    steps = zip(x.shape, x.stride(), strict=True)
    return x.element_size() * prod(size for size, step in steps if step != 0 or size == 1)
