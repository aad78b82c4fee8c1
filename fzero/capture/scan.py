"""scan: `fzero.scan`, a loop over time. In a trace it is one op; elsewhere a Python loop, which is its meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fzero import tree
from fzero._torch_compat import in_functorch, torch_scan
from fzero.capture import scan_bodies
from fzero.capture.context import active
from fzero.capture.provenance import describe, user_line
from fzero.capture.refuse import REPLACED
from fzero.capture.scan_bodies import Both, Step
from fzero.errors import CaptureError
from fzero.ir.scan_op import SCAN, text_of

RECOMPUTES = "__recomputes__"  # of a function that `fzero.remat` gives: the one that it was given


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, *, length: int | None = None, reverse: bool = False,
    remat: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """A loop over dim 0 of `xs`, as `jax.lax.scan`: `carry, y = f(carry, x)` for each x; returns (last carry, ys).

    f: returns a carry of the shapes and dtypes of `init`. init: a pytree of tensors. xs: a pytree of tensors (T, ...),
    or None with `length=T`. length: T, if xs is None. ys: y's leaves, stacked along dim 0. reverse: from the last x to
    the first; ys lie as xs do.

    In a step the loop is one op of the program: `f` is captured once, forward and backward, whatever T is. Tensors
    that `f` closes over get gradients. What the backward reads is kept for all T steps. remat: only the carry is
    kept, and each step is computed again; so of `f = fzero.remat(g)`. `f` may not draw from the loss's own key: split
    a key, and pass the parts in xs. Outside of a step this is a Python loop.

    Raises CaptureError for a carry that changes its form, leaves that are no tensors, and lengths that differ.

    >>> decay = torch.tensor(0.5, requires_grad=True)
    >>> last, ys = scan(lambda c, x: (decay * c + x, c), torch.tensor(0.0), torch.ones(3))
    >>> last.item(), ys.tolist()
    (1.75, [0.0, 1.0, 1.5])
    >>> torch.autograd.grad(last, decay)
    (tensor(2.),)
    """
    f, remat = getattr(f, RECOMPUTES, f), remat or hasattr(f, RECOMPUTES)
    _, carry, carry_form = tree.flatten(init)
    paths, rows, rows_form = tree.flatten(xs)
    _check_tensors("init", tree.flatten(init)[0], carry)
    _check_tensors("xs", paths, rows)
    steps = _length(paths, rows, length)
    form: list[Any] = []

    def step(*operands: Tensor) -> list[Tensor]:
        given = tree.unflatten(carry_form, operands[: len(carry)])
        result = f(given, tree.unflatten(rows_form, operands[len(carry) :]))
        if not isinstance(result, tuple) or len(result) != 2:
            raise CaptureError(f"fzero.scan: f returned {describe(result)}: needed (carry, y)")
        names, following, _ = tree.flatten(result[0])
        _check_carry(names, following, tree.flatten(init)[0], carry)
        ys_names, ys, ys_form = tree.flatten(result[1])
        _check_tensors("y", ys_names, ys)
        form[:] = [ys_form]
        return [*following, *ys]

    outs = scan_leaves(step, carry, rows, steps, reverse=reverse, remat=remat)
    return tree.unflatten(carry_form, outs[: len(carry)]), tree.unflatten(form[0], outs[len(carry) :])


def scan_leaves(
    step: Step, carry: Sequence[Tensor], rows: Sequence[Tensor], steps: int, *, reverse: bool, remat: bool
) -> list[Tensor]:
    """The last carry and the stacked ys of a step on leaves: one op in a trace, else a loop."""
    tracing = active()
    if tracing is None or in_functorch():
        return _loop(step, carry, rows, steps, reverse, remat)
    carry, rows = [x.contiguous() for x in carry], [x.contiguous() for x in rows]
    body = scan_bodies.of_step(tracing, step, carry, rows)
    needed = [torch.is_grad_enabled() and x.requires_grad for x in (*carry, *rows, *body.closed)]
    if not any(needed):
        outs: list[Tensor] = SCAN(carry, rows, _dense(body.closed), text_of(body.gm), steps, reverse)
        return outs
    both = scan_bodies.with_gradients(tracing, step, carry, rows, body, needed, remat)
    return list(_Scan.apply(both, steps, reverse, *carry, *rows, *both.closed))


def _loop(
    step: Step, carry: Sequence[Tensor], rows: Sequence[Tensor], steps: int, reverse: bool, remat: bool
) -> list[Tensor]:
    count, ys = len(carry), []
    for t in reversed(range(steps)) if reverse else range(steps):
        outs = _again(step, *carry, *(row[t] for row in rows)) if remat else step(*carry, *(row[t] for row in rows))
        carry = outs[:count]
        ys.append(outs[count:])
    stacked = zip(*(ys[::-1] if reverse else ys), strict=True)
    return [*carry, *(torch.stack(each) for each in stacked)]


def _again(step: Step, *operands: Tensor) -> list[Tensor]:
    if in_functorch():
        return step(*operands)
    result: list[Tensor] = checkpoint(step, *operands, use_reentrant=False)
    return result


def _of_torch(step: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], closed: Sequence[Tensor]) -> Any:
    """torch's own scan, on leaves: what its function `scan` calls."""
    return scan_leaves(
        lambda *operands: list(step(*operands, *closed)), init, xs, xs[0].shape[0], reverse=False, remat=False
    )


