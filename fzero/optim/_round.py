"""`fzero::stochastic_round`: float32 to bfloat16, up or down at random, so that the error is 0 on average.

bfloat16 is the upper half of float32. The op adds a number from 0 .. 65535 to the lower half and then cuts the lower
half off. This rounds away from zero with the probability of the part cut off: the mean over all random numbers is the
number itself. A moment that changes by less than half a unit of its last place would never move under rounding to
nearest. Here it moves, on average at the right pace.

The random number (the dither) is murmur3's 32-bit finaliser of the element's own bits, keyed by the seed before each of
its two multiplications:

    h <- bits ^ key1;  h <- (h ^ h >> 16) * 0x85ebca6b;  h <- (h ^ key2);  h <- (h ^ h >> 13) * 0xc2b2ae35;  h >> 16

So the op is a function of the element and a scalar tensor alone. It is pointwise, and a buffer's bits depend neither on
its slices nor on the device. Elements of equal value round alike under one seed; another seed gives other numbers.

Exact numbers stay as they are, zeros and infinities among them. A NaN stays a NaN. A finite number never becomes
infinite: a number beyond bfloat16's largest becomes that.

Cost: one read of float32 and one write of bfloat16, through two buffers of 256 KiB on the CPU. There every step of the
formula is a pass over them (1.3 ns an element on one AVX2 core, and 70 us a call). Elsewhere each step is a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fzero.ir import fx_nodes, op_info
from fzero.ir.op_info import OpInfo
from fzero.optim._ops import PIECE, _op, watched

_MAX = 0x7F7F0000  # bits of bfloat16's largest finite number
_INF = 0x7F800000
_C1, _C2 = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)  # as int32

__test__: dict[str, str] = {}  # doctest does not look inside a CustomOpDef: it finds their examples here


def stochastic_round(x: Tensor, seed: Tensor) -> Tensor:
    """Returns `x` (float32, any shape) in bfloat16, each element rounded up or down so that its mean over seeds is `x`.

    x: float32. seed: a scalar int64 tensor, and the only source of randomness: equal seeds give equal bits. In a step,
    use a seed that changes with every step, such as a count. Raises `TypeError` for other dtypes, and if a derivative
    would have to pass through; `ValueError` for a seed that is not 0-d.

    >>> x = torch.full((1000,), 1.0) + torch.arange(1000) * 2**-20    # bfloat16 has 1.0 and 1.0078125 here
    >>> rounded = stochastic_round(x, torch.tensor(7))
    >>> rounded.unique(), bool((rounded.float().mean() - x.mean()).abs() < 2e-4)
    (tensor([1.0000, 1.0078], dtype=torch.bfloat16), True)
    """
    for name, value, needed in (("x", x, "x.float()"), ("seed", seed, "torch.tensor(7), or the optimizer's count")):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"stochastic_round: {name} is {type(value).__name__}, but it must be a tensor: write {needed}"
            )
    if watched(x):
        raise TypeError(
            "stochastic_round: it has no derivative and no batching rule: call it under torch.no_grad(), or on "
            "x.detach()"
        )
    return rounded(x, seed)


@_op("(Tensor x, Tensor seed) -> Tensor", name="stochastic_round")
def rounded(x: Tensor, seed: Tensor) -> Tensor:
    """The op: as `stochastic_round`, without a word on derivatives.

    >>> rounded(torch.tensor([0.5, float("inf")]), torch.tensor(0))
    tensor([0.5000,    inf], dtype=torch.bfloat16)
    """
    _check(x, seed)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    if x.numel() == 0:
        return out
    dense = x.contiguous().view(-1)
    flat = out.view(-1) if out.is_contiguous() else torch.empty_like(dense, dtype=torch.bfloat16)
    key1, key2 = _keys(seed.to(x.device))
    bits, target = dense.view(torch.int32), flat.view(torch.int16)
    if x.is_cpu:
        size = min(PIECE, dense.numel())
        h, t = torch.empty(size, dtype=torch.int32), torch.empty(size, dtype=torch.int32)
        for source, into in zip(bits.split(PIECE), target.split(PIECE), strict=True):
            n = source.numel()
            _round_into(into, source, h[:n], t[:n], key1, key2)
    else:
        _round_into(target, bits, torch.empty_like(bits), torch.empty_like(bits), key1, key2)
    if flat.data_ptr() != out.data_ptr():
        out.copy_(flat.view(x.shape))
    return out


@rounded.register_fake
def _(x: Tensor, seed: Tensor) -> Tensor:
    _check(x, seed)
    return torch.empty_like(x, dtype=torch.bfloat16)


def _round_into(target: Tensor, bits: Tensor, h: Tensor, t: Tensor, key1: Tensor, key2: Tensor) -> None:
    """bfloat16's bits (int16) of float32's (int32), with two buffers to work in."""
    torch.bitwise_xor(bits, key1, out=h)
    torch.bitwise_right_shift(h, 16, out=t).bitwise_and_(0xFFFF)  # torch shifts in copies of the sign
    h.bitwise_xor_(t).mul_(_C1).bitwise_xor_(key2)
    torch.bitwise_right_shift(h, 13, out=t).bitwise_and_(0x7FFFF)
    h.bitwise_xor_(t).mul_(_C2).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    torch.bitwise_and(bits, 0x7FFFFFFF, out=t)
    if not bits.is_cpu or int(t.max()) >= _MAX:  # rare, so the CPU looks first; elsewhere a look would synchronise
        h.masked_fill_(t >= _MAX, 0)
        h.add_(bits).masked_fill_(t > _INF, 0x7FC00000)
    else:
        h.add_(bits)
    target.copy_(h.bitwise_right_shift_(16))


def _keys(seed: Tensor) -> tuple[Tensor, Tensor]:
    """Two 0-d int32 keys: the halves of splitmix64's finaliser of the seed."""
    z = (seed ^ _shift(seed, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - (1 << 64)) + (0x9E3779B97F4A7C15 - (1 << 64))
    z = (z ^ _shift(z, 31)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    return _shift(z, 32).to(torch.int32), z.to(torch.int32)


def _shift(z: Tensor, by: int) -> Tensor:
    """A logical shift to the right of int64."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _check(x: Tensor, seed: Tensor) -> None:
    if x.dtype != torch.float32:
        raise TypeError(f"stochastic_round: x is {x.dtype}, but it must be torch.float32: write x.float()")
    if seed.dtype != torch.int64:
        raise TypeError(f"stochastic_round: seed is {seed.dtype}, but it must be torch.int64: write torch.tensor(7)")
    if seed.dim() != 0:
        raise ValueError(f"stochastic_round: seed has shape {tuple(seed.shape)}, but it must be 0-d")


def _scratch_bytes(node: fx.Node) -> int:
    """Two int32 numbers for each element of a chunk."""
    return 8 * min(PIECE, fx_nodes.operand(node).meta["val"].numel()) + 20


op_info.add(torch.ops.fzero.stochastic_round.default, OpInfo(workspace=_scratch_bytes))
