"""out_forms: how an op writes its results into given tensors.

Most ops have an `out=` form in torch that runs the same kernel on the same strides (`form_of`). A few have none and are
written another way (`special_form`). Of the rest the result is computed and copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fzero import backend
from fzero._torch_compat import kernel_of
from fzero.codegen import embedding_rows
from fzero.ir import fx_nodes, fx_values, op_info, strided_ops
from fzero.ir.op_info import named, of

aten = torch.ops.aten
Call = Callable[[], Any]


def out_form(target: Any) -> Any:
    """The overload of op `target` that writes its result into `out=` and nothing else, or None."""
    how = of(target).out_form
    if how in ("", "call", "program"):
        return fx_nodes.out_overload(target) if how else None
    return named(how)[0]


def form_of(node: fx.Node) -> Any:
    """The `out=` form of a node's op for the node's arguments, or None.

    The form of `add.Scalar` takes two: its third, `alpha`, is no tensor. Some forms need all in plain order.
    """
    row = of(node.target)
    if ("." in row.out_form and len(node.args) > 2) or (row.in_order and not _in_order(node, row.in_order)):
        return None
    return out_form(node.target)


def _in_order(node: fx.Node, what: str) -> bool:
    """Whether a node's result, or "all" its operands too, lie in plain order."""
    nodes = [node, *(node.all_input_nodes if what == "all" else [])]
    return all(x.is_contiguous() for each in nodes for x in fx_values.tensors(each.meta.get("val")))


def special_form(node: fx.Node) -> Callable[..., Iterator[Call]] | None:
    """How a node without a usable `out=` form writes into given memory; None where it has no such way.

    The result is called with the result's tensor, then the node's arguments, and gives the calls.
    """
    if is_by_rows(node):
        return embedding_rows.rows
    form = of(node.target).special_form
    return form if form is not None and _fits(node) else None


def is_by_rows(node: fx.Node) -> bool:
    """Whether a node's result is made some rows at a time: the backward of an embedding, on the CPU."""
    backward = node.target is aten.embedding_dense_backward.default
    return backward and not _fits(node) and not node.args[4] and not _on_cuda(node)


def _fits(node: fx.Node) -> bool:
    """Whether a node's operands are as its special form needs them.

    On CUDA `index_add_` adds rows in any order; torch's own backward of an embedding sorts them.
    """
    if node.target is aten.constant_pad_nd.default:
        return min(node.args[1], default=0) >= 0  # type: ignore[arg-type]
    if node.target is aten.embedding.default:
        return bool(node.args[1].meta["val"].is_contiguous())  # type: ignore[union-attr]
    if node.target is aten.embedding_dense_backward.default:
        operands = all(fx_nodes.operand(node, i).meta["val"].is_contiguous() for i in (0, 1))
        wide = node.meta["val"].dtype in (torch.float32, torch.float64)  # narrow ones are added in fp32
        alone = not _on_cuda(node) and not node.args[4]
        return bool(operands and wide and node.args[3] < 0 and alone)  # type: ignore[operator]
    return True


def _on_cuda(node: fx.Node) -> bool:
    return backend.of(node.meta["val"].device).on_streams


def copy_result(compute: Call, into: torch.Tensor) -> None:
    """Computes a result and copies it into a given tensor."""
    into.copy_(compute())


def copied(node: fx.Node) -> set[int]:
    """Of an op with several results, those that are copied to their places where no form writes them there: what is
    read. The state of the generator is not, of an attention without dropout."""
    used = {int(user.args[1]) for user in node.users}  # type: ignore[arg-type]
    return used - set(of(node.target).seeds) if _dropout(node) == 0 else used


def _dropout(node: fx.Node) -> Any:
    """The argument `dropout_p` of a call; None for an op that has none."""
    schema = fx_nodes.schema(node)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else argument.default_value
            return node.kwargs.get(argument.name, given)
    return None


