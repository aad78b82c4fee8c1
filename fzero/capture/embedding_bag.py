"""embedding_bag: torch's sum of embeddings in bf16 in a trace, without a result that is not there.

A sum on the CPU leaves out which bag an index is in (`offset2bag`), and its backward finds it anew where it has no
elements. Torch's shape rule says so of fp32 and fp16, not of bf16, whose kernel does the same (2.11.0, 2.13.0). A
program would hand memory that nothing has written to the backward, which ends the process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero import backend
from fzero.capture.known import Known
from fzero.ir import op_info

aten = torch.ops.aten
SUM = 0  # `mode`


def traced(
    known: Known, weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = SUM,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten::_embedding_bag`, with an `offset2bag` of no elements for a sum in bf16."""
    operands = (weight, indices, offsets, scale_grad_by_freq, mode, *rest)
    result: tuple[Tensor, ...] = aten._embedding_bag.default(*operands)
    known.follow(aten._embedding_bag.default, operands, {}, result)
    if weight.dtype is torch.bfloat16 and mode == SUM and backend.of_traced(weight.device).on_host:
        return result[0], aten.new_empty.default(indices, [0]), *result[2:]
    return result


op_info.fill("traced", {aten._embedding_bag.default: traced})
