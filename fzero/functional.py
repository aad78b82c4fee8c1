"""The functions that a user's step may call: gradients that arrive reduced, reductions over the mesh, per-rank leaves.

`value_and_grad` belongs to the step, not to the loss. Inside a loss use `torch.func.grad`, `vmap`, `jvp`, `hessian` or
`torch.autograd.grad` as always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fzero import random, tree
from fzero._torch_compat import in_functorch
from fzero.capture import ambient
from fzero.capture.context import Tracing, active
from fzero.capture.gradient_codecs import check_codec
from fzero.capture.graph import PerRank
from fzero.capture.joint import Joint
from fzero.capture.joint_region import combined, means, region_outputs
from fzero.capture.provenance import describe, user_line
from fzero.capture.scan import RECOMPUTES
from fzero.errors import CaptureError, SpecError
from fzero.ir.mesh import DATA, PIPELINE, parts_of
from fzero.precision import Precision, policy
from fzero.random.keys import is_key
from fzero.shard.ops import constrained
from fzero.shard.partition import P


def value_and_grad(
    fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    batch_argnum: int = 1,
    allow_unused: bool | None = None,
    microbatches: int | None = None,
    key: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    precision: str | Precision | None = None,
    reduce: bool = True,
    error: Any = None,
) -> Callable[..., Any]:
    """`fn(params, *args) -> loss` made into `(params, *args) -> (loss, grads)`, both means over the ranks.

    fn: its loss is a scalar floating tensor, or an `fzero.Mean(total, count)`, whose mean is taken over the global
    batch. `grads` has the structure and dtypes of `params`, the first argument; every leaf of it must be floating.
    has_aux: `fn` returns `(loss, aux)` and the result is `((loss, aux), grads)`. `aux` is not reduced: each rank gets
    its own.
    batch_argnum: the argument that microbatches split. microbatches: k, by default the Spec's. Its tensors are split
    into k equal parts along dim 0. Loss, gradients and floating aux are means over them; other aux is the last one's.
    allow_unused: a leaf that gets no gradient has a zero gradient; without it, that is an error that names the leaf.
    key: int64, (2,), the same on every rank. Part j = rank * k + m of the batch has the key `fold_in(key, j)`. `fn`
    gets it as `key=` if it has a parameter of that name. Random draws of modules inside (dropout) are made from it.
    scale: a scalar that multiplies the loss before the backward and divides the gradients after their reduction; the
    returned loss is not scaled. precision: by default the Spec's.
    reduce: with False the gradients are this rank's own: over its microbatches and not over the ranks. They differ
    between ranks, and their mean over these is the gradient that True gives. Reduce what is made of them, as with
    `fzero.coded_mean`; the analysis of the step names a leaf of the state if that is forgotten. The loss is the mean
    all the same.
    error: with `Precision(reduce="sign")`, what the codes of earlier gradients have lost: leaves of the state, as
    `fzero.first_error(params, precision)` begins them. The result is then `(loss, grads, new error)`.

    Outside a step it computes the same for one rank and one microbatch.

    >>> loss, grads = value_and_grad(lambda p, x: (p["w"] * x).sum())({"w": torch.ones(2)}, torch.tensor([1.0, 3.0]))
    >>> float(loss), grads["w"].tolist()
    (4.0, [1.0, 3.0])
    """
    return _gradient(fn, has_aux, False, batch_argnum, allow_unused, microbatches, key, scale, precision, reduce, error)


def with_metrics(
    fn: Callable[..., Any],
    *,
    key: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    precision: str | Precision | None = None,
    reduce: bool = True,
    error: Any = None,
) -> Callable[..., Any]:
    """`value_and_grad` of the loss of a `Spec`, which may return `(loss, {"name": tensor or fzero.Mean})`.

    The result is `((loss, metrics), grads)`. A metric is the mean over microbatches and ranks, in fp32 or wider; for a
    Mean, the mean over all terms.

    >>> from fzero import Mean
    >>> def loss(p, x):
    ...     return (p["w"] * x).sum(), {"largest": x.max(), "positive": Mean((x > 0).float().sum(), (x == x).sum())}
    >>> (value, metrics), _ = with_metrics(loss)({"w": torch.ones(2)}, torch.tensor([-1.0, 3.0]))
    >>> float(value), {name: float(metric) for name, metric in metrics.items()}
    (2.0, {'largest': 3.0, 'positive': 0.5})
    """
    return _gradient(fn, False, True, 1, None, None, key, scale, precision, reduce, error)


def _gradient(
    fn: Callable[..., Any], has_aux: bool, metrics: bool, batch_argnum: int, allow_unused: bool | None,
    microbatches: int | None, key: torch.Tensor | None, scale: torch.Tensor | None, precision: str | Precision | None,
    reduce: bool, error: Any,
) -> Callable[..., Any]:  # fmt: skip
    """`value_and_grad` or `with_metrics`."""
    _check_options(fn, batch_argnum, microbatches, key, scale)

    def wrapped(params: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = active()
        _check_outer("value_and_grad", tracing)
        if tracing is None:
            params, args, kwargs = _usable(params, args, kwargs)
        num = (microbatches or tracing.microbatches) if tracing else 1
        joint = Joint(
            fn, params, args, kwargs, _policy(precision, tracing), has_aux, metrics,
            unused=tracing.allow_unused if tracing and allow_unused is None else bool(allow_unused),
            key=key, scale=scale, microbatches=num, enter=_entering(tracing), reduce=reduce,
            errors={} if error is None else dict(zip(*tree.flatten(error)[:2], strict=True)),
        )  # fmt: skip
        check_codec(joint, tracing, error)
        _check_params(joint.paths, joint.leaves)
        if joint.precision.loss_scale is not None and scale is None:
            raise CaptureError(
                "value_and_grad(precision=...) with a loss scale: in a step of your own it is part of the state. Pass "
                "scale=state['scale']['scale'] and update it with fzero.LossScale, or give Precision(compute='fp16')"
            )
        outs = region_outputs(joint, joint.value_and_grad, tracing, batch_argnum, _part_keys(key, num))
        value, grads, lost = combined(joint, outs)
        return (value, grads) if error is None else (value, grads, tree.map_with_path(lambda p, _: lost[p], error))

    return _steady_outside(wrapped)


def forward(
    fn: Callable[..., Any], *, key: torch.Tensor | None = None, precision: str | Precision | None = None
) -> Callable[..., Any]:
    """`fn(params, *args)` without gradients, with parameters gathered layer by layer as in a loss.

    fn: as in `fzero.evaluate`. key: what randomness in it is made from. precision: by default the Spec's.

    The result is a pytree of tensors and `fzero.Mean`s. A Mean becomes the mean over the terms of all ranks; a floating
    scalar is averaged over the ranks; any other tensor is not reduced. For evaluation, and for a frozen teacher:

    >>> forward(lambda p, x: {"out": p["w"] * x})({"w": torch.ones(2)}, torch.tensor([1.0, 3.0]))["out"].tolist()
    [1.0, 3.0]
    """

    _check_key("forward", key)

    def wrapped(params: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = active()
        _check_outer("forward", tracing)
        joint = Joint(fn, params, args, kwargs, _policy(precision, tracing), key=key)
        outs = region_outputs(joint, joint.forward, tracing, 1, _part_keys(key, joint.microbatches))
        return means(joint, outs)

    return _steady_outside(wrapped)


def grad(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`value_and_grad` without the value: the gradients, or `(grads, aux)` with `has_aux=True`.

    fn, options: as in `value_and_grad`.

    >>> grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})["w"].tolist()
    [2.0, 4.0]
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_grad(fn, **options)(*args, **kwargs)
        return (grads, value[1]) if options.get("has_aux") else grads

    return wrapped


def pmean(x: Any, axis: str | None = None) -> Any:
    """The mean over the ranks of the data axes, of every leaf of a pytree; the same on every rank.

    x: a pytree of tensors. axis: one data axis; None: all of them.

    Integers and bools that are the same on all ranks, such as a BatchNorm's count of batches, are returned unchanged.
    If they may differ, there is no mean in their dtype, and CaptureError says so.

    >>> pmean(torch.tensor([1.0, 2.0])).tolist()  # outside a step: one rank
    [1.0, 2.0]
    """
    return _preduce(x, "mean", axis)


def psum(x: Any, axis: str | None = None) -> Any:
    """The sum over the ranks of the data axes, added in rank order, of every leaf. x, axis: as in `pmean`.

    Bools are counted, in int64, as `torch.sum` counts them.

    >>> psum(torch.tensor(2.0) > 1)  # outside a step: one rank
    tensor(1)
    """
    return _preduce(x, "sum", axis)


def pmax(x: Any, axis: str | None = None) -> Any:
    """The elementwise maximum over the ranks of the data axes, of every leaf. x, axis: as in `pmean`."""
    return _preduce(x, "max", axis)


def per_rank(x: Any) -> Any:
    """Marks the leaves of a pytree as per-rank: logical shape (N, ...), each of the N ranks holds one (...).

    x: a pytree of tensors (...). At `fzero.init` every rank starts with this value, and in the step each rank sees its
    own, of shape (...). The values that the step returns for these leaves may differ between ranks.
    """
    return tree.map(lambda leaf: leaf if isinstance(leaf, PerRank) else PerRank(leaf), x)


def axis_index(axis: str | None = None, device: torch.device | str | None = None) -> torch.Tensor:
    """This rank's index on the data axes, as `jax.lax.axis_index`: a scalar int64, 0 if there is one rank.

    axis: one data axis; None: all of them, numbered together. device: of the result, by default the CPU.

    >>> axis_index()
    tensor(0)
    """
    tracing = active()
    if tracing is not None and tracing.depth:
        raise CaptureError(
            f"fzero.axis_index was called inside a loss at {user_line()}: call it in the step and pass it in"
        )
    axis = _checked_axis("axis_index", axis, tracing)
    index: torch.Tensor = torch.ops.fzero.axis_index(axis, torch.device(device or "cpu"))
    return index


def remat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` for a loss: its activations are not saved, but recomputed in the backward, bit for bit.

    fn: any function of tensors. It is called through `torch.utils.checkpoint`. Inside a torch.func transform, which
    checkpoint does not support, it is `fn` itself. `fzero.scan` of it is `scan(fn, ..., remat=True)`; of a function
    within a scan's it recomputes nothing. For whole layers by path see `Spec(remat=...)`, which needs no wrapping.

    >>> x = torch.ones(3, requires_grad=True)
    >>> remat(lambda t: (t.exp() * 2).sum())(x).backward()
    >>> x.grad.tolist() == (2 * x.exp()).tolist()
    True
    """

    @functools.wraps(fn)
    def again(*args: Any, **kwargs: Any) -> Any:
        if in_functorch():
            return fn(*args, **kwargs)
        return checkpoint(fn, *args, use_reentrant=False, **kwargs)

    setattr(again, RECOMPUTES, fn)
    return again


