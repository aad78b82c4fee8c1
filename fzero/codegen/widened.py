"""widened: casts that are not made, since the kernel which reads them casts its operand itself (`OpInfo.widens`).

On a device with fzero's kernels AdamW reads a gradient in 16 bits as it is. On the processor such a cast is the head of
a chain of tiles (`tiling`).
"""

from __future__ import annotations

import torch
from torch import fx

from fzero import backend
from fzero.ir.op_info import of


def is_widened(node: fx.Node) -> bool:
    """Whether a node is a cast of an input to a wider dtype which its users make themselves."""
    return is_for_its_users(node) and backend.of(node.meta["val"].device).has_kernels


def is_for_its_users(node: fx.Node) -> bool:
    """The same of any device."""
    if node.target is not torch.ops.aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.op != "placeholder" or not node.users:
        return False
    places = [(user, i) for user in node.users for i, arg in enumerate(user.args) if arg is node]
    narrower = source.meta["val"].dtype.itemsize < node.meta["val"].dtype.itemsize
    return narrower and bool(places) and all(i in of(user.target).widens for user, i in places)
