"""recurrent_ops: `fzero::recurrent` and `fzero::recurrent_backward`: a layer of torch's LSTM, GRU or RNN, one way.

kinds: those of `loops`, and `lstm_onednn`, whose kernel and workspace are oneDNN's (`onednn`). Results of the forward:
the outputs (T, B, P), an LSTM's last cells (B, H), and what the backward reads. Those of the backward: the gradients
of the operands (`loops.Grads`). Both have `out=` forms, so a program gives them memory. Operands are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.recurrent import loops, onednn
from fzero.recurrent.loops import Grads, Weights

ONEDNN = "lstm_onednn"
_LAYER = "Tensor x, Tensor h, Tensor? c, Tensor inputs, Tensor hidden, Tensor? bias, Tensor? bias2, Tensor? project"
_BACK = f"Tensor ys, Tensor last, Tensor saved, Tensor dys, Tensor? dlast, {_LAYER}, str kind, bool reverse, bool to_x"
_GRADS = ", ".join(["Tensor"] * 8)
_RETURNS = ", ".join(f"Tensor({a}!)" for a in "abcdefgh")
_OUTS = ", ".join(f"Tensor({a}!) d_{name}" for a, name in zip("abcdefgh", Grads._fields, strict=True))
_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define(f"recurrent({_LAYER}, str kind, bool reverse, bool keep) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    f"recurrent.out({_LAYER}, str kind, bool reverse, bool keep, *, Tensor(a!) ys, Tensor(b!) last, Tensor(c!) saved) "
    "-> (Tensor(a!), Tensor(b!), Tensor(c!))"
)
_LIBRARY.define(f"recurrent_backward({_BACK}) -> ({_GRADS})")
_LIBRARY.define(f"recurrent_backward.out({_BACK}, *, {_OUTS}) -> ({_RETURNS})")
FORWARD = torch.ops.fzero.recurrent.default
BACKWARD = torch.ops.fzero.recurrent_backward.default


def _results(
    x: Tensor, h: Tensor, c: Tensor | None, *weights: Any, keep: bool, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    (steps, rows, width), size = x.shape, _size(weights[1], kind)
    ys, last = x.new_empty((steps, rows, h.shape[1])), x.new_empty((0, size) if c is None else (rows, size))
    if kind == ONEDNN:
        count = onednn.workspace_bytes(steps, rows, width, size, x.element_size()) if keep else 0
        return ys, last, x.new_empty((count,), dtype=torch.uint8)
    return ys, last, x.new_empty((steps, rows, loops.SAVED[kind] * size))


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *layer, kind, _, keep = args
    return _results(*layer, keep=keep, kind=kind)


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    outs = _fake(*args)
    return _forward_out(*args, **dict(zip(("ys", "last", "saved"), outs, strict=True)))


def _forward_out(
    x: Tensor, h: Tensor, c: Tensor | None, *rest: Any, ys: Tensor, last: Tensor, saved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    *weights, kind, reverse, _ = rest
    with torch.no_grad():
        if kind == ONEDNN and c is not None:
            onednn.forward(x, h, c, Weights(*weights), reverse, ys, last, saved)
        else:
            loops.forward(kind, x, h, c, Weights(*weights), reverse, ys, last, saved)
    return ys, last, saved


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x, h, c, inputs, hidden, bias, bias2, project, kind, _, to_x = args[5:]
    own = (x if to_x else None, h, c, inputs, hidden, bias, bias2 if kind == "gru" else None, project)
    return tuple(
        x.new_empty((0,)) if value is None else torch.empty_like(value, memory_format=torch.contiguous_format)
        for value in own
    )


def _backward(*args: Any) -> tuple[Tensor, ...]:
    outs = _backward_fake(*args)
    return _backward_out(*args, **{f"d_{name}": out for name, out in zip(Grads._fields, outs, strict=True)})


def _backward_out(*args: Any, **outs: Tensor) -> tuple[Tensor, ...]:
    (ys, last, saved, dys, dlast, x, h, c), weights, (kind, reverse, _) = args[:8], Weights(*args[8:13]), args[13:]
    into = Grads(*(outs[f"d_{name}"] for name in Grads._fields))
    with torch.no_grad():
        if kind == ONEDNN:
            onednn.backward(x, h, c, weights, reverse, ys, last, saved, dys, dlast, into)
        else:
            loops.backward(kind, x, h, c, weights, reverse, ys, saved, dys, dlast, into)
    return tuple(into)


for _name, _fake_rule, _pure, _out in (
    ("recurrent", _fake, _forward, _forward_out),
    ("recurrent_backward", _backward_fake, _backward, _backward_out),
):
    torch.library.register_fake(f"fzero::{_name}", _fake_rule, lib=_LIBRARY)
    torch.library.impl(f"fzero::{_name}", "CompositeExplicitAutograd", _pure, lib=_LIBRARY)
    torch.library.impl(f"fzero::{_name}.out", "CompositeExplicitAutograd", _out, lib=_LIBRARY)


def scratch_bytes(*args: Any) -> int:
    """The most bytes that the forward holds beside operands and results; `args` are its operands."""
    return _scratch(args)[0]


def backward_scratch_bytes(*args: Any) -> int:
    """Those of the backward."""
    return _scratch(args[5:])[1]


def _scratch(args: Any) -> tuple[int, int]:
    x, h, *_, project, kind, _, keep = args
    (steps, rows, width), size = x.shape, _size(args[4], kind)
    if kind == ONEDNN:
        return onednn.scratch_bytes(steps, rows, width, size, keep, x.element_size())
    forth, back = loops.scratch(kind, steps, rows, size, h.shape[1], project is not None)
    return forth * x.element_size(), back * x.element_size()


def flops(*args: Any) -> int:
    """The operations of the forward's products; those of the backward are twice as many."""
    x, _, _, inputs, hidden, _, _, project, *_ = args
    weights = inputs.numel() + hidden.numel() + (0 if project is None else project.numel())
    count: int = 2 * x.shape[0] * x.shape[1] * weights
    return count


def _size(hidden: Tensor, kind: str) -> int:
    count: int = hidden.shape[0] // (4 if kind == ONEDNN else loops.GATES[kind])
    return count
