"""ops: a constraint is the value itself, and its gradient and tangent are constrained alike; a part is that of the
rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.shard.ops import CONSTRAIN, OWN_PART, constrained
from fzero.shard.placements import Shard, own_part


class Places(TorchDispatchMode):
    """Notes where each constraint wants its value."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is CONSTRAIN:
            self.found.append((tuple(args[0].shape), *args[1:]))
        return func(*args, **(kwargs or {}))


X = torch.randn(2, 4)


def test_a_gradient_is_constrained_as_its_value_is() -> None:
    x = X.clone().requires_grad_()
    with Places() as places:
        (3 * constrained(x, "tp", 1, 2)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 3.0))
    assert places.found == [((2, 4), "tp", 1, 2)] * 2


def test_a_tangent_is_constrained_too() -> None:
    with Places() as places:
        value, tangent = torch.func.jvp(lambda x: constrained(x, "tp", 0, 1) * 2, (X,), (torch.ones(2, 4),))
    assert torch.equal(value, 2 * X)
    assert torch.equal(tangent, torch.full((2, 4), 2.0))
    assert [place[1:] for place in places.found] == [("tp", 0, 1)] * 2


@pytest.mark.parametrize(("dim", "outer"), [(0, 1), (1, 2), (-1, -1)])
def test_of_a_batch_of_values_the_dim_is_one_further(dim: int, outer: int) -> None:
    """But -1, which is no dim: the value is whole."""
    batch = torch.randn(2, 3, 4)
    with Places() as places:
        found = torch.vmap(lambda x: constrained(x, "tp", dim, 1), in_dims=1)(batch)
    assert torch.equal(found, batch.movedim(1, 0))
    assert places.found == [((3, 2, 4), "tp", outer, 1)]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_rank_takes_its_part(groups: int) -> None:
    x = torch.arange(24.0).view(2, 12)
    for rank in range(3):
        part: Tensor = OWN_PART(x, torch.tensor(rank), 3, 1, groups)
        assert torch.equal(part, own_part(x, Shard(1, groups), 3, rank))
    meta = OWN_PART(x.to("meta"), torch.tensor(0, device="meta"), 3, 1, groups)
    assert meta.shape == (2, 4)
