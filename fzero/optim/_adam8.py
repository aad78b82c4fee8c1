"""`fzero::adamw8`: one AdamW step with both moments in 8 bits.

A moment is `codes` and `scales`. `codes` are 8-bit integers of the parameter's shape. `scales` holds one fp32 number
for each block of 64 elements of the flattened parameter: the largest magnitude in the block. The codes are powers of
the remaining factor:

    mu = s * sign(c) * (c / 127)^2        c in -127 .. 127, rounded to nearest
    nu = s * (c / 255)^4                  c in 0 .. 255, rounded up or down at random with the mean at nu

So small elements beside a large one keep their digits. This needs no table and no transcendental function: the roots
are square roots, which every device rounds alike. A nonzero nu never becomes code 0, for a moment that vanished would
make a step of mu / eps. Rounding nu to nearest would freeze it. Little of 0.999 nu + 0.001 g^2 is new, and a change
below half a code is lost again at every step.

Measured against fp32 AdamW (distance to its parameters over the distance that they moved; loss over its loss - 1), on a
regression whose blocks mix gradients of sizes 1 to 18, after 1,000 steps:

    codes (mu, nu)              distance    loss
    linear, (c/255)^2 nearest     0.046    -0.082
    bitsandbytes' dynamic maps    0.039    -0.060
    (c/127)^2, (c/255)^4 nearest  0.034    -0.083    (nu alone)
    (c/127)^2, (c/255)^4 random   0.027    -0.002    this one

The random number is a hash of the element's own bits (parameter and gradient), its place in the block and the step's
number. So there is no state, and the bits are the same however a bucket is cut into slices on 64-element boundaries.

The arithmetic is that of `fzero::adamw` in float32, operation by operation. Each operation rounds on its own, so a step
has the same bits in every slice. The parameter is updated from the moments before they are rounded to codes.

Cost: reads 10 bytes and writes 6 per element of a float32 parameter, through some ten buffers of 128 KiB on the CPU (16
MiB on CUDA, where every operation is a launch). On one core an element takes 10 to 17 ns (aten's fused AdamW: 0.5).
There is no kernel, so it makes half a hundred passes over a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fzero import backend
from fzero.ir import fx_nodes, op_info
from fzero.ir.op_info import OpInfo
from fzero.ir.records import ALIGN
from fzero.optim._ops import CORRECTIONS, _op

BLOCK = ALIGN  # elements; where every leaf of a bucket begins
CHUNK = 32_768  # elements at a time on the CPU, so that the buffers stay in the cache
BUFFER_BYTES = 43  # that an element of a chunk needs in all

_HYPER = "Tensor count, Tensor lr, float beta1, float beta2, float eps, float weight_decay"
_MIX1, _MIX2, _LANE, _STEP = 0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B1 - (1 << 32), 0x85EBCA6B - (1 << 32)

__test__: dict[str, str] = {}  # doctest does not look inside a CustomOpDef: it finds their examples here


@_op(
    "(Tensor(a!) param, Tensor grad, Tensor(b!) mu, Tensor(c!) mu_scales, Tensor(d!) nu, Tensor(e!) nu_scales, "
    f"{_HYPER}, {CORRECTIONS}) -> ()",
    mutates=("param", "mu", "mu_scales", "nu", "nu_scales"),
    pointwise=False,
)
def adamw8_(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    mu_scales: Tensor,
    nu: Tensor,
    nu_scales: Tensor,
    count: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    rate: Tensor | None = None,
    root: Tensor | None = None,
) -> None:
    """One AdamW step in place on `param`, `mu`, `mu_scales`, `nu` and `nu_scales`.

    `param` and `grad` share shape and dtype (floating); `mu` (int8) and `nu` (uint8) have that shape; the scales are
    float32 of shape (ceil(numel / 64),). `count` is the number of this step counted from 1 (scalar int64); `lr` is 0-d
    float64. Any shape, empty included. `rate` and `root` are the step's `bias_corrections`, which only the kernel of
    `fzero.kernels` reads. Raises `ValueError` for shapes and `TypeError` for dtypes that do not fit.

    >>> p, m, v = torch.ones(3), torch.zeros(3, dtype=torch.int8), torch.zeros(3, dtype=torch.uint8)
    >>> one, lr = torch.tensor(1), torch.tensor(0.1, dtype=torch.float64)
    >>> adamw8_(p, torch.tensor([1.0, 2.0, 4.0]), m, torch.zeros(1), v, torch.zeros(1), one, lr, 0.9, 0.999, 1e-8, 0.0)
    >>> p, m
    (tensor([0.9000, 0.9000, 0.9000]), tensor([ 64,  90, 127], dtype=torch.int8))
    """
    _check(param, grad, mu, mu_scales, nu, nu_scales, count, lr)
    targets = (param, mu, mu_scales, nu, nu_scales)
    p, m, ms, v, vs = (t.reshape(-1) for t in targets)  # a view, or a copy where strides leave no choice
    g, total = grad.reshape(-1), param.numel()
    hyper = _scalars(param, count, lr, beta1, beta2, weight_decay)
    chunk = backend.of(param.device).chunk or CHUNK
    for start in range(0, total, chunk):
        stop = min(start + chunk, total)
        here, blocks = slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))
        _step(p[here], g[here], m[here], ms[blocks], v[here], vs[blocks], hyper, beta1, beta2, eps)
    for target, result in zip(targets, (p, m, ms, v, vs), strict=True):
        if result.data_ptr() != target.data_ptr():
            target.copy_(result.view(target.shape))


@_op(
    "(Tensor param, Tensor grad, Tensor mu, Tensor mu_scales, Tensor nu, Tensor nu_scales, "
    f"{_HYPER}, {CORRECTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    pointwise=False,
)
def adamw8(
    param: Tensor, grad: Tensor, mu: Tensor, mu_scales: Tensor, nu: Tensor, nu_scales: Tensor, *hyper: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One AdamW step as a pure function: the new `(param, mu, mu_scales, nu, nu_scales)`; the rest as in `adamw8_`.

    >>> z, m, v = torch.zeros(2), torch.zeros(2, dtype=torch.int8), torch.zeros(2, dtype=torch.uint8)
    >>> one, lr = torch.tensor(1), torch.tensor(0.1, dtype=torch.float64)
    >>> adamw8(z, torch.ones(2), m, torch.zeros(1), v, torch.zeros(1), one, lr, 0.9, 0.999, 1e-8, 0.0)[:3]
    (tensor([-0.1000, -0.1000]), tensor([127, 127], dtype=torch.int8), tensor([0.1000]))
    """
    new = param.clone(), mu.clone(), mu_scales.clone(), nu.clone(), nu_scales.clone()
    adamw8_(new[0], grad, *new[1:], *hyper)
    return new


