"""segment_text: a segment as plain data, which JSON can hold, and back. Reading runs nothing that the data names.

A segment is a list of nodes in their order. A node has its op, its target, its arguments, and the form of its value:
dtype, shape, strides, first element and the elements of its storage. Of a value that is no number, string, list or
None, the data has a dict with one key, its kind: `{"node": 3}`, `{"dtype": "f32"}`. A target is the name of an op of
torch's registry, or `getitem`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode, OpOverload, graph_module
from fzero.ir.records import DTYPE_NAMES, DTYPES

_NAMED = {"layout": torch.layout, "memory_format": torch.memory_format}


def to_data(gm: fx.GraphModule) -> list[dict[str, Any]]:
    """The nodes of a segment as plain data. Raises TypeError for an argument that has no such form."""
    number = {node: i for i, node in enumerate(gm.graph.nodes)}
    nodes = []
    for node in gm.graph.nodes:
        own: dict[str, Any] = {"op": node.op, "args": _data(list(node.args), number)}
        if node.op == "call_function":
            own["target"] = op_text(node.target)
        if node.kwargs:
            own["kwargs"] = {name: _data(value, number) for name, value in node.kwargs.items()}
        if "val" in node.meta:
            own["value"] = _form(node.meta["val"])
        nodes.append(own)
    return nodes


def from_data(nodes: Sequence[Mapping[str, Any]]) -> fx.GraphModule:
    """The segment of this data, on fake tensors. Raises ValueError for data that is none, and for an op that is not
    registered."""
    graph, made = fx.Graph(), list[fx.Node]()
    try:
        with FakeTensorMode():
            for own in nodes:
                args = tuple(_value(x, made) for x in own["args"])
                kwargs = {name: _value(x, made) for name, x in own.get("kwargs", {}).items()}
                if own["op"] == "placeholder":
                    node = graph.placeholder(f"x{len(made)}")
                elif own["op"] == "call_function":
                    node = graph.call_function(op_named(own["target"]), args, kwargs)
                else:
                    node = graph.output(*args)
                if "value" in own:
                    node.meta["val"] = _fake(own["value"])
                made.append(node)
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"node {len(made)} of a segment is not understood ({type(error).__name__}: {error})") from None
    return graph_module(graph)


def op_text(op: Any) -> str:
    """The name of an op, which `op_named` reads."""
    return "getitem" if op is operator.getitem else str(op)


def op_named(name: str) -> Any:
    """The op of a name: of torch's registry, or `getitem`. Raises ValueError where there is none."""
    if name == "getitem":
        return operator.getitem
    if not re.fullmatch(r"\w+\.\w+\.\w+", name):
        raise ValueError(f"{name!r} is no name of an op")
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        raise ValueError(f"there is no op {name}: import the library that registers it first")
    return found


def _data(value: Any, number: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": number[value]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"dtype": DTYPE_NAMES[value]}
    if isinstance(value, torch.device):
        return {"device": value.type}
    for kind, of in _NAMED.items():
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, (tuple, list)):
        items = [_data(item, number) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, slice):
        return {"slice": [_data(item, number) for item in (value.start, value.stop, value.step)]}
    raise TypeError(f"an argument of type {type(value).__name__} has no text")


def _value(data: Any, made: Sequence[fx.Node]) -> Any:
    if isinstance(data, list):
        return [_value(item, made) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, of),) = data.items()
    if kind == "node":
        return made[of]
    if kind in ("tuple", "slice"):
        items = [_value(item, made) for item in of]
        return tuple(items) if kind == "tuple" else slice(*items)
    if kind in _NAMED:
        found = getattr(torch, of)
        if not isinstance(found, _NAMED[kind]):
            raise ValueError(f"torch.{of} is no {kind}")
        return found
    plain: dict[str, Any] = {"float": float, "complex": lambda x: complex(*x), "dtype": DTYPES.__getitem__,
                             "device": torch.device}  # fmt: skip
    return plain[kind](of)


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        held = value.untyped_storage().nbytes() // value.element_size()
        return [DTYPE_NAMES[value.dtype], list(value.shape), list(value.stride()), value.storage_offset(), held,
                value.device.type]  # fmt: skip
    if isinstance(value, (tuple, list)):
        return {"several": [_form(item) for item in value]}
    return None


def _fake(form: Any) -> Any:
    if form is None:
        return None
    if isinstance(form, dict):
        return tuple(_fake(item) for item in form["several"])
    dtype, shape, strides, offset, held, device = form
    return torch.empty(held, dtype=DTYPES[dtype], device=device).as_strided(shape, strides, offset)
