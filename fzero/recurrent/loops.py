"""loops: one recurrent layer in one direction, forward and backward, in ATen ops that write into given memory.

T steps, B rows, inputs of I, hidden size H; outputs of P (H without a projection). `x` (T, B, I), `h` (B, P) and `c`
(B, H) are where the layer begins; weights as in torch: (G H, I), (G H, P), biases (G H). G gates:

| kind | G | a step |
|---|---|---|
| lstm | 4 | i, f, o = sigmoid, g = tanh; c = f c + i g; h = o tanh(c), times the projection's (P, H) transposed |
| gru | 3 | r, z = sigmoid; n = tanh(x_n + r h_n); h = n + z (h - n) |
| tanh, relu | 1 | h = tanh or relu |

The products with x are one product for all steps; so are those of the weights' gradients. A step then is one or two
products and up to seven elementwise ops (forward), two to five (backward): all factors of a step's gradient that do not
depend on the incoming one are computed for all steps at once. Kept for the backward: the gates and, of an LSTM, the
cells (`saved_width` numbers a row). Numbers are torch's to rounding: sums are in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
SAVED = {"lstm": 5, "gru": 4, "tanh": 0, "relu": 0}  # of each row and step, in hidden sizes


class Weights(NamedTuple):
    """A layer's weights in one direction; None where it has none. `project`: (P, H) of an LSTM."""

    inputs: Tensor
    hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    project: Tensor | None


def forward(
    kind: str, x: Tensor, h: Tensor, c: Tensor | None, w: Weights, reverse: bool,
    ys: Tensor, last: Tensor, saved: Tensor,
) -> None:  # fmt: skip
    """Fills `ys` (T, B, P), `last` (B, H), an LSTM's last cells, and `saved` (T, B, of SAVED[kind] H)."""
    _FORWARD[kind](x, h, c, w, reverse, ys, last, saved)


class Grads(NamedTuple):
    """The gradients of a layer's operands, to be filled. Those that are not wanted, or do not exist, have no elements.

    A layer whose two biases have one gradient has it in `input_bias`.
    """

    x: Tensor
    h: Tensor
    c: Tensor
    inputs: Tensor
    hidden: Tensor
    input_bias: Tensor
    hidden_bias: Tensor
    project: Tensor


def backward(
    kind: str, x: Tensor, h: Tensor, c: Tensor | None, w: Weights, reverse: bool,
    ys: Tensor, saved: Tensor, dys: Tensor, dlast: Tensor | None, into: Grads,
) -> None:  # fmt: skip
    """Fills `into` from the gradients of `ys` and, where it has one, of `last`. All but the weights' is contiguous."""
    _BACKWARD[kind](x, h, c, w, reverse, ys, saved, dys, dlast, into)


def scratch(kind: str, steps: int, rows: int, size: int, outputs: int, projected: bool) -> tuple[int, int]:
    """The most numbers that `forward` and `backward` hold beside operands and results. outputs: P."""
    every, shown = steps * rows * size, steps * rows * outputs
    bias = GATES[kind] * size
    if kind == "lstm":
        forth = 4 * rows * size if steps == 1 and not projected else bias + 2 * rows * size
        return forth, 7 * every + (1 + projected) * shown + rows * (size + outputs)
    return (0, 7 * every + 7 * size) if kind == "gru" else (bias, 2 * every + rows * size + 1)


def _times(steps: int, reverse: bool) -> list[int]:
    return list(range(steps - 1, -1, -1) if reverse else range(steps))


