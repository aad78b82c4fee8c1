"""values: the names that a drawn script imports: tensors by number, adapters of shapes, and the call of a module.

Values are small, distinct and the same on every machine, so that a script holds all that a case is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fzero.capture.context import active
from fzero.interop.module import Functional, from_module


def normal(number: int, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Values near a normal distribution, cut at 2, made in fp32; of torch's default dtype unless it says another."""
    generator = torch.Generator("cpu").manual_seed(number)
    value = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").clamp_(-2, 2) * 0.8
    return value.to(torch.get_default_device(), dtype or torch.get_default_dtype())


def integers(number: int, shape: tuple[int, ...], high: int = 4, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers in [0, high)."""
    generator = torch.Generator("cpu").manual_seed(number)
    return torch.randint(0, high, shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def wave(x: Tensor) -> Tensor:
    """Weights of x's shape, no two alike: a gradient at another place is another number."""
    dtype = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
    return torch.linspace(-1.0, 1.5, x.numel(), dtype=dtype).view(x.shape)


def fit(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape from x's elements, again and again."""
    size, flat = math.prod(shape), x.reshape(-1)
    times = -(-size // max(flat.numel(), 1))
    return (torch.cat([flat] * times) if times > 1 else flat)[:size].view(shape)


@dataclass(frozen=True)
class Used:
    """A module, and the pure function that `from_module` made of it."""

    module: nn.Module
    functional: Functional


def used(module: nn.Module) -> Used:
    """A module to `call`; values that its forward writes to its buffers are dropped."""
    return Used(module, from_module(module, mutable=True))


def weights(module: Used) -> dict[str, Tensor]:
    """A module's parameters as leaves of a state."""
    return {name: value.clone() for name, value in module.functional.params.items()}


def call(module: Used, params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """The module's output with these parameters: in a step by `from_module`, else by `torch.func.functional_call`."""
    buffers = module.functional.buffers
    if active() is not None:
        return module.functional.apply(params, buffers, *args, **kwargs)[0]
    own = {**params, **{name: value.clone() for name, value in buffers.items()}}
    return torch.func.functional_call(module.module, own, args, kwargs, tie_weights=True)
