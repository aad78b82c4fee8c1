"""fold_updates: `apply_delta(p, delta(new, p))` becomes `new`.

The optimizer's kernel makes new parameters, and optax's shape asks for updates; the two ops together say so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fzero.ir.fx_nodes import drop_dead

aten = torch.ops.aten


def fold_updates(gm: fx.GraphModule) -> None:
    """Replaces every `apply_delta(p, delta(new, p))` by `new`. In place.

    Two more forms are folded. The step was made on a wider copy of p: `new` is cast to p's dtype. A flag keeps the old
    value: `apply_delta(p, where(flag, delta(new, p), 0))` is `where(flag, new, p)`.
    """
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.fzero.apply_delta.default:
            with gm.graph.inserting_before(node):
                new = _folded(node, *node.args)
            if new is not None:
                node.replace_all_uses_with(new)
    drop_dead(gm.graph)
    gm.recompile()


def _folded(node: fx.Node, old: fx.Node, update: fx.Node) -> fx.Node | None:
    """The node that `old + update` stands for, in old's dtype, or None. New nodes are added before `node`."""

    def added(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        result = node.graph.call_function(target, args, kwargs)
        result.meta = dict(node.meta)
        return result

    if update.target is torch.ops.fzero.delta.default:
        new, base = update.args
        assert isinstance(new, fx.Node)
        if base is old or _equal_casts(base, old):
            return new
        if _equal_casts(base, base) and base.args[0] is old:  # type: ignore[union-attr]
            return added(aten._to_copy.default, new, dtype=node.meta["val"].dtype)
    elif update.target is aten.where.self:
        flag, value, zero = update.args
        if isinstance(zero, fx.Node) and zero.target is aten.zeros.default and isinstance(value, fx.Node):
            new = _folded(node, old, value)
            return None if new is None else added(aten.where.self, flag, new, old)
    return None


def _equal_casts(a: Any, b: Any) -> bool:
    casts = all(isinstance(n, fx.Node) and n.target is aten._to_copy.default for n in (a, b))
    return casts and (a.args, a.kwargs) == (b.args, b.kwargs)