def constrain(x: torch.Tensor, dims: P) -> torch.Tensor:
    """The same value, sharded over mesh axes from here on: as jax's `with_sharding_constraint`.

    x: a tensor of the loss. dims: the axis of each dim, as in `Spec(shard=...)`; `P()` makes the value replicated. The
    gradient gets the same sharding. In a loss it changes the transfers, and numbers only by rounding; outside a step,
    or without the axis, it changes nothing. Along an axis that it does not name, the sharding is what it would be
    without the call.

    Raises SpecError for more dims than there are, and for a data axis or `pp`.

    >>> constrain(torch.ones(2, 4), P(None, "tp")).shape
    torch.Size([2, 4])
    """
    if not isinstance(dims, P) or len(dims) > x.ndim:
        raise SpecError(f"constrain: needed an fzero.P with at most {x.ndim} dims, as P('tp'), not {dims!r}")
    if own := [axis for axis in dims.axes if axis in (PIPELINE, *DATA)]:
        raise SpecError(f"constrain: {dims} names {own[0]!r}, which cuts no dims. Name an axis as 'tp', of shard=")
    if active() is None:
        return x
    if not dims.cuts:
        return constrained(x, "", -1, 1)
    for axis, cut in dims.cuts:
        x = constrained(x, axis, cut.dim, cut.groups)
    return x


