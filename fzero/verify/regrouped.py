"""regrouped: two graphs compute the same but for the order in which they add.

Before a captured graph is laid over ranks, biases are taken out of products and sums are added in another order
(`fzero.shard.split_bias`, `join_sums`). Here every value of both graphs gets a term. A sum is the bag of what it adds.
A product or convolution with a bias adds it. A view of a sum is the sum of views. The outputs must have equal terms.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from fzero.errors import VerifyError
from fzero.ir import fx_nodes
from fzero.shard.moves import VIEWS

aten = torch.ops.aten
Shape = tuple[int, ...]


def check_regrouped(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Raises VerifyError where an output of two graphs with the same inputs has other terms."""
    terms = _Terms()
    pairs = zip(terms.outputs(before), terms.outputs(after), strict=True)
    for index, (one, other) in enumerate(pairs):
        if one != other:
            raise VerifyError(
                f"[sharding] output {index} of a region is not what was captured, once its sums are in another order"
            )


class _Terms:
    """Numbers for terms: equal terms have one. Only the methods write the tables."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.sums: dict[int, tuple[int, ...]] = {}  # of a sum, what it adds, in order of numbers
        self.shapes: dict[int, Shape] = {}
        self.dtypes: dict[int, torch.dtype | None] = {}

    def outputs(self, gm: fx.GraphModule) -> list[Any]:
        held: dict[fx.Node, int] = {}
        for index, node in enumerate(fx_nodes.placeholders(gm.graph)):
            held[node] = self.number(("input", index), node.meta["val"])
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                held[node] = self.number(("constant", id(getattr(gm, str(node.target)))), node.meta.get("val"))
            elif node.op == "call_function":
                held[node] = self.of(node, held)
        return [held[x] if isinstance(x, fx.Node) else x for x in fx_nodes.outputs(gm.graph)]

    def of(self, node: fx.Node, held: dict[fx.Node, int]) -> int:
        value: Any = node.meta.get("val")
        number: Any = lambda x: _Id(held[x])  # noqa: E731
        given: Any = fx.node.map_arg((node.args, node.kwargs), number)
        args, kwargs = given
        if node.target is aten.add.Tensor and not kwargs and all(isinstance(a, _Id) for a in args):
            return self.sum([a.number for a in args], value)
        if node.target is aten.addmm.default and not kwargs:
            product = self.call(aten.mm.default, args[1:], {}, value)
            return self.sum([args[0].number, product], value)
        if node.target is aten.convolution.default and isinstance(args[2], _Id):
            alone = self.call(node.target, (*args[:2], None, *args[3:]), {}, value)
            channels = [self.shapes[args[2].number][0], *[1] * (value.ndim - 2)]
            like = torch.empty(channels, dtype=value.dtype, device="meta")
            seen = self.call(aten.view.default, (args[2], channels), {}, like)
            return self.sum([alone, seen], value)
        if node.target in VIEWS and len(args) == 2 and args[0].number in self.sums:
            parts = self.viewed(node.target, args, tuple(value.shape), value)
            if parts is not None:
                return self.sum(parts, value)
        return self.call(node.target, args, kwargs, value)

    def viewed(self, target: Any, args: Sequence[Any], shape: Shape, value: torch.Tensor) -> list[int] | None:
        """The terms of a view of a sum: of what has the sum's shape the view, of what has the last dim alone itself.
        None where something has another shape, or the last dim another size."""
        whole, last = self.shapes[args[0].number], shape[-1:]
        parts = []
        for term in self.sums[args[0].number]:
            if self.shapes[term] == whole:
                parts.append(self.call(target, (_Id(term), *args[1:]), {}, value))
            elif self.shapes[term] == whole[-1:] == last:
                parts.append(term)
            else:
                return None
        return parts

    def sum(self, terms: Sequence[int], value: torch.Tensor) -> int:
        shape = tuple(value.shape)
        bag: list[int] = []
        for term in terms:
            alike = (self.shapes[term], self.dtypes[term]) == (shape, value.dtype)  # a narrower sum is rounded
            inner = self.sums.get(term) if alike else None
            bag += inner if inner is not None else (term,)
        found = self.number(("sum", *sorted(bag)), value)
        self.sums[found] = tuple(sorted(bag))
        return found

    def call(self, target: Any, args: Any, kwargs: Any, value: Any) -> int:
        return self.number((str(target), repr(args), repr(kwargs)), value)

    def number(self, term: Hashable, value: Any) -> int:
        form = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else ((), None)
        found = self.numbers.setdefault((term, form), len(self.numbers))
        self.shapes[found], self.dtypes[found] = form
        return found


class _Id:
    """A term in the place of a node among a call's arguments."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"
