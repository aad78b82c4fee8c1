"""as_strided: offsets into a tensor's storage become offsets into the value that owns the memory.

`as_strided` takes an offset into the storage of its operand. A trace sees every value in a storage of its own. When a
program runs, values lie side by side in one arena, so the same offset is another value's element. Here such an op
becomes one on the value that owns the memory, seen as 1-D in the order of memory, with an offset from that value's
first element. An op that reaches beyond the value is refused: no op of a program reads or writes outside its operands.

    y = as_strided(x, size, stride, offset)            y = fzero.strided(view(x, [-1]), size, stride, offset)
    z = as_strided_scatter(x, y, size, stride, offset)  z = view(fzero.strided_scatter(view(x, [-1]), y, ...), ...)

Works on graphs of aten ops in two steps: `rooted` before in-place work is made pure, so that a write is one to the
whole value; `rebased` after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fzero.errors import CaptureError, VerifyError
from fzero.ir import fx_nodes, fx_values
from fzero.ir.strided_ops import Layout, span

aten = torch.ops.aten


def faults(gm: fx.GraphModule) -> Iterator[str]:
    """A text for each node of a segment that would read or write outside its operands."""
    for node in gm.graph.nodes:
        if takes_offset(node):
            yield f"{node.target} counts from the start of a storage that other values share"
        elif node.target in (torch.ops.fzero.strided.default, torch.ops.fzero.strided_scatter.default):
            size, stride, start = node.args[-3:]
            first, last = span((size, stride, start))
            held = fx_nodes.operand(node).meta["val"].numel()
            if first < 0 or last > held:
                yield f"{node.target} reaches elements [{first}, {last}) of a value that has {held}"


def check_view(view: torch.Tensor, owner: torch.Tensor, what: object) -> None:
    """Raises VerifyError where a view is not inside the memory of `owner`. `what` is the op, for the error."""
    low, high = _reach(view)
    first, last = _reach(owner)
    if low < high and not (first <= low and high <= last and _storage(view) == _storage(owner)):
        raise VerifyError(
            f"{what} looks at bytes [{low}, {high}) of its storage, of which its operand has [{first}, {last})"
        )


def _reach(x: torch.Tensor) -> tuple[int, int]:
    """[first, last): the bytes of its storage that a tensor spans."""
    first = int(x.storage_offset()) * x.element_size()
    return first, first + fx_values.extent_bytes(x)


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def takes_offset(node: fx.Node) -> bool:
    """Whether an op takes an offset into its operand's storage."""
    if node.target is aten._reshape_alias.default:
        return True
    schema = fx_nodes.schema(node)
    return schema is not None and any(argument.name == "storage_offset" for argument in schema.arguments)


def rooted(gm: fx.GraphModule) -> fx.GraphModule:
    """Views at an offset of a view become views of the value that owns the memory. In place; returns its argument.

    as_strided(slice(x, 0, 1, 3), [2], [1], 0)  becomes  as_strided(x, [2], [1], 0)

    So does an `unfold` that leaves elements out and is written through: its pure form in torch loses those elements.
    """
    for node in {n for written in gm.graph.nodes for w in fx_nodes.mutated(written) for n in _upwards(w)}:
        if node.target is aten.unfold.default and _leaves_out(node):
            value = node.meta["val"]
            layout = (list(value.shape), list(value.stride()), int(value.storage_offset()))
            node.target, node.args, node.kwargs = aten.as_strided.default, (fx_nodes.operand(node), *layout), {}
    for node in gm.graph.nodes:
        if node.target in (aten.as_strided.default, aten._reshape_alias.default):
            operand = fx_nodes.operand(node)
            root = fx_nodes.base(operand)
            size, stride, offset = _layout(node)
            if root.op == "get_attr":
                start = _start_of(getattr(gm, str(root.target)), node)
                offset -= start if _named(node).get("storage_offset") is not None else 0
            if _alike(root, operand):
                node.target, node.args, node.kwargs = aten.as_strided.default, (root, size, stride, offset), {}
    return gm


def _leaves_out(node: fx.Node) -> bool:
    """Whether some elements of its operand are in no window of an `unfold`."""
    x: torch.Tensor = fx_nodes.operand(node).meta["val"]
    dim, size, step = (int(n) for n in node.args[1:])  # type: ignore[arg-type]
    length = x.shape[dim] if x.dim() else 1
    return step > size or not size or (length - size) % step != 0


