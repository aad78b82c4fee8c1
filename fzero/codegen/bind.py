"""bind: a segment as a list of calls without arguments, on tensors in given memory.

Views cost nothing when a segment runs: they are made once, when it is bound. Every other op writes into the memory of
its result (`segment_memory`), through its `out=` form where that writes its result there and nothing else
(`out_forms`). Without such a form the result is computed and then copied. Only such results, and the memory that
kernels take for themselves (`SegmentMemory.heap`), are allocated.

Results have the bits of the plain graph: an `out=` form runs the same kernel on the same strides.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode, kernel_of
from fzero.codegen import inplace, matmul, out_forms, tiling
from fzero.codegen.fusion import Fused
from fzero.codegen.handed import Handed, holding, taking
from fzero.codegen.out_forms import Call
from fzero.codegen.segment_memory import SegmentMemory, layout, tensor_at
from fzero.codegen.widened import is_widened, narrowed
from fzero.ir import as_strided, forms, fx_nodes, fx_values, op_info

aten = torch.ops.aten


def bind(
    gm: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    workspace: torch.Tensor,
    apart: frozenset[int] = frozenset(),
) -> list[Call]:
    """The calls of a segment, in order.

    inputs, outs: a tensor for each placeholder, and for each output, which the calls fill. workspace: 1-D uint8, for
    all other values, in the places of `layout(gm, apart)`.

    A rank's own part of a flat range may be shorter than the segment was planned for, and empty. Where fzero has a
    kernel for an op on these operands (`fzero.kernels`, `fzero.codegen.matmul`), it runs instead of torch's. Raises
    VerifyError for a value that does not fit into the workspace, and for a view that reaches outside its owner."""
    plan = layout(gm, apart)
    env: dict[fx.Node, Any] = dict(zip(fx_nodes.placeholders(gm.graph), inputs, strict=True))
    shapes = _shapes(gm, inputs)
    calls: list[Call] = []
    memory_of = partial(_memory, plan, env, outs, workspace)
    for node in gm.graph.nodes:
        if not fx_nodes.is_compute(node) or node in plan.tiled or node in env:  # a cast that a kernel has written
            continue
        if node in plan.chains:
            chain = plan.chains[node]
            rooms = {n: plan.offsets[chain.rooms.get(n, n), 0] for n, _ in chain.between}
            tiles = {n: tensor_at(workspace, rooms[n], tile).view(-1) for n, tile in chain.between}
            (result,) = [memory_of((node, i), value) for i, value in fx_values.results(node)] or [None]
            for writer in filter(fx_nodes.mutated, chain.nodes):
                env[writer] = env[fx_nodes.mutated(writer)[0]]
            if result is not None:
                env[node] = result
            calls += tiling.calls(chain, env, tiles, result, calls_of)
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if is_widened(node):
            env[node] = args[0]
            continue
        into = {i: memory_of((node, i), value) for i, value in fx_values.results(node, shapes.get(node))}
        if node.target is operator.getitem or fx_nodes.is_view(node):
            env[node] = node.target(*args, **kwargs)
            _check_view(node, env)
        elif isinstance(node.target, Fused):
            calls.append(_stretch(node.target, args, into.values()))
            env[node] = list(into.values())
        elif written := fx_nodes.mutated(node):
            cast = narrowed(node, plan.homes)
            if cast is not None and (kernel := op_info.kernel_for(node.target, *args)) is not None:
                env[cast] = memory_of((cast, 0), fx_values.results(cast, shapes.get(cast))[0][1])
                calls.append(partial(kernel, *args, **kwargs, copy=env[cast]))
            elif not _is_there(node, args):
                calls += calls_of(node, args, kwargs, {})
            env[node] = env[written[0]]
        else:
            calls += calls_of(node, args, kwargs, into)
            env[node] = tuple(map(into.get, range(max(into, default=-1) + 1))) if _several(node) else into.get(0)
    return calls


def _stretch(fused: Fused, args: Sequence[Any], outs: Iterable[torch.Tensor]) -> Call:
    run = partial(taking, fused.run) if any(isinstance(arg, Handed) for arg in args) else fused.run
    return partial(run, *args, *outs)


def _memory(
    plan: SegmentMemory,
    env: Mapping[fx.Node, Any],
    outs: Sequence[torch.Tensor],
    workspace: torch.Tensor,
    key: fx_values.Value,
    value: torch.Tensor,
) -> Any:
    """The memory of a value, in the value's form; what holds it, where it is handed on."""
    home = plan.homes.get(key, key)
    if key in plan.handed:
        return Handed(value)
    if isinstance(home, fx.Node):
        return inplace.at_home(value, env[home])
    if home in plan.outputs:
        out = outs[plan.outputs.index(home)]
        return out if home is key else inplace.at_home(value, out)
    return tensor_at(workspace, plan.offsets[home], value)


