"""error_feedback: the mean over ranks of a pytree that travels in codes, for a step of your own or an optimizer; and
what the codes of a Spec's gradients have lost at first."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fzero import tree
from fzero.capture.context import active
from fzero.capture.graph import PerRank
from fzero.capture.provenance import describe, user_line
from fzero.capture.step_ops import CODED_MEAN
from fzero.errors import CaptureError, SpecError
from fzero.ir.coded_mean import padded_size
from fzero.kernels.codecs import BLOCK, CODECS
from fzero.precision import Precision, policy


class CodedError(NamedTuple):
    """What `coded_mean` has not sent yet, in float32. A step returns the one that it got back, in the state.

    worker: what this rank's codes have lost, (T,), for the T elements of the pytree with each leaf padded to whole
    blocks of 64. server: with both ways, what was lost of the mean of the slice that the rank averages, T / N elements
    in whole blocks; else None.
    """

    worker: Any
    server: Any


def coded_error(x: Any, *, both_ways: bool = False) -> Any:
    """The first error, zeros, of `coded_mean` for pytrees like `x`: a `CodedError` whose leaves are per rank.

    x: the pytree that is sent. both_ways: as in `coded_mean`.

    It is a part of the state that `fzero.init` gets or that an optimizer's `init` makes. It takes 4 bytes an element on
    each rank, and 4 / N more with both ways.

    >>> error = coded_error({"w": torch.ones(3, 50)})
    >>> error.worker.value.shape, error.server
    (torch.Size([192]), None)
    """
    leaves = tree.flatten(x)[1]
    size = padded_size([leaf.numel() for leaf in leaves])
    zeros = torch.zeros(size, device=leaves[0].device if leaves else None)
    return CodedError(PerRank(zeros), PerRank(zeros.clone(), sliced=True) if both_ways else None)


def first_error(params: Any, precision: str | Precision) -> Any:
    """What codes have lost of the gradients of these parameters before the first step: zeros, fp32 and one per rank.

    params: the parameters, or tensors like them. precision: as in `Spec`.

    A pytree of the leaves whose gradients travel in a codec with feedback (`Precision(reduce="sign")`). In a custom
    step it is a part of the state, for `value_and_grad(error=...)`; the step of `Spec(loss=...)` keeps it itself. It
    takes 4 bytes an element on each rank, at every ZeRO stage.

    >>> error = first_error({"w": torch.ones(2, 3), "b": torch.ones(3)}, Precision(reduce="sign"))
    >>> error["w"].value.shape, error["b"]
    (torch.Size([2, 3]), None)
    """
    chosen = policy(precision)
    coded, _ = tree.partition(params, lambda path, x: chosen.feeds_back and chosen.coding(path, x).reduce is not None)
    return tree.map(lambda x: PerRank(torch.zeros(x.shape, dtype=torch.float32, device=x.device)), coded)


def coded_mean(x: Any, error: Any, codec: str, *, both_ways: bool = False) -> tuple[Any, Any]:
    """(the mean of `x` over the ranks of the data axes, the new error). What travels is coded in blocks of 64.

    Each rank codes `x` plus its error, and sends every rank the slice that this one averages; the means are sent to
    all, in float32 or in codes again. The mean is the same on every rank, and its bits are the same
    over every transport. On one rank nothing is coded.

    x: a pytree of float32, bfloat16 or float16 tensors, which may differ between ranks, as the gradients of
    `value_and_grad(reduce=False)`. The mean has its structure, shapes and dtypes. error: a `CodedError` of the state
    (`coded_error` makes the first); None codes without feedback, and what is lost is lost. codec: "int8", "int4",
    "e4m3", "e5m2" or "sign" (1.06, 0.56, 1.06, 1.06 and 0.19 bytes an element and direction, `fzero.kernels.codecs`).
    both_ways: whether the means are sent in codes too.

    An element that is not finite on one rank makes its block not finite on all, and the error too: such a step must be
    discarded as a whole. Raises CaptureError, SpecError.

    >>> coded_mean({"w": torch.tensor([1.0, -3.0])}, None, "int8")  # outside a step: one rank
    ({'w': tensor([ 1., -3.])}, None)
    """
    if codec not in CODECS:
        raise SpecError(f"fzero.coded_mean(codec={codec!r}): needed one of {', '.join(CODECS)}")
    tracing = active()
    if tracing is not None and tracing.depth:
        raise CaptureError(
            f"fzero.coded_mean was called inside a loss at {user_line()}: it is work of the step. Call it on what "
            "fzero.value_and_grad(loss, reduce=False) returns"
        )
    paths, leaves, structure = tree.flatten(x)
    if not leaves:
        return x, error
    flat = _joined(paths, leaves)
    errors = _checked(error, flat, both_ways)
    axis = "dp" if tracing is None else tracing.axis
    results = CODED_MEAN(flat, errors, [leaf.numel() for leaf in leaves], codec, both_ways, axis)
    means, at = [], 0
    for leaf in leaves:
        means.append(results[0][at : at + leaf.numel()].view(leaf.shape).to(leaf.dtype))
        at += padded_size([leaf.numel()])
    kept = None if error is None else CodedError(results[1], results[2] if both_ways else None)
    return tree.unflatten(structure, means), kept


def _joined(paths: list[str], leaves: list[Any]) -> Tensor:
    """All leaves in one flat float32 tensor, each padded to whole blocks. Raises CaptureError."""
    parts = []
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, Tensor) or leaf.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CaptureError(
                f"fzero.coded_mean of x{f'[{path!r}]' if path else ''}: {describe(leaf)}. Codes are of float32, "
                "bfloat16 or float16. Reduce such a leaf by fzero.pmean"
            )
        flat = leaf.to(torch.float32).reshape(-1)
        parts.append(pad(flat, (0, -len(flat) % BLOCK)))
    return torch.cat(parts)


def _checked(error: Any, flat: Tensor, both_ways: bool) -> list[Tensor]:
    """The errors as a list. Raises CaptureError for one that is not of this value."""
    if error is None:
        return []
    make = f"fzero.coded_error(x{', both_ways=True' if both_ways else ''}) makes the first"
    if not isinstance(error, CodedError) or (error.server is None) is both_ways:
        shown = type(error).__name__ if not isinstance(error, CodedError) else "that of the other both_ways"
        raise CaptureError(f"fzero.coded_mean(error=...): needed a CodedError of this call, got {shown}: {make}")
    given = [error.worker, *([error.server] if both_ways else [])]
    for value in given:
        if not isinstance(value, Tensor) or value.dtype is not torch.float32 or value.ndim != 1:
            raise CaptureError(f"fzero.coded_mean(error=...): {describe(value)}, needed fp32 of one dim: {make}")
    if len(error.worker) != len(flat):
        raise CaptureError(
            f"fzero.coded_mean(error=...): worker has {len(error.worker)} elements, x has {len(flat)} in whole blocks: "
            f"{make}, from a pytree like x"
        )
    return given