def _of_inputs(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ weight^T + bias, for all steps at once. `out` may be columns of a wider tensor."""
    rows, into = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=into)
    else:
        torch.addmm(bias, rows, weight.t(), out=into)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b


def _lstm(
    x: Tensor, h: Tensor, c: Tensor | None, w: Weights, reverse: bool, ys: Tensor, last: Tensor, saved: Tensor
) -> None:
    size = w.hidden.shape[0] // 4
    if len(x) == 1 and w.project is None:
        assert c is not None
        return _lstm_step(x[0], h, c, w, ys[0], last, saved[0])
    gates = saved[..., : 4 * size]
    _of_inputs(x, w.inputs, _sum(w.input_bias, w.hidden_bias), gates)
    every = gates.unbind(0)
    first, middle, fourth = (gates.split((2 * size, size, size), 2)[i].unbind(0) for i in range(3))
    inputs, forgets = (gates[..., i * size : (i + 1) * size].unbind(0) for i in (0, 1))
    cells, outs, to_hidden = saved[..., 4 * size :].unbind(0), ys.unbind(0), w.hidden.t()
    tanh, shown = torch.empty_like(last), torch.empty_like(last)
    assert c is not None
    for t in _times(len(x), reverse):
        torch.addmm(every[t], h, to_hidden, out=every[t])
        first[t].sigmoid_()
        middle[t].tanh_()
        fourth[t].sigmoid_()
        torch.mul(forgets[t], c, out=cells[t])
        c = cells[t].addcmul_(inputs[t], middle[t])
        torch.tanh(c, out=tanh)
        if w.project is None:
            torch.mul(fourth[t], tanh, out=outs[t])
        else:
            torch.mm(torch.mul(fourth[t], tanh, out=shown), w.project.t(), out=outs[t])
        h = outs[t]
    last.copy_(c)


def _lstm_step(
    x: Tensor, h: Tensor, c: Tensor, w: Weights, y: Tensor, last: Tensor, saved: Tensor
) -> None:  # fmt: skip
    """One step, in the order of `torch.lstm_cell`: in few calls, for a program that is unrolled makes many."""
    size = h.shape[1]
    gates, cell = saved[:, : 4 * size], saved[:, 4 * size :]
    i, f, g, o = gates.chunk(4, 1)
    if w.input_bias is None or w.hidden_bias is None:
        torch.mm(x, w.inputs.t(), out=gates)
        gates += torch.mm(h, w.hidden.t())
    else:
        torch.addmm(w.input_bias, x, w.inputs.t(), out=gates)
        gates += torch.addmm(w.hidden_bias, h, w.hidden.t())
    gates[:, : 2 * size].sigmoid_()
    g.tanh_()
    o.sigmoid_()
    torch.mul(f, c, out=last).add_(i * g)  # addcmul rounds once
    cell.copy_(last)
    torch.mul(o, torch.tanh(last), out=y)


def _gru(
    x: Tensor, h: Tensor, c: Tensor | None, w: Weights, reverse: bool, ys: Tensor, last: Tensor, saved: Tensor
) -> None:
    size = w.hidden.shape[0] // 3
    gates = saved[..., : 3 * size]
    _of_inputs(x, w.inputs, w.input_bias, gates)
    if w.hidden_bias is not None:
        gates[..., : 2 * size] += w.hidden_bias[: 2 * size]
    both, resets, updates, news, hiddens = (
        saved[..., a * size : b * size].unbind(0) for a, b in ((0, 2), (0, 1), (1, 2), (2, 3), (3, 4))
    )
    outs, for_gates, for_new = ys.unbind(0), w.hidden[: 2 * size].t(), w.hidden[2 * size :].t()
    bias = None if w.hidden_bias is None else w.hidden_bias[2 * size :]
    for t in _times(len(x), reverse):
        torch.addmm(both[t], h, for_gates, out=both[t])
        if bias is None:
            torch.mm(h, for_new, out=hiddens[t])
        else:
            torch.addmm(bias, h, for_new, out=hiddens[t])
        both[t].sigmoid_()
        new = news[t].addcmul_(resets[t], hiddens[t]).tanh_()
        h = torch.lerp(new, h, updates[t], out=outs[t])


def _plain(activate: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def run(
        x: Tensor, h: Tensor, c: Tensor | None, w: Weights, reverse: bool, ys: Tensor, last: Tensor, saved: Tensor
    ) -> None:
        _of_inputs(x, w.inputs, _sum(w.input_bias, w.hidden_bias), ys)
        outs, to_hidden = ys.unbind(0), w.hidden.t()
        for t in _times(len(x), reverse):
            h = activate(torch.addmm(outs[t], h, to_hidden, out=outs[t]))

    return run


_FORWARD: dict[str, Callable[..., None]] = {
    "lstm": _lstm, "gru": _gru, "tanh": _plain(torch.tanh_), "relu": _plain(torch.relu_),
}  # fmt: skip


# --- backward ---------------------------------------------------------------------------------------------------------


_SIGMOID, _TANH = torch.ops.aten.sigmoid_backward.grad_input, torch.ops.aten.tanh_backward.grad_input


def _before(values: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Of values (T, B, H) of steps those of the step before each; `first` (B, H) before the first."""
    begin = first[None]
    return torch.cat((values[1:], begin) if reverse else (begin, values[:-1]))


def _rows(x: Tensor) -> Tensor:
    """(T, B, N) as (T B, N)."""
    return x.reshape(-1, x.shape[-1])


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left^T @ right over all rows of all steps: a weight's gradient."""
    torch.mm(_rows(left).t(), _rows(right), out=out)


def _ends(x: Tensor, h: Tensor, w: Weights, reverse: bool, ys: Tensor, gates: Tensor, into: Grads) -> None:
    """The gradients that follow from those of gates that x and h share; and of h from the first step's."""
    if into.x.numel():
        torch.mm(_rows(gates), w.inputs, out=_rows(into.x))
    torch.mm(gates[-1 if reverse else 0], w.hidden, out=into.h)
    _product(gates, x, into.inputs)
    _product(gates, _before(ys, h, reverse), into.hidden)
    if into.input_bias.numel():
        torch.sum(gates, (0, 1), out=into.input_bias)


def _lstm_backward(
    x: Tensor, h: Tensor, c: Tensor, w: Weights, reverse: bool,
    ys: Tensor, saved: Tensor, dys: Tensor, dlast: Tensor | None, into: Grads,
) -> None:  # fmt: skip
    size = w.hidden.shape[0] // 4
    if len(x) == 1 and w.project is None:
        return _lstm_step_backward(x[0], h, c, w, saved[0], dys[0], dlast, into)
    i, f, g, o, cells = saved.split(size, 2)
    tanh = cells.tanh()
    gates = saved.new_empty((*saved.shape[:2], 4 * size))  # of which these are the factors, until step t fills it
    di, df, dg, do = gates.split(size, 2)
    torch.addcmul(i, i, i, value=-1, out=di).mul_(g)
    torch.addcmul(f, f, f, value=-1, out=df).mul_(_before(cells, c, reverse))
    torch.addcmul(i, i * g, g, value=-1, out=dg)
    torch.addcmul(o, o, o, value=-1, out=do).mul_(tanh)
    shown = o * tanh
    to_cell = torch.addcmul(o, shown, tanh, value=-1).unbind(0)
    three = gates[..., : 3 * size].unflatten(2, (3, size)).unbind(0)
    fourth, every, forgets, dhs = do.unbind(0), gates.unbind(0), f.unbind(0), dys.unbind(0)
    dh, dc, full = torch.empty_like(h), into.c, torch.empty_like(c)
    dc.zero_() if dlast is None else dc.copy_(dlast)
    whole = None if w.project is None else torch.empty_like(ys)
    after: Tensor | None = None
    for t in reversed(_times(len(x), reverse)):
        incoming = dhs[t] if after is None else torch.addmm(dhs[t], after, w.hidden, out=dh)
        if w.project is not None and whole is not None:
            whole[t] = incoming
            incoming = torch.mm(incoming, w.project, out=full)
        dc.addcmul_(incoming, to_cell[t])
        three[t].mul_(dc.unsqueeze(1))
        fourth[t].mul_(incoming)
        dc.mul_(forgets[t])
        after = every[t]
    if whole is not None:
        _product(whole, shown, into.project)
    _ends(x, h, w, reverse, ys, gates, into)


def _lstm_step_backward(
    x: Tensor, h: Tensor, c: Tensor, w: Weights, saved: Tensor, dy: Tensor, dlast: Tensor | None, into: Grads
) -> None:  # fmt: skip
    i, f, g, o, cell = saved.chunk(5, 1)
    gates = saved.new_empty((len(h), 4 * h.shape[1]))
    di, df, dg, do = gates.chunk(4, 1)
    tanh, work = torch.tanh(cell), torch.empty_like(h)
    _SIGMOID(torch.mul(dy, tanh, out=work), o, grad_input=do)
    dc = _TANH(torch.mul(dy, o, out=work), tanh, grad_input=tanh)
    if dlast is not None:
        dc += dlast
    _SIGMOID(torch.mul(dc, g, out=work), i, grad_input=di)
    _SIGMOID(torch.mul(dc, c, out=work), f, grad_input=df)
    _TANH(torch.mul(dc, i, out=work), g, grad_input=dg)
    torch.mul(dc, f, out=into.c)
    if into.x.numel():
        torch.mm(gates, w.inputs, out=into.x[0])
    torch.mm(gates, w.hidden, out=into.h)
    turned = gates.t()
    torch.mm(turned, x, out=into.inputs)
    torch.mm(turned, h, out=into.hidden)
    if into.input_bias.numel():
        torch.sum(gates, 0, out=into.input_bias)


def _gru_backward(
    x: Tensor, h: Tensor, c: Tensor | None, w: Weights, reverse: bool,
    ys: Tensor, saved: Tensor, dys: Tensor, dlast: Tensor | None, into: Grads,
) -> None:  # fmt: skip
    size = w.hidden.shape[0] // 3
    r, z, n, hidden = saved.split(size, 2)
    before = _before(ys, h, reverse)
    gates = torch.empty_like(saved)  # of r, z, the hidden part of n, and n itself; until step t fills it, the factors
    dr, dz, dhidden, dn = gates.split(size, 2)
    rest = 1 - z
    torch.addcmul(rest, rest * n, n, value=-1, out=dn)
    torch.mul(dn, r, out=dhidden)
    torch.addcmul(r, r, r, value=-1, out=dr).mul_(hidden).mul_(dn)
    torch.addcmul(z, z, z, value=-1, out=dz).mul_(before - n)
    four, three = gates.unflatten(2, (4, size)).unbind(0), gates[..., : 3 * size].unbind(0)
    keeps, dhs, dh = z.unbind(0), dys.unbind(0), into.h
    order = _times(len(x), reverse)[::-1]
    dh.copy_(dhs[order[0]])
    for t, following in zip(order, [*order[1:], None], strict=True):
        four[t].mul_(dh.unsqueeze(1))
        if following is None:
            dh.mul_(keeps[t])
        else:
            torch.addcmul(dhs[following], dh, keeps[t], out=dh)
        torch.addmm(dh, three[t], w.hidden, out=dh)
    both, both_weights = gates[..., : 2 * size], w.inputs[: 2 * size]
    if into.x.numel():
        torch.mm(_rows(both), both_weights, out=_rows(into.x))
        torch.addmm(_rows(into.x), _rows(dn), w.inputs[2 * size :], out=_rows(into.x))
    _product(both, x, into.inputs[: 2 * size])
    _product(dn, x, into.inputs[2 * size :])
    _product(gates[..., : 3 * size], before, into.hidden)
    if into.input_bias.numel():
        sums = gates.sum((0, 1))
        into.input_bias.copy_(torch.cat((sums[: 2 * size], sums[3 * size :])))
        into.hidden_bias.copy_(sums[: 3 * size])


def _plain_backward(slope: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def run(
        x: Tensor, h: Tensor, c: Tensor | None, w: Weights, reverse: bool,
        ys: Tensor, saved: Tensor, dys: Tensor, dlast: Tensor | None, into: Grads,
    ) -> None:  # fmt: skip
        gates = slope(ys)
        every, dhs, dh = gates.unbind(0), dys.unbind(0), torch.empty_like(h)
        after: Tensor | None = None
        for t in reversed(_times(len(x), reverse)):
            after = every[t].mul_(dhs[t] if after is None else torch.addmm(dhs[t], after, w.hidden, out=dh))
        _ends(x, h, w, reverse, ys, gates, into)

    return run


_BACKWARD: dict[str, Callable[..., None]] = {
    "lstm": _lstm_backward,
    "gru": _gru_backward,
    "tanh": _plain_backward(lambda y: torch.mul(y, y).neg_().add_(1)),
    "relu": _plain_backward(lambda y: (y > 0).to(y.dtype)),
}
