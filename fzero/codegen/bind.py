"""bind: a segment as calls on tensors that lie where the plan put them.

Shapes are static, so memory can be: every value of a segment has a place in one block (its workspace), values whose
lives do not meet share theirs, and outputs lie in the program's buffers. A segment bound to such memory is a list of
calls without arguments. Views cost nothing when it runs: they are made once, when it is bound. Another op writes
through its `out=` form into its place; where torch has none, or one that computes first and copies then, its result is
copied there. Nothing is allocated but such results and what kernels take for themselves (`heap`).

Results have the bits of the plain graph: an `out=` form runs the same kernel on the same strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode, kernel_of
from fzero.codegen import inplace, matmul, tiling
from fzero.codegen.fusion import Fused
from fzero.codegen.workspace import workspace_bytes
from fzero.errors import VerifyError
from fzero.ir import as_strided, fx_nodes, fx_values
from fzero.ir.offset_assignment import pack
from fzero.kernels import kernel_for

aten = torch.ops.aten
Call = Callable[[], Any]


@dataclass(frozen=True)
class Layout:
    """Where a segment's values lie in its workspace of `nbytes`, but for its `outputs` and those that lie in another's
    place (`homes`); `heap`: the most that the allocator is asked for."""

    outputs: tuple[fx_values.Value, ...]
    homes: Mapping[fx_values.Value, inplace.Home]
    places: Mapping[fx_values.Value, int]
    nbytes: int
    heap: int
    chains: Mapping[fx.Node, tiling.Chain]  # by the last node
    cut: Collection[fx.Node]  # those of chains before the last


def layout(gm: fx.GraphModule, apart: frozenset[int] = frozenset()) -> Layout:
    """The places of a segment's values. `apart` are its destinations that share no memory with others (`reuse`)."""
    known = gm.meta.setdefault("layouts", {})
    if apart not in known:
        found = fx_values.values(gm)
        chains = tiling.chains(gm, apart)
        for one in chains:
            _at_the_last(one, found.lives, {node: i for i, node in enumerate(gm.graph.nodes)})
        cut = {node: one for one in chains for node in one.nodes[:-1]}
        homes = inplace.homes(gm, found, apart, cut)
        lives: dict[fx_values.Value, tuple[int, int, int]] = {}
        for key, (first, last, nbytes) in found.lives.items():
            home = homes.get(key, key)
            if not isinstance(home, fx.Node) and home not in found.outputs:
                before = lives.get(home, (first, last, nbytes))
                lives[home] = (min(first, before[0]), max(last, before[1]), nbytes)
        places, nbytes = pack(list(lives.values()))
        heap = max((_heap(node) for node in gm.graph.nodes if fx_nodes.is_compute(node)), default=0)
        ends = {one.last: one for one in chains}
        known[apart] = Layout(found.outputs, homes, dict(zip(lives, places, strict=True)), nbytes, heap, ends, set(cut))
    found_layout: Layout = known[apart]
    return found_layout


def _at_the_last(one: tiling.Chain, lives: dict[fx_values.Value, tuple[int, int, int]], at: dict[fx.Node, int]) -> None:
    """A chain runs when its last op would: until then it needs what it reads, and of what it makes only strips. What
    its earlier ops do not read strip by strip it needs while the last op writes, which so writes over none of it."""
    for node in one.nodes:
        for n in node.all_input_nodes:
            for key in fx_values.memory(n):
                first, last, nbytes = lives[key]
                whole = one.is_cut(n) and fx_values.extent_bytes(n.meta["val"]) == nbytes
                lives[key] = (first, max(last, at[one.last] + (node is not one.last and not whole)), nbytes)
    for node, strip in one.made:
        lives[node, 0] = (at[one.last], at[one.last], strip.numel() * strip.element_size())


def _heap(node: fx.Node) -> int:
    made = fx_values.results(node)
    direct = isinstance(node.target, Fused) or _special(node) is not None or _form(node) is not None
    own = sum(value.untyped_storage().nbytes() for _, value in made)
    if _special(node) is _embedding_backward_by_columns:
        (rows, columns), itemsize = node.meta["val"].shape, node.meta["val"].element_size()
        step = min(_columns_at_once(rows, itemsize), columns)
        grad, index = (fx_nodes.operand(node, i).meta["val"] for i in (0, 1))
        met = index.numel() if step < columns or not grad.is_contiguous() else 0  # rows that are made contiguous
        own, direct = (rows + met) * step * itemsize, False
    return workspace_bytes(node) + (0 if direct else own)


