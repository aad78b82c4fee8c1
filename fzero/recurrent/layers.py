"""layers: torch's `lstm`, `gru`, `rnn_tanh` and `rnn_relu` in a trace: an op for each layer and direction.

torch would decompose them into the ops of every step, which is a graph whose length is that of time. An LSTM's
cell is a layer of one step: a loop that is unrolled has a third of the nodes. What these ops
cannot do is left to that: packed sequences (of lengths that are known), a transform of torch.func around, mixed dtypes,
autocast. A gradient of a gradient too: `_Layer.backward` differentiates torch's own decomposition then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fzero import backend
from fzero._torch_compat import by_decompositions, in_functorch, onednn_has_bf16, unreplaced
from fzero.recurrent.recurrent_ops import BACKWARD, FORWARD, ONEDNN

# torch's function -> the kind of its layers
LAYERS: dict[Any, str] = {torch.lstm: "lstm", torch.gru: "gru", torch.rnn_tanh: "tanh", torch.rnn_relu: "relu"}
KINDS = {**LAYERS, torch.lstm_cell: "lstm"}  # the other cells have few ops, and torch's are as fast
_FUNCTIONS = {kind: func for func, kind in LAYERS.items()}


def run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, one of `KINDS`, by ops of a layer; decomposed where they do not fit."""
    if func not in LAYERS:
        return _cell(*args) if _fits_cell(args, kwargs) else func(*args, **kwargs)
    if not _fits(func, args, kwargs):
        with _decomposed(any(isinstance(x, Tensor) and backend.of_traced(x.device).on_streams for x in args)):
            return func(*args, **kwargs)
    return _layers(KINDS[func], *args)


@contextmanager
def _decomposed(on_cuda: bool) -> Iterator[None]:
    """torch's own layers as elementary ops: cuDNN would read where the weights lie, and oneDNN, which is taken on the
    processor in the place of a device too, saves nothing that a trace sees (2.13.0)."""
    with torch.backends.mkldnn.flags(enabled=False), by_decompositions() if on_cuda else nullcontext():
        yield


