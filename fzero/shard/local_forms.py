"""local_forms: one rank's part of an op whose sharded dim the op itself must see whole.

Each takes `comm`, the rank, the number of ranks and the op's local arguments. Only `comm.all_reduce(x, "sum" | "max")`
communicates. A sharded dim lies on the ranks in order, so rank r holds the elements from r * size on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fzero.ir import fx_nodes, op_info
from fzero.ir.recorder import record
from fzero.shard import ops

aten = torch.ops.aten


class AxisComm(Protocol):
    """What a form may use of a communicator."""

    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        """The sum or maximum over ranks, a new tensor."""


def mean(comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An addend of the mean over a sharded dim."""
    return aten.mean(x, *args, **kwargs) / size


def embedding(comm: AxisComm, rank: int | Tensor, size: int, weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    """Rows of the weight's own part; zeros where another rank has the row."""
    own, inside = _own(indices, rank, len(weight), size)
    return aten.embedding.default(weight, own).masked_fill(~inside.unsqueeze(-1), 0)


def embedding_dense_backward(
    comm: AxisComm,
    rank: int | Tensor,
    size: int,
    grad: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    by_freq: bool,
) -> Tensor:
    """The own rows of the weight's gradient."""
    rows = num_weights // size
    own, inside = _own(indices, rank, rows, size)
    grad = grad.masked_fill(~(inside & (indices != padding_idx)).unsqueeze(-1), 0)
    return aten.embedding_dense_backward.default(grad, own, rows, -1, by_freq)


def index(comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, indices: list[Tensor]) -> Tensor:
    """x[i] of the own rows of x; zeros where another rank has the row."""
    own, inside = _own_row(indices[0], rank, len(x), size)
    outside = ~inside.reshape(*inside.shape, *[1] * (x.dim() - 1))
    return aten.index.Tensor(x, [own]).masked_fill(outside, 0)


def index_put(
    comm: AxisComm,
    rank: int | Tensor,
    size: int,
    x: Tensor,
    indices: list[Tensor],
    values: Tensor,
    accumulate: bool,
) -> Tensor:
    """The own rows of x, to which values are added at x[i]."""
    own, inside = _own_row(indices[0], rank, len(x), size)
    outside = ~inside.reshape(*inside.shape, *[1] * (x.dim() - 1))
    return aten.index_put.default(x, [own], values.masked_fill(outside, 0), accumulate)


def log_softmax(comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """The own part of log_softmax over a sharded dim; 16-bit types are summed in float32."""
    wide = x.float() if x.element_size() < 4 else x
    wide = wide - comm.all_reduce(wide.amax(dim, keepdim=True), "max")
    wide = wide - comm.all_reduce(wide.exp().sum(dim, keepdim=True), "sum").log()
    return wide if half_to_float else wide.to(x.dtype)


def log_softmax_backward(
    comm: AxisComm, rank: int | Tensor, size: int, grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """The own part of the gradient of log_softmax over a sharded dim."""
    total = comm.all_reduce(grad.sum(dim, keepdim=True), "sum")
    return (grad - output.exp() * total).to(input_dtype)


def logsumexp(
    comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, dim: list[int], keepdim: bool = False
) -> Tensor:
    """logsumexp over dims of which one is sharded; 16-bit types are summed in float32."""
    wide = x.float() if x.element_size() < 4 else x
    most = comm.all_reduce(wide.amax(dim, keepdim=True), "max")
    most = most.masked_fill(most.isinf(), 0)
    total = comm.all_reduce((wide - most).exp().sum(dim, keepdim=True), "sum").log() + most
    return (total if keepdim else total.squeeze(dim)).to(x.dtype)


def vector_norm(
    comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, ord: float = 2, dim: list[int] | None = None,
    keepdim: bool = False, *, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The norm over dims of which one is sharded; 16-bit types are summed in float32."""
    wide = torch.promote_types(dtype or x.dtype, torch.float32)
    own: Tensor = aten.linalg_vector_norm(x, ord, dim, keepdim, dtype=wide)
    if ord == math.inf:
        whole = comm.all_reduce(own, "max")
    elif ord == -math.inf:
        whole = -comm.all_reduce(-own, "max")
    else:
        whole = comm.all_reduce(own if ord in (0, 1) else own**ord, "sum")
        whole = whole if ord in (0, 1) else whole ** (1 / ord)
    return whole.to((dtype or x.dtype).to_real())


def var(comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The variance over dims of which one is sharded."""
    return var_mean(comm, rank, size, x, *args, **kwargs)[0]


def std(comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The root of the variance."""
    return std_mean(comm, rank, size, x, *args, **kwargs)[0]


def std_mean(comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The root of the variance, and the mean."""
    variance, middle = var_mean(comm, rank, size, x, *args, **kwargs)
    return [variance.sqrt(), middle]


def var_mean(
    comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, dim: list[int] | None = None, *,
    correction: float | None = None, keepdim: bool = False,
) -> list[Tensor]:  # fmt: skip
    """The variance over dims of which one is sharded, and the mean; 16-bit types are summed in float32."""
    dims = list(dim or range(x.dim()))
    count = size * math.prod(x.shape[d] for d in dims)
    wide = x.float() if x.element_size() < 4 else x
    middle = comm.all_reduce(wide.sum(dims, keepdim=True), "sum") / count
    total = comm.all_reduce((wide - middle).abs().square().sum(dims, keepdim=True), "sum")
    variance = total / max(count - (1 if correction is None else correction), 0)
    found = [variance, middle] if keepdim else [variance.squeeze(dims), middle.squeeze(dims)]
    return [found[0].to(x.dtype.to_real()), found[1].to(x.dtype)]


def amin(comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The minimum over dims of which one is sharded."""
    return _mirrored(comm.all_reduce(_mirrored(aten.amin(x, *args, **kwargs)), "max"))


def max_dim(comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, dim: int, keepdim: bool = False) -> list[Tensor]:
    """The maximum over a sharded dim, and the first place of it."""
    own, at = aten.max.dim(x, dim, keepdim)
    most = comm.all_reduce(own, "max")
    at = torch.where((own == most) | own.isnan(), at + rank * x.shape[dim], size * x.shape[dim])
    return [most, -comm.all_reduce(-at, "max")]


def min_dim(comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, dim: int, keepdim: bool = False) -> list[Tensor]:
    """The minimum over a sharded dim, and the first place of it."""
    least, at = max_dim(comm, rank, size, _mirrored(x), dim, keepdim)
    return [_mirrored(least), at]


def argmax(comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """The first place of the maximum over a sharded dim."""
    return max_dim(comm, rank, size, x, dim, keepdim)[1]


def argmin(comm: AxisComm, rank: int | Tensor, size: int, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """The first place of the minimum over a sharded dim."""
    return min_dim(comm, rank, size, x, dim, keepdim)[1]


def _mirrored(x: Tensor) -> Tensor:
    """Values in the opposite order; twice it is the same."""
    return -x if x.is_floating_point() else x.bitwise_not()


def nll_loss_forward(
    comm: AxisComm,
    rank: int | Tensor,
    size: int,
    x: Tensor,
    target: Tensor,
    weight: None,
    reduction: int,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    """An addend of the loss over sharded classes (dim 1), and the count of rows."""
    valid = target != ignore_index
    own, inside = _own(target.where(valid, 0), rank, x.shape[1], size)
    loss = -x.gather(1, own.unsqueeze(1)).squeeze(1).masked_fill(~(inside & valid), 0)
    count = valid.sum().to(x.dtype)
    if reduction == _NONE:
        return loss, count.new_zeros(())
    return (loss.sum() / count if reduction == _MEAN else loss.sum()), count


def nll_loss_backward(
    comm: AxisComm, rank: int | Tensor, size: int, grad: Tensor, x: Tensor, target: Tensor, weight: None,
    reduction: int, ignore_index: int, total_weight: Tensor,
) -> Tensor:  # fmt: skip
    """The own classes of the loss's gradient."""
    valid = target != ignore_index
    own, inside = _own(target.where(valid, 0), rank, x.shape[1], size)
    value = -grad / total_weight if reduction == _MEAN else -grad
    value = value.expand(target.shape).masked_fill(~(inside & valid), 0)
    return torch.zeros_like(x).scatter(1, own.unsqueeze(1), value.unsqueeze(1))


def nll_loss_mean(
    comm: AxisComm,
    rank: int | Tensor,
    size: int,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
) -> tuple[Tensor, Tensor]:
    """An addend of the mean loss over sharded rows, and the weight of all rows."""
    op = aten.nll_loss_forward.default if x.dim() == 2 else aten.nll_loss2d_forward.default
    loss, own_weight = op(x, target, weight, _SUM, ignored)
    total = comm.all_reduce(own_weight, "sum")
    return loss / total, total


def uniform(
    comm: AxisComm, rank: int | Tensor, size: int, key: Tensor, shape: list[int], dtype: torch.dtype, low: float,
    high: float, *, dim: int,
) -> Tensor:  # fmt: skip
    """The own part, along a dim, of uniform numbers of this whole shape."""
    part: Tensor = torch.ops.fzero.uniform_part(key, shape, dtype, low, high, torch.as_tensor(rank), size, dim)
    return part


_NONE, _MEAN, _SUM = range(3)  # torch's numbers of a loss's reduction


def _own(index: Tensor, rank: int | Tensor, own: int, size: int) -> tuple[Tensor, Tensor]:
    """Global indices as those of this rank's part of `own` elements, 0 where they are another's, and whether they are
    this rank's. One that no rank has stays as it is: the op refuses it, on every rank."""
    local = index - rank * own
    inside = (local >= 0) & (local < own)
    nobodys = (index < 0) | (index >= own * size)
    return torch.where(inside, local, torch.where(nobodys, index, 0)), inside


def _own_row(index: Tensor, rank: int | Tensor, own: int, size: int) -> tuple[Tensor, Tensor]:
    """The same of an index that may count from the end."""
    rows = own * size
    return _own(torch.where((index < 0) & (index >= -rows), index + rows, index), rank, own, size)


op_info.fill(
    "local_forms",
    {
        "aten.mean": (mean,),
        "aten.embedding": (embedding,),
        "aten.embedding_dense_backward": (embedding_dense_backward,),
        **dict.fromkeys(("aten.index", "aten._unsafe_index"), (index,)),
        **dict.fromkeys(("aten.index_put", "aten._unsafe_index_put"), (index_put,)),
        "aten._log_softmax": (log_softmax,),
        "aten._log_softmax_backward_data": (log_softmax_backward,),
        "aten.logsumexp": (logsumexp,),
        "aten.linalg_vector_norm": (vector_norm,),
        **{f"aten.{form.__name__}": (form,) for form in (var, std, var_mean, std_mean, amin, argmax, argmin)},
        "aten.max.dim": (max_dim,),
        "aten.min.dim": (min_dim,),
        **dict.fromkeys(("aten.nll_loss_forward", "aten.nll_loss2d_forward"), (nll_loss_forward, nll_loss_mean)),
        **dict.fromkeys(("aten.nll_loss_backward", "aten.nll_loss2d_backward"), (nll_loss_backward,)),
        "fzero.uniform": (uniform,),
    },
)


def forms() -> dict[str, Callable[..., Any]]:
    """The local forms of all ops, by name."""
    return {form.__name__: form for forms_of in op_info.column("local_forms").values() for form in forms_of}


def traced(
    form: str, args: Any, kwargs: Any, rank: fx.Node, n: int, axis: str
) -> tuple[fx.Graph, list[fx.Node], dict[fx.Node, fx.Node]]:
    """(the graph of a form on these local arguments, its results, what each of its placeholders is).

    form: a name of `forms()`, and after a colon its `dim`, if it has one. args, kwargs: as the op has them, with nodes
    of the local graph for tensors. rank: the node that holds the rank.
    """
    name, _, dim = form.partition(":")
    own = {"dim": int(dim)} if dim else {}
    local_form, found = forms()[name], list[fx.Node]()
    fx.node.map_arg((args, kwargs), found.append)
    nodes = list(dict.fromkeys(found))

    def local(rank: Tensor, *tensors: Tensor) -> Any:
        of = dict(zip(nodes, tensors, strict=True))
        a, k = fx.node.map_arg((args, kwargs), of.__getitem__)
        return local_form(_Traced(axis, n), rank, n, *a, **k, **own)

    mode = getattr(rank.meta["val"], "fake_mode", None)
    with mode if mode is not None else torch.no_grad():
        gm = record(local, [rank.meta["val"], *(x.meta["val"] for x in nodes)])
    result: Any = fx_nodes.output(gm.graph).args[0]
    results = [result] if isinstance(result, fx.Node) else list(result)
    return gm.graph, results, dict(zip(fx_nodes.placeholders(gm.graph), [rank, *nodes], strict=True))


class _Traced:
    """The communicator of a local form that is traced: a transfer becomes an op."""

    def __init__(self, axis: str, n: int) -> None:
        self.axis, self.n = axis, n

    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        result: Tensor = ops.ALL_REDUCE(x, self.axis, self.n, how)
        return result
