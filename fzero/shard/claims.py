"""claims: what is said of the values of a graph: by the user (`constraint`), and by the writer of a local graph.

`fzero.verify.sharding` believes no claim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fzero.shard.ops import CONSTRAIN
from fzero.shard.placements import Placement, Replicated, Shard


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


def constrains(node: fx.Node, axis: str) -> bool:
    """Whether a node places its value along an axis: `fzero::constrain` of it, or of no axis, which is all."""
    return node.target is CONSTRAIN and node.args[1] in (axis, "")


def constraint(node: fx.Node) -> Placement:
    """Where a node `fzero::constrain` wants its value."""
    _, _, dim, groups = node.args
    return Replicated() if dim == -1 else Shard(int(str(dim)), int(str(groups)))