def _check_view(node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
    """Raises VerifyError for a view that reaches outside the value that owns its memory. Of an op with several views,
    each is looked at where it is taken: of a loop, each step takes one of as many as there are steps."""
    view, owner = env[node], env[fx_nodes.base(node)] if fx_nodes.is_view(node) else None
    if isinstance(view, torch.Tensor) and isinstance(owner, torch.Tensor):
        as_strided.check_view(view, owner, node.target)


def _is_there(node: fx.Node, args: Any) -> bool:
    """Whether a node is a copy whose source lies in its destination already."""
    if node.target is not aten.copy_.default or fx_nodes.operand(node) is fx_nodes.operand(node, 1):
        return False
    return _is_same(*args[:2])


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory, whatever they say of dims of one element: of the
    strides of those, torch's shape rules and its kernels differ."""
    if a.data_ptr() != b.data_ptr():
        return False
    one, other = ((x.dtype, x.shape, x.is_conj(), x.is_neg(), fx_values.steps(x)) for x in (a, b))
    return one == other


def as_sized(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the inputs have the shapes that a segment was planned for; a rank's part of a range may be shorter."""
    return all(x.shape == n.meta["val"].shape for x, n in zip(inputs, fx_nodes.placeholders(gm.graph), strict=True))


def _shapes(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[fx.Node, Any]:
    """The nodes' (fake) values for inputs of other shapes than the planned ones; nothing where the shapes are those."""
    if as_sized(gm, inputs):
        return {}
    with FakeTensorMode():
        like = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
        return forms.shapes(gm, like)


def _several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def calls_of(node: fx.Node, args: Any, kwargs: Any, into: Mapping[int, Any]) -> Iterator[Call]:
    """The calls that compute a node's results into the tensors `into`, by result; a `Handed` waits for its reader.

    `args` and `kwargs` are the node's, with tensors for nodes. `into` is empty for a node that writes to its arguments.
    """
    special, form = out_forms.special_form(node), out_forms.form_of(node)
    if fx_nodes.mutated(node) and not into:
        if isinstance(kwargs.get("out"), torch.Tensor):
            args = [_result_at([kwargs["out"]], x) for x in args]
        yield partial(_kernel(node.target, args, kwargs), *args, **kwargs)
    elif special is not None:
        yield from special(into[0], *args, **kwargs)
    elif form is not None:
        names = [a.name for a in form._schema.arguments if a.is_out]
        args = [_result_at(into.values(), x) for x in args]
        yield partial(_kernel(form, args, kwargs), *args, **kwargs, **dict(zip(names, into.values(), strict=True)))
    elif not into:
        yield partial(_kernel(node.target, args, kwargs), *args, **kwargs)  # a check, which returns nothing
    elif _several(node):
        compute = partial(_kernel(node.target, args, kwargs), *args, **kwargs)
        copied = out_forms.copied(node)
        kept = [(i, tensor) for i, tensor in into.items() if i in copied]
        held = any(isinstance(one, Handed) for _, one in kept)
        yield partial(holding if held else out_forms.copy_results, compute, kept)
    else:
        yield partial(out_forms.copy_result, partial(_kernel(node.target, args, kwargs), *args, **kwargs), into[0])


def _result_at(results: Iterable[torch.Tensor], x: Any) -> Any:
    """The result that lies in the operand's very memory, else the operand.

    torch takes an input and an output as one only if all their strides are equal, those of dims of one element too.
    """
    return next((r for r in results if isinstance(x, torch.Tensor) and _is_same(r, x)), x)


def _kernel(target: Any, args: Any, kwargs: Any) -> Any:
    """The function that runs for an op on these operands."""
    row = op_info.of(target).kernel
    replaced = row.taking(*args, **kwargs) if row is not None else None
    return matmul.KERNELS.get(target) or replaced or kernel_of(target)
