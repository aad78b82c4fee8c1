"""widened: casts that are not made, since a kernel makes them: the one that reads the cast casts its operand itself
(`OpInfo.widens`), or the one that makes the value writes its cast as well (`OpInfo.narrows`).

On a device with fzero's kernels AdamW reads a gradient in 16 bits as it is, and writes a 16-bit copy of the parameter.
On the processor the first cast is the head of a chain of tiles (`tiling`), and the second is made.

    adamw_(p, c, m, v);  b = bf16(p);  copy_(into, b)      becomes one kernel, which writes p, m, v and into
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fzero import backend
from fzero.ir.op_info import of

HALVES = (torch.bfloat16, torch.float16)


def is_widened(node: fx.Node) -> bool:
    """Whether a node is a cast of an input to a wider dtype which its users make themselves."""
    return is_for_its_users(node) and backend.of(node.meta["val"].device).has_kernels


def narrowed(node: fx.Node, homes: Mapping[Any, Any]) -> fx.Node | None:
    """The cast to 16 bits of what a node writes in place, if the node's kernel writes that too; None without one.

    homes: as of `segment_memory`. The cast lies in a destination, which is there when the node runs.
    """
    in_place = of(node.target).in_place
    if in_place is None:
        return None
    pure, places = in_place
    for written in (node.args[places[result]] for result in of(pure).narrows):
        assert isinstance(written, fx.Node)
        if not backend.of(written.meta["val"].device).has_kernels:
            continue
        for user in written.users:
            plain = user.target is torch.ops.aten._to_copy.default and set(user.kwargs) == {"dtype"}
            if plain and user.kwargs["dtype"] in HALVES and node < user and isinstance(homes.get((user, 0)), fx.Node):
                return user
    return None


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
