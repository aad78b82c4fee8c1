"""claims: what the writer of a local graph says of its values: `fzero.verify.sharding` believes none of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fzero.shard.placements import Placement


@dataclass(frozen=True)
class Claim:
    """What a node of a local graph is.

    kind: "call" (the global op on parts), "move" (a value brought to another placement), "form" (a result of a local
    form), "addend" (a number that the first rank alone keeps) or "region" (a graph of its own).
    of: the name of the global value. placements: of the results of the call, or of the value that moved.
    given: of a move, the local value that moved; of a form, its operands. form: its name. result: which of its results.
    """

    kind: str
    of: str
    placements: tuple[Placement, ...]
    given: tuple[fx.Node, ...] = ()
    form: str = ""
    result: int = 0


def claim(node: fx.Node, what: Claim) -> fx.Node:
    """Notes a claim on a node; returns the node."""
    node.meta["claim"] = what
    return node


def claim_of(node: fx.Node) -> Claim | None:
    """The claim on a node; None where there is none."""
    found = node.meta.get("claim")
    return found if isinstance(found, Claim) else None
