"""captures: steps that were captured and cut for a rank, for plans of one step that differ in nothing that these read.

A planner lowers one step many times: with other stages, homes, schedules and data ranks. Its graph, and what a rank of
the axes that cut dims computes of it, are the same as long as shapes, microbatches and these axes are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from fzero import tree
from fzero.capture.graph import Graph
from fzero.compile.kept_lowerings import Kept
from fzero.lowering.localise import Sharding
from fzero.plan.memory_use import MemoryUse
from fzero.plan.state_plan import Plan
from fzero.spec import Spec

KEPT = 12  # steps: those of a few depths and numbers of microbatches
LATER = ({f.name for f in fields(MemoryUse)} - {"loss_chunks"}) | {"mesh", "zero", "pipeline", "reduce"}
READ = [f.name for f in fields(Spec) if f.init and f.name not in LATER]  # fields of a spec that the graph may depend on
Captured = tuple[Graph, Graph, Sharding | None, Kept]  # the step, that of one rank, how it is cut, and its place


@dataclass
class Captures:
    """The last steps. Only `of` writes the field."""

    known: list[tuple[tuple[Any, ...], Captured]] = field(default_factory=list)

    def of(self, spec: Spec, state: Any, batch: Any, plan: Plan, make: Callable[[], Captured]) -> Captured:
        """What `make` makes for a spec, a state, a batch and a plan, or made for others that it cannot tell apart."""
        key = _key(spec, state, batch, plan)
        found = next((captured for known, captured in self.known if known == key), None)
        if found is None:
            self.known.append((key, found := make()))
            del self.known[:-KEPT]
        return found


def _key(spec: Spec, state: Any, batch: Any, plan: Plan) -> tuple[Any, ...]:
    """All that capture and the cut over axes read."""
    axes = plan.mesh.model_axes
    leaves = [(leaf.path, leaf.per_rank, [str(leaf.layout.on(axis)) for axis, _ in axes]) for leaf in plan.leaves]
    return [getattr(spec, name) for name in READ], _forms(state), _forms(batch), plan.axis, axes, leaves


def _forms(value: Any) -> list[Any]:
    """The paths of a pytree, with the form of its tensors and the other leaves as they are."""
    paths, leaves, treedef = tree.flatten(value)
    forms = [(x.shape, x.dtype, x.device, x.stride()) if isinstance(x, torch.Tensor) else x for x in leaves]
    return [treedef, *zip(paths, forms, strict=True)]