def bind(
    gm: fx.GraphModule,
    given: Sequence[torch.Tensor],
    fresh: Sequence[torch.Tensor],
    workspace: torch.Tensor,
    apart: frozenset[int] = frozenset(),
) -> list[Call]:
    """The calls of a segment: `given` are its placeholders, `fresh` what it returns, `workspace` bytes for the rest,
    laid out as `layout(gm, apart)` says.

    A rank's own part of a flat range may be less than the segment was planned for, and empty. Where fzero has a kernel
    for an op on these operands (`fzero.kernels`, `fzero.codegen.matmul`), it runs in the op's place.
    """
    plan = layout(gm, apart)
    env: dict[fx.Node, Any] = dict(zip(fx_nodes.placeholders(gm.graph), given, strict=True))
    shapes = _shapes(gm, given)
    calls: list[Call] = []

    def place(key: fx_values.Value, value: torch.Tensor) -> torch.Tensor:
        home = plan.homes.get(key, key)
        if isinstance(home, fx.Node):
            return inplace.at_home(value, env[home])
        if home in plan.outputs:
            made = fresh[plan.outputs.index(home)]
            return made if home is key else inplace.at_home(value, made)
        return at(workspace, plan.places[home], value)

    for node in gm.graph.nodes:
        if not fx_nodes.is_compute(node) or node in plan.cut:
            continue
        if node in plan.chains:
            one = plan.chains[node]
            blocks = {n: at(workspace, plan.places[n, 0], strip).view(-1) for n, strip in one.made}
            made = [place((node, i), value) for i, value in fx_values.results(node)]
            env[node] = made[0] if made else env[fx_nodes.mutated(node)[0]]
            calls += tiling.calls(one, env, blocks, made[0] if made else None, _writing)
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        into = {i: place((node, i), value) for i, value in fx_values.results(node, shapes.get(node))}
        if node.target is operator.getitem or fx_nodes.is_view(node):
            env[node] = node.target(*args, **kwargs)
            _check_views(node, env)
        elif isinstance(node.target, Fused):
            calls.append(partial(node.target.run, *args, *into.values()))
            env[node] = list(into.values())
        elif written := fx_nodes.mutated(node):
            if not _is_there(node, args):
                calls += _writing(node, args, kwargs, {})
            env[node] = env[written[0]]
        else:
            calls += _writing(node, args, kwargs, into)
            env[node] = tuple(map(into.get, range(max(into, default=-1) + 1))) if _several(node) else into.get(0)
    return calls


