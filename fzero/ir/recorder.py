"""recorder: the ops of a call, written down as a graph.

Every op that PyTorch dispatches passes the mode `Recorder`, which runs it on fake tensors and adds a node. It is what
`make_fx` does, without what fzero has no use for (symbolic sizes, decompositions, constants that are followed, a proxy
and metadata for every value). That takes a third of the time of an op.

A tensor that no op has made, and that is no input, is closed over: each of its uses is a `get_attr` node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from fzero import backend
from fzero._torch_compat import (
    ONE_THREAD,
    FakeTensor,
    RecordingMode,
    autocast_uncached,
    decomposes,
    fake_detached,
    fx_tracing,
    graph_module,
)
from fzero.ir import forms, fx_nodes
from fzero.ir.elsewhere import device_elsewhere, move, on_host

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default


class Recorder(RecordingMode):
    """Writes down the ops that are dispatched while it is on. Within `unrecorded()` it is not.

    graph: the nodes so far. Each has its value as `meta["val"]`: fake tensors, or None for an op that returns nothing.
    root: holds the tensors that are closed over. `nodes`: tensor -> the node whose value it is now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.nodes: Any = WeakIdKeyDictionary()
        self.closed: dict[int, tuple[str, torch.Tensor]] = {}  # by id: the attribute of root
        self._snapshots: dict[Any, FakeTensor] = {}  # by form

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an op and adds its node."""
        kwargs = kwargs or {}
        if func is DEVICE:
            return func(*args, **kwargs)
        if decomposes(func, args, kwargs):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is aten.is_nonzero.default:
            with self:
                return (args[0] != 0).item()
        if func is aten.lift_fresh.default:  # a literal, which in-place work may follow
            func = aten.lift_fresh_copy.default
        operands = tuple(map(self.operand, args)), {key: self.operand(x) for key, x in kwargs.items()}
        result = forms.run(func, args, kwargs)
        node = self.graph.create_node("call_function", func, name=func.overloadpacket.__name__)
        node.args = operands[0]  # set afterwards: torch 2.13 walks what it is given at first
        if kwargs:
            node.kwargs = operands[1]
        self.keep(node, result)
        return result

    def placeholder(self, name: str, value: torch.Tensor) -> None:
        """Adds an input."""
        self.keep(self.graph.placeholder(name), value)

    def operand(self, value: Any) -> Any:
        """An operand of an op as its node has it."""
        if isinstance(value, torch.Tensor):
            return self.nodes.get(value) or self._closed_over(value)
        if isinstance(value, (list, tuple)):
            return [self.operand(x) for x in value]
        return value

    def keep(self, node: fx.Node, value: Any, form: Any = None) -> None:
        """Notes the value of a node, which has this form, and of the items of a tuple."""
        node.meta["val"] = form = self._snapshot(value) if form is None else form
        if isinstance(value, torch.Tensor):
            self.nodes[value] = node
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if item is not None:
                    self.keep(self.graph.call_function(operator.getitem, (node, i)), item, form[i])

    def _closed_over(self, value: torch.Tensor) -> fx.Node:
        kind = "_param_constant" if isinstance(value, torch.nn.Parameter) else "_tensor_constant"
        if id(value) not in self.closed:
            name = f"{kind}{sum(known.startswith(kind) for known, _ in self.closed.values())}"
            self.closed[id(value)] = name, value
            if isinstance(value, torch.nn.Parameter):
                self.root.register_parameter(name, value)
            else:
                setattr(self.root, name, value)
        node = self.graph.get_attr(self.closed[id(value)][0])
        node.meta["val"] = self._snapshot(value)
        return node

    def _snapshot(self, value: Any) -> Any:
        """A value as it is now: of a tensor its form, which in-place work may change, without its gradient. Values of
        one form have one snapshot."""
        if isinstance(value, FakeTensor) and value.layout is torch.strided:
            lies = tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.fake_device
            form = (*lies, value.is_conj(), value.is_neg())
            if (known := self._snapshots.get(form)) is None:
                known = self._snapshots[form] = fake_detached(value)
            return known
        if isinstance(value, torch.Tensor):
            return fake_detached(value) if isinstance(value, FakeTensor) else value.detach()
        return tuple(map(self._snapshot, value)) if isinstance(value, (list, tuple)) else value


def record(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """`fn(*inputs)` as a graph of what was dispatched, and of its result: a pytree of lists and tuples.

    Nothing is made pure, and nothing is refused. `inputs` are fake tensors, whose mode is on. One thread at a time.
    """
    if (away := device_elsewhere(inputs)) is not None:
        inputs = [*map(on_host, inputs)]
    recorder = Recorder()
    for i, value in enumerate(inputs):
        recorder.placeholder(f"arg{i}_1", value)
    with backend.traced_for(away), ONE_THREAD, recorder, autocast_uncached(), fx_tracing():
        result = fn(*inputs)
    recorder.graph.output(recorder.operand(result))
    fx_nodes.drop_dead(recorder.graph)
    gm = graph_module(recorder.graph, recorder.root)
    if away is not None:
        move(gm, away)
    return gm
