"""lowering_context: what a lowering reads beside its step and its plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from fzero.compile.captures import Captures
from fzero.compile.decide import DECIDERS, Deciders
from fzero.compile.kept_lowerings import NOTHING, Kept
from fzero.cost.kept_costs import Costs
from fzero.cost.rates import Rates


@dataclass(frozen=True)
class LoweringContext:
    """What a lowering reads beside its spec, state, batch and plan.

    transport: "p2p", "shared" or "nccl". costs: kept measurements; by default no matrix product is measured. rates: the
    measured rates of the transport. deciders: they choose where the spec says nothing. captures: of the same step,
    lowered before. kept: where what is made is kept. verified: False for programs that are only compared, and never
    run.
    """

    transport: str = "p2p"
    costs: Costs = field(default_factory=lambda: Costs("products", measures=False))
    rates: Rates | None = None
    deciders: Deciders = DECIDERS
    captures: Captures | None = None
    kept: Kept = NOTHING
    verified: bool = True
