"""What tests of kernels in Triton's interpreter share: numbers, and the graph of a stretch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir import forms

NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(*shape: int, like: Tensor) -> Tensor:
    """Memory to write to, with a number in it that nothing may leave there."""
    return torch.full(shape, torch.nan, dtype=like.dtype)


def near(got: Tensor, wanted: Tensor) -> bool:
    return bool((got.double() - wanted.double()).norm() <= NEAR[got.dtype] * wanted.double().norm().clamp(min=1e-3))


def stretch(fn: Any, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The graph of a stretch: what `fn` computes of its inputs, written into as many further inputs."""

    def written(*tensors: Tensor) -> list[Tensor]:
        for into, value in zip(tensors[len(inputs) :], fn(*tensors[: len(inputs)]), strict=True):
            into.copy_(value)
        return []

    outs = [torch.empty_like(value) for value in fn(*inputs)]
    gm = make_fx(written)(*inputs, *outs)
    mode = FakeTensorMode()
    return forms.propagate(gm, [mode.from_tensor(x) for x in (*inputs, *outs)])
