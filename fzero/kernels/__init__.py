"""Kernels: one per file, each with its formula, reference, kernel and launcher. They import nothing of fzero.

| file | does | bytes an element of float32 |
|---|---|---|
| `adamw`    | Adam(W): unscale, clip, update, round, copy out, in one pass | 28, 20 with bfloat16 moments |
| `adam8_kernel` | AdamW with moments in 8 bits                                 | 16.25 |
| `flat_norms` | squared norm and finite check                                | 4 |
| `round`    | stochastic rounding to bfloat16                              | 6 |
| `cast`     | cast and scale                                               | 6 to or from 16 bits |
| `codec_kernels` | block codecs: int8 and fp8, int4, signs; and back; a sum of messages | 5.06, 4.56, 4.19 |
| `block_sparse` | attention over blocks of pairs, and its backward               | |
| `row_sums` | gradients whose rows are added up in the pass that makes them    | |
| `softmax_loss` | the loss over a vocabulary and its gradient                  | |
| `philox`   | random numbers                                               | 4 |

`fzero.ir.op_info.kernel_for` returns the kernel that can replace an operator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from fzero import backend
from fzero.kernels.codecs import CODECS

WIDEST = 8192  # columns of a norm's row in `row_sums`, which one program holds
NORM_ROWS = 16  # rows of a program of a norm's backward, one after the other
TALL = 64  # rows of a program of the others in `row_sums`
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Kernel(NamedTuple):
    """A function of a file here, which takes an operator's own arguments. `fits` returns whether the kernel can take
    given arguments. The file is imported when the first ones fit: Triton takes longer to import than all of fzero.
    `before`: arguments of the function before the operator's."""

    file: str
    function: str
    fits: Callable[..., bool]
    before: tuple[Any, ...] = ()

    @property
    def launch(self) -> Callable[..., Any]:
        """The function. Its file is imported here."""
        launch: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{self.file}"), self.function)
        return partial(launch, *self.before) if self.before else launch

    def taking(self, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
        """The function, if it can take these arguments on this machine."""
        return self.launch if self.fits(*args, **kwargs) and _has_triton() else None


def _has_triton() -> bool:
    return importlib.import_module(f"{__name__}._triton").triton is not None


def _flat(*tensors: torch.Tensor) -> bool:
    return all(backend.of(t.device).has_kernels and t.is_contiguous() for t in tensors)


def _fits_adamw(param: Any, grad: Any, mu: Any, nu: Any, *hyper: Any) -> bool:
    return _flat(param, grad, mu, nu) and param.dtype in FLOATS


def _fits_fused(params: Any, grads: Any, mus: Any, nus: Any, *rest: Any, **options: Any) -> bool:
    plain = not options.get("amsgrad") and not options.get("maximize") and options.get("grad_scale") is None
    each = zip(params, grads, mus, nus, strict=True)
    return plain and all(_flat(*four) and {t.dtype for t in four} <= set(FLOATS) for four in each)


def _fits_adamw8(param: Any, grad: Any, mu: Any, mu_scales: Any, nu: Any, nu_scales: Any, *hyper: Any) -> bool:
    return _flat(param, grad, mu, mu_scales, nu, nu_scales) and param.dtype in FLOATS


def _fits_one(x: Any, *rest: Any) -> bool:
    return _flat(x) and x.dtype in FLOATS


def _fits_scalars(count: Any, lr: Any, *rest: Any) -> bool:
    return all(backend.of(x.device).has_kernels for x in (count, lr))


def _fits_messages(messages: Any, *rest: Any) -> bool:
    has_kernels = backend.of(messages.device).has_kernels
    return has_kernels and messages.stride(-1) == 1 and messages.dtype is torch.uint8  # rows may be apart


def _fits_sparse(*args: Any, **outs: Any) -> bool:
    """Of block-sparse attention and its backward, which has the gradient first. Larger tiles do not fit on chip."""
    q, k, v, columns, documents, block = args[-9:-3]
    given = [x for x in (q, k, v, columns, documents) if x is not None]
    there = all(backend.of(x.device).has_kernels for x in given) and all(x.stride(3) == 1 for x in (q, k, v))
    room = 2048 if q.dtype == torch.float32 else 4096  # numbers of the smallest tile, of 16 tokens
    return there and q.dtype in FLOATS and block % 16 == 0 and 16 * max(q.shape[3], v.shape[3]) <= room


KERNELS: dict[str, Kernel] = {
    "fzero.adamw_.default": Kernel("adamw", "adamw_", _fits_adamw),
    "fzero.adamw.default": Kernel("adamw", "adamw", _fits_adamw),
    "fzero.adamw8_.default": Kernel("adam8_kernel", "adamw8_", _fits_adamw8),
    "fzero.adamw8.default": Kernel("adam8_kernel", "adamw8", _fits_adamw8),
    "fzero.bias_corrections.default": Kernel("hyper", "bias_corrections", _fits_scalars),
    "fzero.stochastic_round.default": Kernel("round", "stochastic_round", _fits_one),
    "fzero.sum_squares.default": Kernel("flat_norms", "sum_squares", _fits_one),
    "fzero.block_sparse_attention.out": Kernel("block_sparse", "attention_out", _fits_sparse),
    "fzero.block_sparse_attention_backward.out": Kernel("block_sparse", "backward_out", _fits_sparse),
    "aten._fused_adamw_.default": Kernel("adamw", "fused_adamw_", _fits_fused),
    "aten._fused_adamw_.tensor_lr": Kernel("adamw", "fused_adamw_", _fits_fused),
    "aten._fused_adam_.default": Kernel("adamw", "fused_adam_", _fits_fused),
    "aten._fused_adam_.tensor_lr": Kernel("adamw", "fused_adam_", _fits_fused),
}
KERNELS |= {
    f"fzero.{op}_{name}.{form}": Kernel("codec_kernels", op, fits, (codec,))
    for name, codec in CODECS.items()
    for op, fits in (("encode", _fits_one), ("decode", _fits_messages), ("decode_sum", _fits_messages))
    for form in ("default", "out")
}
