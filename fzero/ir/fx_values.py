"""fx_values: the fake tensors of a graph's nodes (`meta["val"]`): strides, bytes, and how long each value lives."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode, is_fake
from fzero.ir.fx_nodes import also_returns, is_compute, is_view, mutated, operand, outputs

Value = tuple[fx.Node, int]  # a node, and which of its results


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's value: one, those of a tuple, or none."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (tuple, list)) else []


# --- strides ----------------------------------------------------------------------------------------------------------


def mode_of(value: torch.Tensor) -> FakeTensorMode:
    """The mode of a fake tensor, or a new one. (A new one costs up to a millisecond: torch keeps its maker's stack.)"""
    return value.fake_mode if is_fake(value) else FakeTensorMode()  # type: ignore[attr-defined]


def dense_like(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same shape, dtype and device, without gaps, its dims in the same order in memory.

    That is the layout that `clone` gives. A value without gaps is returned as it is.
    """
    if is_dense(value):
        return value
    strides = torch.empty_like(torch.empty_strided(value.shape, value.stride(), device="meta")).stride()
    with mode_of(value):
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def contiguous_like(value: torch.Tensor) -> torch.Tensor:
    """A contiguous fake tensor of the same shape, dtype and device. One that is contiguous is returned as it is."""
    if value.is_contiguous():
        return value
    with mode_of(value):
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor's elements lie side by side, in any order of its dims."""
    return dense(value.shape, value.stride())


def dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a layout of these sizes and strides has every element from its first to its last once."""
    dims = sorted((step, n) for n, step in zip(size, stride, strict=True) if n != 1)
    steps = itertools.accumulate((n for _, n in dims), operator.mul, initial=1)
    return 0 in size or all(step == wanted for (step, _), wanted in zip(dims, steps, strict=False))


def steps(x: torch.Tensor) -> list[int]:
    """The strides that decide where a tensor's elements lie: those of dims of more than one element."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1] if x.numel() else []


def extent_bytes(value: torch.Tensor) -> int:
    """Bytes from a tensor's first byte to its last, gaps included: the memory that it needs for itself."""
    if not value.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()


# --- lives ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """The memory that a segment's nodes allocate.

    lives: of each result of each node (first node, last node, bytes), nodes by their position in the graph. A value
    lives until the last use of it or of any view of it.
    outputs: the values that the segment returns, in order.
    """

    lives: dict[Value, tuple[int, int, int]]
    outputs: tuple[Value, ...]


def values(gm: fx.GraphModule) -> Values:
    """The values of a segment and their lives."""
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    last: dict[Value, int] = {}
    lives: dict[Value, tuple[int, int, int]] = {}
    for node, index in position.items():
        end = max((position[user] for user in node.users), default=index)
        for key in memory(node):
            last[key] = max(last.get(key, 0), end)
        for result, value in results(node):
            lives[node, result] = (index, index, extent_bytes(value))
    lives = {key: (first, max(first, last.get(key, 0)), size) for key, (first, _, size) in lives.items()}
    returned = [key for out in outputs(gm.graph) if isinstance(out, fx.Node) for key in memory(out)]
    return Values(lives, tuple(returned))


def results(node: fx.Node, value: Any = None) -> list[tuple[int, torch.Tensor]]:
    """(position, fake tensor) of each tensor that a node allocates: none for views, in-place ops and getitem.

    `value` is the node's value, where it is not the one in its `meta`.
    """
    if not is_compute(node) or node.target is operator.getitem or is_view(node):
        return []
    if mutated(node) and not also_returns(node):
        return []
    value = node.meta.get("val") if value is None else value
    numbered = enumerate(value) if isinstance(value, (tuple, list)) else [(0, value)]
    return [(index, x) for index, x in numbered if isinstance(x, torch.Tensor)]


def memory(node: fx.Node) -> Iterator[Value]:
    """The results whose memory a node's value keeps alive.

    An op that writes to an argument returns that argument or nothing, so it keeps the argument's memory alive.
    """
    if node.op not in ("call_function", "placeholder"):
        return
    root, index = node, None
    while is_compute(root):
        if mutated(root):
            root = mutated(root)[0]
        elif is_view(root):
            root = operand(root)
        elif root.target is operator.getitem:
            root, index = operand(root), root.args[1]
            if results(root):
                break
        else:
            break
    if isinstance(index, int):
        yield (root, index)
    else:
        for i, _ in results(root):
            yield (root, i)
