"""bucket_costs: what a bucket of each size costs a byte on a machine, kept for it and agreed on between ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fzero.cost.kept_costs import Costs
from fzero.cost.rates import Rates
from fzero.ir.mesh import Mesh

log = logging.getLogger("fzero")
KINDS = ("all_gather", "reduce_scatter")  # what a bucket makes
BUCKETS = tuple(n << 20 for n in (8, 16, 32, 64, 128))
LARGE_BUCKETS = (*BUCKETS, *(n << 20 for n in (256, 512, 1024)))  # of large worlds, where a transfer has many hops


def bucket_costs(rates: Rates, axis: str = "", ranks: int = 0, sizes: Sequence[int] = BUCKETS) -> dict[str, float]:
    """Seconds per GB by bucket size in bytes: of the kind of transfer that is slowest. axis, ranks: as of
    `Rates.transfer`."""
    return {str(size): max(rates.transfer(kind, size, axis, ranks) for kind in KINDS) / size * 1e9 for size in sizes}


def kept_bucket_costs(
    transport: str, mesh: Mesh, rank: int = 0, rates: Rates | None = None, store: Any = None
) -> dict[str, float]:
    """`bucket_costs` of a transport among so many ranks, as this machine measured them first; {} where it did not.

    They are kept, so that all runs have one layout, and so one order of sums. `store` makes them the same on every
    rank.
    """
    costs = Costs("buckets", measures=rates is not None, rank=rank, store=store)
    question = f"{transport}, {mesh.data_ranks} ranks"
    measured = costs.find([question], lambda _: bucket_costs(rates) if rates is not None else {})
    known = {size: cost for size, cost in measured.get(question, {}).items() if size in map(str, BUCKETS)}
    if known:
        log.info("fzero: buckets by measured seconds a GB (%s): %s", question, known)
    return known
