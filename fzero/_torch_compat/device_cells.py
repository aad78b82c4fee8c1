"""device_cells: recurrent cells as a CUDA device has them: two products, and one kernel for what is beside them.

The processor takes a cell apart (RNN.cpp), and has no kernel of these ops and no rule of their shapes, or one that
fails without biases (RNN.cu, _meta_registrations.py: 2.11.0, 2.13.0).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def lstm(x: Tensor, carry: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None) -> Sequence[Tensor]:
    """`torch.lstm_cell` of a device. x (B, I); carry two of (B, H); weights (4H, I) and (4H, H)."""
    h, c = carry
    found: Sequence[Tensor] = aten._thnn_fused_lstm_cell.default(x.matmul(w_ih.t()), h.matmul(w_hh.t()), c, *biases)
    return found[:2]


def gru(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None) -> Tensor:
    """`torch.gru_cell` of a device. x (B, I); h (B, H); weights (3H, I) and (3H, H)."""
    found: Sequence[Tensor] = aten._thnn_fused_gru_cell.default(x.matmul(w_ih.t()), h.matmul(w_hh.t()), h, *biases)
    return found[0]


@functools.cache
def shapes() -> torch.library.Library:
    """Gives the ops of cells rules of shapes, for this process: a program that was traced is traced again."""
    library = torch.library.Library("aten", "IMPL")
    for name, rule in SHAPES.items():
        library.impl(name, rule, "Meta", allow_override=True)
    return library


def _lstm_cell(gates: Tensor, _: Tensor, c: Tensor, *__: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(c.contiguous()), torch.empty_like(c.contiguous()), torch.empty_like(gates.contiguous())


def _gru_cell(_: Tensor, __: Tensor, hidden: Tensor, *___: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty((hidden.shape[0], 5 * hidden.shape[1]))


def _gru_cell_back(grad: Tensor, _: Tensor, biased: bool) -> tuple[Tensor | None, ...]:
    rows, width = grad.shape
    gates, bias = (grad.new_empty(shape) for shape in ((rows, 3 * width), (3 * width,)))
    given = (bias, torch.empty_like(bias)) if biased else (None, None)
    return gates, torch.empty_like(gates), torch.empty_like(grad), *given


SHAPES = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_back,
}
