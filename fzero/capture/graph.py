"""graph: the records of a captured step: `Graph`, its `Region`s, and the mark `PerRank`. No code that traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fzero.capture.known import Baked, Closed
from fzero.capture.reads.noted import Reads
from fzero.ir import fx_nodes
from fzero.ir.records import ALIGN


@dataclass(frozen=True)
class Roles:
    """The meaning of a region's outputs: the loss, one gradient per entry of `grad_of`, then the rest.

    grad_of: for each gradient the index of the input that it belongs to.
    summed: outputs that are added over microbatches and ranks; others are averaged, integers are the last part's.
    wire: the dtype in which a gradient travels between ranks, by output index.
    """

    grad_of: tuple[int, ...]
    summed: frozenset[int]
    wire: Mapping[int, torch.dtype]


@dataclass(frozen=True)
class Region:
    """One `value_and_grad`: its joint graph, and the meaning of its inputs and outputs. Immutable.

    gm: the graph of one microbatch. Outputs are the loss, the gradients, then the rest.
    values: the outputs' fake tensors.
    grad_of, summed, wire: as in `Roles`.
    sliced: for each input whether it carries the batch in dim 0 and is cut into `microbatches` parts.
    source: the user's line.
    """

    gm: fx.GraphModule
    values: tuple[torch.Tensor, ...]
    grad_of: tuple[int, ...]
    summed: frozenset[int]
    wire: Mapping[int, torch.dtype]
    sliced: tuple[bool, ...]
    microbatches: int
    source: str


@dataclass(frozen=True)
class Graph:
    """A captured step. Immutable: a rewrite makes a new one.

    gm: its placeholders are the state's leaves, the batch's leaves, then the constants. Its outputs are the new state's
    leaves, then the metrics.
    regions: those that the `fzero::region` nodes of `gm` name by index.
    constants: closed-over tensors, by the names that the user's code has for them.
    varying_metrics: the names of the metrics that may differ between ranks.
    baked: closed-over tensors whose values have decided the graph.
    reads: what else of Python the step has read, to be compared before it runs.
    closed: the closed-over tensors that `constants` hold the memory of.
    """

    gm: fx.GraphModule
    regions: tuple[Region, ...]
    state_paths: tuple[str, ...]
    batch_paths: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    metric_names: tuple[str, ...]
    metrics_treedef: Any
    varying_metrics: tuple[str, ...]
    baked: tuple[Baked, ...] = ()
    reads: Reads = field(default_factory=Reads)
    closed: tuple[Closed, ...] = ()

    def rewritten(self, rewrite: Callable[[fx.GraphModule], fx.GraphModule], update: bool = False) -> Graph:
        """The step with each region's graph rewritten, and with `update` the graph around them too."""
        regions = tuple(replace(region, gm=rewrite(region.gm)) for region in self.regions)
        return replace(self, gm=rewrite(self.gm) if update else self.gm, regions=regions)

    def numbers(self) -> dict[str, str]:
        """The numbers that its ops hold, by op and the user's line, as messages show them: those that ranks give to
        their optimizers differ here."""
        found = {}
        names = [f"loss {n}" for n in range(len(self.regions))] if len(self.regions) > 1 else ["the loss"]
        graphs = [self.gm, *(region.gm for region in self.regions)]
        for what, gm in zip(["the update", *names], graphs, strict=False):
            for place, node in enumerate(gm.graph.nodes):
                given: list[Any] = []
                fx.node.map_aggregate((node.args, node.kwargs), given.append)
                given = [x for x in given if isinstance(x, float)]
                if given and node.op == "call_function":
                    line = f" ({node.meta['source']})" if node.meta.get("source") else ""
                    found[f"`{fx_nodes.op_name(node)}`, op {place} of {what}{line},"] = ", ".join(map(str, given))
        return found

    def change(self) -> tuple[str, str] | None:
        """(what the step read from Python and is another now, the remedy); None if all is as it was."""
        tensors: tuple[Baked | Closed, ...] = (*self.baked, *self.closed)
        return next((change for tensor in tensors if (change := tensor.change())), None) or self.reads.change()


@dataclass(frozen=True)
class PerRank:
    """A leaf of which every rank keeps its own: made by `fzero.per_rank`.

    value: what every rank starts with. sliced: of a value of one dim and of whole blocks, only as many of them as are
    a rank's share.
    """

    value: Any
    sliced: bool = False

    def on(self, ranks: int) -> Any:
        """What a rank starts with, among so many ranks of the data."""
        return self.value[: -(-self.value.shape[0] // (ALIGN * ranks)) * ALIGN] if self.sliced else self.value
