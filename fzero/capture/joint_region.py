"""joint_region: a joint as a region of the step, and its outputs as the user's results.

`joint` is the function that is traced, `region` makes the node. Here its inputs are named and its outputs reduced over
the mesh, divided, and given the parameters' dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero.capture.context import Tracing, active
from fzero.capture.graph import Roles
from fzero.capture.joint import Joint, safe
from fzero.capture.provenance import describe
from fzero.capture.region import add_region
from fzero.errors import CaptureError, leaf_name


def region_outputs(
    joint: Joint,
    fn: Callable[..., list[torch.Tensor]],
    tracing: Tracing | None,
    batch_argnum: int,
    part_keys: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The joint's outputs: computed at once outside a step, else by one node of the step's graph. part_keys: those of
    this rank's parts of the batch, where there is a key."""
    num = joint.microbatches
    others = joint.others
    if part_keys is not None:
        others = [*others, part_keys]
    if tracing is None:
        return fn(*joint.leaves, *others)
    prefix = f"0/{batch_argnum - 1}"
    paths = joint.other_paths
    of_batch = [path == prefix or path.startswith(prefix + "/") for path in paths]
    sliced = [num > 1 and of and leaf.ndim > 0 for of, leaf in zip(of_batch, others, strict=False)]
    _check_slices(num, sliced, paths, others[: len(paths)], prefix)
    names = [leaf_name("params", p) for p in joint.paths]
    names += [_argument(p, prefix) for p in paths]
    if part_keys is not None:
        sliced, names = [*sliced, num > 1], [*names, "key"]
    marks = joint.marks

    def roles() -> Roles:
        summed = {0, 1 + len(marks.grad_of)} | set(range(1, 1 + len(marks.grad_of))) if marks.has_count else set()
        first = 1 + len(marks.grad_of) + marks.has_count if joint.metrics else 0  # of what aux_kinds speaks of
        summed |= {first + i for i, kind in enumerate(marks.aux_kinds) if kind in ("total", "count")}
        wire = {1 + n: joint.precision.wire_dtype(joint.leaves[i].dtype) for n, i in enumerate(marks.grad_of)}
        if not joint.reduce:
            return Roles((), frozenset(summed), {})
        return Roles(marks.grad_of, frozenset(summed), wire)

    tracing.cut = "" if len(joint.args) < 2 else _cut(num, sliced, names[len(joint.paths) :], others)
    changing = {*range(len(joint.leaves)), *(len(joint.leaves) + i for i, of in enumerate(of_batch) if of)}
    try:
        return add_region(fn, roles, joint.leaves, names, others, microbatches=num, sliced=sliced, changing=changing)
    finally:
        tracing.cut = ""


def combined(joint: Joint, outs: list[torch.Tensor]) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """(loss, gradients, new errors by path) from a region's outputs: reduced, divided, and in the parameters' dtypes.

    Gradients that are not reduced over the ranks have a mean that is: they are divided by a rank's share of a `Mean`'s
    count.
    """
    marks = joint.marks
    how = "sum" if marks.has_count else "mean"
    errors = dict(joint.errors)
    end = 1 + len(marks.grad_of)
    loss = _reduce(outs[0], how)
    divisor = safe(_reduce(outs[end], "sum")) if marks.has_count else None
    loss = loss if divisor is None else loss / divisor
    share = divisor if joint.reduce or divisor is None else safe(_reduce(outs[end].to(loss.dtype), "mean"))
    grad_at = dict(zip(marks.grad_of, outs[1:end], strict=True))
    grads = []
    for i, leaf in enumerate(joint.leaves):
        if i not in grad_at:
            grads.append(torch.zeros_like(leaf))
            continue
        path, g = joint.paths[i], grad_at[i]
        if path in errors:
            g, errors[path] = _fed(g, errors[path], str(joint.precision.reduce), how)
        elif joint.reduce:
            g = _reduce(g, how)
        g = g if share is None else g / share
        g = g if joint.scale is None else g / joint.scale
        held_low = joint.precision.params is not None  # the update is made in fp32 then
        grads.append(g.to(joint.precision.sum_dtype(leaf.dtype) if held_low else leaf.dtype))
    aux = outs[end + marks.has_count :]
    result = tree.unflatten(joint.treedef, grads)
    if joint.metrics:
        return (loss, means(joint, aux)), result, errors
    return (loss, tree.unflatten(marks.aux_treedef, aux)) if joint.has_aux else loss, result, errors


def means(joint: Joint, outs: list[torch.Tensor]) -> Any:
    """The pytree of a forward's results, or of a loss's metrics, from the region's outputs: means over the ranks."""
    results = []
    for i, (kind, value) in enumerate(zip(joint.marks.aux_kinds, outs, strict=True)):
        if kind == "total":
            results.append(_reduce(value, "sum") / safe(_reduce(outs[i + 1], "sum")))
        elif kind != "count":
            results.append(_reduce(value, "mean") if kind == "mean" else value)
    return tree.unflatten(joint.marks.aux_treedef, results)


def _reduce(x: torch.Tensor, how: str) -> torch.Tensor:
    tracing = active()
    result: torch.Tensor = torch.ops.fzero.reduce(x, how, tracing.axis if tracing else "dp")
    return result


def _fed(x: torch.Tensor, error: torch.Tensor, codec: str, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    tracing = active()
    mean, lost = torch.ops.fzero.fed_mean(x, error, codec, how, tracing.axis if tracing else "dp")
    return mean, lost


def _check_slices(num: int, sliced: list[bool], paths: list[str], leaves: list[torch.Tensor], prefix: str) -> None:
    """Raises CaptureError unless the batch can be cut into `num` parts along dim 0."""
    if num > 1 and not any(sliced):
        raise CaptureError(
            f"microbatches={num} cuts the batch along dim 0, but argument {int(prefix.split('/')[1]) + 1} after the "
            "parameters has no tensor to cut: pass the batch as an argument (not by closure), or set batch_argnum (of "
            "fzero.value_and_grad). Without a batch leave microbatches= out"
        )
    for cut, path, leaf in zip(sliced, paths, leaves, strict=True):
        if cut and (leaf.shape[0] % num or not leaf.shape[0]):
            raise CaptureError(
                f"{_argument(path, prefix)} is {describe(leaf)}: dim 0 must be divisible by microbatches={num}"
                f"{f': give {-(-leaf.shape[0] // num) * num} rows' if leaf.shape[0] else ', and not 0'}"
            )


def _cut(num: int, sliced: list[bool], names: list[str], leaves: list[torch.Tensor]) -> str:
    """What is added to torch's error about operands, for a loss with other arguments beside the batch: the first leaf
    that is cut, and how the batch is named. Empty where nothing is cut."""
    for cut, name, leaf in zip(sliced, names, leaves, strict=True):
        if cut:
            return (
                f". microbatches={num} cut {name}, {describe(leaf)}, along dim 0 into parts of {leaf.shape[0] // num}, "
                "for it is in the place of the batch: if another argument is the batch, say which, as "
                "fzero.value_and_grad(loss, batch_argnum=2)"
            )
    return ""


def _argument(path: str, prefix: str) -> str:
    """The name in messages of a leaf of a loss's arguments after the parameters."""
    if path == prefix or path.startswith(prefix + "/"):
        return leaf_name("batch", path.removeprefix(prefix).lstrip("/"))
    return leaf_name("arguments", path.partition("/")[2])
