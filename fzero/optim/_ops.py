"""The optimizers' operators, each one node in a captured step.

| op | does | tag |
|---|---|---|
| `fzero::adamw`       | new (param, mu, nu) of one Adam step                          | pointwise |
| `fzero::adamw_`      | the same in place, one pass over memory in aten's fused kernel | pointwise |
| `fzero::bias_corrections` | what kernels read of step number and learning rate, once a step | |
| `fzero::delta`       | `new - old`                                                   | pointwise |
| `fzero::apply_delta` | `old + delta`                                                 | pointwise |
| `fzero::sum_squares` | sum of squares, accumulated in float64                        |           |

`pointwise` means: an element of the outputs depends on the same element of the inputs and on 0-d tensors alone. So the
op may run on a flat slice of a bucket instead of on a leaf. On slices that start and end on 64-element boundaries the
bits are those of the whole, too. (aten's kernel treats full vectors and a remainder differently; a remainder then
appears only at the end of the whole.)

`delta` and `apply_delta` exist because a transformation returns *updates*, while the fused kernel makes *parameters*.
Adam emits `new, mu, nu = adamw(p, ...)` and returns `delta(new, p)`. `apply_updates` emits `apply_delta(p, u)`. fzero's
capture folds `apply_delta(p, delta(new, p))` to `new`, so a compiled step has one op and no rounding. Run eagerly, the
pair rounds: the result is within one unit in the last place of the larger of `new` and `p`.

The step number and the learning rate are 0-d tensors, never Python numbers, so one trace serves every step. On CUDA
nothing synchronises. The learning rate is rounded to float32 there, as in `torch.optim` with a tensor learning rate.

Cost: `adamw_` reads four tensors and writes three. `adamw` first clones three. `sum_squares` reads one, through a
buffer of 512 KiB (32 MiB on CUDA).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.library import CustomOpDef, custom_op

from fzero import backend
from fzero._torch_compat import fused_adam_, fused_adamw_, in_functorch
from fzero.ir import fx_nodes, op_info
from fzero.ir.op_info import OpInfo

_HYPER = "Tensor count, Tensor lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled"
CORRECTIONS = "Tensor? rate=None, Tensor? root=None"
PIECE = 65_536  # elements at a time on the CPU

__test__: dict[str, str] = {}  # doctest does not look inside a CustomOpDef: it finds their examples here


def _op(
    schema: str, *, mutates: Sequence[str] = (), pointwise: bool = True, name: str = ""
) -> Callable[..., CustomOpDef]:
    """`fzero::<name>` (the function's), whose one body serves every device. Its module needs a dict `__test__`."""

    def register(fn: Callable[..., Any]) -> CustomOpDef:
        tags = [torch.Tag.pointwise] if pointwise else []
        op = custom_op(f"fzero::{name or fn.__name__}", fn, mutates_args=mutates, schema=schema, tags=tags)
        op.__doc__ = fn.__globals__["__test__"][fn.__name__] = fn.__doc__ or ""
        return op

    return register


@_op(
    f"(Tensor(a!) param, Tensor grad, Tensor(b!) mu, Tensor(c!) nu, {_HYPER}, {CORRECTIONS}) -> ()",
    mutates=("param", "mu", "nu"),
)
def adamw_(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    count: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    rate: Tensor | None = None,
    root: Tensor | None = None,
) -> None:
    """One Adam step in place on `param`, `mu` and `nu`, with aten's fused kernel; on CUDA with fzero's own
    (`fzero.kernels.adamw`), if Triton is installed and the four are contiguous.

    All four share shape, dtype (floating) and device; any shape, empty included. A narrower `grad` is cast. `count` is
    this step's number, from 1 (scalar int64); `lr` is scalar float64. `decoupled` chooses AdamW's weight decay over the
    L2 term. Strides may be any; if the four differ, the step goes through contiguous copies. `rate` and `root` are
    the step's `bias_corrections`, which fzero's kernel reads; without them it makes them.

    Raises `ValueError` for shapes that differ and `TypeError` for dtypes that differ.

    >>> p, m, v = torch.ones(3), torch.zeros(3), torch.zeros(3)
    >>> one, lr = torch.tensor(1), torch.tensor(0.1, dtype=torch.float64)
    >>> adamw_(p, torch.ones(3), m, v, one, lr, 0.9, 0.999, 1e-8, 0.0, True)
    >>> p
    tensor([0.9000, 0.9000, 0.9000])
    """
    _check_step(param, grad, mu, nu, count, lr)
    if param.numel() == 0:
        return
    numbers = (beta1, beta2, eps, weight_decay, decoupled)
    has_kernels = backend.of(param.device).has_kernels
    kernel = op_info.kernel_for(torch.ops.fzero.adamw_.default, param, grad, mu, nu) if has_kernels else None
    if kernel is not None:
        kernel(param, grad, mu, nu, count, lr, *numbers, rate, root)
        return
    tensors = [param, grad.to(param.dtype), mu, nu]
    if not _one_layout(tensors):  # aten's kernel walks raw memory: unlike strides would pair the wrong elements
        tensors = [t.contiguous().view(-1) for t in tensors]
    step_size: Any = lr.item() if param.is_cpu else lr.to(param.device, torch.float32)
    step = fused_adamw_ if decoupled else fused_adam_
    step(
        *([t] for t in tensors),  # type: ignore[call-overload]
        [],
        [count.to(param.device, torch.float32)],
        lr=step_size,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    for target, result in ((param, tensors[0]), (mu, tensors[2]), (nu, tensors[3])):
        if result.data_ptr() != target.data_ptr():
            target.copy_(result.view(target.shape))


@_op(f"(Tensor param, Tensor grad, Tensor mu, Tensor nu, {_HYPER}, {CORRECTIONS}) -> (Tensor, Tensor, Tensor)")
def adamw(param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor, *hyper: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One Adam step as a pure function: the new `(param, mu, nu)`; arguments and errors as in `adamw_`.

    >>> z, one, lr = torch.zeros(2), torch.tensor(1), torch.tensor(0.1, dtype=torch.float64)
    >>> new, mu, nu = adamw(z, torch.ones(2), z, z, one, lr, 0.9, 0.999, 1e-8, 0.0, True)
    >>> new, mu
    (tensor([-0.1000, -0.1000]), tensor([0.1000, 0.1000]))
    """
    new = param.clone(), mu.clone(), nu.clone()
    adamw_(new[0], grad, new[1], new[2], *hyper)
    return new


@_op("(Tensor count, Tensor lr, float beta1, float beta2) -> (Tensor, Tensor)", pointwise=False)
def bias_corrections(count: Tensor, lr: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """(lr / (1 - beta1^count), sqrt(1 - beta2^count)), scalar float64. `count` is scalar int64, `lr` scalar float64.

    >>> bias_corrections(torch.tensor(1), torch.tensor(0.1, dtype=torch.float64), 0.5, 0.75)
    (tensor(0.2000, dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
    """
    kernel = op_info.kernel_for(torch.ops.fzero.bias_corrections.default, count, lr)
    if kernel is not None:
        rate, root = kernel(count, lr, beta1, beta2)
        return rate, root
    t = count.to(torch.float64)
    return lr / (1 - beta1**t), (1 - beta2**t).sqrt()


def corrections(count: Tensor, lr: Tensor, beta1: float, beta2: float) -> tuple[Tensor, ...]:
    """The last operands of `adamw` and `adamw8`: one `bias_corrections` for all leaves, if fzero's kernels run on the
    device. aten's kernel makes its own."""
    return bias_corrections(count, lr, beta1, beta2) if backend.of_traced(count.device).has_kernels else ()


@_op("(Tensor new, Tensor old) -> Tensor")
def delta(new: Tensor, old: Tensor) -> Tensor:
    """`new - old`, of one shape and dtype. See the module's docstring for why it is a separate op.

    >>> delta(torch.tensor([3.0]), torch.tensor([1.0]))
    tensor([2.])
    """
    return new - old


@_op("(Tensor old, Tensor delta) -> Tensor")
def apply_delta(old: Tensor, delta: Tensor) -> Tensor:
    """`old + delta`, of one shape, in `old`'s dtype. `apply_delta(p, delta(new, p))` is folded to `new` by capture.

    >>> apply_delta(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0]))
    tensor([3.], dtype=torch.bfloat16)
    """
    return (old + delta).to(old.dtype)


@_op("(Tensor x) -> Tensor", pointwise=False)
def sum_squares(x: Tensor) -> Tensor:
    """The sum of squares of a floating-point tensor of any shape: scalar float64, 0 for an empty one.

    Chunks of fixed size, counted from the start of the flat view, are cast to float64 and added in order. So the
    bits depend only on the values and their order. Raises `TypeError` for another dtype.

    >>> sum_squares(torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16))
    tensor(25., dtype=torch.float64)
    """
    _check_sum(x)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    if x.numel() == 0:
        return total
    flat, chunk = x.reshape(-1), backend.of(x.device).chunk or PIECE
    buffer = torch.empty(min(chunk, flat.numel()), dtype=torch.float64, device=x.device)
    for piece in flat.split(chunk):
        wide = buffer[: piece.numel()].copy_(piece)
        total += torch.dot(wide, wide)
    return total


def _chunk_bytes(node: fx.Node) -> int:
    """A chunk in float64, and its sum. A rank's own part of a range may be less than the chunk that is planned."""
    return 8 * (min(PIECE, fx_nodes.operand(node).meta["val"].numel()) + 1)


op_info.add(torch.ops.fzero.sum_squares.default, OpInfo(workspace=_chunk_bytes))
op_info.add(torch.ops.fzero.apply_delta.default, OpInfo(out_form="aten.add.out", overwrites="elements", exact=True))
op_info.add(torch.ops.fzero.adamw.default, OpInfo(widens=(1,), narrows=(0,)))
op_info.add(torch.ops.fzero.adamw_.default, OpInfo(in_place=(torch.ops.fzero.adamw.default, (0, 2, 3)), widens=(1,)))

# The shape rules.


@adamw_.register_fake
def _(param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor, count: Tensor, lr: Tensor, *hyper: Any) -> None:
    _check_step(param, grad, mu, nu, count, lr)


@adamw.register_fake
def _(
    param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor, count: Tensor, lr: Tensor, *hyper: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _check_step(param, grad, mu, nu, count, lr)
    return torch.empty_like(param), torch.empty_like(mu), torch.empty_like(nu)


@bias_corrections.register_fake
def _(count: Tensor, lr: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    return lr.new_empty(()), lr.new_empty(())


@delta.register_fake
def _(new: Tensor, old: Tensor) -> Tensor:
    return new - old


@apply_delta.register_fake
def _(old: Tensor, delta: Tensor) -> Tensor:
    return (old + delta).to(old.dtype)


@sum_squares.register_fake
def _(x: Tensor) -> Tensor:
    _check_sum(x)
    return x.new_empty((), dtype=torch.float64)


# Checks: the cases that the ops do not handle.


def watched(*tensors: Tensor) -> bool:
    """Whether a derivative or a torch.func transform looks on. The ops have no rules for those: use plain arithmetic.

    >>> watched(torch.ones(1)), watched(torch.ones(1, requires_grad=True))
    (False, True)
    """
    return in_functorch() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def _one_layout(tensors: Sequence[Tensor]) -> bool:
    """Whether the i-th element in memory is the same one in every tensor: equal strides, without gaps or overlaps."""
    strides = tensors[0].stride()
    dense = tensors[0].is_contiguous() or torch.empty_like(tensors[0]).stride() == strides
    return dense and all(t.stride() == strides for t in tensors)


def _check_step(param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor, count: Tensor, lr: Tensor) -> None:
    for name, t in (("grad", grad), ("mu", mu), ("nu", nu)):
        if t.shape != param.shape:
            raise ValueError(f"fzero::adamw: {name} has shape {tuple(t.shape)}, param has shape {tuple(param.shape)}")
        narrow = name == "grad" and t.is_floating_point() and t.dtype.itemsize < param.dtype.itemsize
        if t.dtype != param.dtype and not narrow:
            raise TypeError(f"fzero::adamw: {name} is {t.dtype}, param is {param.dtype}: they must be one dtype")
    if not param.is_floating_point():
        raise TypeError(f"fzero::adamw: param is {param.dtype}, but it must be a floating-point tensor")
    for name, t in (("count", count), ("lr", lr)):
        if t.dim() != 0:
            raise ValueError(f"fzero::adamw: {name} has shape {tuple(t.shape)}, but it must be 0-d")


def _check_sum(x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"fzero::sum_squares: x is {x.dtype}, but it must be a floating-point tensor")
