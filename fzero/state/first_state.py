"""first_state: the first state, leaf by leaf, without a peak of memory.

The function that makes the state (the user's `fn(key)`, then the optimizer's `init`) is traced on fake tensors. Then
each leaf is computed alone, from the nodes it depends on, with elementwise work in place. It is cut to this rank's part
and freed. So a rank holds its shards and one whole leaf at a time, and logical values do not depend on the world. A
leaf that is copied unchanged from a source is read shard by shard.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from fzero import progress, tree
from fzero._torch_compat import FakeTensorMode
from fzero.capture.context import Tracing
from fzero.capture.graph import PerRank
from fzero.capture.leaves import check_leaf, check_names
from fzero.capture.provenance import describe
from fzero.capture.tracing import lifted, trace
from fzero.errors import TreeError, leaf_name
from fzero.ir import fx_nodes, op_info, segments
from fzero.ir.messages import bytes_of
from fzero.plan.state_plan import Plan
from fzero.state import storage
from fzero.state.order import Order
from fzero.state.source import Source, Want, batches

aten = torch.ops.aten


@dataclass(frozen=True)
class Deferred:
    """A tensor of a source, read when it is placed."""

    source: Source
    path: str

    def to(self, device: torch.device) -> torch.Tensor:
        """The whole leaf on a device. It is named as a tensor's method, since both are inputs of a recipe."""
        shape = self.source.leaves[self.path].shape
        return self.source.read(self.path, 0, math.prod(shape)).view(shape).to(device)

    def fill(self, out: torch.Tensor, start: int, order: Order) -> None:
        """Reads the elements from `start` on, counted in `order`, into a part of the state."""
        flat = Order.of(self.source.leaves[self.path].shape)
        for batch in batches([Want(self.path, start, out, order)], lambda path: flat):
            self.source.fill(batch.wants)
            batch.finish()


class Recipe:
    """A traced function from tensors to a pytree of leaves: a `Filler` of a new state.

    inputs: one for each placeholder of the graph `gm`. values: the leaves as fake tensors, on `device` or on the
    inputs' devices. seen: digests of the whole leaves of all ranks that `place` has stored. `recipe_for` may replace
    inputs by `Deferred` ones; nobody else writes a field.
    """

    step = 0

    def __init__(
        self, fn: Callable[..., Any], inputs: Sequence[torch.Tensor], device: torch.device | None = None, ranks: int = 1
    ) -> None:
        """Traces `fn(*inputs)`, of a state on so many ranks of the data. Raises TreeError for a leaf that no state can
        hold, CaptureError for a function that cannot be traced."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        shown: dict[str, Any] = {}

        def flat(*xs: torch.Tensor) -> list[torch.Tensor]:
            paths, leaves, shown["treedef"] = tree.flatten(fn(*xs))
            marked = {path: x for path, x in zip(paths, leaves, strict=True) if isinstance(x, PerRank)}
            shown["per_rank"], shown["sliced"] = (*marked,), {path for path, x in marked.items() if x.sliced}
            shown["paths"] = paths
            check_names("state", paths)
            return [_as_tensor(path, leaf, ranks) for path, leaf in zip(paths, leaves, strict=True)]

        tracing = Tracing(mode, (fn,))
        with mode:
            fakes = [torch.empty(tuple(x.shape), dtype=x.dtype, device=device or x.device) for x in inputs]
        self.gm = trace(tracing, flat, fakes, [f"argument {i}" for i in range(len(fakes))])
        extra = lifted(self.gm, len(fakes))
        self.inputs: list[torch.Tensor | Deferred] = [*inputs, *extra]
        _shapes_only(self.gm)
        segments.normalised(self.gm)
        self.paths: list[str] = shown["paths"]
        self.treedef = shown["treedef"]
        self.per_rank: tuple[str, ...] = shown["per_rank"]
        self.sliced: set[str] = shown["sliced"]  # of these, the leaves whose ranks hold slices of one value
        self.values = [node.meta["val"] for node in fx_nodes.outputs(self.gm.graph)]
        self.seen: dict[str, str] = {}

    def place(
        self, plan: Plan, rank: int, memory: Mapping[str, torch.Tensor], only: Collection[str] | None = None
    ) -> tuple[str, str]:
        """Fills this rank's buffers, one leaf after the other; with `only`, only those leaves.

        Returns digests of the whole leaves: of those that every rank holds, which must be the same on all of them, and
        of those that only ranks of one role hold. Both are empty in a world of one.
        """
        digests: tuple[list[str], list[str]] = ([], [])
        inputs = dict(zip(fx_nodes.placeholders(self.gm.graph), self.inputs, strict=True))
        order = {node: i for i, node in enumerate(self.gm.graph.nodes)}
        for leaf, node in zip(plan.leaves, fx_nodes.outputs(self.gm.graph), strict=True):
            if leaf.buffer not in memory or (only is not None and leaf.path not in only):
                continue
            progress.now(leaf.path)
            if isinstance(first := inputs.get(node), Deferred) and leaf.slot is not None:
                value, start = storage.flat(plan, memory, leaf, rank)
                first.fill(value, start, storage.order(plan, leaf))
                if plan.buffers[leaf.buffer].sharded or leaf.layout:  # each rank reads another part
                    continue
            else:
                value = _compute(node, inputs, order)
                storage.store(plan, memory, leaf, value, rank)
            if plan.world_size > 1 and not leaf.per_rank:
                of_role = plan.role_of(plan.buffers[leaf.buffer]) is not None
                digests[of_role].append(fingerprint(value))
                if not of_role:
                    self.seen[f"the digest of {leaf_name('state', leaf.path)}"] = digests[False][-1]
            del value  # frees it before the next leaf is computed
        common, own = (hashlib.blake2b(" ".join(found).encode(), digest_size=8).hexdigest() for found in digests)
        return (common, own) if plan.world_size > 1 else ("", "")


def fingerprint(value: torch.Tensor) -> str:
    """A digest of a tensor's bits, from sums of pieces as integers, so that it needs little memory."""
    value = torch.view_as_real(value) if value.is_complex() else value
    pieces = bytes_of(value).split(1 << 15)
    sums = [torch.nn.functional.pad(piece, (0, -len(piece) % 8)).view(torch.int64).sum() for piece in pieces]
    return hashlib.blake2b(repr(torch.stack(sums).tolist()).encode(), digest_size=8).hexdigest()


