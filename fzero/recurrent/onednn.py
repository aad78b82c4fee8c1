"""onednn: one LSTM layer in one direction by oneDNN, in fp32 on the CPU, as torch's own LSTM runs it outside of a step.

Its forward keeps a workspace of some sixteen hidden sizes a row and step for its backward. oneDNN alone knows how many
bytes; `workspace_bytes` bounds them from above by its formula (`set_workspace_sizes` in its rnn_utils.cpp, 3.10 to
3.12): gates, states, and their gradients, rows padded to cache lines, each part to a page.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.recurrent.loops import Grads, Weights

aten = torch.ops.aten
_LSTM, _PAGE, _PARTS = 2, 4096, 8


def workspace_bytes(steps: int, rows: int, width: int, size: int) -> int:
    """The most bytes of the workspace of T steps of B rows, I inputs and H hidden units."""
    numbers = _padded(4 * size) + 6 * _padded(max(width, size)) + 6 * _padded(size)
    return 4 * (steps + 1) * rows * numbers + _PARTS * _PAGE


def scratch_bytes(steps: int, rows: int, width: int, size: int, keep: bool) -> tuple[int, int]:
    """The most bytes that `forward` and `backward` hold beside operands and results: what aten returns, weights in
    other orders, and the gates' gradients. Found by measuring (torch 2.13.0)."""
    gates = 4 * size
    held = (steps * rows + 1) * _padded(gates) + 2 * rows * _padded(size) + (width + size) * _padded(gates)
    apart = sum(_padded(n) * (_padded(n) != n) for n in (width, size))
    forth = held + steps * rows * size + 3 * rows * size + 2 * gates
    back = held + steps * rows * width + 4 * rows * size + gates * (width + size + apart + 8)
    kept = workspace_bytes(steps, rows, width, size) if keep else 0
    return 4 * forth + kept + 5 * _PAGE, 4 * back + 5 * _PAGE


def _padded(count: int) -> int:
    lines = -(-count // 16) * 16
    return lines + 16 * (lines % 256 == 0)


def forward(x: Tensor, h: Tensor, c: Tensor, w: Weights, reverse: bool, ys: Tensor, last: Tensor, kept: Tensor) -> None:
    """Fills `ys` (T, B, H), `last` (B, H), and the workspace `kept`, 1-D uint8; one of no bytes is not filled.

    Raises RuntimeError where oneDNN wants a larger workspace.
    """
    operands = [t.detach() for t in (x, *_four(w), h, c)]
    with torch.enable_grad():  # without, no workspace is returned (2.11.0, 2.13.0)
        numbers: tuple[Any, ...] = ([], _LSTM, h.shape[1], 1, True, False, False, bool(kept.numel()))
        out, _, cells, workspace = aten.mkldnn_rnn_layer.default(*operands, reverse, *numbers)
    ys.copy_(out)
    last.copy_(cells)
    if kept.numel():
        if workspace.numel() > kept.numel():
            raise RuntimeError(f"oneDNN's LSTM wants {workspace.numel()} bytes of workspace, planned {kept.numel()}")
        kept[: workspace.numel()] = workspace


def backward(
    x: Tensor, h: Tensor, c: Tensor, w: Weights, reverse: bool,
    ys: Tensor, last: Tensor, kept: Tensor, dys: Tensor, dlast: Tensor, into: Grads,
) -> None:  # fmt: skip
    """Fills `into` from the gradients of `ys` and of `last`, all contiguous."""
    end = ys[0 if reverse else -1]
    numbers: tuple[Any, ...] = (reverse, _LSTM, h.shape[1], 1, True, True, False, [], False)
    results = aten.mkldnn_rnn_layer_backward.default(
        x, *_four(w), h, c, ys, end, last, dys, torch.zeros_like(h), dlast, *numbers, kept
    )
    dx, dinputs, dhidden, dbias, _, dh, dc = results
    for target, value in zip(
        (into.x, into.h, into.c, into.inputs, into.hidden, into.input_bias), (dx, dh, dc, dinputs, dhidden, dbias),
        strict=True,
    ):  # fmt: skip
        if target.numel():
            target.copy_(value.view_as(target))


def _four(w: Weights) -> tuple[Tensor, ...]:
    zeros = w.inputs.new_zeros(len(w.inputs)) if w.input_bias is None else None
    biases = (w.input_bias, w.hidden_bias) if zeros is None else (zeros, zeros)
    return (w.inputs, w.hidden, *biases)  # type: ignore[return-value]
