"""rule: the records of this folder: what a row of a table says about an op, and what follows for one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fzero.shard.factors import Call, Factors
from fzero.shard.placements import Placement


@dataclass(frozen=True, slots=True)
class Strategy:
    """Placements under which the local calls of all ranks compute an op.

    inputs: of the tensor operands, in the order of the flattened args and kwargs. outputs: of the tensor results.
    local: the function of `fzero.shard.local_forms` that each rank calls in the op's place; "" for the op itself.
    costly: a sum not yet taken goes through a product or a narrower type; whoever chooses may prefer to take it first.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    local: str = ""
    costly: bool = False

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"
        return text + (f" by {self.local}" if self.local else "") + (" (costly)" if self.costly else "")


@dataclass(frozen=True, slots=True)
class Rule:
    """What is known of an op.

    factors: the factors of a call. linear: sets of arguments, each a text of names; the op is linear in the arguments
    of a set together, with all others fixed. moves: the op only moves elements, so parts of any kind pass through.
    local: the arguments that differ in the local call, by name, from the call, the strategy and n. more: further
    strategies of a call on n ranks.
    """

    factors: Callable[[Call], Factors]
    linear: tuple[str, ...] = ()
    moves: bool = False
    local: Callable[[Call, Strategy, int], dict[str, Any]] | None = None
    more: Callable[[Call, int], Iterable[Strategy]] | None = None


Rules = dict[Any, Rule]  # by op, or by the name of one that this folder must not import
