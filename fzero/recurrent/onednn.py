"""onednn: one LSTM layer in one direction by oneDNN, as torch's own LSTM runs it on the CPU outside of a step: in fp32,
and in bf16 where the processor has it.

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


def workspace_bytes(steps: int, rows: int, width: int, size: int, itemsize: int) -> int:
    """The most bytes of the workspace of T steps of B rows, I inputs and H hidden units. Gates and states have numbers
    of `itemsize`; what stands beside states, and the gradients of all, have four bytes."""
    own = itemsize * _padded(4 * size, itemsize) + 4 * (4 * _padded(max(width, size)) + 3 * size)
    return (steps + 1) * rows * own + _states_bytes(steps, rows, width, size, itemsize) + _PARTS * _PAGE


def _states_bytes(steps: int, rows: int, width: int, size: int, itemsize: int) -> int:
    return (steps + 1) * rows * itemsize * (2 * _padded(max(width, size), itemsize) + 3 * _padded(size, itemsize))


def scratch_bytes(steps: int, rows: int, width: int, size: int, keep: bool, itemsize: int) -> tuple[int, int]:
    """The most bytes that `forward` and `backward` hold beside operands and results: what aten returns, weights in
    other orders, gates (in bf16 those of a step, but for one row), and without a backward to come (`keep`) the states.
    Gradients are in fp32, in bf16 they and the incoming one are there twice. Found by measuring (torch 2.13.0)."""
    gates, narrow = 4 * size, itemsize != 4
    held = 4 * ((rows * (1 if narrow and rows > 1 else steps) + 1) * _padded(gates) + 2 * rows * _padded(size))
    blocks = 4 * _padded(size, 2)
    weights = blocks if narrow else _padded(gates) if keep else max(_padded(gates), blocks)
    forth = held + itemsize * (_even(width) + _even(size)) * weights + itemsize * (steps + 3) * rows * size + 8 * gates
    kept = (workspace_bytes if keep else _states_bytes)(steps, rows, width, size, itemsize)
    back = held + 4 * steps * rows * width + 16 * rows * size + 4 * gates * (width + size + 8)
    back += 4 * (width + size) * _padded(gates)
    if narrow:
        turned = _padded(width, itemsize) + _padded(size, itemsize)
        back += 4 * steps * rows * size + itemsize * (4 * _even(size) * turned + rows * max(width, size))
    else:
        back += 4 * gates * sum(_padded(n) * (_padded(n) != n) for n in (width, size))
    return forth + kept + 5 * _PAGE, back + 5 * _PAGE


def _even(count: int) -> int:
    return count + count % 2


def _padded(count: int, itemsize: int = 4) -> int:
    """`count` numbers in whole cache lines; one line more where the lines of rows would meet in a cache."""
    line = 64 // itemsize
    lines = -(-count // line) * line
    return lines + line * (lines % 256 == 0)


def forward(x: Tensor, h: Tensor, c: Tensor, w: Weights, reverse: bool, ys: Tensor, last: Tensor, kept: Tensor) -> None:
    """Fills `ys` (T, B, H), `last` (B, H), and the workspace `kept`, 1-D uint8; one of no bytes is not filled.

    Raises RuntimeError where oneDNN wants a larger workspace.
    """
    operands = [t.detach() for t in (x, *_four(w), h, c)]
    with torch.set_grad_enabled(bool(kept.numel())):  # without, no workspace is returned (2.11.0, 2.13.0)
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
