"""The reduction of gradients in codes whose loss is fed back: what a rank computes before it sends.

    sum  = gradient + what earlier codes have lost       travels in codes
    lost = sum - decode(encode(sum))                     is kept for the next step

Source: arXiv 1901.09847 (error feedback fixes signSGD). A gradient is the sum over the microbatches of the step; what
is lost is kept in units of their mean, so that a run may go on with another number of them. Of a loss that is a `Mean`
it is in units of the sum: what is owed is divided by the count of the step that sends it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.ir.code_ops import OPS


def owed(gradient: Tensor, error: Tensor, *, codec: str, parts: int, ranks: int) -> list[Tensor]:
    """[what is lost, what is to be sent], both float32 in the gradient's shape.

    parts: microbatches whose mean is taken. On one rank nothing is coded, and nothing is lost.

    >>> owed(torch.ones(64), torch.full((64,), 0.5), codec="sign", parts=1, ranks=2)[1][0]
    tensor(1.5000)
    """
    value = gradient.to(error.dtype) + (error if parts == 1 else error * parts)
    if ranks == 1:
        return [torch.zeros_like(error), value]
    ops = OPS[codec]
    lost = value - ops.decode(ops.encode(value))[: value.numel()].view(value.shape)
    return [lost if parts == 1 else lost / parts, value]


def owed_by_all(*values: Tensor, codec: str, parts: int, ranks: int) -> list[Tensor]:
    """The same of several leaves: their gradients, then their errors; what they lose, then what they send."""
    count = len(values) // 2
    pairs = zip(values[:count], values[count:], strict=True)
    lost, sums = zip(*(owed(g, e, codec=codec, parts=parts, ranks=ranks) for g, e in pairs), strict=True)
    return [*lost, *sums]
