"""Norms with running statistics are traced without cuDNN, whose kernel writes them unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import optim
from fzero.capture.running_norms import _with_flag

RAW: dict[str, Callable[..., Tensor]] = {"batch_norm": torch.batch_norm, "instance_norm": torch.instance_norm}


def functional(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, None, None, True)


def functional_instance(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.instance_norm(x, mean, var, None, None, True)


def raw(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, True)


def named(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, cudnn_enabled=True)


@pytest.mark.parametrize("norm", [functional, functional_instance, raw, named], ids=lambda fn: fn.__name__)
def test_cudnn_is_not_asked(norm: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The complaint: only modules that are named so were traced without it."""
    asked: list[Any] = []

    def watched(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def called(*args: Any, **kwargs: Any) -> Tensor:
            asked.append(kwargs.get("cudnn_enabled", args[-1]))
            return fn(*args, **kwargs)

        return called

    def loss(p: Any, x: Tensor) -> Tensor:
        return (norm(x * p["w"], x.new_zeros(3), x.new_ones(3)) ** 3).mean()

    for name, fn in RAW.items() if norm in (functional, functional_instance) else ():
        monkeypatch.setattr(torch, name, watched(fn))
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3))
    lowered = fzero.lower(spec, {"w": torch.tensor(2.0)}, torch.empty(4, 3, 5), world_size=1)
    (region,) = lowered.graph.regions
    assert [node for node in region.gm.graph.nodes if "batch_norm" in str(node.target)]
    assert set(asked) == ({False} if asked or norm in (functional, functional_instance) else set())


def test_a_flag_by_position_or_name() -> None:
    """Of torch's own functions it is said in the call."""
    seen: list[Any] = []

    def asked(*args: Any, **kwargs: Any) -> None:
        seen.append((len(args), args[-1], kwargs))

    _with_flag(asked)(*range(8), True)
    _with_flag(asked)(*range(8), cudnn_enabled=True)
    assert seen == [(9, False, {}), (8, 7, {"cudnn_enabled": False})]
