"""functionalise: in-place work of a traced graph made pure, by running the graph again under torch's functionalization.

Where a value of its own is changed with scalars alone, and no view of it exists (`add_(eps)` in torch's norms), the
pure op takes the place of the in-place one. Then nothing needs to run.

An op that works in place, or with `out=`, keeps its tensor's strides. Its pure form may give other strides, which do
not allow the views that the graph takes. Such a node is found by running. The graph is then run again, with the node's
result copied into the old value.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import compiled_functions_traced
from fzero.capture.context import Tracing
from fzero.capture.refuse import attribute, explained
from fzero.capture.watch import Watch
from fzero.errors import CaptureError
from fzero.ir import as_strided, fx_nodes, fx_values
from fzero.ir.in_place import FOREACH
from fzero.ir.op_info import of
from fzero.ir.recorder import record
from fzero.recurrent.recurrent_ops import FORWARD as LAYER

aten = torch.ops.aten
_LITERAL = (aten.lift_fresh.default, aten.lift_fresh_copy.default)


def purified(gm: fx.GraphModule) -> None:
    """Puts pure ops in the place of elementwise in-place ops with scalars on values that nothing else looks at. In
    place."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        pure = _pure_form(node)
        if pure is None:
            continue
        changed = fx_nodes.operand(node)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(pure, node.args, node.kwargs)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        for user in [user for user in changed.users if order.get(user, -1) > order[node]]:
            user.replace_input_with(changed, new)
        gm.graph.erase_node(node)
        order[new] = order[node]
    gm.recompile()


def _pure_form(node: fx.Node) -> Any:
    """The op without the write that gives a node's value, strides and all; None where it must run to know."""
    written = fx_nodes.mutated(node) if fx_nodes.is_compute(node) else []
    if len(written) != 1 or written != node.all_input_nodes or not isinstance(node.args[0], fx.Node):
        return None
    (changed,) = written
    own = fx_nodes.is_compute(changed) and fx_nodes.source(changed) is None and not fx_nodes.mutated(changed)
    seen = any(fx_nodes.is_view(user) or (fx_nodes.mutated(user) and user is not node) for user in changed.users)
    packet = getattr(aten, fx_nodes.op_name(node).removesuffix("_"), None)
    pure = getattr(packet, getattr(node.target, "_overloadname", ""), None)
    value: Any = changed.meta.get("val")
    if pure is None or _types(pure) != _types(node.target) or not own or seen or not of(pure).pointwise:
        return None
    plain = isinstance(value, torch.Tensor) and value.dtype.is_floating_point and fx_values.is_dense(value)
    return pure if plain and _gives_another(pure, node, value) else None


def _gives_another(pure: Any, node: fx.Node, value: torch.Tensor) -> bool:
    """Whether the op gives a new value of the dtype that the write left: `logical_not` of floats gives truths, and
    `conj_physical` of real numbers their very tensor."""
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: like)
    result = pure(*args, **kwargs)
    return result is not like and result.dtype is node.meta["val"].dtype is value.dtype


def _types(op: Any) -> list[str]:
    return [str(argument.type) for argument in op._schema.arguments]


def without_copies(gm: fx.GraphModule) -> None:
    """A recurrent layer returns copies, into which the caller may write: in a graph that writes nothing they are what
    they are copies of. In place."""
    for node in list(gm.graph.nodes):
        if node.target is aten.clone.default and _is_of_layer(fx_nodes.operand(node)):
            node.replace_all_uses_with(fx_nodes.operand(node))
            gm.graph.erase_node(node)


