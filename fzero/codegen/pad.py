"""pad: 16-bit matrix products whose sides are no multiple of eight become products of padded operands.

Tensor cores ask for m, n and k in multiples of 16 bytes. A vocabulary of 50,257 is none: on an H100 its three products
take 26 ms, those of 50,304 take 4. Zeros add exactly nothing to a sum, which may be added up in another order. So in
the captured graph, before anything is lowered,

    c = mm(a, b)      becomes      c = mm(pad(a), pad(b))[:m, :n]

with `aten.constant_pad_nd` and views. The meaning of a step and the program of every stage hold the same ops, so bits
do not depend on the stage. Leaves, gradients and checkpoints keep their shapes.

Cost: a pad is one pass over its operand, shared by the products that read it. Products under `LEAST_FLOPS` are left
alone. Which devices want it, and to what multiple: `Backend.product_sides`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from fzero import backend
from fzero.capture.graph import Graph
from fzero.cost.flops import product_of
from fzero.ir import forms, fx_nodes, segments

aten = torch.ops.aten
LEAST_FLOPS = 1e11
WIDTHS = (2,)  # bytes of an element
MULTIPLE = 64  # sides are padded to: a tile's rows are full
PRODUCTS = (aten.mm.default, aten.bmm.default)


def padded(graph: Graph) -> Graph:
    """The graph with padded operands where products gain by it; itself where none does."""
    return graph.rewritten(_with_pads, update=True)


def is_odd(node: fx.Node) -> bool:
    """Whether a node is a product that its device wants padded."""
    product = product_of(node) if node.target in PRODUCTS else None
    if product is None or product.itemsize not in WIDTHS or product.flops < LEAST_FLOPS:
        return False
    sides = backend.of(node.meta["val"].device).product_sides
    return any(side % sides for side in (product.m, product.n, product.k))


def _with_pads(gm: fx.GraphModule) -> fx.GraphModule:
    if not any(map(is_odd, gm.graph.nodes)):
        return gm
    for contiguous in (False, True):  # a result with longer rows suits most readers, and not a view over rows
        graph = segments.copied(gm.graph)
        pads = _Pads(graph, contiguous)
        for node in list(graph.nodes):
            if is_odd(node):
                pads.replace(node)
        try:
            forms.renew(graph)
            return segments.module(graph)
        except (RuntimeError, ValueError):  # as a view raises them
            if contiguous:
                raise
    raise AssertionError("the second try returns or raises")


@dataclass
class _Pads:
    """A graph whose products are replaced, and its pads by (operand, rows, columns): two products share one. Only
    `replace` changes them. contiguous: results are copied to rows of their own length."""

    graph: fx.Graph
    contiguous: bool
    known: dict[tuple[fx.Node, int, int], fx.Node] = field(default_factory=dict)

    def replace(self, node: fx.Node) -> None:
        """Puts a padded product in a product's place."""
        left, right = (fx_nodes.operand(node, i) for i in (0, 1))
        (m, k), n = left.meta["val"].shape[-2:], right.meta["val"].shape[-1]
        sides = backend.of(node.meta["val"].device).product_sides
        rows, inner, columns = (-side % MULTIPLE if side % sides else 0 for side in (m, k, n))
        with self.graph.inserting_before(node):
            operands = self.pad(left, rows, inner), self.pad(right, inner, columns)
            result = self.graph.call_function(node.target, operands)  # type: ignore[arg-type]
            for dim, size, more in ((-2, m, rows), (-1, n, columns)):
                if more:
                    result = self.graph.call_function(aten.slice.Tensor, (result, dim, 0, size))
            if self.contiguous and columns:
                result = self.graph.call_function(
                    aten.clone.default, (result,), {"memory_format": torch.contiguous_format}
                )
        for each in self.graph.nodes:
            if "val" not in each.meta:  # the new ones; their values are propagated at the end
                each.meta = {key: value for key, value in node.meta.items() if key != "val"}
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def pad(self, operand: fx.Node, rows: int, columns: int) -> fx.Node:
        """The operand with so many zeros behind its rows and columns. Of a transposed one, what it is a view of has
        them: else the pad would transpose it."""
        if not rows and not columns:
            return operand
        if (operand, rows, columns) not in self.known:
            if operand.target is aten.t.default:
                wide = self.pad(fx_nodes.operand(operand), columns, rows)
                made = self.graph.call_function(aten.t.default, (wide,))
            else:
                made = self.graph.call_function(aten.constant_pad_nd.default, (operand, [0, columns, 0, rows]))
            self.known[operand, rows, columns] = made
        return self.known[operand, rows, columns]