@adamw8_.register_fake
def _(*tensors: Any) -> None:
    _check(*tensors[:8])


@adamw8.register_fake
def _(*tensors: Any) -> tuple[Tensor, ...]:
    _check(*tensors[:8])
    param, _, *moments = tensors[:6]
    return torch.empty_like(param), *(torch.empty_like(t) for t in moments)


def _buffer_bytes(node: fx.Node) -> int:
    """The buffers of a chunk: some ten."""
    return min(fx_nodes.operand(node).meta["val"].numel(), CHUNK) * BUFFER_BYTES


op_info.add(
    torch.ops.fzero.adamw8_.default,
    OpInfo(in_place=(torch.ops.fzero.adamw8.default, (0, 2, 3, 4, 5)), workspace=_buffer_bytes),
)
op_info.add(
    torch.ops.fzero.adamw8.default,
    OpInfo(blockwise=((1, 1, 1, BLOCK, 1, BLOCK), (1, 1, BLOCK, 1, BLOCK)), workspace=_buffer_bytes),
)


# --- codes ------------------------------------------------------------------------------------------------------------


def decode_mu(codes: Tensor, scales: Tensor) -> Tensor:
    """First moments in float32 of `codes` (blocks, 64) int8 and `scales` (blocks,).

    >>> decode_mu(torch.tensor([[127, -64]], dtype=torch.int8), torch.tensor([2.0]))
    tensor([[ 2.0000, -0.5079]])
    """
    x = codes.to(torch.float32).mul_(1 / 127)
    return x.mul_(x.abs()).mul_(scales[:, None])


def decode_nu(codes: Tensor, scales: Tensor) -> Tensor:
    """Second moments in float32 of `codes` (blocks, 64) uint8 and `scales` (blocks,).

    >>> decode_nu(torch.tensor([[255, 1]], dtype=torch.uint8), torch.tensor([2.0]))
    tensor([[2.0000e+00, 4.7301e-10]])
    """
    return _fourth(codes.to(torch.float32)).mul_(scales[:, None])