def _checked_axis(name: str, axis: str | None, tracing: Tracing | None) -> str:
    """The data axes, as one. Raises CaptureError if others are asked for."""
    own = tracing.axis if tracing is not None else axis or "dp"
    if axis is not None and axis != own:
        raise CaptureError(
            f"fzero.{name} over axis {axis!r}: this mesh has the data axes {' and '.join(parts_of(own))}, and it runs "
            "over all of them. Leave axis out"
        )
    return own


def _preduce(x: Any, op: str, axis: str | None) -> Any:
    """The reduction of every leaf over a mesh axis. Raises CaptureError inside a loss, and for a leaf that does not
    fit."""
    tracing = active()
    if tracing is not None and tracing.depth:
        raise CaptureError(
            f"fzero.p{op} was called inside a loss at {user_line()}: reduce what value_and_grad returns, "
            "or return the value as aux and reduce it in the step"
        )
    axis = _checked_axis(f"p{op}", axis, tracing)

    def reduced(path: str, leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, torch.Tensor):
            raise CaptureError(f"fzero.p{op} of {path or 'a value'}: needed a tensor, got {leaf!r}")
        if op == "mean" and leaf.dtype.is_complex:
            raise CaptureError(f"fzero.pmean of {describe(leaf)}: needed a real dtype. Use torch.view_as_real(x)")
        if op == "mean" and not leaf.dtype.is_floating_point:
            return leaf if tracing is None else torch.ops.fzero.equal(leaf)
        if op == "sum" and leaf.dtype is torch.bool:
            leaf = leaf.to(torch.int64)
        return torch.ops.fzero.reduce(leaf.contiguous(), op, axis)

    return tree.map_with_path(reduced, x)


