"""packed: records and graphs as JSON, and back. Reading makes what is listed here, and runs nothing.

A value is a number, a text, None, or an array, which is a tuple; all else is an object with one key, its kind:

    {"record": 7}   the 7th entry of "records": [class, value of each field]; equal for what is one object
    {"graph": 2}    the 2nd of "graphs", a list of nodes: [kind, name, target, args, kwargs, meta]
    {"node": 3}     the 3rd node of the graph that it stands in
    {"own": ...}    a record that names nodes, in its place
    {"list": ...}, {"dict": pairs}, {"set": ...}, {"slice": ...}, {"float": "inf"}, {"dtype": ...}, {"op": ...}

So are fake tensors records, with views on the memory of what they are views of. Of a graph there is all that lowering
and the judge read: names, fake values, the user's lines, what rooms have noted of nodes. What was computed from it
(`segments.notes`) is left out.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Set
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode, OpOverload, fake_like, graph_module, is_fake
from fzero.ir.segment_text import op_named, op_text

_OF_TORCH = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
CPU = torch.device("cpu")
_FAKE = "fake"  # in the place of a record's class
_SCALARS = (int, str, bool, type(None))


def pack(value: Any) -> bytes:
    """The bytes of a value. Raises TypeError for what has no such form, as a function."""
    packer = _Packer()
    top = packer.plain(value)
    graphs = [packer.nodes(gm) for gm in packer.graphs]  # which grow, where a node's meta names another graph
    data = {"classes": [*packer.classes], "records": packer.records, "graphs": graphs, "value": top}
    return json.dumps(data, check_circular=False, separators=(",", ":")).encode()


def unpack(data: bytes, mode: FakeTensorMode, device: torch.device = CPU) -> Any:
    """The value of these bytes, with fake tensors of this mode. To be called outside of all modes. device: that of its
    type; of a device its number is not packed.

    Raises ValueError for bytes that `pack` did not make, and for an op that is not registered. The forms of values are
    taken as they stand there.
    """
    try:
        content = json.loads(data)
        unpacker = _Unpacker(content["classes"], len(content["graphs"]), mode, device)
        for kind, *fields in content["records"]:
            unpacker.read(kind, fields)
        for gm, nodes in zip(unpacker.graphs, content["graphs"], strict=True):
            unpacker.fill(gm, nodes)
        return unpacker.value(content["value"])
    except Exception as error:
        raise ValueError(f"these bytes are not what fzero packed ({type(error).__name__}: {error})") from error


class _Packer:
    """graphs, classes: those that were named so far; records: what is written of them. Only the methods write them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.classes: dict[tuple[str, str], int] = {}
        self.records: list[Any] = []
        self._known: dict[int, tuple[Any, dict[str, int]]] = {}  # by id, what was written; held, for ids are used again
        self._storages: dict[int, int] = {}
        self._places: dict[fx.Node, int] = {}  # of the graph that is written
        self._nodes_named = 0

    def plain(self, value: Any) -> Any:
        """A value as JSON holds it."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is tuple:
            return [self.plain(one) for one in value]
        if id(value) in self._known:
            return self._known[id(value)][1]
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, fx.Node):
            self._nodes_named += 1
            return {"node": self._places[value]}
        if isinstance(value, fx.GraphModule):
            return self._new(value, "graph", self.graphs, value)
        if is_fake(value):
            return self._new(value, "record", self.records, [_FAKE, *self._form(value)])
        if isinstance(value, OpOverload) or value is operator.getitem:
            return {"op": op_text(value)}
        if isinstance(value, enum.Enum):
            return self._new(value, "record", self.records, [self._class(kind), self.plain(value.value)])
        if dataclasses.is_dataclass(value) and not isinstance(value, kind.__class__):
            before = self._nodes_named
            fields = [self.plain(getattr(value, one.name)) for one in dataclasses.fields(value) if one.init]
            entry = [self._class(kind), *fields]
            return self._new(value, "record", self.records, entry) if self._nodes_named == before else {"own": entry}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._new(value, "record", self.records, [self._class(kind), *map(self.plain, value)])
        return self._container(value)

    def nodes(self, gm: fx.GraphModule) -> list[Any]:
        """The nodes of a graph, in order."""
        self._places = {node: i for i, node in enumerate(gm.graph.nodes)}
        return [
            [node.op, node.name, self.plain(node.target) if node.op == "call_function" else "",
             self.plain(tuple(node.args)), self.plain(dict(node.kwargs)), self.plain(dict(node.meta))]
            for node in gm.graph.nodes
        ]  # fmt: skip

    def _container(self, value: Any) -> Any:
        if isinstance(value, list):
            return {"list": [self.plain(one) for one in value]}
        if isinstance(value, Mapping):
            pairs = [[self.plain(key), self.plain(one)] for key, one in value.items()]
            return {"counter" if isinstance(value, Counter) else "dict": pairs}
        if isinstance(value, Set):
            return {"set" if isinstance(value, set) else "frozenset": [self.plain(one) for one in value]}
        if isinstance(value, torch.Size):
            return {"size": [*value]}
        if isinstance(value, slice):
            return {"slice": [self.plain(one) for one in (value.start, value.stop, value.step)]}
        if isinstance(value, Fraction):
            return {"fraction": str(value)}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, torch.device):
            return {"device": value.type}
        for name, of in _OF_TORCH.items():
            if isinstance(value, of):
                return {name: str(value).removeprefix("torch.")}
        raise TypeError(f"{type(value).__name__} has no packed form")

    def _form(self, value: Any) -> list[Any]:
        storage = value.untyped_storage()
        memory = self._storages.setdefault(int(storage._cdata), len(self._storages))
        held = storage.nbytes() // value.element_size()
        dtype, device = str(value.dtype).removeprefix("torch."), value.fake_device.type
        return [memory, held, dtype, device, [*value.shape], [*value.stride()], value.storage_offset()]

    def _class(self, kind: type) -> int:
        return self.classes.setdefault((kind.__module__, kind.__qualname__), len(self.classes))

    def _new(self, value: Any, name: str, table: list[Any], entry: Any) -> dict[str, int]:
        self._known[id(value)] = value, {name: len(table)}
        table.append(entry)
        return self._known[id(value)][1]


class _Unpacker:
    """graphs: empty until they are filled."""

    def __init__(self, classes: list[list[str]], graphs: int, mode: FakeTensorMode, device: torch.device) -> None:
        self.graphs = [graph_module(fx.Graph()) for _ in range(graphs)]
        self._classes, self._mode, self._own = [_class_of(*names) for names in classes], mode, device
        self._records: list[Any] = []
        self._nodes: list[fx.Node] = []
        self._storages: dict[int, torch.Tensor] = {}
        self._made: dict[str, Callable[[Any], Any]] = {
            "record": self._records.__getitem__,
            "own": lambda entry: self._classes[entry[0]](*map(self.value, entry[1:])),
            "graph": self.graphs.__getitem__,
            "node": lambda number: self._nodes[number],
            "op": op_named,
            "list": lambda items: [self.value(one) for one in items],
            "dict": self._dict,
            "counter": lambda pairs: Counter(self._dict(pairs)),
            "set": lambda items: {self.value(one) for one in items},
            "frozenset": lambda items: frozenset(self.value(one) for one in items),
            "size": torch.Size,
            "slice": lambda ends: slice(*map(self.value, ends)),
            "fraction": Fraction,
            "complex": lambda parts: complex(*parts),
            "float": float,
            "device": self._device,
            **{name: partial(_of_torch, of=of) for name, of in _OF_TORCH.items()},
        }

    def value(self, data: Any) -> Any:
        """The value that JSON holds."""
        if type(data) is list:
            return tuple([self.value(one) for one in data])
        if type(data) is dict:
            ((kind, of),) = data.items()
            return self._made[kind](of)
        return data

    def read(self, kind: Any, fields: list[Any]) -> None:
        """Makes the next record."""
        self._records.append(self._fake(*fields) if kind == _FAKE else self._classes[kind](*map(self.value, fields)))

    def fill(self, gm: fx.GraphModule, nodes: list[Any]) -> None:
        """Adds nodes to an empty graph."""
        self._nodes.clear()
        for op, name, target, args, kwargs, meta in nodes:
            given = self.value(args)
            if op == "placeholder":
                node = gm.graph.create_node(op, name, given, {}, name)
            elif op == "output":
                node = gm.graph.output(given[0])
            else:
                node = gm.graph.create_node("call_function", self.value(target), given, self.value(kwargs), name)
            node.meta.update(self.value(meta))
            self._nodes.append(node)

    def _dict(self, pairs: list[Any]) -> dict[Any, Any]:
        return {self.value(key): self.value(one) for key, one in pairs}

    def _fake(self, memory: int, held: int, dtype: str, device: str, *form: Any) -> torch.Tensor:
        own: torch.dtype = _of_torch(dtype, torch.dtype)
        base = self._storages.get(memory)
        if base is None:
            base = self._storages[memory] = torch.empty(held, dtype=own, device="meta")
        view = (base if base.dtype is own else base.view(own)).as_strided(*form)
        return fake_like(self._mode, view, self._device(device))

    def _device(self, kind: str) -> torch.device:
        return self._own if self._own.type == kind else torch.device(kind)


def _class_of(module: str, name: str) -> Callable[..., Any]:
    """A class of records, or an enum, of a module of fzero that is imported."""
    found = getattr(sys.modules.get(module), name, None) if module.startswith("fzero.") else None
    if not isinstance(found, type) or not (dataclasses.is_dataclass(found) or issubclass(found, (enum.Enum, tuple))):
        raise ValueError(f"{module} has no record {name} of fzero's")
    return found


def _of_torch(name: str, of: Any) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, of):
        raise ValueError(f"torch.{name} is no {of.__name__}")
    return found
