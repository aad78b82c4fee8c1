"""oracle: the result of a case in eager PyTorch, and whether fzero's result is the same.

The reference runs the script's loss by `torch.autograd.grad`, part of the batch by part, rank by rank. It takes means,
and lets the optimizer's functions run on the result. It does so in fp32. If that is not bit for bit fzero's result, it
does so in fp64 too: a difference may be a few times the error that eager PyTorch itself has there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero import optim, tree
from fzero.capture.ambient_rng import Keyed
from fzero.capture.joint import Mean
from fzero.random import fold_in, split
from lab.fuzz.case import Case
from lab.fuzz.runs import Prepared, same_bits
from lab.fuzz.values import Used, used

TIMES, RELATIVE, ABSOLUTE = 16.0, 2e-5, 1e-6
DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def eager(case: Case, prepared: Prepared, *, double: bool = False) -> dict[str, Tensor]:
    """The loss, and the gradients or the leaves of the state that are floating, by path."""
    loss, params, batches = prepared.names["loss"], prepared.state["params"], prepared.batches
    if double:
        loss = _double_loss(case, prepared)
        params, batches = tree.map(_doubled, params), tree.map(_doubled, list(batches))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if double else before)
    try:
        return _step(case, prepared, loss, params, batches)
    finally:
        torch.set_default_dtype(before)


def _step(case: Case, prepared: Prepared, loss: Any, params: Any, batches: Any) -> dict[str, Tensor]:
    rules = prepared.fields.get("trainable") or ("**",)
    train, frozen = tree.partition(
        params, lambda path, x: x.dtype.is_floating_point and any(tree.matches(r, path) for r in rules)
    )
    key = None
    if case.options.keyed:
        key = split(prepared.state["key"])[1] if case.options.form == "training" else prepared.state["key"]
    parts = case.options.microbatches
    total: Any = 0.0
    sums, count = None, 0.0
    for rank, batch in enumerate(batches):
        own_grads: Any = None
        own: Any = 0.0
        for n in range(parts):
            part = tree.map(lambda x, n=n: x.chunk(parts)[n], batch)
            value, grads, size = _value_and_grad(loss, train, frozen, part, key, rank * parts + n)
            own, count = own + value, count + size
            own_grads = grads if own_grads is None else tree.map(torch.add, own_grads, grads)
        if size == 1.0:
            own, own_grads = own / parts, tree.map(lambda g: g / parts, own_grads)
        total = total + own
        sums = own_grads if sums is None else tree.map(torch.add, sums, own_grads)
    divisor = len(batches) if size == 1.0 else count
    grads = tree.map(lambda g, p: (g / divisor).to(p.dtype), sums, train)
    result = {"loss": (total / divisor).to(torch.promote_types(total.dtype, torch.float32))}  # never narrow
    if case.options.form == "gradients":
        return {**result, **{f"grads/{path}": g for path, g in zip(*tree.flatten(grads)[:2], strict=True)}}
    new = _updated(prepared, train, frozen, grads)
    return {**result, **{f"params/{path}": x for path, x in zip(*tree.flatten(new)[:2], strict=True)}}


def _value_and_grad(loss: Any, train: Any, frozen: Any, batch: Any, key: Any, part: int) -> tuple[Tensor, Any, Any]:
    """(the loss or total, its gradients, 1.0 or the count of a Mean)."""
    _, leaves, spec = tree.flatten(train)
    own = [x.detach().clone().requires_grad_() for x in leaves]
    batch = tree.map(torch.clone, batch)
    with Keyed(fold_in(key, part)) if key is not None else torch.enable_grad():
        result = loss(tree.merge(tree.unflatten(spec, own), frozen), batch)
        value, size = (result.total, result.count) if isinstance(result, Mean) else (result, 1.0)
        grads = torch.autograd.grad(value, own, allow_unused=True) if value.requires_grad else [None] * len(own)
    full = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return value.detach(), tree.unflatten(spec, full), size


def _updated(prepared: Prepared, train: Any, frozen: Any, grads: Any) -> Any:
    fields = prepared.fields
    if fields.get("clip_norm") is not None:
        norm = torch.stack([g.double().square().sum() for g in tree.flatten(grads)[1]]).sum().sqrt()
        grads = tree.map(lambda g: (g * (fields["clip_norm"] / (norm + 1e-6)).clamp(max=1.0)).to(g.dtype), grads)
    if fields.get("clip_value") is not None:
        grads = tree.map(lambda g: g.clamp(-fields["clip_value"], fields["clip_value"]), grads)
    tx = fields["optimizer"]
    updates, _ = tx.update(grads, tx.init(train), train)
    return tree.merge(optim.apply_updates(train, updates), frozen)


def _doubled(x: Any) -> Any:
    return x.to(DOUBLE.get(x.dtype, x.dtype)) if isinstance(x, Tensor) else x


def _double_loss(case: Case, prepared: Prepared) -> Any:
    """The loss of the script with every fp32 an fp64; modules and constants keep their values."""
    source = case.source.replace("torch.float32", "torch.float64")
    names = case.namespace(source)
    for name, value in prepared.names.items():
        if isinstance(value, Used):
            names[name] = used(copy.deepcopy(value.module).double())
        elif isinstance(value, Tensor):
            names[name] = _doubled(value)
    return names["loss"]


def difference(case: Case, prepared: Prepared, results: Mapping[str, Tensor]) -> str | None:
    """Returns the difference of fzero's result from eager PyTorch's, in a few words; None if there is none."""
    reference = eager(case, prepared)
    if not case.options.exact:
        reference = {"loss": reference["loss"]}
    wrong = [name for name, value in reference.items() if not same_bits(results[name], value)]
    if not wrong:
        return None
    exact = eager(case, prepared, double=True)
    for name in wrong:
        what = _apart(results[name], reference[name], exact[name])
        if what:
            return f"{name}: {what}"
    return None


def _apart(result: Tensor, reference: Tensor, exact: Tensor) -> str | None:
    if result.shape != reference.shape or result.dtype != reference.dtype:
        return f"{tuple(result.shape)} {result.dtype}, eager {tuple(reference.shape)} {reference.dtype}"
    if not result.dtype.is_floating_point:
        return "other integers than eager" if not torch.equal(result, reference) else None
    a, b, c = result.double(), reference.double(), exact.double()
    if not (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())):
        return f"not finite elsewhere than in eager: {a.flatten()[:4].tolist()}, eager {b.flatten()[:4].tolist()}"
    a, b, c = (torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in (a, b, c))
    gap, noise, size = (float(x.abs().max()) if x.numel() else 0.0 for x in (a - b, b - c, c))
    relative = max(RELATIVE, 4 * torch.finfo(result.dtype).eps if result.dtype is not torch.float64 else 1e-12)
    if gap <= TIMES * noise + relative * size + ABSOLUTE:
        return None
    return f"off by {gap:.3g}, eager's own error is {noise:.3g}, the largest element {size:.3g}"
