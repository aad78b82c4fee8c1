"""leaves: which tensors a state, a batch or the metrics may hold, and the fake tensors that stand for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fzero._torch_compat import FakeTensorMode, fake_empty, gradient_hooks
from fzero.capture.remedies import RAGGED, SPARSE
from fzero.errors import TreeError, leaf_name
from fzero.ir.records import DTYPE_NAMES, buffer_name


def fake_like(mode: FakeTensorMode, leaf: torch.Tensor) -> torch.Tensor:
    """A contiguous fake tensor of this shape, dtype and device."""
    return fake_empty(mode, tuple(leaf.shape), leaf.dtype, leaf.device)


def check_names(tree_name: str, paths: Sequence[str]) -> None:
    """Raises TreeError for two paths that would have one name in the program. `tree_name` is their tree."""
    path_of: dict[str, str] = {}
    for path in paths:
        name = buffer_name(path)
        if path_of.get(name) == path:
            raise TreeError(
                f"two leaves are named {leaf_name(tree_name, path)}: a key that holds a / reads as a dict within a "
                "dict, and a number as its text. Rename a key"
            )
        if name in path_of:
            raise TreeError(
                f"{leaf_name(tree_name, path_of[name])} and {leaf_name(tree_name, path)} have one name in the "
                "program: rename a key"
            )
        path_of[name] = path


def check_hooks(name: str, value: torch.Tensor) -> None:
    """Raises TreeError for a parameter with hooks on its gradient, which no step would call."""
    if value.requires_grad and gradient_hooks(value):
        raise TreeError(
            f"{name} has hooks on its gradient (register_hook, register_post_accumulate_grad_hook): no step calls "
            "them. Remove them, handle.remove(), and change the gradient in a transformation before the optimizer, as "
            "fzero.optim.chain(yours, optimizer)"
        )


def check_leaf(name: str, value: torch.Tensor) -> None:
    """Raises TreeError for a tensor that no buffer can hold: a sparse, nested or quantised one, or of another dtype.

    `value` may be fake; `name` is how the error calls it.
    """
    if value.is_nested:
        raise TreeError(f"{name} is a nested tensor. {RAGGED}")
    if value.layout is not torch.strided:
        raise TreeError(f"{name} is a tensor of {value.layout}. {SPARSE}")
    if value.dtype not in DTYPE_NAMES or value.is_quantized:
        raise TreeError(
            f"{name} is a tensor of {value.dtype}: needed one of {', '.join(DTYPE_NAMES.values())}. Convert it first"
        )
