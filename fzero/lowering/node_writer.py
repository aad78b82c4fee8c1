"""node_writer: nodes written into a graph, each with its fake value."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)


class NodeWriter:
    """Writes nodes where the graph inserts. They have the phase and the line of `like`, a node of the step."""

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self.graph, self.like = graph, like

    def __call__(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """A call of an op. Of a view that the strides of its operand do not allow, a copy is taken first."""
        given = fx.node.map_arg((tuple(args), dict(kwargs or {})), lambda x: x.meta["val"])
        try:
            value = self._fake(target, *given)
        except (RuntimeError, ValueError):
            if target not in VIEWS or args[0].meta["val"].is_contiguous():
                raise
            first = self(aten.clone.default, (args[0],), {"memory_format": torch.contiguous_format})
            return self(target, (first, *args[1:]))
        node = self.graph.call_function(target, tuple(args), dict(kwargs or {}))
        node.meta = {**self.like.meta, "val": value}
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """One result of an op of several."""
        done = self.graph.call_function(operator.getitem, (node, index))
        done.meta = {**self.like.meta, "val": node.meta["val"][index]}
        return done

    def _fake(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat: list[torch.Tensor] = []
        fx.node.map_aggregate((args, kwargs), lambda x: flat.append(x) if isinstance(x, torch.Tensor) else None)
        mode = next((x.fake_mode for x in flat), None) or self.like.meta["val"].fake_mode  # type: ignore[attr-defined]
        with mode:
            return target(*args, **kwargs)
