"""strategy_cost: what it costs an op to take an operand as a strategy wants it.

The unit is a byte that one rank sends. What is no transfer, but leads to one, is priced in that unit too. A chooser
takes such a function as an argument (`Cost`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fzero.shard.moves import kind_of, wire_bytes
from fzero.shard.placements import Placement

# A sum that is taken in parts which nobody asked for is gathered later. One all-reduce sends 2 shares of the value, and
# the scatter and the gather 1 each: 3 shares for the scatter let the all-reduce win, even if the gather is shared.
SCATTERED_UNASKED = 3
TRANSFER = 1e-3  # bytes: of ways that send as much, the one with fewer transfers
UNKNOWN_BYTES = 1 << 20  # operands of an op of which nothing is known are gathered up to here, and refused above


@dataclass(frozen=True, slots=True)
class Fetch:
    """An operand that has to be brought to a placement.

    value: the whole. source: where it lies, the nearest of its placements. beside: another operand lies as `want`.
    wished: the value ends in an output that lies so. along: the result lies as sums are to (`sequence`). drawn: its
    parts can be drawn again. readers: of a gathered value, the calls yet to come, which share it.
    """

    value: torch.Tensor
    source: Placement
    want: Placement
    n: int
    beside: bool = False
    wished: bool = False
    along: bool = False
    drawn: bool = False
    readers: int = 1


Cost = Callable[[Fetch], float]


def fewest_bytes(fetch: Fetch) -> float:
    """The bytes that one rank sends, with the price of parts for which nobody asked.

    >>> from fzero.shard.placements import Partial, Replicated, Shard
    >>> x = torch.empty(8, 16)
    >>> fewest_bytes(Fetch(x, Shard(0), Replicated(), 2, readers=4))
    64.001
    >>> fewest_bytes(Fetch(x, Partial(), Shard(0), 2)), fewest_bytes(Fetch(x, Partial(), Shard(0), 2, beside=True))
    (768, 256.001)
    >>> fewest_bytes(Fetch(x, Replicated(), Shard(0), 2)), fewest_bytes(Fetch(x, Replicated(), Shard(0), 2, along=True))
    (512.0, 0.0)
    """
    kind = kind_of(fetch.source, fetch.want)
    nbytes = wire_bytes(fetch.source, fetch.want, fetch.value, fetch.n)
    if kind == "own_part":
        return 0.0 if fetch.beside or fetch.along or fetch.drawn else float(fetch.value.nbytes)
    if kind == "reduce_scatter" and not (fetch.beside or fetch.wished or fetch.along):
        return SCATTERED_UNASKED * nbytes
    return (nbytes / fetch.readers if kind == "all_gather" else nbytes) + TRANSFER