def _is_of_layer(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.all_input_nodes[0].target is LAYER


def functionalised(tracing: Tracing, gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The same graph with in-place work on its own intermediates made pure.

    `inputs` are the fake tensors that the graph was traced on. Raises CaptureError, with the line, where a pure form
    cannot stand for the in-place op.
    """
    keep_strides: set[fx.Node] = set()
    while True:
        replay = _Replay(gm, frozenset(keep_strides))
        try:
            pure = _replayed(tracing, gm, inputs, replay)
            break
        except CaptureError:
            if replay.moved <= keep_strides:
                raise
            keep_strides |= replay.moved  # further on there may be more
    left = [node for node in pure.graph.nodes if fx_nodes.mutated(node)]
    if left:
        raise CaptureError(f"{left[0].target} works in place where it cannot be made pure: use its pure form")
    return pure


def _replayed(tracing: Tracing, gm: fx.GraphModule, inputs: Sequence[torch.Tensor], replay: _Replay) -> fx.GraphModule:
    """The graph of one run under functionalization. Raises CaptureError, with the line, if the pure form of an op
    fails."""
    shared = [n for n in gm.graph.nodes if n.op == "get_attr" and not all(u.target in _LITERAL for u in n.users)]
    constants = {str(n.target): x for n in shared if isinstance(x := attribute(gm, n), torch.Tensor)}

    def place() -> str:
        return str(replay.node.meta.get("source") or "")

    def watched(*xs: torch.Tensor) -> Any:
        with Watch(tracing, place, phase=lambda: replay.node.meta.get("phase")):
            return torch.func.functionalize(replay.with_constants)(constants, *xs)

    with explained(tracing, place), tracing.mode, compiled_functions_traced():
        try:
            return record(watched, inputs)
        except (RuntimeError, ValueError) as error:  # the pure form fails where the traced op did not
            line, reason = replay.node.meta.get("source") or "the step", str(error).partition("\n")[0]
            if fx_nodes.mutated(replay.node) and getattr(replay.node.target, "namespace", "aten") != "aten":
                raise CaptureError(
                    f"{replay.node.target} at {line} is a custom op that writes to its arguments and has no pure form: "
                    "register one that returns a new tensor, with mutates_args=()"
                ) from error
            raise CaptureError(
                f"{replay.node.target} at {line} follows in-place work that cannot be made pure ({reason}). Write "
                "x = x.op(...) instead of x.op_(...)"
            ) from error


class _Replay(fx.Interpreter):
    """Runs a graph. Its methods write `node`, `moved` and `constants`.

    node: the node that runs. keep_strides: nodes that write, whose result is copied into the old value, which keeps its
    strides. moved: those that left what they wrote to with other strides than in the trace; views of it may then be
    impossible. constants: the closed-over tensors by name; `functionalize` wraps them only if it gets them as an
    argument.
    """

    node: fx.Node

    def __init__(self, gm: fx.GraphModule, keep_strides: Collection[fx.Node]) -> None:
        super().__init__(gm)
        self.keep_strides, self.moved = keep_strides, set[fx.Node]()

    def with_constants(self, constants: Mapping[str, torch.Tensor], *xs: torch.Tensor) -> Any:
        self.constants = constants
        return self.run(*xs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.constants[target] if target in self.constants else super().get_attr(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node, and notes the nodes that change the strides of what they write to."""
        self.node = n
        if as_strided.takes_offset(n):
            self._check_layout(n)
        if n in self.keep_strides:
            target = fx_nodes.source(n)
            assert target is not None
            old, self.env[target] = self.env[target], self.env[target].clone()
            result = super().run_node(n)
            self.env[target] = old
            return old.copy_(result)
        result = super().run_node(n)
        if self._moves(n, result):
            self.moved.add(n)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function; of a list that shares memory tensor by tensor, as eager does. torch's pure form computes
        all before it writes any: of what one writes the next would read what was there before."""
        if not _writes_what_it_reads(self.node):
            return super().call_function(target, args, kwargs)
        for i in range(len(args[0])):
            target(*([x[i]] if isinstance(x, (list, tuple)) else x for x in args), **kwargs)
        return None

    def _moves(self, n: fx.Node, result: Any) -> bool:
        """Whether an op that writes to a tensor and returns it left it with other strides than when it was traced."""
        source = None if fx_nodes.is_view(n) else fx_nodes.source(n)
        if source is None or source not in fx_nodes.mutated(n) or not isinstance(result, torch.Tensor):
            return False
        return torch.Tag.inplace_view not in n.target.tags and fx_values.steps(result) != fx_values.steps(n.meta["val"])  # type: ignore[union-attr]

    def _check_layout(self, n: fx.Node) -> None:
        """Refuses an offset into a tensor whose strides changed when a write to it was made pure."""
        operand = fx_nodes.operand(n)
        traced, now = operand.meta["val"], self.env[operand]
        if (traced.stride(), traced.storage_offset()) != (now.stride(), now.storage_offset()):
            raise CaptureError(
                f"{n.target} at {n.meta.get('source') or 'the step'} follows an in-place change that makes its tensor "
                f"one of strides {now.stride()} instead of {traced.stride()}: write x = x.op(...) instead of x.op_(...)"
            )


def _writes_what_it_reads(node: fx.Node) -> bool:
    """Whether a `_foreach_` op writes to several tensors, and to memory that another of its operands lies in."""
    written = fx_nodes.mutated(node) if fx_nodes.op_name(node).startswith(FOREACH) else []
    if len(written) < 2:
        return False
    operands: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), operands.append)
    owners = Counter(map(fx_nodes.base, operands))
    return any(owners[fx_nodes.base(one)] > 1 for one in written)