def encode_mu(mu: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (codes, scales) of `mu` (blocks, 64) float32, to nearest. A value that is not finite makes its block NaN.

    >>> encode_mu(torch.tensor([[1.0, -0.25, 0.0]]))
    (tensor([[127, -64,   0]], dtype=torch.int8), tensor([1.]))
    """
    part, scales = _parts(mu)
    codes = part.sqrt_().mul_(127).round_().copysign_(mu)
    return codes.to(torch.int8), scales


def encode_nu(nu: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of `nu` (blocks, 64) float32, at least 0. `draw`, int32 of that shape: its upper 24 bits decide.

    >>> encode_nu(torch.tensor([[1.0, 1e-30, 0.0]]), torch.zeros(1, 3, dtype=torch.int32))
    (tensor([[255,   1,   0]], dtype=torch.uint8), tensor([1.]))
    """
    part, scales = _parts(nu)
    low = part.sqrt().sqrt_().mul_(255).floor_().clamp_(max=254)
    under = _fourth(low.clone())
    gap = _fourth(low + 1).sub_(under)
    chance = part.sub_(under).div_(gap)  # of going up; may be just below 0 where the root was rounded up
    uniform = ((draw >> 8) & 0xFFFFFF).to(torch.float32).mul_(2**-24)
    codes = low.add_(uniform < chance)
    return codes.clamp_(min=1).mul_(nu != 0).to(torch.uint8), scales


def _fourth(codes: Tensor) -> Tensor:
    """(codes / 255)^4, in place."""
    x = codes.mul_(1 / 255)
    x.mul_(x)
    return x.mul_(x)


def _parts(values: Tensor) -> tuple[Tensor, Tensor]:
    """(magnitudes over the largest of their block, those largest)."""
    size = values.abs()
    scales = size.amax(1)
    divisor = torch.where(scales > 0, scales, 1.0)[:, None]
    return size.div_(divisor).nan_to_num_(0.0), scales


# --- the step ---------------------------------------------------------------------------------------------------------


def _scalars(param: Tensor, count: Tensor, lr: Tensor, beta1: float, beta2: float, weight_decay: float) -> Any:
    """0-d tensors on the parameter's device: lr / (1 - beta1^t), sqrt(1 - beta2^t), 1 - lr * weight_decay; the step's
    part of the draw."""
    device = param.device
    t, rate = count.to(device, torch.float64), lr.to(device, torch.float64)
    first, second = (1 - torch.pow(beta, t) for beta in (beta1, beta2))
    wide = torch.promote_types(param.dtype, torch.float32)
    numbers = (rate / first).float(), second.sqrt().float(), (1 - rate * weight_decay).to(wide)
    return *numbers, count.to(device, torch.int32) * _STEP


def _step(
    p: Tensor, g: Tensor, m: Tensor, ms: Tensor, v: Tensor, vs: Tensor, hyper: Any, beta1: float, beta2: float,
    eps: float,
) -> None:  # fmt: skip
    """One step on flat views that hold whole blocks, the last one maybe short."""
    rate, correction, decay, key = hyper
    gradient = _blocks(g).to(torch.float32)
    mu = decode_mu(_blocks(m), ms).mul_(beta1).add_(gradient * (1 - beta1))
    nu = decode_nu(_blocks(v), vs).mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
    lane = torch.arange(BLOCK, dtype=torch.int32, device=p.device).mul_(_LANE)
    draw = _mixed(_blocks(p).to(torch.float32).view(torch.int32), gradient.view(torch.int32), lane + key)
    step = (mu / nu.sqrt().div_(correction).add_(eps)).mul_(rate)
    wide = p.to(torch.promote_types(p.dtype, torch.float32))
    p.copy_((wide * decay).sub_(step.view(-1)[: p.numel()]))
    for codes, scales, (new, largest) in ((m, ms, encode_mu(mu)), (v, vs, encode_nu(nu, draw))):
        codes.copy_(new.view(-1)[: codes.numel()])
        scales.copy_(largest)


def _mixed(first: Tensor, second: Tensor, key: Tensor) -> Tensor:
    """32 well-mixed bits of two words and a key, by two rounds of multiply and shift."""
    h = first * _MIX1
    h ^= second
    h ^= key
    for multiplier in (_MIX1, _MIX2):
        h ^= (h >> 16) & 0xFFFF
        h *= multiplier
    return h


def _blocks(flat: Tensor) -> Tensor:
    """A flat tensor as (blocks, 64), the last block filled with zeros."""
    short = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, short)) if short else flat).view(-1, BLOCK)


def _check(
    param: Tensor, grad: Tensor, mu: Tensor, mu_scales: Tensor, nu: Tensor, nu_scales: Tensor, count: Tensor, lr: Tensor
) -> None:
    """Raises TypeError or ValueError for tensors that the op cannot step."""
    if not param.is_floating_point():
        raise TypeError(f"fzero::adamw8: param is {param.dtype}, but it must be a floating-point tensor")
    blocks = (-(-param.numel() // BLOCK),)
    wanted = {
        "grad": (grad, param.shape, param.dtype),
        "mu": (mu, param.shape, torch.int8),
        "mu_scales": (mu_scales, blocks, torch.float32),
        "nu": (nu, param.shape, torch.uint8),
        "nu_scales": (nu_scales, blocks, torch.float32),
    }
    for name, (t, shape, dtype) in wanted.items():
        if t.shape != shape:
            raise ValueError(
                f"fzero::adamw8: {name} has shape {tuple(t.shape)}, needed {tuple(shape)} for param of shape "
                f"{tuple(param.shape)}"
            )
        if t.dtype != dtype:
            raise TypeError(f"fzero::adamw8: {name} is {t.dtype}, needed {dtype}")
    for name, t in (("count", count), ("lr", lr)):
        if t.dim() != 0:
            raise ValueError(f"fzero::adamw8: {name} has shape {tuple(t.shape)}, but it must be 0-d")