def copy_results(compute: Call, into: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Computes several results and copies those numbered in `into`."""
    results = compute()
    for index, tensor in into:
        result = results[index]
        if result is not None:  # some ops leave out what is not needed
            if result.shape != tensor.shape:  # copy_ would spread it
                raise RuntimeError(
                    f"result {index} of {getattr(compute, 'func', compute)} has shape {list(result.shape)}, and "
                    f"{list(tensor.shape)} is planned: a bug in fzero, or in the op's rule of shapes"
                )
            tensor.copy_(result)


# --- special forms ----------------------------------------------------------------------------------------------------


def _copy(into: torch.Tensor, source: torch.Tensor, **_: Any) -> Iterator[Call]:
    yield partial(into.copy_, source)


def _copy_over(into: torch.Tensor, _: Any, source: torch.Tensor, *__: Any, **___: Any) -> Iterator[Call]:
    """Of `copy(self, source)`, of whose `self` only the form counts. torch's kernel copies all memory behind it first:
    here that is the arena."""
    yield partial(into.copy_, source)


def _fill(value: float) -> Callable[..., Iterator[Call]]:
    def form(into: torch.Tensor, *_: Any, **__: Any) -> Iterator[Call]:
        yield partial(into.fill_, value)

    return form


def _leave(*_: Any, **__: Any) -> Iterator[Call]:
    """Nothing to do: an empty tensor may hold any values."""
    yield from ()


def _full(into: torch.Tensor, _: Any, value: Any, **__: Any) -> Iterator[Call]:
    yield partial(into.fill_, value)


def _relu(into: torch.Tensor, x: torch.Tensor) -> Iterator[Call]:
    """As torch's own, which has no `out=` form."""
    yield partial(kernel_of(aten.clamp_min.out), x, 0, out=into)


def _scalar(into: torch.Tensor, value: Any, **_: Any) -> Iterator[Call]:
    yield partial(into.fill_, value)


def _strided_scatter(into: torch.Tensor, x: torch.Tensor, values: torch.Tensor, *layout: Any) -> Iterator[Call]:
    yield partial(into.copy_, x)
    yield partial(strided_ops.strided(into, *layout).copy_, values)


def _scatter(view: Any) -> Callable[..., Iterator[Call]]:
    """Of an op that gives a copy with a view of it replaced. torch's kernels copy all memory behind the operand: here
    that is the arena."""

    def form(into: torch.Tensor, x: torch.Tensor, values: torch.Tensor, *place: Any, **named: Any) -> Iterator[Call]:
        yield partial(into.copy_, x)
        yield partial(view(into, *place, **named).copy_, values)

    return form


def _embedding(into: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, *_: Any) -> Iterator[Call]:
    rows = into.view(-1, weight.shape[1])
    yield partial(kernel_of(aten.index_select.out), weight, 0, index.view(-1), out=rows)


def _embedding_backward(into: torch.Tensor, grad: torch.Tensor, index: torch.Tensor, *_: Any) -> Iterator[Call]:
    yield into.zero_
    yield partial(into.index_add_, 0, index.view(-1), grad.view(index.numel(), into.shape[1]))


def _padded(into: torch.Tensor, x: torch.Tensor, pads: Sequence[int], value: float = 0) -> Iterator[Call]:
    """The strips around, dim by dim from the last, then what lies between them."""
    inner = into
    for number in range(len(pads) // 2):
        dim, before, after = -1 - number, pads[2 * number], pads[2 * number + 1]
        size = inner.shape[dim]
        strips = inner.narrow(dim, 0, before), inner.narrow(dim, size - after, after)
        yield from (partial(strip.fill_, value) for strip in strips if strip.numel())
        inner = inner.narrow(dim, before, size - before - after)
    yield partial(inner.copy_, x)


_FORMS: dict[Any, Callable[..., Iterator[Call]]] = {
    aten.clone.default: _copy,
    aten.copy.default: _copy_over,
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
    aten.relu.default: _relu,
    aten.scalar_tensor.default: _scalar,
    torch.ops.fzero.strided_scatter.default: _strided_scatter,
    aten.constant_pad_nd.default: _padded,
    aten.slice_scatter.default: _scatter(aten.slice.Tensor),
    aten.select_scatter.default: _scatter(aten.select.int),
    aten.diagonal_scatter.default: _scatter(aten.diagonal.default),
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
}
op_info.fill("special_form", _FORMS)