def _as_tensor(path: str, leaf: Any, ranks: int) -> torch.Tensor:
    """A leaf of the first state as a tensor; a plain number becomes a 0-d tensor. Raises TreeError otherwise."""
    leaf = leaf.on(ranks) if isinstance(leaf, PerRank) else leaf
    if isinstance(leaf, torch.Tensor):
        check_leaf(leaf_name("state", path), leaf)
        return leaf.detach() if leaf.requires_grad else leaf
    if type(leaf) is float or (type(leaf) is int and -(1 << 63) <= leaf < 1 << 63):
        dtype = torch.int64 if type(leaf) is int else torch.float32
        return torch.full((), leaf, dtype=dtype)
    raise TreeError(
        f"{leaf_name('state', path)} is {describe(leaf)}: a state holds tensors (and plain numbers, which become 0-d "
        f"tensors). {_as_tensors(leaf)}"
    )


def _as_tensors(leaf: Any) -> str:
    """What makes tensors of a leaf that is none."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return "Give torch.as_tensor(x)"
    if isinstance(leaf, torch.nn.Module):
        return "Give the parameters and buffers of fzero.interop.from_module(x)"
    if is_dataclass(leaf):
        return "Give vars(x), a dict of its fields, or make the class a NamedTuple, whose fields are leaves too"
    return "Keep it outside the state, or make it a tensor"


def _shapes_only(gm: fx.GraphModule) -> None:
    """Turns zeros_like(x) into zeros(x.shape), in place; the same for ones, empty and full. So no moment needs its
    parameter."""
    for node in gm.graph.nodes:
        if made := op_info.of(node.target).of_shape:
            value = node.meta["val"]
            node.target, node.args = op_info.named(made)[0], (list(value.shape), *node.args[1:])
            node.kwargs = {"dtype": value.dtype, "device": value.device}


def _compute(node: fx.Node, inputs: dict[fx.Node, Any], order: dict[fx.Node, int]) -> torch.Tensor:
    """One output, from the nodes it needs. A value is dropped after its last use; elementwise ops reuse their input."""
    needed = fx_nodes.ancestors(node)
    values: dict[fx.Node, Any] = {n: inputs[n].to(n.meta["val"].device) for n in needed if n in inputs}
    left = {n: sum(u in needed for u in n.users) for n in needed}
    for op in sorted((n for n in needed if n not in inputs), key=order.__getitem__):
        args, kwargs = fx.node.map_arg((op.args, op.kwargs), lambda n: values[n])
        values[op] = (_in_place(op, left, inputs) or op.target)(*args, **kwargs)  # type: ignore[operator]
        for operand in op.all_input_nodes:
            left[operand] -= 1
            if not left[operand]:
                values.pop(operand)
    return values[node]


def _in_place(op: fx.Node, left: dict[fx.Node, int], inputs: dict[fx.Node, Any]) -> Any:
    """The in-place form of an elementwise op whose first operand has no other use; None if there is none."""
    first = op.args[0] if op.args else None
    if not (fx_nodes.is_pointwise(op) and isinstance(first, fx.Node)) or first in inputs or left[first] != 1:
        return None
    if fx_nodes.is_view(first) or (first.all_input_nodes and fx_nodes.base(first) in inputs):
        return None
    same = first.meta["val"].shape == op.meta["val"].shape and first.meta["val"].dtype == op.meta["val"].dtype
    packet = getattr(aten, f"{op.target.overloadpacket.__name__}_", None)  # type: ignore[union-attr]
    if not same or packet is None or op.target.namespace != "aten":  # type: ignore[union-attr]
        return None
    return getattr(packet, op.target._overloadname, None)  # type: ignore[union-attr]