def check_reach(gm: fx.GraphModule) -> None:
    """Refuses an `as_strided` that reaches beyond its operand, a view, and is read after their memory was written to.

    Eager autograd then makes the view anew from the value that owns the memory. A trace goes back through the view that
    it was taken of, whose gradient has no room for the elements outside.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    writes = [(order[n], fx_nodes.base(w)) for n in order for w in fx_nodes.mutated(n)]
    for node in order if writes else ():
        if node.target is not aten.as_strided.default or node.meta.get("no_grad") or _inside(node):
            continue
        same = {node}
        for later in list(order)[order[node] + 1 :]:
            if fx_nodes.source(later) in same:
                same.add(later)
        last = max((order[u] for n in same for u in n.users if u not in same), default=-1)
        if any(order[node] < write < last and root is fx_nodes.base(node) for write, root in writes):
            raise CaptureError(
                f"{node.target} at {_where(node)} reaches beyond the view that it is taken of, and is read after their "
                "memory was written to: its gradient would be wrong. Take it of the whole tensor"
            )


def _inside(node: fx.Node) -> bool:
    """Whether an `as_strided` looks only at elements of its operand, or at all of a value that is no view."""
    operand = fx_nodes.operand(node)
    value, (first, last) = operand.meta["val"], span(_layout(node))
    held = span((value.shape, value.stride(), int(value.storage_offset())))
    return not fx_nodes.is_view(operand) or (held[0] <= first and last <= held[1] and fx_values.is_dense(value))


def _start_of(closed_over: torch.Tensor, node: fx.Node) -> int:
    """The offset of a closed-over tensor in its storage; in a trace it is contiguous in a storage of its own.

    Raises CaptureError for one that is not contiguous.
    """
    if not closed_over.is_contiguous():
        raise CaptureError(
            f"{node.target} at {_where(node)} takes a closed-over tensor of strides {closed_over.stride()} apart by "
            "its place in memory: close over its .contiguous()"
        )
    return int(closed_over.storage_offset())


def rebased(gm: fx.GraphModule) -> fx.GraphModule:
    """Ops at an offset of a storage become ops at an offset of a value. In place; returns its argument.

    Raises CaptureError, with the line, for an op that reaches beyond the value.
    """
    for node in list(gm.graph.nodes):
        if takes_offset(node):
            rewrite = _REWRITES.get(node.target)
            if rewrite is None:
                raise CaptureError(
                    f"{node.target} at {_where(node)} sets where a tensor lies in memory, which a program decides "
                    "by itself: use torch.as_strided"
                )
            with gm.graph.inserting_before(node):
                new = rewrite(node, _Maker(node))
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            gm.recompile()
    return gm


def aligned(gm: fx.GraphModule, parts: Sequence[fx.Node]) -> None:
    """Views of `parts` as wider elements become views of a copy. In place.

    `parts` are inputs that may begin anywhere in a buffer.

    Two floats are a complex number, and four bytes an int32, only at a multiple of their size.
    """
    for node in list(gm.graph.nodes):
        if node.target in (aten.view_as_complex.default, aten.view.dtype) and fx_nodes.base(node) in parts:
            x = fx_nodes.operand(node)
            with gm.graph.inserting_before(node):
                copy = gm.graph.call_function(aten.clone.default, (x,))
            value = x.meta["val"]
            with value.fake_mode:
                copy.meta = {**x.meta, "val": value.clone()}
            node.replace_input_with(x, copy)
            gm.recompile()


class _Maker:
    """Adds nodes before `node`, with its provenance and their own fake values."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.mode = fx_values.tensors(node.meta["val"])[0].fake_mode  # type: ignore[attr-defined]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        added = self.node.graph.call_function(target, args, kwargs)
        added.meta = dict(self.node.meta)
        with self.mode:
            values, options = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
            added.meta["val"] = target(*values, **options)
        return added

    def flat(self, x: fx.Node, layout: Layout | None = None) -> fx.Node:
        """A value's elements in the order of memory, or in that of another dense layout of its dims, in 1-D."""
        value = x.meta["val"]
        if value.dim() == 1 and value.is_contiguous():
            return x
        order = _order(layout or (value.shape, value.stride(), 0))
        if order != sorted(order):
            x = self(aten.permute.default, x, order)
        if not x.meta["val"].is_contiguous():
            x = self(aten.clone.default, x, memory_format=torch.contiguous_format)
        return self(aten.view.default, x, [value.numel()])

    def shaped(self, flat: fx.Node, like: torch.Tensor) -> fx.Node:
        """The elements of a 1-D value as a dense tensor with the shape and strides of `like`."""
        order = _order((like.shape, like.stride(), 0))
        shaped = flat if like.dim() == 1 else self(aten.view.default, flat, [like.shape[d] for d in order])
        return (
            shaped
            if order == sorted(order)
            else self(aten.permute.default, shaped, [order.index(d) for d in range(like.dim())])
        )


