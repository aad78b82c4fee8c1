"""The shared parts of the kernel files: the import of Triton, a launch, and device functions on bits.

Kernels whose bits count are launched without fused multiply-adds (`exact`), and divide and take roots by IEEE's rules
(`div_rn`, `sqrt_rn`). So each operation rounds on its own. One element's bits are the same in every slice of a buffer,
on every GPU, and in Triton's interpreter. They also equal those of PyTorch operators that do the same steps in turn.
The cost is hidden: these kernels wait for memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from fzero import backend
from fzero.kernels import FLOATS

__all__ = [
    "FLOATS",
    "check",
    "exact",
    "jit",
    "largest",
    "launch",
    "narrow",
    "nearest",
    "power_of_two",
    "rounded",
    "tl",
    "triton",
    "wide",
]

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it; kernels then stay text and `launch` refuses
    triton = tl = None

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1") if triton is not None else None

jit: Callable[[Callable[..., Any]], Any] = triton.jit if triton is not None else lambda fn: fn


def launch(
    kernel: Any, programs: int, device: torch.device, *args: Any, enable_fp_fusion: bool = True, **constants: Any
) -> None:
    """Runs `programs` programs of a kernel on `device`. Raises ImportError if Triton is missing.

    The fusion of products into sums is always set: Triton's default changes between its versions.
    """
    if triton is None:
        name = kernel.__name__.strip("_")
        raise ImportError(f"{name} on {device} needs Triton, which this Python does not have: pip install triton")
    with backend.of(device).calls.current(device):
        kernel[(programs,)](*args, enable_fp_fusion=enable_fp_fusion, **constants)


def exact(kernel: Any, programs: int, device: torch.device, *args: Any, **constants: Any) -> None:
    """`launch` with every operation rounded on its own."""
    launch(kernel, programs, device, *args, enable_fp_fusion=False, **constants)


def check(
    where: str, name: str, t: torch.Tensor, like: torch.Tensor, dtypes: tuple[torch.dtype, ...], numel: int
) -> None:
    """Raises ValueError or TypeError for an operand that a flat kernel would misread."""
    if t.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{where}: {name} is {t.dtype}, needed {wanted}")
    if t.numel() != numel:
        raise ValueError(f"{where}: {name} has {t.numel()} elements, needed {numel}")
    if not t.is_contiguous():
        raise ValueError(f"{where}: {name} has strides {t.stride()}, but it must be contiguous")
    if t.device != like.device:
        raise ValueError(f"{where}: {name} is on {t.device}, the others are on {like.device}")


def power_of_two(where: str, block: int, least: int, most: int) -> None:
    """Raises ValueError for a block size that no tile can have."""
    if block & (block - 1) or not least <= block <= most:
        raise ValueError(f"{where}: block is {block}, but it must be a power of two from {least} to {most}")


# ---- device functions ------------------------------------------------------------------------------------------------


@jit
def largest(x):  # type: ignore[no-untyped-def]
    """The largest magnitude of each row of x (rows, n) fp32. As integers, for those order NaN above infinity."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, 1).to(tl.float32, bitcast=True)


@jit
def nearest(x):  # type: ignore[no-untyped-def]
    """fp32 to the nearest integer, halves to even, for |x| < 2**22: the last place of 1.5 * 2**23 is 1."""
    return (x + 12582912.0) - 12582912.0


@jit
def wide(x):  # type: ignore[no-untyped-def]
    """fp32 of fp32, bf16 or fp16. bfloat16 is float32's upper half; the interpreter loses its subnormal numbers."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def narrow(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 to fp32, bf16 or fp16: nearest, halves to even, NaN stays NaN. The interpreter would cut bf16 off."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, near, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@jit
def rounded(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `narrow`, by the device's own instruction where there is one: a NaN has other bits."""
    if INTERPRETED:
        return narrow(x, dtype)
    else:
        return x.to(dtype)