def at(block: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """The tensor at a place of a block of bytes that has a fake tensor's shape, strides and dtype."""
    nbytes = fx_values.extent_bytes(like)
    if place + nbytes > block.numel():
        raise VerifyError(f"a value of {nbytes} bytes at byte {place} does not fit into {block.numel()}")
    return block[place : place + nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def _check_views(node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
    """A view lies inside the value that owns its memory: nothing else of the arena can be read through it."""
    owner = env[fx_nodes.base(node)] if fx_nodes.is_view(node) else None
    if isinstance(owner, torch.Tensor):
        for view in fx_values.tensors(env[node]):
            as_strided.check_view(view, owner, node.target)


def _is_there(node: fx.Node, args: Any) -> bool:
    """Whether a copy's source was made where the copy goes."""
    if node.target is not aten.copy_.default or fx_nodes.operand(node) is fx_nodes.operand(node, 1):
        return False
    into, source = ((x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()) for x in args[:2])
    return into == source


def as_sized(gm: fx.GraphModule, given: Sequence[torch.Tensor]) -> bool:
    """Whether the operands have the shapes that a segment was planned for; a rank's part of a flat range may not."""
    return all(x.shape == n.meta["val"].shape for x, n in zip(given, fx_nodes.placeholders(gm.graph), strict=True))


def _shapes(gm: fx.GraphModule, given: Sequence[torch.Tensor]) -> dict[fx.Node, Any]:
    """The nodes' values where they are not those of the plan: with operands of these shapes."""
    if as_sized(gm, given):
        return {}
    with FakeTensorMode():
        return fx_values.shapes(
            gm, [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in given]
        )


def _several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _writing(node: fx.Node, args: Any, kwargs: Any, into: dict[int, torch.Tensor]) -> Iterator[Call]:
    """The calls that compute a node's results into their places."""
    special, form = _special(node), _form(node)
    if fx_nodes.mutated(node) and not into:
        if isinstance(kwargs.get("out"), torch.Tensor):
            args = [_one_with([kwargs["out"]], x) for x in args]
        yield partial(_kernel(node.target, args, kwargs), *args, **kwargs)
    elif special is not None:
        yield from special(into[0], *args, **kwargs)
    elif form is not None:
        names = [a.name for a in form._schema.arguments if a.is_out]
        args = [_one_with(into.values(), x) for x in args]
        yield partial(_kernel(form, args, kwargs), *args, **kwargs, **dict(zip(names, into.values(), strict=True)))
    elif not into:
        yield partial(_kernel(node.target, args, kwargs), *args, **kwargs)  # a check, which returns nothing
    elif _several(node):
        compute = partial(_kernel(node.target, args, kwargs), *args, **kwargs)
        used = {u.args[1] for u in node.users}
        yield partial(_copy_results, compute, [(i, tensor) for i, tensor in into.items() if i in used])
    else:
        yield partial(_copy_result, partial(_kernel(node.target, args, kwargs), *args, **kwargs), into[0])


def _one_with(results: Iterable[torch.Tensor], x: Any) -> Any:
    """The result that lies where an operand does, instead of it: torch takes them as one only if all their strides are
    equal, those of dims of one element too, and what torch's shape rules say of those is not what its kernels do."""
    if not isinstance(x, torch.Tensor) or x.is_conj() or x.is_neg():
        return x
    for made in results:
        alike = (made.data_ptr(), made.dtype, made.shape) == (x.data_ptr(), x.dtype, x.shape)
        if alike and fx_values.steps(made) == fx_values.steps(x):
            return made
    return x


def _kernel(target: Any, args: Any, kwargs: Any) -> Any:
    """What runs for an op on these operands."""
    return matmul.KERNELS.get(target) or kernel_for(target, *args, **kwargs) or kernel_of(target)


def _copy_result(compute: Call, into: torch.Tensor) -> None:
    into.copy_(compute())


def _copy_results(compute: Call, into: Sequence[tuple[int, torch.Tensor]]) -> None:
    found = compute()
    for index, tensor in into:
        if found[index].numel() or not tensor.numel():  # some ops leave out what nobody will need
            tensor.copy_(found[index])


# --- forms that write into a given tensor -----------------------------------------------------------------------------

# a Python number for the tensor of another overload, which has an `out=` form
_WITH_TENSOR = {
    aten.add.Scalar: aten.add.out,
    aten.sub.Scalar: aten.sub.out,
    aten.mul.Scalar: aten.mul.out,
    aten.div.Scalar: aten.div.out,
}
# beside pointwise ops, those whose `out=` form was seen to write its result there and nothing else: others resize `out`
# and use it for what lies between (binary_cross_entropy), or need results in memory of their own (linalg.qr)
_WRITES_OUT = frozenset(
    str.split(
        "mm addmm bmm baddbmm sum mean amax amin any all argmax argmin cumsum cat stack index_select gather tril triu "
        "index _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
        "nll_loss_forward nll_loss_backward "
        "gelu_backward silu_backward max_pool2d_with_indices onednn_mm onednn_addmm onednn_bmm onednn_baddbmm"
    )
)


@cache
def out_form(target: Any) -> Any:
    """The overload of an op that writes its result into `out=` and nothing else, or None."""
    if target in _WITH_TENSOR:
        return _WITH_TENSOR[target]
    if not hasattr(target, "_schema"):
        return None
    name = target.overloadpacket.__name__
    if name not in _WRITES_OUT and torch.Tag.pointwise not in target.tags:
        return None
    return fx_nodes.out_overload(target)


def _form(node: fx.Node) -> Any:
    """The `out=` form of a node's op that takes its arguments; add.Scalar's third is no tensor's. A softmax writes its
    result row by row, whatever strides torch's shape rules say that it has and `out` therefore has."""
    if node.target in _WITH_TENSOR and len(node.args) > 2:
        return None
    if "_softmax" in fx_nodes.op_name(node) and "val" in node.meta and not node.meta["val"].is_contiguous():
        return None
    return out_form(node.target)


def _special(node: fx.Node) -> Callable[..., Iterator[Call]] | None:
    if node.target is aten.embedding_dense_backward.default and not _fits(node):
        return None if node.args[4] or _on_cuda(node) else _embedding_backward_by_columns
    form = _SPECIAL.get(node.target)
    return form if form is not None and _fits(node) else None


def _fits(node: fx.Node) -> bool:
    """Whether a node's operands are as its special form needs them. CUDA adds rows in any order, but in torch's own
    backward of an embedding, which sorts them."""
    if node.target is aten.embedding.default:
        return bool(node.args[1].meta["val"].is_contiguous())  # type: ignore[union-attr]
    if node.target is aten.embedding_dense_backward.default:
        operands = all(fx_nodes.operand(node, i).meta["val"].is_contiguous() for i in (0, 1))
        wide = node.meta["val"].dtype in (torch.float32, torch.float64)  # narrow ones are added in fp32
        alone = not _on_cuda(node) and not node.args[4]
        return bool(operands and wide and node.args[3] < 0 and alone)  # type: ignore[operator]
    return True


def _on_cuda(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_cuda)


def _copy(into: torch.Tensor, source: torch.Tensor, **_: Any) -> Iterator[Call]:
    yield partial(into.copy_, source)


def _fill(value: float) -> Callable[..., Iterator[Call]]:
    def form(into: torch.Tensor, *_: Any, **__: Any) -> Iterator[Call]:
        yield partial(into.fill_, value)

    return form


def _leave(*_: Any, **__: Any) -> Iterator[Call]:
    """Nothing to do: whatever lies there is a value of it."""
    yield from ()


def _full(into: torch.Tensor, _: Any, value: Any, **__: Any) -> Iterator[Call]:
    yield partial(into.fill_, value)


def _scalar(into: torch.Tensor, value: Any, **_: Any) -> Iterator[Call]:
    yield partial(into.fill_, value)


def _strided_scatter(into: torch.Tensor, x: torch.Tensor, values: torch.Tensor, *layout: Any) -> Iterator[Call]:
    yield partial(into.copy_, x)
    yield partial(as_strided.strided(into, *layout).copy_, values)


def _embedding(into: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, *_: Any) -> Iterator[Call]:
    rows = into.view(-1, weight.shape[1])
    yield partial(kernel_of(aten.index_select.out), weight, 0, index.view(-1), out=rows)


def _embedding_backward(into: torch.Tensor, grad: torch.Tensor, index: torch.Tensor, *_: Any) -> Iterator[Call]:
    yield into.zero_
    yield partial(into.index_add_, 0, index.view(-1), grad.view(-1, into.shape[1]))


_COLUMNS_BYTES = tiling.BYTES[1]  # of a result in memory that malloc keeps


def _columns_at_once(rows: int, itemsize: int) -> int:
    return max(1, _COLUMNS_BYTES // max(rows * itemsize, 1))


def _embedding_backward_by_columns(
    into: torch.Tensor, grad: torch.Tensor, index: torch.Tensor, *rest: Any
) -> Iterator[Call]:
    """aten's own kernel, which returns a new tensor, on some columns at a time: columns do not meet. (Scaled by how
    often a row is met, they are added with a factor, which rounds by the number of columns: see `strips`.)"""
    step = _columns_at_once(into.shape[0], into.element_size())
    kernel = kernel_of(aten.embedding_dense_backward.default)
    for start in range(0, into.shape[1], step):
        columns = slice(start, start + step)
        yield partial(_copy_result, partial(kernel, grad[..., columns], index, *rest), into[:, columns])


_SPECIAL: dict[Any, Callable[..., Iterator[Call]]] = {
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.empty.memory_format: _leave,
    aten.empty_like.default: _leave,
    aten.empty_permuted.default: _leave,
    aten.empty_strided.default: _leave,
    aten.new_empty.default: _leave,
    aten.new_empty_strided.default: _leave,
    aten.zeros.default: _fill(0),
    aten.zeros_like.default: _fill(0),
    aten.new_zeros.default: _fill(0),
    aten.ones.default: _fill(1),
    aten.ones_like.default: _fill(1),
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.scalar_tensor.default: _scalar,
    torch.ops.fzero.strided_scatter.default: _strided_scatter,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
}