def _read(node: fx.Node, make: _Maker) -> fx.Node:
    """The node for an as_strided: a view of the value that holds the elements."""
    layout = _layout(node)
    owner, start = _owner(node, layout)
    size, stride, _ = layout
    value = owner.meta["val"]
    if start == 0 and tuple(size) == tuple(value.shape) and tuple(stride) == value.stride():
        return owner
    flat = make.flat(owner)
    if start == 0 and torch.Size(size).numel() == value.numel() and _is_contiguous(size, stride):
        return make(aten.view.default, flat, list(size))
    return make(torch.ops.fzero.strided.default, flat, list(size), list(stride), start)


def _read_copy(node: fx.Node, make: _Maker) -> fx.Node:
    """The node for an as_strided_copy: a contiguous copy of that view."""
    return make(aten.clone.default, _read(node, make), memory_format=torch.contiguous_format)


def _write(node: fx.Node, make: _Maker) -> fx.Node:
    """The node for an as_strided_scatter: a new value in its operand's layout."""
    x, values = fx_nodes.operand(node), fx_nodes.operand(node, 1)
    size, stride, _ = layout = _layout(node)
    start = _start_in(x.meta["val"], layout)
    if start is None:
        raise _beyond(node, layout)
    like = x.meta["val"]
    if torch.Size(size).numel() > 1 and not _is_apart(size, stride):
        raise CaptureError(f"{node.target} at {_where(node)} writes several values to one element: write to a clone")
    if start == 0 and torch.Size(size).numel() == like.numel() and fx_values.dense(size, stride):
        return make.shaped(make.flat(values, layout), like)  # nothing is left of the old value
    new = make(torch.ops.fzero.strided_scatter.default, make.flat(x), values, list(size), list(stride), start)
    return make.shaped(new, like)


_REWRITES = {
    aten.as_strided.default: _read,
    aten._reshape_alias.default: _read,
    aten.as_strided_copy.default: _read_copy,
    aten.as_strided_scatter.default: _write,
}


def _layout(node: fx.Node) -> Layout:
    """The layout in a node's arguments; its start is an offset into the operand's storage."""
    named = _named(node)
    offset = named.get("storage_offset")
    if offset is None:
        offset = fx_nodes.operand(node).meta["val"].storage_offset()
    return named["size"], named["stride"], offset


def _named(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names in its op's schema."""
    arguments = fx_nodes.schema(node).arguments  # type: ignore[union-attr]
    return {a.name: v for a, v in zip(arguments, node.args, strict=False)} | dict(node.kwargs)


def _owner(node: fx.Node, layout: Layout) -> tuple[fx.Node, int]:
    """The dense value that holds all elements of a layout of the operand's storage, and the layout's start in it."""
    operand = fx_nodes.operand(node)
    for x in reversed(list(_upwards(operand))):
        start = _start_in(x.meta["val"], layout) if _alike(x, operand) else None
        if start is not None:
            return x, start
    raise _beyond(node, layout)


def _start_in(value: torch.Tensor, layout: Layout) -> int | None:
    """The offset of a layout's start in a value that lies in the same storage.

    None where the value is not dense, or does not hold all elements of the layout.
    """
    size, stride, offset = layout
    start = offset - int(value.storage_offset())
    first, last = span((size, stride, start))
    held = fx_values.is_dense(value) and first >= 0 and last <= value.numel()
    return (start if last else 0) if held else None


def _upwards(node: fx.Node) -> Iterator[fx.Node]:
    """A node, then its source, and so on to the node that owns the memory."""
    yield node
    while (source := fx_nodes.source(node)) is not None:
        yield source
        node = source


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes read the same bytes of a storage as the same numbers."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return (x.dtype, x.is_conj(), x.is_neg()) == (y.dtype, y.is_conj(), y.is_neg())


def _beyond(node: fx.Node, layout: Layout) -> CaptureError:
    """The error for an op that reaches beyond its value."""
    first, last = span(layout)
    value = fx_nodes.operand(node).meta["val"]
    return CaptureError(
        f"{node.target} at {_where(node)} reaches elements [{first}, {last}) of a storage, of which a value of shape "
        f"{tuple(value.shape)} and strides {value.stride()} from element {value.storage_offset()} holds only some: "
        "take it of the whole tensor, or of a .contiguous() one"
    )


def _where(node: fx.Node) -> str:
    return node.meta.get("source") or "the step"


def _order(layout: Layout) -> list[int]:
    """The dims by stride, largest first; dims of one element keep their place among the others."""
    size, stride, _ = layout
    dims = sorted((d for d in range(len(size)) if size[d] != 1), key=lambda d: -stride[d])
    moving = iter(dims)
    return [d if size[d] == 1 else next(moving) for d in range(len(size))]


def _is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for n, s in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and s != expected:
            return False
        expected *= n
    return True


def _is_apart(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no element occurs twice. False also for some layouts without such elements, whose strides do not nest."""
    reach = 0
    for s, n in sorted((s, n) for n, s in zip(size, stride, strict=True) if n > 1):
        if s <= reach:
            return False
        reach += s * (n - 1)
    return True
