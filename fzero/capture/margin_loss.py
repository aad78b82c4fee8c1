"""margin_loss: torch's margin loss of several labels in a trace, of one row that has no axis for rows.

Without a reduction torch's rule of shapes gives it one element in one dim; its kernels give a scalar (2.11.0, 2.13.0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.capture.known import Known
from fzero.ir import op_info

aten = torch.ops.aten
NONE = 0  # `reduction`


def traced(known: Known, x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """`aten::multilabel_margin_loss_forward` of one row as of a batch of one: the same bits."""
    if x.ndim != 1 or reduction != NONE:
        whole: tuple[Tensor, Tensor] = aten.multilabel_margin_loss_forward.default(x, target, reduction)
        return whole
    loss, is_target = aten.multilabel_margin_loss_forward.default(x[None], target[None], reduction)
    return loss[0], is_target[0]


op_info.fill("traced", {aten.multilabel_margin_loss_forward.default: traced})
