"""workspace_parts: what formulas of a kernel's memory are made of: bytes of operands and results, and of copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from fzero.ir import fx_nodes, fx_values

Formula = Callable[[fx.Node], int]
LAST = torch.channels_last
TRANSPOSED = 60 * 60  # elements of the block through which ATen copies a transposed matrix


def of(names: str, formula: Formula) -> dict[str, Formula]:
    """The same formula for several of torch's ops; a name without an overload is of the default one."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": formula for name in names.split()}


def operand_bytes(node: fx.Node, index: int = 0) -> int:
    """Bytes of the elements of an operand."""
    value = fx_nodes.operand(node, index).meta["val"]
    return value.numel() * value.element_size()


def result_bytes(node: fx.Node) -> int:
    """Bytes of the elements of the results."""
    return sum(v.numel() * v.element_size() for v in fx_values.tensors(node.meta["val"]))


def copy_bytes(value: torch.Tensor) -> int:
    """Bytes of a contiguous copy of a value, and of what its kernel takes; 0 where it is contiguous."""
    if value.is_contiguous() or not value.numel():
        return 0
    return (value.numel() + is_transposed(value) * TRANSPOSED) * value.element_size()


def is_transposed(value: torch.Tensor) -> bool:
    """Whether ATen copies a matrix through a block: its rows follow one another."""
    return value.dim() == 2 and value.stride(0) == 1 and value.numel() >= TRANSPOSED


def copies(*places: int) -> Formula:
    """Contiguous copies of the operands at these places, of those that are tensors."""
    return lambda node: sum(map(copy_bytes, values(node, places)))


def values(node: fx.Node, places: Sequence[int]) -> list[torch.Tensor]:
    """The fake tensors of the arguments at these places, of those that are tensors."""
    operands = [*node.args, *node.kwargs.values()]
    return [x.meta["val"] for i in places if i < len(operands) and isinstance(x := operands[i], fx.Node)]


def together(*rules: Formula) -> Formula:
    """The sum of formulas."""
    return lambda node: sum(rule(node) for rule in rules)


def counted(count: int) -> Formula:
    """So many bytes for each element of the operand."""
    return lambda node: count * fx_nodes.operand(node).meta["val"].numel()