def _fits(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    packed = len(args) != 9 or not isinstance(args[2], (list, tuple))
    if packed or kwargs or in_functorch() or torch.is_autocast_enabled(args[0].device.type):
        return False
    return args[0].dim() == 3 and _alike([args[0], *_states(args[1]), *args[2]])


def _fits_cell(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if len(args) not in (4, 6) or kwargs or in_functorch() or torch.is_autocast_enabled(args[0].device.type):
        return False
    if not backend.of_traced(args[0].device).on_host:  # CUDA has a kernel of its own for a cell
        return False
    tensors = [args[0], *_states(args[1]), *args[2:]]
    if not all(isinstance(x, Tensor) for x in tensors) or not _alike(tensors) or len(tensors) != len(args) + 1:
        return False
    x, h, c, inputs, hidden, *_ = tensors
    rows = x.shape[:1]
    return (x.shape, h.shape, c.shape) == ((*rows, inputs.shape[1]), *[(*rows, hidden.shape[1])] * 2)


def _states(start: Any) -> Sequence[Tensor]:
    return start if isinstance(start, (list, tuple)) else (start,)


def _alike(tensors: Sequence[Tensor]) -> bool:
    alike = len({(x.dtype, x.device) for x in tensors}) == 1 and tensors[0].dtype.is_floating_point
    return alike and all(x.numel() for x in tensors)


def _cell(x: Tensor, start: Sequence[Tensor], *own: Tensor) -> tuple[Tensor, Tensor]:
    """What torch's LSTM cell returns, the state and the cell, from a layer of one step. Without oneDNN: a call of its
    LSTM costs more than a step."""
    h, c = start
    ys, last = _direction("lstm", False, x.unsqueeze(0), h, c, _weights(own, len(own) == 4), by_onednn=False)
    return ys.squeeze(0), last


def _layers(
    kind: str, x: Tensor, start: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What torch's function returns: the outputs, the last states, and of an LSTM the last cells."""
    ways = 1 + bidirectional
    first_h, first_c = start if kind == "lstm" else (start, None)
    each = len(params) // (num_layers * ways)
    value, last_h, last_c = x.transpose(0, 1) if batch_first else x, [], []
    for layer in range(num_layers):
        outs = []
        for way in range(ways):
            at = layer * ways + way
            w = _weights(params[at * each : (at + 1) * each], has_biases)
            c = None if first_c is None else first_c[at]
            ys, last = _direction(kind, bool(way), value, first_h[at], c, w)
            outs.append(ys)
            last_h.append(ys[0 if way else -1])
            last_c.append(last)
        value = torch.cat(outs, 2) if bidirectional else outs[0]
        if dropout and train and layer < num_layers - 1:
            value = torch.dropout(value, dropout, True)
    value = value.transpose(0, 1) if batch_first else value
    states = (torch.stack(last_h), torch.stack(last_c)) if kind == "lstm" else (torch.stack(last_h),)
    return value, *states


def _weights(own: Sequence[Tensor], has_biases: bool) -> tuple[Tensor | None, ...]:
    """A direction's weights, biases and projection, None where there is none."""
    rest: list[Tensor | None] = list(own[2:])
    biases = rest[:2] if has_biases else [None, None]
    project = rest[2:] if has_biases else rest
    return *own[:2], *biases, *(project or [None])


def _direction(
    kind: str, reverse: bool, x: Tensor, h: Tensor, c: Tensor | None, w: Sequence[Tensor | None],
    by_onednn: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    operands = [None if t is None else t.contiguous() for t in (x, h, c, *w)]
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    kernel = ONEDNN if by_onednn and kind == "lstm" and w[4] is None and _has_onednn(x) else kind
    ys, last = _Layer.apply(kind, kernel, reverse, keep, *operands)
    return ys, last


def _has_onednn(x: Tensor) -> bool:
    """Whether torch would take oneDNN's LSTM for `x`. In bf16 it is the nearer to exact numbers: it rounds results
    alone."""
    if not (
        backend.of_traced(x.device).on_host and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    ):
        return False
    return x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and onednn_has_bf16())


class _Layer(torch.autograd.Function):
    """A layer in one direction. A plain backward is one op; one that is to be differentiated again is decomposed."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, kernel: str, reverse: bool, keep: bool, *operands: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ys, last, saved = FORWARD(*operands, kernel, reverse, keep)
        ctx.save_for_backward(ys, last, saved, *operands)
        ctx.of = kind, kernel, reverse
        results = ys.clone(), last.clone()  # for the caller, who may write into them
        if kind != "lstm":
            ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    def backward(ctx: Any, dys: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        (kind, kernel, reverse), (ys, last, saved, *operands) = ctx.of, ctx.saved_tensors
        if torch.is_grad_enabled():
            return *[None] * 4, *_differentiable(kind, reverse, operands, dys, dlast)
        of_last = dlast.contiguous() if kind == "lstm" else None
        grads = BACKWARD(
            ys, last, saved, dys.contiguous(), of_last, *operands, kernel, reverse, bool(ctx.needs_input_grad[4])
        )
        dx, dh, dc, *weights, dbias, dbias2, project = grads
        own = (dx, dh, dc, *weights, dbias, dbias2 if kind == "gru" else dbias, project)
        wanted = ctx.needs_input_grad
        return *[None] * 4, *(g if needed else None for g, needed in zip(own, wanted[4:], strict=True))


def _differentiable(
    kind: str, reverse: bool, operands: Sequence[Tensor | None], dys: Tensor, dlast: Tensor
) -> list[Tensor | None]:
    """The gradients of a layer's operands as functions of them, and of the incoming gradients."""
    x, h, c, *weights = operands
    assert x is not None
    assert h is not None
    has_biases = weights[2] is not None
    params = [w for w in weights if w is not None]
    start: Any = h[None] if c is None else (h[None], c[None])
    with unreplaced(), _decomposed(backend.of_traced(x.device).on_streams):
        outs = _FUNCTIONS[kind](x.flip(0) if reverse else x, start, params, has_biases, 1, 0.0, True, False, False)
    ys = outs[0].flip(0) if reverse else outs[0]
    wanted = [t for t in operands if t is not None and t.requires_grad]
    ends, incoming = ([ys, outs[2][0]], [dys, dlast]) if kind == "lstm" else ([ys], [dys])
    grads = iter(torch.autograd.grad(ends, wanted, incoming, create_graph=True, allow_unused=True))
    return [next(grads) if t is not None and t.requires_grad else None for t in operands]
