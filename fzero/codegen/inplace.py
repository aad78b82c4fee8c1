"""inplace: values of a segment that need no memory of their own.

An elementwise op may write over an operand that no later op reads. A value that is only copied or added into a
destination may be computed in the destination's memory. So a chain of elementwise work holds one value instead of two.
A gradient that is the sum of two terms holds its second term where the sum will lie.

    a = mul(x, y); b = exp(a)              b lies where a lay
    t = mm(x, y); add.out(h, t, out=dest)  t lies in dest
    x = mm(h, w); loss, dx = fused(x, y)   x lies where dx will lie, if the kernel says so (`Fused.over`)

The column `overwrites` is of ops alone whose kernel reads each element before it writes that element. They were seen to
give the same bits, but for the sign and payload of a NaN, which follow how a kernel walks over memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fzero import backend
from fzero.ir import fx_nodes, fx_values
from fzero.ir.op import Op
from fzero.ir.op_info import of
from fzero.ir.rewrite import Spans

aten = torch.ops.aten
Home = fx_values.Value | fx.Node  # a value of the segment, or the placeholder of a destination


def apart(op: Op) -> frozenset[int]:
    """The destinations of a run that share no memory with its reads or with one another.

    They are given as positions of the segment's placeholders.
    """
    into = op.writes[op.num_outputs :]
    spans = Spans((*op.reads, *into))
    return frozenset(i for i, dest in enumerate(into, len(op.reads)) if all(other == i for other in spans.over(dest)))


def homes(
    gm: fx.GraphModule,
    values: fx_values.Values,
    apart: frozenset[int],
    tiled: Collection[fx.Node] = (),
    over: Mapping[fx.Node, tuple[int, int]] = MappingProxyType({}),
) -> dict[fx_values.Value, Home]:
    """{value: the value or the destination in whose memory it lies}, of the values that need no memory of their own.

    values: those of the segment, with their lives. apart: as `apart` gives it. tiled: nodes whose values are never
    whole (`fzero.codegen.tiling`). over: of stretches, an operand and the result that may be written over it, as
    numbers (`Fused.over`).
    """
    holders = fx_nodes.placeholders(gm.graph)
    free = {holders[i] for i in apart}
    takes: dict[fx_values.Value, Home] = {}
    for position, node in enumerate(gm.graph.nodes):
        if node in over:
            takes |= _under(node, over[node], values, position)
        result = _result(node, free)
        if result is None or node in tiled:
            continue
        target = result if isinstance(result, fx.Node) else node
        for operand in node.all_input_nodes:
            key = _own(operand, values)
            if (
                key is not None
                and key[0] not in tiled
                and values.lives[key][1] == position
                and _elementwise(node, key, target.meta["val"])
            ):
                takes[key] = result
                break
    return {key: _final(takes, key) for key in takes}


def _under(
    call: fx.Node, over: tuple[int, int], values: fx_values.Values, position: int
) -> dict[fx_values.Value, Home]:
    """{an operand of a stretch that nothing reads later: the result that is written over it}."""
    operand = fx_nodes.operand(call, over[0])
    key, result = _own(operand, values), dict(fx_values.results(call)).get(over[1])
    if key is None or result is None or values.lives[key][1] != position:
        return {}
    if [n for n in call.all_input_nodes if key in fx_values.memory(n)] != [operand]:
        return {}
    value, memory = operand.meta["val"], dict(fx_values.results(key[0]))[key[1]]
    whole = value.is_contiguous() and result.is_contiguous() and value.dtype == result.dtype == memory.dtype
    sizes = {fx_values.extent_bytes(x) for x in (value, result, memory)}
    return {key: (call, over[1])} if whole and len(sizes) == 1 else {}


def _final(takes: dict[fx_values.Value, Home], key: fx_values.Value) -> Home:
    """The home of a value, whose own home may lie in another's memory again."""
    home: Home = key
    while not isinstance(home, fx.Node) and home in takes:
        home = takes[home]
    return home


def _result(node: fx.Node, free: set[fx.Node]) -> Home | None:
    """Where an op that may write over its operands writes to; None for another op."""
    into: Any = node.args[0] if node.target is aten.copy_.default else node.kwargs.get("out")
    if node.target is not aten.copy_.default and not writes_over(node):
        return None
    if isinstance(into, fx.Node):
        return into if into in free and set(into.users) == {node} else None
    return (node, 0) if fx_values.results(node) else None


def writes_over(node: fx.Node) -> bool:
    """Whether an op may write over an operand: elementwise, or row by row."""
    return of(node.target).overwrites == "elements" or by_rows(node)


def by_rows(node: fx.Node) -> bool:
    """Softmax along the last dim on the CPU reads a row before it writes the row."""
    if of(node.target).overwrites != "rows":
        return False
    value = fx_nodes.operand(node).meta["val"]
    dims = {arg for arg in node.args[1:3] if isinstance(arg, int) and not isinstance(arg, bool)}
    return backend.of(value.device).on_host and bool(dims) and dims <= {-1, value.ndim - 1}


def _own(operand: fx.Node, values: fx_values.Values) -> fx_values.Value | None:
    """The one value of the segment's workspace that an operand is, or is a view of; None for another operand."""
    keys = list(fx_values.memory(operand))
    return keys[0] if len(keys) == 1 and keys[0] in values.lives and keys[0] not in values.outputs else None


def _elementwise(node: fx.Node, key: fx_values.Value, result: torch.Tensor) -> bool:
    """Whether every operand of this memory has the shape, strides and dtype of the result, and all of the memory.

    Strides of dims of size one count too: torch takes an input and an output as one only if they are equal. After an
    `expand` torch's shape rules give them other ones than its kernels (2.13.0).
    """
    value = dict(fx_values.results(key[0]))[key[1]]
    # a value read as another dtype; complex division rounds differently over its operand (torch 2.13.0)
    if value.dtype != result.dtype or result.dtype.is_complex:
        return False
    readers = [n for n in node.all_input_nodes if key in fx_values.memory(n)]
    if any(map(_expanded, readers)):
        return False
    operands = [n.meta["val"] for n in readers]
    dense = torch.empty(result.shape, device="meta").stride()
    return fx_values.extent_bytes(value) == fx_values.extent_bytes(result) and all(
        x.shape == result.shape and x.dtype == result.dtype and x.stride() == result.stride() == dense for x in operands
    )


def _expanded(node: fx.Node) -> bool:
    while fx_nodes.is_view(node):
        if node.target is aten.expand.default:
            return True
        node = fx_nodes.operand(node)
    return False


def at_home(value: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
    """A value's tensor in the memory of its home; `value` says the shape and the strides."""
    return home.as_strided(value.shape, value.stride())
