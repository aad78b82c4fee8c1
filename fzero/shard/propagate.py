"""propagate: a captured graph becomes the graph of each rank of a mesh axis: strategies are chosen, then written.

The global graph stays what a step means: every value of the local graph is a global one's part, and `Sharded` says
which. A chooser says how each op is computed (`choose_strategies`), the writer writes that (`write_local_graph`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fzero.ir import fx_nodes
from fzero.shard.choose_strategies import cheapest
from fzero.shard.placements import Placement, Shard
from fzero.shard.sharding_problem import Chooser, ShardingProblem, leaf_values
from fzero.shard.write_local_graph import Regions, Sharded, write


def propagate(
    gm: fx.GraphModule, placed: Sequence[Placement], wanted: Sequence[Placement], n: int, axis: str,
    leaves: Sequence[bool], regions: Regions | None = None, sequence: Shard | None = None,
    names: Sequence[str] = (), choose: Chooser = cheapest,
) -> Sharded:  # fmt: skip
    """The graph of one rank.

    placed: of each placeholder. wanted: of each output. leaves: which placeholders are leaves of the state, which never
    move. regions: for a graph with nodes `fzero::region`, what is inside of them. The rank is then no placeholder but a
    node `fzero::axis_index`. sequence: where sums of values with that many dims, and one more, are to lie rather than
    whole. names: of the first placeholders, for errors. choose: a strategy for each op.

    Raises SpecError where n does not divide a dim, and as the chooser does.
    """
    holders = fx_nodes.placeholders(gm.graph)
    own = {x for x, is_leaf in zip(holders, leaves, strict=True) if is_leaf}
    problem = ShardingProblem(
        gm.graph, dict(zip(holders, placed, strict=True)), tuple(wanted), n, axis, leaf_values(gm.graph, own),
        dict(zip(holders, names, strict=False)), sequence, None if regions is None else regions.ends,
    )  # fmt: skip
    return write(problem, choose(problem), regions)