def _check_params(paths: list[str], leaves: list[Any]) -> None:
    if not leaves:
        raise CaptureError("value_and_grad needs parameters: its first argument has no leaves")
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) or not leaf.dtype.is_floating_point:
            fix = "Keep it out of the first argument"
            if isinstance(leaf, torch.Tensor) and leaf.is_complex():
                fix = "Hold torch.view_as_real(x), and take torch.view_as_complex(x) of it in the loss"
            raise CaptureError(f"params[{path!r}] is {describe(leaf)}: gradients need floating tensors. {fix}")


def _check_outer(name: str, tracing: Tracing | None) -> None:
    if (tracing is not None and tracing.depth) or in_functorch():
        raise CaptureError(
            f"fzero.{name} was called inside a loss or a torch.func transform at {user_line()}: "
            "it belongs to the step and reduces over the ranks. Inside a loss use torch.func.grad"
        )


def _check_options(fn: Any, batch_argnum: Any, microbatches: Any, key: Any, scale: Any) -> None:
    """Raises CaptureError for an argument of `value_and_grad` that it cannot use."""
    if not callable(fn):
        raise CaptureError(f"value_and_grad of {describe(fn)}: needed a function (params, *args) -> loss")
    for name, number in (("microbatches", microbatches), ("batch_argnum", batch_argnum)):
        if not (number is None and name == "microbatches") and (type(number) is not int or number < 1):
            raise CaptureError(f"value_and_grad({name}={number!r}): needed a positive int")
    _check_key("value_and_grad", key)
    if scale is not None and not (isinstance(scale, torch.Tensor) and scale.ndim == 0 and scale.is_floating_point()):
        raise CaptureError(f"value_and_grad(scale={describe(scale)}): needed a floating 0-d tensor")


def _check_key(name: str, key: Any) -> None:
    if key is not None and not is_key(key):
        raise CaptureError(f"{name}(key={describe(key)}): needed a key, as fzero.random.key(0)")


def _policy(value: str | Precision | None, tracing: Tracing | None) -> Precision:
    if value is None and tracing is not None:
        return tracing.precision
    return policy("fp32" if value is None else value)


def _entering(tracing: Tracing | None) -> Callable[[str], None]:
    def enter(phase: str) -> None:
        if tracing is not None:
            tracing.phase = phase

    return enter


def _steady_outside(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which outside of a step leaves torch's settings around the call (`fzero.capture.ambient`)."""

    @functools.wraps(fn)
    def steady(*args: Any, **kwargs: Any) -> Any:
        if active() is not None:
            return fn(*args, **kwargs)
        with ambient.steady(), ambient.of_caller():
            return fn(*args, **kwargs)

    return steady


def _usable(*arguments: Any) -> Any:
    """Arguments from inference mode as copies that a backward may read."""

    def usable(x: Any) -> Any:
        return x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x

    return tree.map(usable, arguments)


def _part_keys(key: torch.Tensor | None, num: int) -> torch.Tensor | None:
    """Returns (num, 2): the keys of this rank's parts of the batch. Part j of all has fold_in(key, j) on every rank."""
    if key is None:
        return None
    first = axis_index(device=key.device) * num
    parts = first + torch.arange(num, device=key.device)
    keys: torch.Tensor = torch.vmap(lambda j: random.fold_in(key, j))(parts)
    return keys
