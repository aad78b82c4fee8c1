"""What a user's step may call: gradients that arrive reduced, reductions over the mesh, leaves that differ per rank.

`value_and_grad` belongs to the step, not to the loss: inside a loss use `torch.func.grad`, `vmap`, `jvp`, `hessian` or
`torch.autograd.grad` as always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero import capture as _capture
from fzero import tree
from fzero._torch_compat import in_functorch
from fzero.errors import CaptureError, at
from fzero.provenance import defined_at, describe, user_line
from fzero.tracing import active, check_leaf


def value_and_grad(
    fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    batch_argnum: int = 1,
    allow_unused: bool | None = None,
    microbatches: int | None = None,
) -> Callable[..., Any]:
    """`fn(params, *args) -> loss` made into `(params, *args) -> (loss, grads)`, both means over the ranks.

    `loss` is a 0-d floating tensor; with `has_aux=True` `fn` returns `(loss, aux)` and the result is
    `((loss, aux), grads)`, aux being this rank's own (not reduced). `grads` has the structure of `params` (the first
    argument), of which every leaf must be floating. With k microbatches (by default the Spec's) the tensors of argument
    `batch_argnum` are cut into k equal parts along dim 0; loss, gradients and floating aux are means over the parts.

    A leaf that gets no gradient is an error that names it, unless `allow_unused` (then its gradient is zero).
    Outside a step it computes the same for a world of one.

    >>> loss, grads = value_and_grad(lambda p, x: (p["w"] * x).sum())({"w": torch.ones(2)}, torch.tensor([1.0, 3.0]))
    >>> float(loss), grads["w"].tolist()
    (4.0, [1.0, 3.0])
    """

    if not callable(fn):
        raise CaptureError(f"value_and_grad of {describe(fn)}: needed a function (params, *args) -> loss")
    for name, number in (("microbatches", microbatches), ("batch_argnum", batch_argnum)):
        if not (number is None and name == "microbatches") and (type(number) is not int or number < 1):
            raise CaptureError(f"value_and_grad({name}={number!r}): needed a positive int")

    def wrapped(params: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = active()
        if (tracing is not None and tracing.depth) or in_functorch():
            raise CaptureError(
                f"fzero.value_and_grad was called inside a loss or a torch.func transform at {user_line()}: "
                "it belongs to the step and reduces over the ranks. Inside a loss use torch.func.grad"
            )
        paths, leaves, spec = tree.flatten(params)
        _check_params(paths, leaves)
        arg_paths, arg_leaves, arg_spec = tree.flatten((args, kwargs))
        tensor = [isinstance(leaf, torch.Tensor) for leaf in arg_leaves]
        num = microbatches or (tracing.microbatches if tracing else 1)
        unused = tracing.allow_unused if tracing and allow_unused is None else bool(allow_unused)
        marks_aux: dict[str, Any] = {}

        def joint(marks: dict[str, Any], *xs: torch.Tensor) -> list[torch.Tensor]:
            feed = iter(xs[len(leaves) :])
            full = [next(feed) if t else leaf for t, leaf in zip(tensor, arg_leaves, strict=True)]
            own = [x.detach().requires_grad_() for x in xs[: len(leaves)]]
            call_args, call_kwargs = tree.unflatten(arg_spec, full)
            with torch.enable_grad():
                result = fn(tree.unflatten(spec, own), *call_args, **call_kwargs)
            loss, aux = _check_loss(result, has_aux, fn)
            aux_paths, aux_leaves, marks_aux["spec"] = tree.flatten(aux)
            for path, leaf in zip(aux_paths, aux_leaves, strict=True):
                if not isinstance(leaf, torch.Tensor):
                    raise CaptureError(
                        f"{at('aux', path)} of {defined_at(fn)} is the Python value {leaf!r}: it would stay "
                        "what it was at the first step. Return a tensor, or leave it out"
                    )
                check_leaf(at("aux", path), leaf)
            if tracing is not None:
                tracing.phase = "backward"
            grads = torch.autograd.grad(loss, own, allow_unused=True) if loss.requires_grad else [None] * len(own)
            missing = [path for path, g in zip(paths, grads, strict=True) if g is None]
            if missing and not unused:
                raise CaptureError(
                    f"{', '.join(repr(p) for p in missing[:5])}{' and more' if len(missing) > 5 else ''} get no "
                    f"gradient from the loss {defined_at(fn)}. Use them, leave them out of the parameters, or "
                    "pass allow_unused=True"
                )
            marks["grad_of"] = [i for i, g in enumerate(grads) if g is not None]
            return [loss.detach(), *(g for g in grads if g is not None), *(a.detach() for a in aux_leaves)]

        others = [leaf for leaf, t in zip(arg_leaves, tensor, strict=True) if t]
        if tracing is None:
            marks: dict[str, Any] = {}
            outs = joint(marks, *leaves, *others)
        else:
            prefix = f"0/{batch_argnum - 1}"
            sliced = [
                num > 1 and (path == prefix or path.startswith(prefix + "/")) and leaf.ndim > 0
                for path, leaf, t in zip(arg_paths, arg_leaves, tensor, strict=True)
                if t
            ]
            _check_slices(num, sliced, [p for p, t in zip(arg_paths, tensor, strict=True) if t], others, prefix)
            names = [at("params", p) for p in paths]
            names += [_argument(p, prefix) for p, t in zip(arg_paths, tensor, strict=True) if t]
            outs = _capture.add_region(joint, leaves, names, others, microbatches=num, sliced=sliced)
            marks = {"grad_of": list(tracing.regions[-1].grad_of)}
        loss, grads, aux = _reduced(outs, marks["grad_of"], leaves)
        _check_aux(aux, num)
        value = (loss, tree.unflatten(marks_aux["spec"], aux)) if has_aux else loss
        return value, tree.unflatten(spec, grads)

    return wrapped


def grad(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`value_and_grad` without the value: the gradients, or `(grads, aux)` with `has_aux=True`.

    >>> grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})["w"].tolist()
    [2.0, 4.0]
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_grad(fn, **options)(*args, **kwargs)
        return (grads, value[1]) if options.get("has_aux") else grads

    return wrapped


def pmean(x: Any, axis: str = "dp") -> Any:
    """The mean over the ranks of a mesh axis, of every (floating) leaf of a pytree; the same on every rank.

    >>> pmean(torch.tensor([1.0, 2.0])).tolist()  # outside a step: a world of one
    [1.0, 2.0]
    """
    return _preduce(x, "mean", axis)


def psum(x: Any, axis: str = "dp") -> Any:
    """The sum over the ranks of a mesh axis, added in rank order, of every leaf of a pytree."""
    return _preduce(x, "sum", axis)


def pmax(x: Any, axis: str = "dp") -> Any:
    """The elementwise maximum over the ranks of a mesh axis, of every leaf of a pytree."""
    return _preduce(x, "max", axis)


def per_rank(x: Any) -> Any:
    """Marks the leaves of a pytree as kept once per rank: logical shape (N, ...), one (...) on each.

    Given to `fzero.init`, every rank starts with this value, and the step sees its own of shape (...). What the step
    returns there may differ between ranks.
    """
    return tree.map(lambda leaf: leaf if isinstance(leaf, _capture.PerRank) else _capture.PerRank(leaf), x)


def _preduce(x: Any, op: str, axis: str) -> Any:
    tracing = active()
    if tracing is not None and tracing.depth:
        raise CaptureError(
            f"fzero.p{op} was called inside a loss at {user_line()}: reduce what value_and_grad returns, "
            "or return the value as aux and reduce it in the step"
        )
    if tracing is not None and axis != tracing.axis:
        raise CaptureError(f"fzero.p{op} over axis {axis!r}: this mesh has the axis {tracing.axis!r}")

    def one(path: str, leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, torch.Tensor):
            raise CaptureError(f"fzero.p{op} of {path or 'a value'}: needed a tensor, got {leaf!r}")
        if op == "mean" and not leaf.dtype.is_floating_point:
            raise CaptureError(f"fzero.pmean of {describe(leaf)}: needed a floating dtype. Use psum, or cast")
        return torch.ops.fzero.reduce(leaf.contiguous(), op, axis)

    return tree.map_with_path(one, x)


def _check_params(paths: list[str], leaves: list[Any]) -> None:
    if not leaves:
        raise CaptureError("value_and_grad needs parameters: its first argument has no leaves")
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) or not leaf.dtype.is_floating_point:
            raise CaptureError(
                f"params[{path!r}] is {describe(leaf)}: gradients need floating tensors. "
                "Keep it out of the first argument"
            )


def _check_loss(result: Any, has_aux: bool, fn: Callable[..., Any]) -> tuple[torch.Tensor, Any]:
    name = defined_at(fn)
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise CaptureError(
            f"with has_aux=True a loss returns (loss, aux), {name} returned {type(result).__name__}. Return the pair, "
            "or leave out has_aux"
        )
    loss, aux = result if has_aux else (result, None)
    if isinstance(loss, tuple):
        raise CaptureError(
            f"the loss {name} returned a tuple: return the loss alone. For (loss, aux) write a step= with "
            "fzero.value_and_grad(loss, has_aux=True)"
        )
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not loss.dtype.is_floating_point:
        raise CaptureError(
            f"a loss is a floating 0-d tensor, {name} returned {describe(loss)}. Return a floating tensor's "
            ".mean() or .sum()"
        )
    return loss, aux


def _check_slices(num: int, sliced: list[bool], paths: list[str], leaves: list[torch.Tensor], prefix: str) -> None:
    if num > 1 and not any(sliced):
        raise CaptureError(
            f"microbatches={num} cuts the batch along dim 0, but argument {int(prefix.split('/')[1]) + 1} after the "
            "parameters has no tensor to cut: pass the batch as an argument (not by closure), or set batch_argnum"
        )
    for cut, path, leaf in zip(sliced, paths, leaves, strict=True):
        if cut and leaf.shape[0] % num:
            raise CaptureError(
                f"{_argument(path, prefix)} is {describe(leaf)}: dim 0 must be divisible by microbatches={num}"
            )


def _argument(path: str, prefix: str) -> str:
    """How messages name a leaf of what a loss is called with after the parameters."""
    if path == prefix or path.startswith(prefix + "/"):
        return at("batch", path.removeprefix(prefix).lstrip("/"))
    return at("arguments", path.partition("/")[2])


def _check_aux(aux: list[torch.Tensor], num: int) -> None:
    for leaf in aux:
        if num > 1 and not leaf.dtype.is_floating_point:
            raise CaptureError(
                f"an aux output is {describe(leaf)}: with microbatches={num} aux is averaged, which needs a "
                "floating dtype. Cast it in the loss"
            )


def _reduced(
    outs: list[torch.Tensor], grad_of: list[int], leaves: list[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    tracing = active()
    axis = tracing.axis if tracing else "dp"
    loss = torch.ops.fzero.reduce(outs[0], "mean", axis)
    count = len(grad_of)
    found = dict(zip(grad_of, outs[1 : 1 + count], strict=True))
    grads = [
        torch.ops.fzero.reduce(found[i], "mean", axis) if i in found else torch.zeros_like(leaf)
        for i, leaf in enumerate(leaves)
    ]
    return loss, grads, outs[1 + count :]