REPLACED[torch_scan] = _of_torch


def _dense(values: Sequence[Tensor]) -> list[Tensor]:
    return [x.contiguous() for x in values]


class _Scan(torch.autograd.Function):
    """A scan whose backward is a scan from its last step to its first."""

    @staticmethod
    def forward(ctx: Any, both: Both, steps: int, reverse: bool, *operands: Tensor) -> tuple[Tensor, ...]:
        count, width, num_ys = both.counts
        carry, rows, closed = operands[:count], operands[count : count + width], _dense(operands[count + width :])
        outs = SCAN(carry, rows, closed, both.forward, steps, reverse)
        results, kept = outs[: count + num_ys], outs[count + num_ys :]
        ctx.save_for_backward(*kept, *(rows[i] for i in both.reads), *closed)
        ctx.of = both, steps, reverse, len(kept) + len(both.reads)
        floats = {*both.floats[0], *(count + i for i in both.floats[1])}
        ctx.mark_non_differentiable(*(x for i, x in enumerate(results) if i not in floats))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        (both, steps, reverse, num_read), saved = ctx.of, ctx.saved_tensors
        if torch.is_grad_enabled():
            raise CaptureError(
                f"fzero.scan at {user_line()}: a gradient of its gradient is asked for, which its op does not have. "
                "Write a Python loop there"
            )
        (count, width, _), (own, of_ys) = both.counts, both.floats
        reads, closed = saved[:num_read], saved[num_read:]
        d_carry, d_ys = [incoming[i] for i in own], [incoming[count + i] for i in of_ys]
        sums = [torch.zeros_like(closed[i]) for i in both.sums]
        outs = SCAN(_dense([*d_carry, *sums]), [*reads, *_dense(d_ys)], closed, both.backward, steps, not reverse)
        grads: list[Any] = [None] * (count + width + len(closed))
        places = [*own, *(count + width + i for i in both.sums), *(count + i for i in both.of_xs)]
        for place, grad in zip(places, outs, strict=True):
            grads[place] = grad if ctx.needs_input_grad[3 + place] else None
        return None, None, None, *grads


# --- what a caller may give -------------------------------------------------------------------------------------------


def _check_tensors(name: str, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise CaptureError(
                f"fzero.scan: {_named(name, path)} is {describe(leaf)}: needed a tensor, as torch.tensor"
            )


def _length(paths: Sequence[str], rows: Sequence[Tensor], length: int | None) -> int:
    sizes = {_named("xs", path): row.shape[0] if row.ndim else 0 for path, row in zip(paths, rows, strict=True)}
    lengths = {*sizes.values(), *([] if length is None else [length])}
    if len(lengths) != 1 or min(lengths) < 1:
        shown = ", ".join(f"{name} has {size}" for name, size in sizes.items()) or "xs has no tensors"
        raise CaptureError(
            f"fzero.scan: needed one length of at least 1 along dim 0 of all of xs, or length=T: {shown}, "
            f"length={length}"
        )
    return lengths.pop()


def _check_carry(
    paths: Sequence[str], after: Sequence[Any], before_paths: Sequence[str], before: Sequence[Any]
) -> None:
    """Raises CaptureError unless a step gives back a carry of the form that it was given."""
    if list(paths) != list(before_paths):
        raise CaptureError(
            f"fzero.scan: f returned a carry with the leaves {', '.join(paths) or 'none'}: init has "
            f"{', '.join(before_paths) or 'none'}"
        )
    _check_tensors("carry", paths, after)
    for path, new, old in zip(paths, after, before, strict=True):
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise CaptureError(
                f"fzero.scan: {_named('carry', path)} is {describe(new)} after a step, and {describe(old)} before it: "
                "each step must return the same form. Cast it, or change init"
            )


def _named(name: str, path: str) -> str:
    return f"{name}[{path!r}]" if path else name
