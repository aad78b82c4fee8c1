"""no_tensor: a leaf that is used as a tensor says what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fzero

USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda w: w + 1,
    "radd": lambda w: torch.ones(3) + w,
    "matmul": lambda w: torch.ones(3, 3) @ w,
    "negation": lambda w: -w,
    "comparison": lambda w: w < 1,
    "float": float,
    "index": lambda w: w[0],
    "loop": list,
    "torch": torch.sum,
    "second argument": lambda w: torch.equal(torch.ones(3), w),
    "list of arguments": lambda w: torch.cat([w, w]),
    "written": lambda w: torch.ones(3).copy_(w),
    "tensor": torch.tensor,
    "numpy": np.asarray,
}


@pytest.mark.parametrize("name", USES)
def test_a_leaf_that_is_used_as_a_tensor_names_its_remedy(name: str) -> None:
    spec = fzero.Spec(loss=lambda p, b: (p["w"] * b).sum(), optimizer=fzero.optim.sgd(0.1))
    leaf = fzero.init({"w": torch.ones(3)}, spec).params["w"]
    with pytest.raises(TypeError, match=r"state\['params/w'\] is sharded.* \.full\(\) on every rank"):
        USES[name](leaf)
    assert leaf
    assert leaf == leaf
